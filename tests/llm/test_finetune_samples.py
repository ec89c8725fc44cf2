"""Records become samples by their keys, whatever the file; what is wrong says what and where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_like.collections.llm.finetune.config import KeysConfig
from nemo_like.collections.llm.finetune.samples import (
    BadSampleError,
    ChatSample,
    PreferenceSample,
    Sample,
    TextSample,
    read_sample,
)
from nemo_like.collections.llm.finetune.sources import find_files, read_records
from nemo_like.core.errors import DataError
from nemo_like.data.jsonl_zst import ReadReport

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
PAIR = ChatSample([USER, ANSWER])


@pytest.mark.parametrize(
    ("record", "sample"),
    [
        ({"messages": [USER, ANSWER]}, PAIR),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Hi"},
                    {"from": "gpt", "value": "Hello"},
                ]
            },
            PAIR,
        ),
        ({"messages": json.dumps([USER, ANSWER])}, PAIR),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, ANSWER]},
            PAIR,
        ),
        (
            {"messages": [USER, ANSWER], "system": "Be kind", "tools": "[]"},
            ChatSample([{"role": "system", "content": "Be kind"}, USER, ANSWER]),
        ),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, PAIR),
        (
            {"instruction": "Add", "input": "1 2", "output": "3"},
            ChatSample([USER | {"content": "Add\n\n1 2"}, ANSWER | {"content": "3"}]),
        ),
        ({"prompt": "Hi", "completion": "Hello"}, PAIR),
        ({"prompt": [USER], "completion": [ANSWER]}, PAIR),
        ({"question": "Hi", "answer": "Hello"}, PAIR),
        ({"input": "Hi", "output": "Hello"}, PAIR),
        ({"text": "A text", "messages": None}, TextSample("A text")),
        (
            {"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
            PreferenceSample([USER], [ANSWER], [ANSWER | {"content": "No"}]),
        ),
        (  # the whole conversation twice, with and without the prompt beside it
            {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER | {"content": "No"}]},
            PreferenceSample([USER], [ANSWER], [ANSWER | {"content": "No"}]),
        ),
        (
            {
                "prompt": "Hi",
                "chosen": [USER, ANSWER],
                "rejected": [USER, ANSWER | {"content": "No"}],
            },
            PreferenceSample([USER], [ANSWER], [ANSWER | {"content": "No"}]),
        ),
        (  # calls as hosted models give them: arguments are a text, the content is null
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
                        ],
                    },
                    {"role": "function", "content": "2", "name": "f"},
                    ANSWER,
                ],
                "tools": json.dumps([{"name": "f"}]),
            },
            ChatSample(
                [
                    USER,
                    {"role": "assistant", "content": "", "tool_calls": [CALL]},
                    {"role": "tool", "content": "2", "name": "f"},
                    ANSWER,
                ],
                [{"name": "f"}],
            ),
        ),
    ],
)
def test_a_record_is_recognised_by_its_keys(record: dict[str, Any], sample: Sample) -> None:
    assert read_sample(record) == sample


def test_keys_and_kind_can_be_named() -> None:
    keys = KeysConfig(prompt="ask", completion="say", messages="talk", role="who", content="what")
    assert read_sample({"ask": "Hi", "say": "Hello", "text": "other"}, keys=keys) == PAIR
    talk = [{"who": "user", "what": "Hi"}, {"who": "gpt", "what": "Hello"}]
    assert read_sample({"talk": talk}, keys=keys) == PAIR
    preference = {"prompt": "Hi", "chosen": "Hello", "rejected": "No"}
    assert read_sample(preference, kind="pair", keys=KeysConfig(completion="chosen")) == PAIR
    assert read_sample({"text": "x", "messages": [USER, ANSWER]}, kind="text") == TextSample("x")


@pytest.mark.parametrize(
    ("record", "kind", "message"),
    [
        ({"story": "x"}, "auto", r"by its keys: 'story'; name them with keys"),
        ({"txt": "x"}, "text", r"the key 'text' is missing; did you mean 'txt'; there are: 'txt'"),
        ({"text": ["x"]}, "text", r"'text' must be a text that is not empty, this is \['x'\]"),
        ({"messages": []}, "auto", r"'messages' must be a list of messages, .* this is \[\]"),
        ({"messages": ["x"]}, "auto", r"messages\[0\] must be an object, this is 'x'"),
        ({"messages": "x"}, "auto", r"messages is a text that is no JSON"),
        (
            {"messages": [{"role": "asistant", "content": "x"}]},
            "auto",
            r"messages\[0\].role='asistant': must be one of .*; did you mean 'assistant'",
        ),
        ({"messages": [{"content": "x"}]}, "auto", r"messages\[0\].role=None: must be one of"),
        ({"messages": [USER]}, "auto", "the chat has no answer of the assistant"),
        ({"messages": [USER, {"role": "assistant"}]}, "auto", r"messages\[1\]: has no 'content'"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "auto",
            r"messages\[0\].content must be .*3",
        ),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": ["f"]}]},
            "auto",
            r"messages\[1\].tool_calls must be a list of objects, this is \['f'\]",
        ),
        (
            {"messages": [USER, ANSWER], "tools": {"f": 1}},
            "auto",
            "'tools' must be a list of tools",
        ),
        (
            {"messages": [USER, ANSWER], "system": 5},
            "auto",
            "the system message must be a text, .* 5",
        ),
        ({"prompt": 3, "completion": "x"}, "auto", "prompt and answer must be texts, .* this is 3"),
        ({"prompt": "x", "completion": ""}, "auto", "the pair has no answer"),
        (
            {"prompt": "x", "chosen": "a", "rejected": "a"},
            "auto",
            "chosen and rejected are the same",
        ),
        ({"chosen": "a", "rejected": "b"}, "auto", "a preference needs a prompt"),
    ],
)
def test_what_is_no_sample_is_refused(record: dict[str, Any], kind: Any, message: str) -> None:
    with pytest.raises(BadSampleError, match=message):
        read_sample(record, kind=kind)


RECORDS = [{"messages": [USER, ANSWER], "number": number} for number in range(5)]


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".zst":
        import zstandard

        path.write_bytes(zstandard.ZstdCompressor().compress(text.encode()))
    else:
        path.write_text(text)
    return path


def write_parquet(path: Path, records: list[Any]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(records), path)
    return path


def write_arrow(path: Path, records: list[Any], *, is_stream: bool) -> Path:
    import pyarrow as pa

    table = pa.Table.from_pylist(records)
    make = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def test_all_kinds_of_files_give_the_same_records(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(json.dumps(RECORDS))
    paths = [
        write_jsonl(tmp_path / "a.jsonl", RECORDS),
        write_jsonl(tmp_path / "b.jsonl.zst", RECORDS),
        write_parquet(tmp_path / "c.parquet", RECORDS),
        write_arrow(tmp_path / "d.arrow", RECORDS, is_stream=True),
        write_arrow(tmp_path / "e.arrow", RECORDS, is_stream=False),
        tmp_path / "f.json",
    ]
    report = ReadReport()
    found = list(read_records(find_files(str(tmp_path / "*")), report=report))
    assert [record.values for record in found] == RECORDS * len(paths)
    assert [(record.file, record.line) for record in found[3:7]] == [
        (paths[0], 4),
        (paths[0], 5),
        (paths[1], 1),
        (paths[1], 2),
    ]
    assert report.documents == 30


def test_folders_of_data_sets_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list(RECORDS)
    saved.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": saved.select([1, 3]), "test": saved}).save_to_disk(
        str(tmp_path / "two")
    )
    read = lambda *specs, **options: [  # noqa: E731
        record.values["number"] for record in read_records(find_files(list(specs), **options))
    ]
    assert read(str(tmp_path / "one")) == [0, 1, 2, 3, 4]
    assert read(str(tmp_path / "two")) == [1, 3]
    assert read(str(tmp_path / "two"), split="test") == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="has no split 'dev'; there are: train, test"):
        find_files(str(tmp_path / "two"), split="dev")


def test_a_folder_of_files_is_read_by_its_splits(tmp_path: Path) -> None:
    train = write_parquet(tmp_path / "data/train-00000-of-00001.parquet", RECORDS)
    test = write_parquet(tmp_path / "data/test_sft-00000-of-00001.parquet", RECORDS)
    (tmp_path / "README.md").write_text("about it")
    assert find_files(str(tmp_path)) == [train]
    assert find_files(str(tmp_path), split="test_sft") == [test]
    with pytest.raises(DataError, match="no file of the split 'dev'; there are: test_sft, train"):
        find_files(str(tmp_path), split="dev")
    plain = write_jsonl(tmp_path / "plain/part-1.jsonl", RECORDS)
    assert find_files(str(tmp_path / "plain")) == [plain]


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.parquet").write_text("x")
    (tmp_path / "c.jsonl").write_text('{"text": "x"}\n[1]\n{"number": 12345678901234567890123}\n')
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"a.txt: is no file of a known kind: .jsonl"):
        find_files(str(tmp_path / "a.txt"))
    with pytest.raises(DataError, match="empty: holds no file of a known kind"):
        find_files(str(tmp_path / "empty"))
    with pytest.raises(DataError, match=r"c.jsonl: is named twice"):
        find_files([str(tmp_path / "c.jsonl"), str(tmp_path / "*.jsonl")])
    with pytest.raises(DataError, match=r"b.parquet: is no table that pyarrow can read"):
        list(read_records([tmp_path / "b.parquet"]))
    with pytest.raises(
        DataError, match=r"c.jsonl:2 .*: a line must be an object, this is an array"
    ):
        list(read_records([tmp_path / "c.jsonl"]))
    report = ReadReport()
    found = list(read_records([tmp_path / "c.jsonl"], on_error="skip", report=report))
    assert [record.line for record in found] == [1, 3]
    assert found[1].values["number"] == 12345678901234567890123
    assert report.faults == {"record": 1}
    (tmp_path / "d.json").write_text('{"text": "x"}')
    with pytest.raises(DataError, match=r"d.json: must be an array of objects"):
        list(read_records(find_files(str(tmp_path / "d.json"))))
    (tmp_path / "d.json").write_text("[")
    with pytest.raises(DataError, match=r"d.json: is no JSON: Expecting value"):
        list(read_records([tmp_path / "d.json"]))
    state = {"_data_files": [], "_indices_files": [{"filename": "i.arrow"}]}
    (tmp_path / "empty/state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match="was saved with a selection of rows"):
        find_files(str(tmp_path / "empty"))
