"""Training with adapters: every plan gives the run of one process, and a resumed run is the uninterrupted one."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like.collections.llm.adapters import Lora
from nemo_like.collections.llm.decoder import DecoderConfig, DecoderModel, DecoderNetwork
from nemo_like.collections.llm.decoder.model import open_source
from nemo_like.collections.llm.hf_folder import save_hf_folder
from nemo_like.collections.llm.testing import TinyTextDataModule, rehearse
from nemo_like.core.checkpoint import find_checkpoints, open_checkpoint
from nemo_like.core.errors import CheckpointError
from nemo_like.optim import AdamW, AdamW8bit
from nemo_like.strategies import DDPStrategy, FSDPStrategy
from nemo_like.testing.world import run_world

NETWORK: dict[str, Any] = {"init_std": 0.1, "tie_embeddings": True, "num_layers": 2}
SHAPE = DecoderConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
    intermediate_size=48, max_positions=16, init_std=0.1,
)  # fmt: skip


@functools.cache
def base_folder() -> str:
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp()) / "base"
    return str(save_hf_folder(folder, SHAPE, DecoderNetwork(SHAPE).state_dict()))


@pytest.fixture
def base() -> str:
    return base_folder()


def train(
    base: str,
    *,
    strategy: Any = None,
    adapter: dict[str, Any] | None = None,
    noise: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    lora = None if adapter is None else Lora(**{"rank": 4, **adapter})
    options = {"steps": 4, "optim": AdamW(lr=1e-2, weight_decay=0.0), **options}
    return rehearse(
        strategy or DDPStrategy(micro_batch_size=4),
        network=NETWORK,
        model_options={"init_from": base, "adapter": lora, "neftune_alpha": noise},
        **options,
    )


def adapters_of(run: dict[str, Any]) -> dict[str, torch.Tensor]:
    kinds = ("lora_a", "lora_b", "magnitude")
    return {name: it for name, it in run["weights"].items() if name.endswith(kinds)}


def assert_same_run(run: dict[str, Any], other: dict[str, Any]) -> None:
    for step, expected in zip(run["steps"], other["steps"], strict=True):
        assert step["train/loss"] == pytest.approx(expected["train/loss"], rel=2e-5)
    adapters = adapters_of(other)
    assert adapters
    for name, tensor in adapters.items():
        torch.testing.assert_close(run["weights"][name], tensor, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    "adapter", [{}, {"dora": True}, {"quantize": "nf4"}, {"quantize": "int8"}], ids=str
)
def test_the_first_loss_is_that_of_the_base_and_only_adapters_move(
    base: str, adapter: dict[str, Any]
) -> None:
    run = train(base, adapter=adapter)
    start = DecoderModel(init_from=base, adapter=Lora(rank=4, **adapter))
    if "quantize" not in adapter:
        assert run["steps"][0]["train/loss"] == train(base, steps=1)["steps"][0]["train/loss"]
    losses = [step["train/loss"] for step in run["steps"]]
    assert losses[-1] < losses[0]
    for name, tensor in start.state_dict().items():
        is_trained = name.endswith(("lora_b", "magnitude"))
        if not name.endswith("lora_a"):
            assert torch.equal(run["weights"][name], tensor) != is_trained, name


# Each is compared with one process and micro-batches of 4, nothing computed twice.
SAME: dict[str, dict[str, Any]] = {
    "accumulation": {"micro_batch_size": 1},
    "full": {"micro_batch_size": 4, "activation_checkpointing": "full"},
    "selective": {"micro_batch_size": 4, "activation_checkpointing": "selective"},
}


@pytest.mark.parametrize("options", SAME.values(), ids=SAME)
@pytest.mark.parametrize("adapter", [{}, {"dora": True, "quantize": "nf4"}], ids=["lora", "qdora"])
def test_accumulation_and_checkpointing_change_nothing(
    base: str, options: dict[str, Any], adapter: dict[str, Any]
) -> None:
    run = train(base, strategy=DDPStrategy(**options), adapter=adapter)
    assert_same_run(run, train(base, adapter=adapter))


PLANS: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "ddp lora": (DDPStrategy, {}, {"adapter": {}}),
    "ddp qlora": (DDPStrategy, {}, {"adapter": {"quantize": "nf4"}}),
    "fsdp full": (FSDPStrategy, {}, {}),
    "fsdp lora": (FSDPStrategy, {}, {"adapter": {}}),
    "fsdp dora": (FSDPStrategy, {"accumulate": "whole"}, {"adapter": {"dora": True}}),
    "fsdp qlora": (FSDPStrategy, {}, {"adapter": {"quantize": "nf4"}}),
    "fsdp qlora checkpointed": (
        FSDPStrategy,
        {"activation_checkpointing": "full"},
        {"adapter": {"quantize": "int8"}},
    ),
}


def run_plans(base: str, folder: Path) -> dict[str, dict[str, Any]]:
    runs = {}
    for name, (strategy, options, run) in PLANS.items():
        made = strategy(micro_batch_size=2, **options)
        runs[name] = train(base, strategy=made, devices=2, folder=folder / name, **run)
    return runs


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, run_world(2, run_plans, base_folder(), folder)[0]


@pytest.mark.dist
@pytest.mark.parametrize("plan", PLANS)
def test_two_ranks_give_the_run_of_one(base: str, two: Any, plan: str) -> None:
    _, _, options = PLANS[plan]
    if "adapter" in options:
        assert_same_run(two[1][plan], train(base, **options))
    else:
        losses = [
            [step["train/loss"] for step in run["steps"]] for run in (two[1][plan], train(base))
        ]
        assert losses[0] == pytest.approx(losses[1], rel=2e-5)


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["fsdp dora", "fsdp qlora"])
def test_what_two_ranks_saved_goes_on_on_one(base: str, two: Any, plan: str) -> None:
    folder, runs = two
    options = PLANS[plan][2]
    saved = find_checkpoints(folder / plan)[-1]
    assert all(
        "lora" in it or "magnitude" in it for it in open_checkpoint(saved).tensor_names("model")
    )
    resumed = train(base, resume=saved, **{**options, "steps": 6})
    whole = train(base, **{**options, "steps": 6})
    assert [it["train/loss"] for it in resumed["steps"]] == pytest.approx(
        [it["train/loss"] for it in whole["steps"][4:]], rel=2e-5
    )
    assert runs[plan]["global_step"] == 4


def start_empty(base: str) -> dict[str, torch.Tensor]:
    """The weights that a model without any gets under FSDP, whole."""
    from nemo_like.core.seed import derive_seed, seed_all

    seed_all(derive_seed(3, 0))
    with torch.device("meta"):
        model = DecoderModel(init_from=base, adapter=Lora(rank=4, dora=True, quantize="nf4"))
    assert all(it.is_meta for it in model.parameters())
    model.seed = 3
    return dict(model.draw_weights())


def test_a_model_made_empty_draws_the_weights_of_one_made_whole(base: str) -> None:
    from nemo_like.core.seed import derive_seed, seed_all

    drawn = start_empty(base)
    seed_all(derive_seed(3, 0))
    whole = DecoderModel(init_from=base, adapter=Lora(rank=4, dora=True, quantize="nf4"))
    assert list(drawn) == [name for name, _ in whole.named_parameters()] or set(drawn) == {
        name for name, _ in whole.named_parameters()
    }
    for name, parameter in whole.named_parameters():
        assert torch.equal(drawn[name], parameter), name


EXACT: dict[str, dict[str, Any]] = {
    "lora": {"adapter": {"dropout": 0.2}},
    "noise": {"adapter": {"dora": True}, "noise": 5.0},
    "qlora": {"adapter": {"quantize": "nf4", "dropout": 0.1}, "optim": AdamW8bit(lr=1e-2)},
    "full": {"noise": 5.0},
}


@pytest.mark.parametrize("options", EXACT.values(), ids=EXACT)
def test_resumed_is_uninterrupted_bit_for_bit(
    base: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    whole = train(base, folder=tmp_path, every_n_steps=2, **options)
    resumed = train(base, resume=find_checkpoints(tmp_path)[0], **options)
    assert resumed["steps"] == whole["steps"][2:]
    for name, tensor in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], tensor), name


def test_a_checkpoint_holds_adapters_and_opens_merged(base: str, tmp_path: Path) -> None:
    run = train(base, folder=tmp_path, adapter={"dora": True, "quantize": "nf4"})
    saved = find_checkpoints(tmp_path)[-1]
    opened = open_checkpoint(saved)
    assert set(opened.tensor_names("model")) == set(adapters_of(run))
    described = json.loads(opened.read_file("adapter.json"))
    assert described["base"] == {"path": base, "sha256": open_source(Path(base)).identify().sha256}
    adapted = DecoderModel(init_from=base, adapter=Lora(rank=4, dora=True, quantize="nf4")).eval()
    adapted.load_state_dict(run["weights"])
    tokens_BT = TinyTextDataModule().tokens_NT[:2, :16]
    merged = DecoderModel.load(saved)
    assert merged.adapter is None
    torch.testing.assert_close(
        merged.network(tokens_BT), adapted.network(tokens_BT), rtol=1e-4, atol=1e-4
    )
    # And it is a base to go on from.
    again = DecoderModel(init_from=str(saved)).eval()
    assert torch.equal(again.network(tokens_BT), merged.network(tokens_BT))


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        ({}, None, "of a run with an adapter, the model has none"),
        (None, {}, "of a run with no adapter, the model has one"),
        ({}, {"alpha": 5.0}, "adapter.alpha=5.0: it is 32.0 there"),
        ({}, {"quantize": "nf4"}, "adapter.quantize=nf4: it is None there"),
        ({}, {"target_modules": ["query"]}, r"target_modules=\['query'\]: they are \['all-linear'\]"),
    ],
)  # fmt: skip
def test_another_adapter_on_resume_is_refused(
    base: str, tmp_path: Path, saved: Any, now: Any, message: str
) -> None:
    train(base, folder=tmp_path, adapter=saved, steps=1)
    with pytest.raises(CheckpointError, match=message):
        train(base, resume=find_checkpoints(tmp_path)[-1], adapter=now, steps=2)


def test_another_base_on_resume_is_refused_and_both_are_named(base: str, tmp_path: Path) -> None:
    train(base, folder=tmp_path / "run", adapter={}, steps=1)
    torch.manual_seed(9)
    other = save_hf_folder(tmp_path / "other", SHAPE, DecoderNetwork(SHAPE).state_dict())
    with pytest.raises(CheckpointError, match="was trained on another base") as it:
        train(str(other), resume=find_checkpoints(tmp_path / "run")[-1], adapter={}, steps=2)
    for folder in (base, str(other)):
        assert f"{folder}" in str(it.value)
        assert str(open_source(Path(folder)).identify().sha256) in str(it.value)


# NEFTune.


def test_noise_is_added_in_training_only_and_has_its_width(base: str) -> None:
    plain, noisy = DecoderModel(init_from=base), DecoderModel(init_from=base, neftune_alpha=5.0)
    tokens_BT = TinyTextDataModule().tokens_NT[:2, :16]
    embed = noisy.network.embedding
    noisy.eval()
    assert torch.equal(embed(tokens_BT), plain.network.embedding(tokens_BT))
    noisy.train()
    added = embed(tokens_BT) - plain.network.embedding(tokens_BT)
    width = 5.0 / (16 * 32) ** 0.5
    assert width * 0.95 < added.abs().max() <= width
    assert abs(added.mean()) < width / 10


def test_noise_is_a_function_of_the_step(base: str) -> None:
    one, two = train(base, noise=5.0), train(base, noise=5.0)
    assert one["steps"] == two["steps"]
    assert one["steps"] != train(base)["steps"]
    assert one["val"].keys() == {"val/loss"}
