"""Under every plan: what is written behind the steps is what would be written in place, and ranks share the reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like.callbacks.checkpointing import Checkpointing
from nemo_like.core.checkpoint import open_checkpoint
from nemo_like.core.checkpoint_writer import save_checkpoint
from nemo_like.core.errors import CheckpointError
from nemo_like.strategies.resume import load_run
from nemo_like.testing.world import run_world

pytestmark = pytest.mark.dist


def _train(plan: str, folder: Path) -> None:
    from nemo_like.collections.llm.testing import rehearse

    for asynchronous in (True, False):
        keeper = Checkpointing(
            folder=folder / str(asynchronous),
            every_n_steps=1,
            keep_last=9,
            asynchronous=asynchronous,
        )
        rehearse(_make_strategy(plan), devices=2, steps=2, callbacks=[keeper])


def _make_strategy(plan: str) -> Any:
    from nemo_like.strategies import DDPStrategy, FSDPStrategy, MegatronStrategy

    if plan == "ddp":
        return DDPStrategy(micro_batch_size=2)
    if plan == "fsdp":
        return FSDPStrategy(micro_batch_size=2)
    return MegatronStrategy(micro_batch_size=2, tensor_parallel=2)


@pytest.mark.parametrize("plan", ["ddp", "fsdp", "megatron"])
def test_written_behind_and_in_place_are_the_same_bytes(plan: str, tmp_path: Path) -> None:
    run_world(2, _train, plan, tmp_path, process_group=False)
    compared = set()
    for step in ("step_00000001", "step_00000002"):
        folders = [tmp_path / str(kind) / step for kind in (True, False)]
        entries = [json.loads((it / "manifest.json").read_bytes())["files"] for it in folders]
        assert entries[0].keys() == entries[1].keys()
        for name in entries[0].keys() - {"trainer.json"}:
            assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
            compared.add(name)
        states = [dict(open_checkpoint(it).state) for it in folders]
        for state in states:
            del state["saved_at"]
        assert states[0] == states[1]
    # Both ranks have written.
    assert {name[-36:] for name in compared if name.startswith("model/")} == {
        f"0000{rank}-model-00001-of-00001.safetensors"[-36:] for rank in (1, 2)
    }


def _load_shared(folder: Path) -> dict[str, torch.Tensor]:
    import torch.distributed as dist
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    if dist.get_rank() == 1:
        # This rank must not read a single tensor.
        def refuse(*arguments: Any) -> None:
            raise AssertionError("read on rank 1")

        HuggingFaceStorageReader.read_data = refuse
    tensors = {"a": torch.zeros(3, 2).T, "b": torch.zeros(())}
    open_checkpoint(folder).load_tensors("model", tensors)
    return tensors


def test_what_all_ranks_hold_is_read_by_one(tmp_path: Path) -> None:
    model = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7.0)}
    save_checkpoint(tmp_path / "step_1", model=model, optimizer={}, state={}, files={})
    for loaded in run_world(2, _load_shared, tmp_path / "step_1"):
        assert torch.equal(loaded["a"], model["a"])
        assert torch.equal(loaded["b"], model["b"])


def _load_damaged(folder: Path) -> list[str]:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    said = []
    with pytest.raises(CheckpointError) as caught:
        load_run(folder)
    said.append(str(caught.value))
    if torch.distributed.get_rank() == 0:

        def fail(*arguments: Any) -> None:
            raise OSError("a broken disk")

        HuggingFaceStorageReader.read_data = fail
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder, verify=False).load_tensors(
            "model", {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
        )
    return [*said, str(caught.value)]


def _save_two(folder: Path) -> None:
    model = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}
    save_checkpoint(folder, model=model, optimizer={}, state={}, files={"notes.txt": b"n"})


def test_damage_is_told_to_all_ranks_alike(tmp_path: Path) -> None:
    folder = tmp_path / "step_1"
    run_world(2, _save_two, folder)
    (folder / "notes.txt").write_bytes(b"m")
    first, second = run_world(2, _load_damaged, folder)
    assert first == second
    assert "notes.txt: its content changed" in first[0]
    assert "step_1/model: cannot be read on rank 0: a broken disk" in first[1]
