from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_like.core.errors import DataError
from nemo_like.text import tokenizer as module
from nemo_like.text.tokenizer import END_OF_TEXT, Tokenizer, train_bpe

TEXTS = [
    "The sea was calm, and the ship lay still.\n\nNobody spoke; the sea did.",
    "def add(a, b):\n    return a + b  # 1234567\n",
    "Größenwahn, naïveté, мир, 世界, 👩‍👩‍👧, \u200bzero width",
]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_bpe(TEXTS * 3, vocab_size=330)


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def write_folder(folder: Path, trained: Tokenizer, *special: str, **files: object) -> Path:
    """A folder as on the hub: a tokenizer.json with more special tokens, and JSON files beside it."""
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(trained.backend.to_str())
    backend.add_special_tokens(list(special))
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        write_json(folder / f"{name}.json", content)
    return folder


def random_text(seed: int) -> str:
    """Code points from everywhere but the surrogates, which no UTF-8 text holds."""
    rng = random.Random(seed)
    points = [
        rng.choice((rng.randrange(128), rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)))
        for _ in range(300)
    ]
    return "".join(map(chr, points))


@pytest.mark.parametrize(
    "text", ["", " ", "\n \t\r\n", "\0", "\ufeff", "\ufffd", *TEXTS, *map(random_text, range(5))]
)
def test_any_text_survives_a_round_trip(trained: Tokenizer, text: str) -> None:
    assert trained.decode(trained.encode(text)) == text


def test_a_trained_tokenizer_has_the_size_asked_for_and_one_special_token(
    trained: Tokenizer,
) -> None:
    assert trained.vocab_size == 330
    assert (trained.bos_id, trained.eos_id, trained.prefix_id) == (None, 0, 0)
    assert trained.decode([0]) == ""
    assert trained.decode([0], skip_special_tokens=False) == END_OF_TEXT


