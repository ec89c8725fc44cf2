"""Chat templates: tokens are those of transformers, and what is learnt is the answers with their end, to the token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_like.collections.llm.finetune.chat import ChatTemplate, open_chat_template
from nemo_like.collections.llm.finetune.encode import SampleEncoder
from nemo_like.collections.llm.finetune.samples import (
    BadSampleError,
    ChatSample,
    Message,
    PreferenceSample,
    TextSample,
)
from nemo_like.collections.llm.finetune.template import ChatML
from nemo_like.core.errors import ConfigError, DataError
from nemo_like.text.tokenizer import Tokenizer, train_bpe

TEMPLATES = Path(__file__).parent / "chat_templates"
# Template -> begin of text, end of text, further special tokens, what ends an answer, what stands before its content.
PUBLISHED: dict[str, tuple[str | None, str, list[str], str, str]] = {
    "chatml": (None, "<|im_end|>", ["<|im_start|>"], "<|im_end|>", ""),
    "llama3": (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"],
        "<|eot_id|>",
        "",
    ),
    "mistral": ("<s>", "</s>", ["[INST]", "[/INST]"], "</s>", " "),
    "zephyr": ("<s>", "</s>", [], "</s>", ""),
    "phi3": (
        "<s>",
        "<|endoftext|>",
        ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"],
        "<|end|>",
        "",
    ),
    "gemma": ("<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>"], "<end_of_turn>", ""),
    "qwen3": (None, "<|im_end|>", ["<|im_start|>", "<|endoftext|>"], "<|im_end|>", ""),
}
TEXT = (
    "hello world the answer is user assistant system model tool one two three { } think tool_call"
)


def say(*turns: tuple[str, str]) -> list[Message]:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": names[who], "content": content} for who, content in turns]


TURNS = say(("u", "hello?"), ("a", "one two"), ("u", "  and\n"), ("a", "three\n\nthe answer "))
SYSTEM = say(("s", "the system"))


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    """A tokenizer as pre-training makes it, with no template."""
    return train_bpe([TEXT] * 3, vocab_size=320)


def make_folder(folder: Path, plain: Tokenizer, name: str) -> Path:
    """A Hugging Face folder with a published template."""
    bos, eos, others, _, _ = PUBLISHED[name]
    backend = type(plain.backend).from_str(plain.backend.to_str())
    backend.encode_special_tokens = False
    backend.add_special_tokens([it for it in (bos, eos, *others) if it])
    if name == "qwen3":
        backend.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
    config["pad_token"] = eos  # padding = end token, as many models have it
    config["chat_template"] = (TEMPLATES / f"{name}.jinja").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=sorted(PUBLISHED))
def published(
    request: pytest.FixtureRequest, plain: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, ChatTemplate]:
    folder = make_folder(tmp_path_factory.mktemp("hf") / request.param, plain, request.param)
    return request.param, folder, open_chat_template(Tokenizer.load(folder))


def list_learnt(
    chat: ChatTemplate, messages: list[Message], tools: list[Any] | None = None
) -> list[str]:
    """The text of each run of learnt tokens."""
    ids, is_learnt = chat.encode(messages, tools)
    runs: list[list[int]] = [[]]
    for token, learnt in zip(ids.tolist(), is_learnt.tolist(), strict=True):
        if learnt:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [chat.tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]


def test_tokens_are_those_of_apply_chat_template(
    published: tuple[str, Path, ChatTemplate],
) -> None:
    from transformers import AutoTokenizer

    name, folder, chat = published
    reference = AutoTokenizer.from_pretrained(folder)
    for messages in (TURNS[:2], TURNS, *([] if name == "gemma" else [SYSTEM + TURNS])):
        ids, _ = chat.encode(messages)
        expected = reference.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert ids.tolist() == expected
        expected = reference.apply_chat_template(
            messages[:-1], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert chat.encode_prompt(messages[:-1]) == expected


def test_the_answers_and_their_ends_are_learnt_and_nothing_else(
    published: tuple[str, Path, ChatTemplate],
) -> None:
    name, _, chat = published
    _, _, _, end, before = PUBLISHED[name]
    assert chat.end_token == end
    trims = name in ("llama3", "mistral", "gemma")
    last = "three\n\nthe answer" if trims else "three\n\nthe answer "
    thought = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    expected = [f"{before}one two{end}", f"{before}{thought}{last}{end}"]
    assert list_learnt(chat, TURNS) == expected
    assert list_learnt(chat, TURNS[:3]) == expected[:1]
    if name != "gemma":
        assert list_learnt(chat, SYSTEM + TURNS) == expected


def test_prefixes_and_marks_find_the_same_answers(
    published: tuple[str, Path, ChatTemplate],
) -> None:
    name, _, chat = published
    text = chat.render(TURNS)
    by_prefix = [chat._find_by_prefix(TURNS, None, text, number) for number in (1, 3)]
    by_marks = [span for _, span in chat._find_by_marks(TURNS, None, text, [1, 3])]
    assert None not in by_prefix
    if (
        name == "qwen3"
    ):  # an empty thought is written before the last answer: only prefixes see that it is part of it
        by_prefix.pop()
        by_marks.pop()
    assert by_prefix == by_marks


def test_a_mask_token_by_token(plain: Tokenizer, tmp_path: Path) -> None:
    chat = open_chat_template(Tokenizer.load(make_folder(tmp_path, plain, "chatml")))
    ids, is_learnt = chat.encode(say(("u", "a"), ("a", "b"), ("u", "c"), ("a", "d")))
    tokens = [chat.tokenizer.decode([it], skip_special_tokens=False) for it in ids.tolist()]
    text = "".join(
        f"[{token}]" if it else token for token, it in zip(tokens, is_learnt, strict=True)
    )
    assert text == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b][<|im_end|>]\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[d][<|im_end|>]\n"
    )


def test_calls_of_tools_are_learnt_and_what_tools_say_is_not(
    plain: Tokenizer, tmp_path: Path
) -> None:
    call = {"type": "function", "function": {"name": "one", "arguments": {"two": 3}}}
    asked = say(("u", "hello?"))
    called: list[Message] = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    messages = [*asked, *called, *say(("t", "three"), ("a", "the answer"))]
    tools = [{"type": "function", "function": {"name": "one"}}]
    llama = open_chat_template(Tokenizer.load(make_folder(tmp_path / "l", plain, "llama3")))
    assert list_learnt(llama, messages, tools) == [
        '{"name": "one", "parameters": {"two": 3}}<|eom_id|>',
        "the answer<|eot_id|>",
    ]
    qwen = open_chat_template(Tokenizer.load(make_folder(tmp_path / "q", plain, "qwen3")))
    assert list_learnt(qwen, messages, tools) == [
        '<tool_call>\n{"name": "one", "arguments": {"two": 3}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nthe answer<|im_end|>",
    ]
    built_in = open_chat_template(plain)
    assert list_learnt(built_in, messages, tools) == [
        '<tool_call>\n{"name": "one", "arguments": {"two": 3}}\n</tool_call><|endoftext|>',
        "the answer<|endoftext|>",
    ]
    assert '{"type": "function", "function": {"name": "one"}}' in built_in.render(messages, tools)


def test_thoughts_that_a_template_drops_do_not_shift_the_mask(
    plain: Tokenizer, tmp_path: Path
) -> None:
    qwen = open_chat_template(Tokenizer.load(make_folder(tmp_path, plain, "qwen3")))
    messages = say(("u", "hello?"), ("a", "<think>\nthree\n</think>\n\none two"), *[("u", "and")])
    messages += say(("a", "<think>\ntwo\n</think>\n\nthe answer"))
    assert list_learnt(qwen, messages) == [
        "one two<|im_end|>",
        "<think>\ntwo\n</think>\n\nthe answer<|im_end|>",
    ]


def test_the_built_in_template_needs_no_new_tokens(plain: Tokenizer) -> None:
    chat = open_chat_template(plain)
    assert chat.render(SYSTEM + TURNS[:2]) == (
        "<|endoftext|><|im_start|>system\nthe system<|endoftext|>\n<|im_start|>user\nhello?<|endoftext|>\n"
        "<|im_start|>assistant\none two<|endoftext|>\n"
    )
    assert (chat.end_token, chat.end_id) == ("<|endoftext|>", plain.eos_id)
    assert list_learnt(chat, TURNS) == ["one two<|endoftext|>", "three\n\nthe answer <|endoftext|>"]
    assert max(chat.encode(TURNS)[0]) < plain.vocab_size
    system = say(("s", "the system"))
    assert chat.render(system, [{"name": "one"}]) == (
        '<|endoftext|><|im_start|>system\nthe system\n\nTools, one a line:\n{"name": "one"}<|endoftext|>\n'
    )


def test_the_built_in_template_is_published_chatml_where_the_vocabulary_has_it(
    plain: Tokenizer, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(make_folder(tmp_path, plain, "chatml"))
    own, built_in = open_chat_template(tokenizer), open_chat_template(tokenizer, "chatml")
    assert isinstance(built_in.template, ChatML)
    for asks in (False, True):
        assert built_in.render(SYSTEM + TURNS, asks_for_answer=asks) == own.render(
            SYSTEM + TURNS, asks_for_answer=asks
        )


def test_without_a_template_the_texts_are_joined(plain: Tokenizer) -> None:
    chat = open_chat_template(plain, "none")
    assert chat.render(TURNS[:2]) == "<|endoftext|>hello?one two<|endoftext|>"
    assert list_learnt(chat, TURNS[:2]) == ["one two<|endoftext|>"]
    with pytest.raises(BadSampleError, match="chat_template=none has no place for tools"):
        chat.encode(TURNS[:2], [{"name": "one"}])


def test_a_file_brings_a_template(plain: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    )
    chat = open_chat_template(plain, str(tmp_path / "mine.jinja"))
    # It writes no request for an answer, so the heading is not learnt, only the blank behind it.
    assert list_learnt(chat, TURNS[:2]) == [" one two<|endoftext|>"]
    with pytest.raises(DataError, match="nowhere"):
        open_chat_template(plain, "nowhere")
    with pytest.raises(ConfigError, match=r"chat_template=.*must be chatml, none, or a file"):
        open_chat_template(plain, str(tmp_path))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].content }}", "does not write the contents of the messages once each"),
        (
            "{% for m in messages %}{{ m.content }}\n{% endfor %}",
            r"behind an answer it writes '\\n', which has no token that ends it",
        ),
        ("{{ raise_exception('never') }}", "the chat template refuses it: never"),
        ("{{ messages[0].nothing.more }}", "refuses it: .*nothing"),
        ("{{ 'a' + 1 }}", "the chat template fails on it: TypeError"),
    ],
)
def test_a_template_whose_answers_cannot_be_found_is_refused(
    plain: Tokenizer, tmp_path: Path, source: str, message: str
) -> None:
    (tmp_path / "mine.jinja").write_text(source)
    with pytest.raises(ConfigError, match=rf"(?s)mine.jinja: .*{message}.*; choose another one"):
        open_chat_template(plain, str(tmp_path / "mine.jinja"))


def test_a_conversation_that_a_template_rewrites_is_refused(
    plain: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "mine.jinja").write_text(
        "{% for m in messages %}{{ m.content | replace('x', messages | length) }}{{ eos_token }}{% endfor %}"
    )
    chat = open_chat_template(plain, str(tmp_path / "mine.jinja"))
    assert list_learnt(chat, TURNS[:2])
    with pytest.raises(BadSampleError, match=r"mine.jinja rewrites this conversation"):
        chat.encode(say(("u", "x"), ("a", "one"), ("u", "two"), ("a", "three")))


def test_the_name_of_a_special_token_in_a_message_is_refused(
    plain: Tokenizer, tmp_path: Path
) -> None:
    chat = open_chat_template(Tokenizer.load(make_folder(tmp_path, plain, "llama3")))
    for content in ("one <|eot_id|> two", "<|start_header_id|>"):
        with pytest.raises(BadSampleError, match=r"messages\[0\] holds the name .*<\|"):
            chat.encode(say(("u", content), ("a", "one")))
        with pytest.raises(BadSampleError, match=r"messages\[0\] holds the name .*<\|"):
            chat.encode_prompt(say(("u", content)))


def test_what_a_template_refuses_is_a_fault_of_the_sample(plain: Tokenizer, tmp_path: Path) -> None:
    chat = open_chat_template(Tokenizer.load(make_folder(tmp_path, plain, "gemma")))
    with pytest.raises(BadSampleError, match="refuses it: System role not supported"):
        chat.encode(SYSTEM + TURNS)


def test_answers_of_weight_zero_are_not_learnt(plain: Tokenizer) -> None:
    chat = open_chat_template(plain)
    messages = [TURNS[0], TURNS[1] | {"weight": 0}, *TURNS[2:]]
    assert list_learnt(chat, messages) == ["three\n\nthe answer <|endoftext|>"]
    encoder = SampleEncoder(plain, chat)
    with pytest.raises(BadSampleError, match="no token of it would be learnt"):
        encoder.encode(ChatSample(messages[:2]))


def test_only_the_answers_of_a_preference_are_learnt(plain: Tokenizer) -> None:
    encoder = SampleEncoder(plain, open_chat_template(plain))
    sample = PreferenceSample(TURNS[:3], say(("a", "one")), say(("a", "two three")))
    for encoded, answer in zip(
        encoder.encode_preference(sample), ("one", "two three"), strict=True
    ):
        learnt = encoded.ids_T[encoded.is_learnt_T]
        text = plain.decode(learnt.tolist(), skip_special_tokens=False)
        assert text == f"{answer}<|endoftext|>"
        assert plain.decode(encoded.ids_T.tolist()).count("one two") == 1  # the prompt is whole


def test_a_text_is_learnt_as_in_pre_training(plain: Tokenizer) -> None:
    encoder = SampleEncoder(plain, open_chat_template(plain))
    encoded = encoder.encode(TextSample("hello <|endoftext|>"))
    assert encoded.ids_T.tolist() == [
        plain.prefix_id,
        *plain.encode("hello <|endoftext|>"),
        plain.eos_id,
    ]
    assert encoded.num_targets == len(encoded.ids_T) - 1
    assert (encoded.ids_T == plain.eos_id).sum() == 2  # the name in the text is text
