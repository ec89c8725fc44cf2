"""``nemo-like data preview`` as it is typed."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_like.text.tokenizer import train_bpe

COMMAND = [sys.executable, "-m", "nemo_like.cli.main", "data"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preview")
    train_bpe(["one two three user assistant"] * 5, vocab_size=300).save(folder / "model")
    pairs = [
        {"prompt": "one?", "completion": "two"},
        {"prompt": "one", "completion": "three " * 40},
    ]
    records = [*pairs, {"nothing": 1}, {"text": "three"}]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "mine.jsonl").write_text(text)
    return folder


def preview(*arguments: str, code: int = 0) -> tuple[str, str]:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def test_samples_counts_lengths_and_faults_are_shown_as_plain_text(folder: Path) -> None:
    out, err = preview(
        "preview",
        str(folder / "mine.jsonl"),
        f"--tokenizer={folder / 'model'}",
        "-n2",
        "--seq-len=40",
    )
    assert err == ""
    assert "chat template: chatml; an answer ends with <|endoftext|> (0)" in out
    assert "<|im_start|>user\none?<|endoftext|>\n<|im_start|>assistant\n[[two<|endoftext|>]]" in out
    (head,) = re.findall(r"^2. mine.jsonl:2, chat, .*, (\d+) cut off$", out, re.MULTILINE)
    assert int(head) > 0
    assert "{{" in out
    assert "3 samples (2 chat, 1 text)" in out
    assert "mine.jsonl:3: no chat" in out
    assert "1 longer than seq_len=40 (too_long=keep_start)" in out
    assert re.search(r"^ +\d+ - +\d+ +1  #+$", out, re.MULTILINE)


def test_without_a_tokenizer_one_is_trained_from_the_data() -> None:
    out, _ = preview("preview", "pkg://nemo_like.samples/chat/facts.jsonl.zst", "-n1", "--limit=30")
    assert "no --tokenizer: one of 2,0" in out
    assert "the first 30 samples" in out


def test_preferences_show_the_better_answer(folder: Path) -> None:
    files = "pkg://nemo_like.samples/preference/facts.jsonl.zst"
    out, _ = preview("preview", files, f"--tokenizer={folder / 'model'}", "-n1", "--limit=5")
    assert "5 samples (5 preference (chosen))" in out


def test_a_terminal_gets_colours(folder: Path) -> None:
    parent, child = pty.openpty()
    command = [*COMMAND, "preview", str(folder / "mine.jsonl"), f"--tokenizer={folder / 'model'}"]
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(command, stdout=child, env=environment)
    os.close(child)
    content = b""
    while True:
        try:
            part = os.read(parent, 4096)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        content += part
    os.close(parent)
    assert process.wait() == 0
    text = content.decode()
    assert "\x1b[32mtwo\x1b[0m\x1b[1;32m<|endoftext|>" in text  # learnt: green, its end bold
    assert "\x1b[2m" in text  # context: dim
    assert "[[" not in text


def test_a_run_is_shown_as_it_is_configured(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "conf/llm/mine.yaml"
    run.parent.mkdir(parents=True)
    run.write_text(
        "# @package _global_\n# Fine-tunes.\ndefaults:\n  - override /model: llm/llama_3m\n"
        "  - override /data: llm/sft\nname: mine\ndata:\n"
        f"  files: {folder / 'mine.jsonl'}\n  seq_len: 40\n  global_batch_size: 4\n"
        f"  too_long: drop\n  tokenizer: {{path: {folder / 'model'}}}\ntrainer: {{max_steps: 3}}\n"
    )
    out, _ = preview("preview", "--verb=pretrain", f"--config-dir={tmp_path}", "+conf=llm/mine")
    assert "1 longer than seq_len=40 (too_long=drop)" in out
    _, err = preview("preview", "--verb=pretrain", "+conf=llm/quickstart", code=2)
    assert "this run trains on TextDataModule; a preview is for a FinetuneDataModule" in err


def test_mistakes_are_told_in_a_line(folder: Path) -> None:
    _, err = preview("preveiw", "x", code=2)
    assert err.startswith("nemo-like data: no action 'preveiw'; did you mean 'preview'")
    _, err = preview("preview", "nowhere.jsonl", code=2)
    assert "'nowhere.jsonl': no such file" in err
    _, err = preview("preview", str(folder / "mine.jsonl"), "-n=-1", code=2)
    assert "-n -1 --limit 10000: must be at least 0" in err
    _, err = preview("preview", str(folder / "mine.jsonl"), "--seq-len=0", code=2)
    assert "seq_len=0: must be at least 1" in err
    (folder / "empty.jsonl").write_text('{"nothing": 1}\n')
    out, _ = preview(
        "preview", str(folder / "empty.jsonl"), f"--tokenizer={folder / 'model'}", code=1
    )
    assert "0 samples (none)" in out
    _, err = preview("preview", str(folder / "empty.jsonl"), code=2)
    assert "no record of the files can be used" in err


def test_help_loads_no_torch() -> None:
    code = "import sys, nemo_like.cli.data; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
