import pytest
import torch
from torch import nn

from nemo_like.collections.llm.decoder.config import DecoderConfig
from nemo_like.collections.llm.decoder.network import DecoderNetwork
from nemo_like.collections.llm.decoding import generate
from nemo_like.text.tokenizer import Tokenizer, train_bpe

VOCAB = 257  # every byte, and the end of text


def make_tokenizer() -> Tokenizer:
    return train_bpe(["ab"], vocab_size=VOCAB)


def make_network(*, max_positions: int = 32) -> DecoderNetwork:
    torch.manual_seed(0)
    shape = DecoderConfig(
        vocab_size=VOCAB + 7,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        intermediate_size=32,
        max_positions=max_positions,
        init_std=0.5,
    )
    return DecoderNetwork(shape)


class Reciting(nn.Module):
    """Says the tokens of a text one after the other, whatever it reads; remembers what it read."""

    def __init__(self, ids: list[int], *, start: int, max_positions: int = 100) -> None:
        super().__init__()
        self.ids, self.start = ids, start
        self.shape = DecoderConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            num_layers=1,
            num_heads=2,
            intermediate_size=8,
            max_positions=max_positions,
        )
        self.output_weight_VD = torch.eye(VOCAB)
        self.read: list[list[int]] = []

    def compute_hidden(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        said = len(self.read)
        self.read.append(tokens_BT[0].tolist())
        hidden_BTD = torch.zeros(1, tokens_BT.size(1), VOCAB)
        hidden_BTD[0, -1, self.ids[said]] = 50.0
        return hidden_BTD


def recite(
    text: str, prompt: str = "", *, max_tokens: int = 100, **options
) -> tuple[str, Reciting]:
    tokenizer = make_tokenizer()
    network = Reciting([*tokenizer.encode(text), tokenizer.eos_id], start=0, **options)
    return generate(network, tokenizer, prompt, max_tokens=max_tokens), network  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["plain", "größer", "山水 🙂 ende", " leading space", ""])
def test_characters_of_several_bytes_come_out_whole_and_the_end_of_text_ends(text):
    continuation, network = recite(text, "über ")
    assert continuation == text
    assert len(network.read) == len(text.encode()) + 1


def test_a_character_that_is_cut_is_left_out():
    assert recite("a山b", max_tokens=2)[0] == "a"
    assert recite("a山b", max_tokens=3)[0] == "a"
    assert recite("a山b", max_tokens=4)[0] == "a山"


def test_it_starts_as_training_documents_start():
    tokenizer = make_tokenizer()
    assert recite("x", "ab")[1].read[0] == [tokenizer.prefix_id, *tokenizer.encode("ab")]
    assert recite("x")[1].read[0] == [tokenizer.prefix_id]


def test_the_oldest_tokens_are_forgotten_where_the_model_reads_no_more():
    tokenizer = make_tokenizer()
    prompt = "abcdefghij"
    continuation, network = recite("xyz", prompt, max_positions=4)
    assert continuation == "xyz"
    assert network.read[0] == tokenizer.encode("ghij")
    assert network.read[2] == tokenizer.encode("ijxy")
    assert generate(make_network(max_positions=4), tokenizer, prompt, max_tokens=9)


def test_the_likeliest_token_is_taken_at_temperature_zero():
    network, tokenizer = make_network(), make_tokenizer()
    ids = [tokenizer.prefix_id, *tokenizer.encode("ab")]
    for _ in range(8):
        logits_V = network(torch.tensor([ids]))[0, -1, : tokenizer.vocab_size]
        ids.append(int(logits_V.argmax()))
        assert ids[-1] != tokenizer.eos_id
    text = generate(network, tokenizer, "ab", max_tokens=8, temperature=0)
    assert text == tokenizer.decode(ids[3:]).rstrip("\ufffd")
    assert generate(network, tokenizer, "ab", max_tokens=8, temperature=1e-300, seed=3) == text
    assert generate(network, tokenizer, "ab", max_tokens=8, top_p=1e-9, seed=4) == text


def test_a_seed_decides_and_the_global_generator_is_left_alone():
    network, tokenizer = make_network(), make_tokenizer()
    before = torch.get_rng_state()
    texts = [generate(network, tokenizer, "a", max_tokens=12, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_tokens_are_drawn_by_their_probability_within_top_p():
    from collections import Counter

    from nemo_like.collections.llm.decoding import _choose

    logits_V = torch.tensor([0.5, 0.1, 0.3, 0.1], dtype=torch.float64).log()
    generator = torch.Generator().manual_seed(0)

    def draw(**options: float) -> Counter[int]:
        return Counter(_choose(logits_V, generator=generator, **options) for _ in range(4000))

    every = draw(temperature=1.0, top_p=1.0)
    assert every[0] / 4000 == pytest.approx(0.5, abs=0.03)
    assert every[2] / 4000 == pytest.approx(0.3, abs=0.03)
    assert set(draw(temperature=1.0, top_p=0.79)) == {0, 2}
    assert set(draw(temperature=1.0, top_p=0.81)) == {0, 2, 1}  # of equal ones the first
    sharp = draw(temperature=0.5, top_p=1.0)
    assert sharp[0] / 4000 == pytest.approx(0.25 / 0.36, abs=0.03)


def test_rows_of_the_embedding_without_a_token_are_never_drawn():
    network, tokenizer = make_network(), make_tokenizer()
    with torch.no_grad():
        network.embedding.weight[VOCAB:] *= 1e4
    assert generate(network, tokenizer, "a", max_tokens=4, temperature=0)


def test_the_network_is_left_in_its_mode():
    network = make_network().train()
    generate(network, make_tokenizer(), "a", max_tokens=1)
    assert network.training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"max_tokens": 1, "temperature": -0.5}, "temperature=-0.5"),
        ({"max_tokens": 1, "temperature": float("nan")}, "temperature=nan"),
        ({"max_tokens": 1, "top_p": 0.0}, "top_p=0.0"),
        ({"max_tokens": 1, "top_p": 1.1}, "top_p=1.1"),
    ],
)
def test_numbers_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        generate(make_network(), make_tokenizer(), "a", **options)
