import pytest

from nemo_like.collections.llm.generation.stop import StopStrings
from nemo_like.collections.llm.generation.streaming import TextStream
from nemo_like.core.extras import require
from nemo_like.text.tokenizer import Tokenizer, train_bpe


def make_tokenizer():
    return train_bpe(["ab abc the then"] * 3, vocab_size=262)


def make_byte_fallback_tokenizer():
    """Like Llama 2's: a space is part of the next token and is dropped at the start; unknown characters are bytes."""
    tokenizers = require("tokenizers")
    vocab = {"<unk>": 0, "</s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    vocab |= {"\u2581hello": 258, "\u2581there": 259, "!": 260}
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    files = {"tokenizer.json": backend.to_str().encode()}
    return Tokenizer(files, bos_token=None, eos_token="</s>")


def collect(tokenizer, tokens, *, prompt=(), stop=()):
    stream = TextStream(tokenizer, prompt, stop)
    pieces = [stream.push(token) for token in tokens]
    return [*pieces, stream.finish()], stream


@pytest.mark.parametrize(
    "text", ["plain", "gr\u00f6\u00dfer", "\u5c71\u6c34 \U0001f642 ende", " leading space", ""]
)
def test_pieces_are_whole_characters_and_together_the_text(text):
    tokenizer = make_tokenizer()
    prompt = [tokenizer.prefix_id, *tokenizer.encode("\u00fcber ")]
    pieces, _ = collect(tokenizer, tokenizer.encode(text), prompt=prompt)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_comes_as_soon_as_its_last_byte_is_there():
    tokenizer = make_tokenizer()
    pieces, _ = collect(tokenizer, tokenizer.encode("a\u5c71b"))
    assert pieces == ["a", "", "", "\u5c71", "b", ""]


@pytest.mark.parametrize(("num_bytes", "shown"), [(2, "a"), (3, "a"), (4, "a\u5c71")])
def test_a_character_that_is_cut_is_left_out(num_bytes, shown):
    tokenizer = make_tokenizer()
    pieces, _ = collect(tokenizer, tokenizer.encode("a\u5c71b")[:num_bytes])
    assert "".join(pieces) == shown


def test_bytes_that_never_become_a_character_do_not_hold_the_text_back():
    tokenizer = make_tokenizer()
    broken = tokenizer.encode("\u5c71")[0]
    pieces, _ = collect(tokenizer, [broken, *tokenizer.encode("xy")])
    assert pieces == ["", "\ufffdx", "y", ""]
    pieces, _ = collect(tokenizer, [broken] * 20)
    assert pieces[15] == "\ufffd" * 16


def test_a_space_that_belongs_to_a_token_is_kept_behind_a_prompt():
    tokenizer = make_byte_fallback_tokenizer()
    hello, there, bang = 258, 259, 260
    assert collect(tokenizer, [hello, there, bang])[0] == ["hello", " there", "!", ""]
    assert collect(tokenizer, [hello, there], prompt=[there, 1])[0] == [" hello", " there", ""]
    smile = [2 + byte for byte in "\U0001f642".encode()]
    assert collect(tokenizer, [hello, *smile, there])[0] == [
        "hello",
        "",
        "",
        "",
        "\U0001f642",
        " there",
        "",
    ]


def test_special_tokens_have_no_text():
    tokenizer = make_tokenizer()
    tokens = [*tokenizer.encode("a"), tokenizer.eos_id, *tokenizer.encode(" b")]
    assert "".join(collect(tokenizer, tokens)[0]) == "a b"


def test_a_prompt_may_end_within_a_character():
    tokenizer = make_tokenizer()
    tokens = tokenizer.encode("\u5c71x")
    pieces, _ = collect(tokenizer, tokens[1:], prompt=tokens[:1])
    assert pieces[-2:] == ["\ufffd\ufffdx", ""]


def test_text_ends_before_a_stop_string_that_lies_across_tokens():
    tokenizer = make_tokenizer()
    tokens = tokenizer.encode("one two END three")
    pieces, stream = collect(tokenizer, tokens, stop=[" END", "three"])
    assert "".join(pieces) == "one two"
    assert stream.stopped_by == " END"


@pytest.mark.parametrize("pieces", [["a<|en", "d|>b"], list("a<|end|>b"), ["a<|end|>b"]])
def test_a_stop_string_is_found_however_the_text_is_cut(pieces):
    stops = StopStrings(["<|end|>"])
    assert "".join(stops.push(piece) for piece in pieces) + stops.finish() == "a"
    assert stops.found == "<|end|>"


def test_what_only_begins_like_a_stop_string_is_shown():
    stops = StopStrings(["aab", "xyz"])
    assert [stops.push(piece) for piece in ("a", "a", "a", "c", "xy")] == ["", "", "a", "aac", ""]
    assert stops.finish() == "xy"
    assert stops.found is None


def test_the_stop_string_that_begins_first_counts():
    stops = StopStrings(["d", "bcd"])
    assert stops.push("abcd") == "a"
    assert stops.found == "bcd"
    assert stops.push("more") == ""
