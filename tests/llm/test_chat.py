"""The two commands that talk: what a person sees, and what ends up in files."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nemo_like.collections.llm.decoder import DecoderConfig, DecoderModel, DecoderNetwork
from nemo_like.collections.llm.generation import GenerationConfig
from nemo_like.collections.llm.generation.conversation import Conversation
from nemo_like.collections.llm.generation.options import read_prompts, read_stop_tokens
from nemo_like.collections.llm.hf_folder import save_hf_folder
from nemo_like.core.errors import DataError
from nemo_like.text.tokenizer import Tokenizer, train_bpe

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "llm"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    tokenizer = train_bpe(["ab"], vocab_size=257)
    torch.manual_seed(0)
    shape = DecoderConfig(
        vocab_size=257,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        intermediate_size=32,
        max_positions=256,
        init_std=0.5,
    )
    state = DecoderNetwork(shape).state_dict()
    monkeypatch.chdir(tmp_path)
    return save_hf_folder(
        tmp_path / "model",
        shape,
        state,
        tokenizer_files=tokenizer.to_bytes(),
        eos_token_id=tokenizer.eos_id,
    )


def load_script(name):
    spec = importlib.util.spec_from_file_location(f"{name}_script", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_main(monkeypatch, name, *argv):
    monkeypatch.setattr(sys, "argv", [name, *argv])
    load_script(name).main()


def talk(monkeypatch, lines, *argv):
    """Runs the chat on lines of a person; a line that is an exception is raised."""
    script = iter(lines)

    def give(prompt=""):
        line = next(script, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", give)
    run_main(monkeypatch, "chat", "model", "--max-tokens", "8", *argv)


def test_one_prompt_is_streamed_and_the_seed_is_named(folder, monkeypatch, capsys):
    run_main(monkeypatch, "generate", "model", "--prompt", "ab", "--max-tokens", "9", "seed=4")
    shown = capsys.readouterr()
    model = DecoderModel.load(folder)
    (expected,) = model.generate(["ab"], GenerationConfig(max_tokens=9, seed=4))
    assert shown.out == f"ab{expected.text}\n"
    assert "9 tokens (length)" in shown.err
    assert "seed 4" in shown.err


def test_a_file_of_prompts_becomes_json_lines(folder, monkeypatch, capsys):
    records = [{"prompt": text, "id": index} for index, text in enumerate(["a", "bc", "d e f"])]
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n\n")
    options = ["max_tokens=6", "seed=1", "logprobs=2", "--batch-size", "2"]
    run_main(
        monkeypatch, "generate", "model", "prompt_file=prompts.jsonl", "output=out.jsonl", *options
    )
    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    config = GenerationConfig(max_tokens=6, seed=1, logprobs=2)
    expected = DecoderModel.load(folder).generate([it["prompt"] for it in records], config)
    for record, line, result in zip(records, lines, expected, strict=True):
        assert line.items() >= record.items()
        assert (line["text"], line["tokens"], line["seed"]) == (
            result.text,
            result.tokens,
            result.seed,
        )
        assert len(line["logprobs"][0]["top"]) == 2
    assert "of 3 texts" in capsys.readouterr().err


def test_several_prompts_and_lines_of_a_text_file_are_shown(folder, monkeypatch, capsys):
    Path("prompts.txt").write_text("ab\ncd\n")
    options = ["--max-tokens", "4", "--num-beams", "2"]
    run_main(monkeypatch, "generate", "model", "--prompt-file", "prompts.txt", *options)
    from_file = capsys.readouterr().out
    run_main(monkeypatch, "generate", "model", "--prompt", "ab", "--prompt", "cd", *options)
    assert capsys.readouterr().out == from_file
    assert from_file.startswith("ab")
    assert "\ncd" in from_file


def test_without_a_number_a_text_is_as_long_as_fits(folder, monkeypatch, capsys):
    run_main(monkeypatch, "generate", "model", "--prompt", "abc", "temperature=0", "--ignore-eos")
    assert "253 tokens (length)" in capsys.readouterr().err


def test_a_prompt_may_look_like_an_option(folder, monkeypatch, capsys):
    run_main(monkeypatch, "generate", "model", "--prompt", "seed=7", "max_tokens=0")
    assert capsys.readouterr().out == "seed=7\n"


@pytest.mark.slow
def test_a_prompt_comes_through_a_pipe(folder):
    command = [sys.executable, str(EXAMPLES / "generate.py"), "model", "temperature=0", "--json"]
    done = subprocess.run(command, input="ab\n", capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["prompt"] == "ab"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--prompt", "a", "temprature=1"],
            "'temprature' is no argument; did you mean 'temperature'",
        ),
        (["--prompt", "a", "top_p=3"], "top_p=3.0: must be above 0"),
        (["--prompt", "a", "temperature=0", "top_p=0.5"], "top_p=0.5: has no effect"),
        (["--prompt", "a", "--prompt-file", "x"], "prompt and prompt_file: give one"),
        (["--prompt", "a", "--batch-size", "0"], "batch_size=0"),
        (["--prompt", "a", "max_tokens=999"], "max_tokens=999 need"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(folder, monkeypatch, capsys, argv, message):
    with pytest.raises(SystemExit, match="2"):
        run_main(monkeypatch, "generate", "model", *argv)
    assert message in capsys.readouterr().err


def test_prompts_that_cannot_be_read_are_named(tmp_path):
    file = tmp_path / "prompts.jsonl"
    for text, message in (("{", "no JSON"), ('{"text": "a"}', 'a text "prompt"')):
        file.write_text(f'{{"prompt": "a"}}\n{text}\n')
        with pytest.raises(DataError, match=f"prompts.jsonl:2: .*{message}"):
            list(read_prompts(file))
    with pytest.raises(DataError, match=r"nowhere.txt: no such file"):
        list(read_prompts(tmp_path / "nowhere.txt"))


def test_all_stop_tokens_of_a_folder_are_read(tmp_path):
    assert read_stop_tokens(tmp_path) == []
    file = tmp_path / "generation_config.json"
    for value, expected in (([3, 4], [3, 4]), (5, [5]), (None, [])):
        file.write_text(json.dumps({"eos_token_id": value}))
        assert read_stop_tokens(tmp_path) == expected


def test_a_chat_answers_and_remembers(folder, monkeypatch, capsys):
    talk(monkeypatch, ["hello", "and you", "/save talk.json", "/exit", "never"], "seed=1")
    messages = json.loads(Path("talk.json").read_text())["messages"]
    assert [it["role"] for it in messages] == ["user", "assistant"] * 2
    assert [it["content"] for it in messages[::2]] == ["hello", "and you"]
    shown = capsys.readouterr()
    for message in messages[1::2]:
        assert message["content"] in shown.out
    assert "template: plain, 256 tokens are remembered" in shown.err
    assert "[4 messages in talk.json]" in shown.err


def test_reset_starts_anew_and_the_system_stays(folder, monkeypatch, capsys):
    lines = ["hello", "/reset", "again", "/save talk.json", "/what", "/save no/such/folder", ""]
    talk(monkeypatch, lines, "--system", "Be brief.", "seed=1")
    messages = json.loads(Path("talk.json").read_text())["messages"]
    assert [it["role"] for it in messages] == ["system", "user", "assistant"]
    assert messages[0]["content"] == "Be brief."
    shown = capsys.readouterr().err
    assert "/what is no command" in shown
    assert "not saved" in shown


def test_ctrl_c_ends_an_answer_and_not_the_chat(folder, monkeypatch, capsys):
    talk(
        monkeypatch, ["hello", "/save free.json"], "temperature=0", "max_tokens=30", "--ignore-eos"
    )
    free = json.loads(Path("free.json").read_text())["messages"][1]["content"]
    capsys.readouterr()
    write, count = sys.stdout.write, iter(range(100))

    def interrupted(text):
        if next(count) == 2:
            raise KeyboardInterrupt
        return write(text)

    monkeypatch.setattr(sys.stdout, "write", interrupted)
    lines = [KeyboardInterrupt(), "hello", "more", "/save talk.json"]
    talk(monkeypatch, lines, "temperature=0", "max_tokens=30", "--ignore-eos")
    messages = json.loads(Path("talk.json").read_text())["messages"]
    assert len(messages) == 4
    assert free.startswith(messages[1]["content"])
    assert messages[1]["content"] != free
    assert "/exit or Ctrl-D leaves" in capsys.readouterr().err


def test_a_long_chat_forgets_and_says_so_or_is_refused(folder, monkeypatch, capsys):
    lines = ["hello there", "more", "and more"]
    talk(monkeypatch, lines, "cache_size=40", "--ignore-eos")
    assert "more than 40 tokens: attention_sinks forgets" in capsys.readouterr().err
    talk(monkeypatch, lines, "cache_size=40", "--ignore-eos", "eviction_policy=error")
    assert "cache_size is 40: start anew" in capsys.readouterr().err


def test_a_plain_conversation_is_written_out():
    tokenizer = train_bpe(["ab"], vocab_size=257)
    conversation = Conversation(tokenizer, system="Be brief.")
    conversation.say("user", "hello")
    conversation.say("assistant", "hi")
    conversation.say("user", "bye")
    ids = conversation.encode()
    assert ids[0] == tokenizer.prefix_id
    assert tokenizer.decode(ids) == "Be brief.\nUser: hello\nAssistant: hi\nUser: bye\nAssistant:"
    assert conversation.stop == ["\nUser:"]
    assert conversation.end_tokens == []


def test_the_template_of_the_tokenizer_is_used():
    plain = train_bpe(["ab"], vocab_size=257)
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    config = {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    files = plain.to_bytes() | {"tokenizer_config.json": json.dumps(config).encode()}
    tokenizer = Tokenizer(files, bos_token=None, eos_token="<|endoftext|>")
    conversation = Conversation(tokenizer)
    conversation.say("user", "hello")
    ids = conversation.encode()
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<user>hello<|endoftext|><assistant>"
    assert ids.count(tokenizer.eos_id) == 1
    assert conversation.end_tokens == [tokenizer.eos_id]
    assert conversation.stop == []
    assert Conversation(tokenizer, template="plain").stop
