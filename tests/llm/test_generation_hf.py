"""The same tokens as transformers.generate for the same weights."""

import os
from pathlib import Path

import pytest
import torch

from nemo_like.collections.llm.decoder import DecoderModel, DecoderNetwork
from nemo_like.collections.llm.decoder.convert import config_from_hf, state_from_hf
from nemo_like.collections.llm.generation import GenerationConfig
from nemo_like.collections.llm.generation.generate import generate
from nemo_like.core.extras import require
from nemo_like.text.tokenizer import train_bpe

TOKENIZER = train_bpe(["ab"], vocab_size=257)
EOS = TOKENIZER.eos_id
PROMPTS = [[5, 9, 31, 7, 200, 3, 77], [40], [99, 98, 97, 96]]
FAMILIES = {
    "Llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "Mistral": {"num_key_value_heads": 1, "sliding_window": 5},
    "Qwen2": {"num_key_value_heads": 4},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 12},
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def make_pair(family):
    transformers = require("transformers")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=EOS,
        **FAMILIES[family],
    )
    # With seed 0 two beams of Qwen3 tie in all digits of float32.
    torch.manual_seed(1)
    reference = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in reference.named_parameters():
        std = 1.0 if "norm" in name or name.endswith("bias") else 0.2
        torch.nn.init.normal_(parameter, std=std)
    shape = config_from_hf(config.to_dict())
    network = DecoderNetwork(shape)
    network.load_state_dict(state_from_hf(reference.state_dict(), shape))
    return reference.double(), network.double()


def continue_by_transformers(reference, prompt, **options):
    ids = torch.tensor([prompt])
    out = reference.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=EOS, **options
    )
    return out[0, len(prompt) :].tolist()


@every_family
@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_greedy_tokens_equal_those_of_transformers(family, penalty):
    reference, network = make_pair(family)
    config = GenerationConfig(max_tokens=24, temperature=0, repetition_penalty=penalty)
    results = generate(network, TOKENIZER, PROMPTS, config)
    for prompt, result in zip(PROMPTS, results, strict=True):
        expected = continue_by_transformers(
            reference, prompt, max_new_tokens=24, repetition_penalty=penalty
        )
        assert result.tokens == expected


@every_family
@pytest.mark.parametrize(
    ("num_beams", "options"),
    [
        (2, {}),
        (4, {"length_penalty": 2.0}),
        (4, {"length_penalty": -1.0}),
        (3, {"repetition_penalty": 1.3, "length_penalty": 0.0}),
    ],
    ids=str,
)
def test_beams_equal_those_of_transformers(family, num_beams, options):
    reference, network = make_pair(family)
    # A likely end of text, so that beams end at several lengths.
    with torch.no_grad():
        network.output_weight_VD[EOS] *= 2.5
        reference.get_output_embeddings().weight[EOS] *= 2.5
    config = GenerationConfig(max_tokens=16, num_beams=num_beams, **options)
    results = generate(network, TOKENIZER, PROMPTS, config)
    for prompt, result in zip(PROMPTS, results, strict=True):
        expected = continue_by_transformers(
            reference, prompt, max_new_tokens=16, num_beams=num_beams, **options
        )
        assert result.tokens == expected


@pytest.mark.slow
def test_a_real_model_continues_as_with_transformers():
    folder = Path(os.environ.get("NEMO_LIKE_SMOLLM2", ""))
    if not (folder / "config.json").is_file():
        pytest.skip("set NEMO_LIKE_SMOLLM2 to a Hugging Face folder of SmolLM2-135M")
    transformers = require("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = DecoderModel.load(folder)
    texts = ["The capital of France is", "Once upon a time", "def fibonacci(n):"]
    prompts = [model.tokenizer.encode(text) for text in texts]
    for options in ({"temperature": 0}, {"num_beams": 4, "length_penalty": 0.8}):
        results = model.generate(prompts, GenerationConfig(max_tokens=32, **options))
        options = {name: value for name, value in options.items() if name != "temperature"}
        for prompt, result in zip(prompts, results, strict=True):
            expected = continue_by_transformers(reference, prompt, max_new_tokens=32, **options)
            assert result.tokens == expected