def test_training_compresses(trained: Tokenizer) -> None:
    assert len(trained.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_training_is_the_same_in_another_process(trained: Tokenizer) -> None:
    code = (
        "import sys; from nemo_like.text.tokenizer import train_bpe; "
        f"sys.stdout.write(train_bpe({TEXTS * 3!r}, vocab_size=330).content_hash)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == trained.content_hash


def test_little_text_gives_fewer_tokens() -> None:
    assert train_bpe(["ab ab"], vocab_size=1000).vocab_size < 300


def test_a_vocabulary_without_all_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size=256: a byte-level BPE has at least 257"):
        train_bpe(TEXTS, vocab_size=256)


def test_the_name_of_a_special_token_in_a_text_is_text(trained: Tokenizer, tmp_path: Path) -> None:
    write_folder(
        tmp_path, trained, "<s>", tokenizer_config={"bos_token": "<s>", "eos_token": END_OF_TEXT}
    )
    text = f"one{END_OF_TEXT}two<s>{END_OF_TEXT}"
    for tokenizer in (trained, Tokenizer.load(tmp_path), pickle.loads(pickle.dumps(trained))):  # noqa: TID251
        ids = tokenizer.encode(text)
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)
        assert tokenizer.decode(ids) == text


def test_batches_are_the_same_as_single_texts(trained: Tokenizer) -> None:
    texts = [*TEXTS, "", TEXTS[0] * 3]
    assert [ids.tolist() for ids in trained.encode_batch(texts)] == [
        trained.encode(text) for text in texts
    ]


@pytest.mark.parametrize("unit", ["word, and\n", "word\n\n   word  word wo", "Word1 'll ... \n "])
def test_long_texts_are_cut_without_a_trace(
    trained: Tokenizer, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained.encode(unit * 50)
    monkeypatch.setattr(module, "PIECE_CHARS", 30)
    monkeypatch.setattr(module, "CALL_CHARS", 100)
    assert trained.encode(unit * 50) == whole
    assert len(list(module._split(unit * 50))) > 8


def test_a_long_text_without_a_place_to_cut_keeps_every_character(
    trained: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_CHARS", 10)
    text = "世界" * 100
    assert trained.decode(trained.encode(text)) == text


def test_settings_of_a_file_for_cutting_and_padding_are_ignored(
    trained: Tokenizer, tmp_path: Path
) -> None:
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(trained.backend.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path, eos_token=END_OF_TEXT)
    assert loaded.encode(TEXTS[0]) == trained.encode(TEXTS[0])


def test_saved_and_loaded_tokenizers_are_the_same(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path / "saved")
    copies = [
        Tokenizer.load(tmp_path / "saved"),
        Tokenizer.load(tmp_path / "saved" / "tokenizer.json"),
        Tokenizer.from_bytes(trained.to_bytes()),
        pickle.loads(pickle.dumps(trained)),  # noqa: TID251
    ]
    for copy in copies:
        assert copy.to_bytes() == trained.to_bytes()
        assert copy.content_hash == trained.content_hash
        assert (copy.bos_id, copy.eos_id, copy.vocab_size) == (None, 0, 330)


def test_transformers_opens_what_we_save_with_the_same_ids(
    trained: Tokenizer, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
    loaded = Tokenizer.load(
        write_folder(
            tmp_path / "hub",
            trained,
            "<s>",
            tokenizer_config={"bos_token": "<s>", "eos_token": END_OF_TEXT},
        )
    )
    for number, ours in enumerate((trained, loaded)):
        ours.save(tmp_path / str(number))
        theirs = transformers.AutoTokenizer.from_pretrained(
            tmp_path / str(number), local_files_only=True
        )
        for text in (*TEXTS, "  two  spaces ", random_text(9)):
            assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
            assert theirs.decode(ours.encode(text)) == text
        assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)


def test_the_content_hash_tells_tokenizers_apart(trained: Tokenizer, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, trained, "<a>", "<b>")
    hashes = {
        trained.content_hash,
        train_bpe(TEXTS, vocab_size=300).content_hash,
        Tokenizer.load(folder, eos_token="<a>").content_hash,
        Tokenizer.load(folder, eos_token="<b>").content_hash,
        Tokenizer.load(folder, eos_token="<a>", bos_token="<b>").content_hash,
    }
    assert len(hashes) == 5


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": {"eos_token": "</s>", "bos_token": "<s>"}}, ("<s>", "</s>")),
        (
            {"tokenizer_config": {"eos_token": {"content": "</s>"}, "bos_token": None}},
            (None, "</s>"),
        ),
        (
            {"special_tokens_map": {"eos_token": "</s>", "bos_token": {"content": "<s>"}}},
            ("<s>", "</s>"),
        ),
        ({"generation_config": {"eos_token_id": [331, 0], "bos_token_id": 330}}, ("<s>", "</s>")),
        ({"config": {"eos_token_id": 331}}, (None, "</s>")),
        # A tokenizer_config decides that there is no begin of text, as in Qwen's folders.
        (
            {
                "tokenizer_config": {"bos_token": None},
                "config": {"eos_token_id": 331, "bos_token_id": 330},
            },
            (None, "</s>"),
        ),
    ],
)
def test_begin_and_end_are_found_where_a_folder_names_them(
    trained: Tokenizer, tmp_path: Path, files: dict[str, object], expected: tuple[str | None, str]
) -> None:
    loaded = Tokenizer.load(write_folder(tmp_path, trained, "<s>", "</s>", **files))
    assert (loaded.bos_token, loaded.eos_token) == expected
    assert loaded.prefix_id == (331 if expected[0] is None else 330)


def test_arguments_override_what_a_folder_names(trained: Tokenizer, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, trained, "<s>", "</s>", tokenizer_config={"eos_token": "</s>"})
    loaded = Tokenizer.load(folder, bos_token="<s>", eos_token=END_OF_TEXT)
    assert (loaded.bos_id, loaded.eos_id) == (330, 0)
    assert Tokenizer.from_bytes(loaded.to_bytes()).bos_id == 330


def test_other_settings_of_a_folder_are_kept(trained: Tokenizer, tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path / "hub",
        trained,
        tokenizer_config={"eos_token": END_OF_TEXT, "model_max_length": 77},
    )
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    Tokenizer.load(folder).save(tmp_path / "again")
    assert (tmp_path / "again" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (
        json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())["model_max_length"]
        == 77
    )


def test_ids_with_gaps_count_in_the_vocabulary(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    Backend(models.WordLevel({"a": 0, "end": 9}, unk_token="a")).save(
        str(tmp_path / "tokenizer.json")
    )
    assert Tokenizer.load(tmp_path, eos_token="end").vocab_size == 10


def test_a_folder_that_names_no_end_is_an_error(trained: Tokenizer, tmp_path: Path) -> None:
    write_folder(tmp_path, trained, "<s>")
    with pytest.raises(
        DataError, match=rf"{tmp_path}.*which token ends a text.*: <\|endoftext\|>, <s>"
    ):
        Tokenizer.load(tmp_path)


def test_an_end_outside_the_vocabulary_is_an_error(trained: Tokenizer, tmp_path: Path) -> None:
    write_folder(tmp_path, trained)
    with pytest.raises(DataError, match=r"eos_token '<stop>' is not in the vocabulary"):
        Tokenizer.load(tmp_path, eos_token="<stop>")
    with pytest.raises(DataError, match=r"bos_token '<go>' is not in the vocabulary"):
        Tokenizer.load(tmp_path, eos_token=END_OF_TEXT, bos_token="<go>")


@pytest.mark.parametrize("slow", ["tokenizer.model", "spiece.model", "vocab.txt"])
def test_slow_files_alone_are_an_error_with_the_remedy(tmp_path: Path, slow: str) -> None:
    (tmp_path / slow).write_bytes(b"")
    with pytest.raises(
        DataError, match=rf"holds only {slow}; needed is tokenizer.json.*save_pretrained"
    ):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["", "nowhere", "nowhere.json"])
def test_a_missing_tokenizer_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=rf"{name}: no such tokenizer"):
        Tokenizer.load(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe"])
def test_a_broken_tokenizer_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=rf"{tmp_path}: no readable tokenizer"):
        Tokenizer.load(tmp_path, bos_token="<s>", eos_token="</s>")
    with pytest.raises(DataError, match=rf"{tmp_path}: no readable tokenizer"):
        Tokenizer.load(tmp_path)
