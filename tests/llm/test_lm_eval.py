"""Bits per byte against lm-eval's rolling log-likelihoods (extra ``bench``)."""

import math
from pathlib import Path

import pytest
import torch

from nemo_like.collections.llm.decoder.network import DecoderNetwork
from nemo_like.collections.llm.evaluation import evaluate_bits_per_byte
from nemo_like.collections.llm.hf_folder import load_hf_folder
from nemo_like.text.tokenizer import Tokenizer, train_bpe

CONTEXT = 32
TEXTS = [
    "the old mill by the river stood still while rain fell " * 9,
    "größer Übung naïve café мир город 水 山 日本 " * 4,
    "def f(x):\n    return x + 1\n\n\n" * 7,
    "x",
    " ",
    "exactly one window? " * 3,
]


def write_hf_folder(folder: Path, *, bos_token: str | None) -> None:
    """A random Llama with a tokenizer of its own."""
    import transformers

    tokenizer = train_bpe([*TEXTS, bos_token or ""], vocab_size=400)
    if bos_token is not None:
        tokenizer.backend.add_special_tokens([bos_token])
        files = {**tokenizer.to_bytes(), "tokenizer.json": tokenizer.backend.to_str().encode()}
        tokenizer = Tokenizer.from_bytes(files, bos_token=bos_token)
    tokenizer.save(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("bos_token", [None, "<s>"])
@pytest.mark.filterwarnings("default")  # lm-eval's own
def test_the_figure_is_lm_evals_on_the_same_model(tmp_path, bos_token):
    pytest.importorskip(
        "lm_eval", reason="lm-eval is not installed: pip install 'nemo-like[bench]'"
    )
    from lm_eval.api.instance import Instance
    from lm_eval.api.metrics import bits_per_byte
    from lm_eval.models.huggingface import HFLM

    write_hf_folder(tmp_path, bos_token=bos_token)
    theirs = HFLM(pretrained=str(tmp_path), device="cpu", dtype="float32", batch_size=3)
    assert theirs.max_length == CONTEXT
    requests = [
        Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
        for text in TEXTS
    ]
    log_likelihoods = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    shape, state = load_hf_folder(tmp_path)
    network, tokenizer = DecoderNetwork(shape), Tokenizer.load(tmp_path)
    network.load_state_dict(state)
    for text, log_likelihood in zip(TEXTS, log_likelihoods, strict=True):
        result = evaluate_bits_per_byte(network, tokenizer, [("a", text)], context=CONTEXT)
        expected = -log_likelihood / math.log(2) / len(text.encode())
        assert result.model.pooled == pytest.approx(expected, rel=1e-5), text
    result = evaluate_bits_per_byte(
        network, tokenizer, [("a", text) for text in TEXTS], context=CONTEXT
    )
    sizes = [len(text.encode()) for text in TEXTS]
    expected = bits_per_byte(list(zip(log_likelihoods, sizes, strict=True)))
    assert result.model.pooled == pytest.approx(expected, rel=1e-6)
    print(f"bits per byte: {result.model.pooled!r} here, {expected!r} in lm-eval")
