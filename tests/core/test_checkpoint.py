"""A checkpoint is whole or not there, and nothing in it is ever unpickled."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nemo_like.core.checkpoint import (
    checkpoint_name,
    find_checkpoints,
    open_checkpoint,
    remove_checkpoint,
    to_plain,
)
from nemo_like.core.checkpoint_writer import save_checkpoint
from nemo_like.core.errors import CheckpointError

WEIGHTS = {
    "network.weight": torch.arange(6.0).view(2, 3),
    "network.bias": torch.tensor([1.5, -2.0]),
}
OPTIMIZER = {"network.weight/exp_avg": torch.ones(2, 3), "network.weight/step": torch.tensor(7.0)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_checkpoint(
        tmp_path / checkpoint_name(7), model=WEIGHTS, optimizer=OPTIMIZER, state={"step": 7, "a": [1, None]},
        files={"config.yaml": b"seed: 1\n", "tokenizer/tokenizer.json": b"{}"},
    )  # fmt: skip


def test_what_was_saved_comes_back_bit_for_bit(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    assert checkpoint.step == 7
    assert checkpoint.state["a"] == [1, None]
    assert checkpoint.read_file("tokenizer/tokenizer.json") == b"{}"
    for part, tensors in (("model", WEIGHTS), ("optimizer", OPTIMIZER)):
        assert checkpoint.tensor_names(part) == sorted(tensors)
        loaded = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
        checkpoint.load_tensors(part, loaded)
        for name, tensor in tensors.items():
            assert torch.equal(loaded[name], tensor)


def test_some_tensors_are_read_without_the_others(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    read = checkpoint.read_tensors("model", ["network.bias"])
    assert list(read) == ["network.bias"]
    assert torch.equal(read["network.bias"], WEIGHTS["network.bias"])
    with pytest.raises(CheckpointError, match="model: has no such tensors") as caught:
        checkpoint.read_tensors("model", ["network.bias", "network.bais"])
    assert caught.value.missing == ["network.bais"]


def test_nothing_is_left_of_a_save_but_the_folder(saved: Path) -> None:
    assert [path.name for path in saved.parent.iterdir()] == ["step_00000007"]
    assert find_checkpoints(saved.parent) == [saved]


def test_a_checkpoint_is_never_written_over(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="step_00000007 exists already"):
        save_checkpoint(saved, model=WEIGHTS, optimizer={}, state={"step": 7}, files={})


def test_a_state_that_only_pickle_could_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Object of type object is not JSON"):
        save_checkpoint(
            tmp_path / "step_1", model=WEIGHTS, optimizer={}, state={"x": object()}, files={}
        )
    assert list(tmp_path.iterdir()) == []


def test_a_planted_pickle_is_refused_and_not_executed(saved: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    (saved / "model" / "extra.pt").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(
        CheckpointError, match=r"model/extra\.pt: is not in the manifest \(a pickle"
    ):
        open_checkpoint(saved)
    weights = next((saved / "model").glob("*.safetensors"))
    (saved / "model" / "extra.pt").rename(weights)
    with pytest.raises(CheckpointError, match="bytes"):
        open_checkpoint(saved)
    assert not (tmp_path / "exploded").exists()


def test_a_pickle_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes(pickle.dumps(1))
    with pytest.raises(CheckpointError, match=r"last\.ckpt: is a pickle file"):
        open_checkpoint(tmp_path / "last.ckpt")


def test_every_change_of_a_file_is_found(saved: Path) -> None:
    weights = next((saved / "model").glob("*.safetensors"))
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (saved / "config.yaml").unlink()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(saved)
    assert "config.yaml: is missing" in str(caught.value)
    assert "its content changed" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"config\.yaml: is missing"):
        open_checkpoint(saved, verify=False)


@pytest.mark.parametrize("name", ["", "step_00000008"])
def test_a_folder_without_manifest_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "step_00000008"
    folder.mkdir()
    (folder / "trainer.json").write_text("{}")
    assert find_checkpoints(tmp_path) == []
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        open_checkpoint(tmp_path / name)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such checkpoint folder"):
        open_checkpoint(tmp_path / "nowhere")
    assert find_checkpoints(tmp_path / "nowhere") == []


def test_a_damaged_manifest_is_named(saved: Path) -> None:
    (saved / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"manifest\.json: is damaged"):
        open_checkpoint(saved)


def test_a_later_format_asks_for_an_upgrade(saved: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_bytes())
    (saved / "manifest.json").write_text(json.dumps({**manifest, "format_version": 99}))
    with pytest.raises(CheckpointError, match=r"format version 99, .* reads up to 1"):
        open_checkpoint(saved)


def test_all_names_that_do_not_fit_are_listed(saved: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(saved).load_tensors(
            "model", {"a": torch.zeros(1), "network.bias": torch.zeros(2)}
        )
    assert caught.value.missing == ["a"]
    assert caught.value.unexpected == ["network.weight"]


def test_all_shapes_that_do_not_fit_are_listed(saved: Path) -> None:
    wrong = {"network.weight": torch.zeros(3, 2), "network.bias": torch.zeros(3)}
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(saved).load_tensors("model", wrong)
    assert "network.weight: (2, 3) here, (3, 2) in the model" in str(caught.value)
    assert "network.bias: (2,) here, (3,) in the model" in str(caught.value)


def test_a_missing_file_is_named(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no notes\.txt"):
        open_checkpoint(saved).read_file("notes.txt")


def test_a_half_removed_checkpoint_is_not_taken(saved: Path) -> None:
    remove_checkpoint(saved)
    assert find_checkpoints(saved.parent) == []
    assert not saved.exists()


def test_weights_are_ordinary_safetensors(saved: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    loaded = load_file(next((saved / "model").glob("*.safetensors")))
    assert loaded.keys() == WEIGHTS.keys()
    save_file(loaded, tmp_path / "copy.safetensors")


def test_plain_values_are_what_json_takes() -> None:
    plain = to_plain({"a": torch.tensor(2), 3: (1.5, {"b": torch.float32})})
    assert plain == {"a": 2, "3": [1.5, {"b": "torch.float32"}]}
    json.dumps(plain)
