"""Predicted against measured peak memory of training steps on this CPU.

python tools/bench_plan_memory.py                 # every case: plan x shape; code 1 if one is off by over 10 %
python tools/bench_plan_memory.py fsdp            # the cases whose name holds a word

Measured are the bytes of all tensors at the peak of a rank's third step (weights, gradients, optimizer state, buffers,
activations), without the interpreter, its libraries and fragmentation. Each rank
is a process of its own, trained by Lightning through the strategy that the plan names. Predicted is what
`nemo_like.strategies.planning` says, which `nemo-like plan` and `strategy=auto` choose by.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_like import strategies
from nemo_like.collections.llm.data import TextBatch
from nemo_like.collections.llm.decoder import DecoderConfig, DecoderModel
from nemo_like.core.datamodule import DataModule, StepBatch
from nemo_like.core.precision import PrecisionName, build_precision
from nemo_like.optim import AdamW, Muon
from nemo_like.strategies.planning.memory import Memory, estimate
from nemo_like.strategies.planning.plan import Plan, Strategy
from nemo_like.strategies.planning.work import Work
from nemo_like.testing.world import run_world

# Shapes: B = samples of a micro-batch, T = tokens.
MIB = 2**20
STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    name: str
    shape: DecoderConfig
    plan: Plan
    seq_len: int
    global_batch_size: int
    precision: PrecisionName = "fp32"
    optimizer: str = "adamw"
    packed: bool = False

    def predict(self) -> Memory:
        """What the planner says."""
        work = Work(
            shape=self.shape,
            seq_len=self.seq_len,
            global_batch_size=self.global_batch_size,
            precision=self.precision,
            optimizer="muon" if self.optimizer == "muon" else "adamw",
            platform="cpu",
            packed=self.packed,
        )
        return estimate(self.plan, work)


class RandomTokens(DataModule):
    """The same random tokens in every step.

    Args:
        case: How many of them.
        on_last_step: Called before the last step.
    """

    def __init__(self, case: Case, on_last_step: Callable[[], None]) -> None:
        super().__init__(global_batch_size=case.global_batch_size)
        self.case, self.on_last_step = case, on_last_step

    def train_dataloader(self) -> Any:
        """One item an optimizer step."""
        return Steps(self)


class Steps:
    """The loader of :class:`RandomTokens`."""

    def __init__(self, data: RandomTokens) -> None:
        case, share = data.case, data.data_parallel
        size = (share.micro_batch_size, case.seq_len)
        tokens_BT = torch.randint(0, case.shape.vocab_size, size)
        segments_BT = (torch.arange(size[1]) // 50).expand(size).contiguous()
        batch = TextBatch(tokens_BT, tokens_BT, segments_BT if case.packed else None)
        self.on_last_step = data.on_last_step
        self.samples = case.global_batch_size
        count = self.samples // (share.data_parallel_size * share.micro_batch_size)
        self.micro_batches = [batch] * count

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[StepBatch]:
        for step in range(STEPS):
            if step == STEPS - 1:
                self.on_last_step()
            yield StepBatch(self.micro_batches, position=(step + 1) * self.samples)


def train(case: Case, folder: str, on_last_step: Callable[[], None]) -> None:
    """Trains a few steps on this rank."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = DecoderModel(network=case.shape)
    model.optim = Muon() if case.optimizer == "muon" else AdamW(lr=1e-4)
    model.gradient_clip_norm = 1.0
    model.seed = 0
    strategy = getattr(strategies, case.plan.class_name)(**case.plan.options())
    pl.Trainer(
        accelerator="cpu",
        devices=case.plan.ranks,
        strategy=strategy,
        plugins=[build_precision(case.precision, "cpu")],
        max_steps=STEPS,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        default_root_dir=folder,
    ).fit(model, datamodule=RandomTokens(case, on_last_step))


class Account(TorchDispatchMode):
    """Adds up the storages of all tensors that exist, after each operation.

    Counted this way a tensor that a communication thread of gloo has not let go of yet, or that exists only inside of
    an operation, does not enter; both are matters of the CPU's libraries, and of chance.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operation and looks at its results."""
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
                storage = local.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        total = 0
        for key, reference in list(self._storages.items()):
            alive = reference()
            if alive is None:
                del self._storages[key]
            else:
                total += alive.nbytes()
        self.peak = max(self.peak, total)
        return output


def measure_rank(case: Case, folder: str) -> int:
    """Peak bytes of this rank's tensors in its last step."""
    account = Account()
    with account:
        train(case, folder, on_last_step=lambda: setattr(account, "peak", 0))
    return account.peak


def measure(case: Case) -> int:
    """The largest peak over the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        peaks = run_world(
            case.plan.ranks, measure_rank, case, folder, timeout_s=280, process_group=False
        )
    return int(max(peaks))


def make_shape(**changes: Any) -> DecoderConfig:
    """A small decoder with grouped heads."""
    numbers: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": 128,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "intermediate_size": 352,
        "max_positions": 512,
    }
    return DecoderConfig(**{**numbers, **changes})


WIDE = {"hidden_size": 256, "intermediate_size": 704}
UNTIED = {"tie_embeddings": False, "vocab_size": 4096}


def make_case(
    name: str,
    strategy: Strategy = "ddp",
    ranks: int = 1,
    *,
    size: tuple[int, int, int] = (8, 256, 16),
    shape: dict[str, Any] | None = None,
    work: dict[str, Any] | None = None,
    **settings: Any,
) -> Case:
    """A case in short.

    Args:
        name: In the table.
        strategy: Of the plan.
        ranks: Processes.
        size: Micro-batch, tokens of a sample, samples of a step over all ranks.
        shape: Changes of the decoder.
        work: Precision, optimizer, whether samples are packed.
        settings: Of the strategy.
    """
    micro, seq_len, samples = size
    return Case(
        name=name,
        shape=make_shape(**(shape or {})),
        plan=Plan(strategy=strategy, ranks=ranks, micro_batch_size=micro, **settings),
        seq_len=seq_len,
        global_batch_size=samples,
        **(work or {}),
    )


# Few tokens: weights, gradients and optimizer decide. Many: activations and logits.
FEW, MANY = (1, 16, 4), (8, 256, 16)
BF16: dict[str, Any] = {"precision": "bf16-mixed"}
CASES = [
    make_case("single, weights", size=FEW, shape=WIDE),
    make_case("single, untied", size=FEW, shape=UNTIED),
    make_case("single, Muon", size=FEW, shape=WIDE, work={"optimizer": "muon"}),
    make_case("single, activations"),
    make_case("single, packed", work={"packed": True}),
    make_case("single, qk_norm, dropout", shape={"qk_norm": True, "dropout": 0.1}),
    make_case("single, full", activation_checkpointing="full"),
    make_case("single, selective", activation_checkpointing="selective"),
    make_case("single, bf16", size=(4, 128, 8), work=BF16),
    make_case("ddp x 2, weights", "ddp", 2, size=FEW, shape=UNTIED),
    make_case("ddp x 2, activations", "ddp", 2),
    make_case("fsdp x 2, weights", "fsdp", 2, size=(1, 16, 2), shape=WIDE),
    make_case("fsdp x 2, accumulating", "fsdp", 2, size=FEW, shape=WIDE),
    make_case("fsdp x 2, whole", "fsdp", 2, size=FEW, shape=WIDE, accumulate="whole"),
    make_case("fsdp x 2, untied", "fsdp", 2, size=(1, 16, 2), shape=UNTIED),
    make_case("fsdp x 2, gradients", "fsdp", 2, size=(1, 16, 2), shape=WIDE, shard="gradients"),
    make_case("fsdp 2 x 2", "fsdp", 4, size=(1, 16, 4), shape=WIDE, replicate=2),
    make_case("fsdp x 2, activations", "fsdp", 2),
    make_case("fsdp x 2, bf16", "fsdp", 2, size=(4, 128, 8), shape=WIDE, work=BF16),
    make_case("zero 1 x 2", "deepspeed", 2, size=FEW, shape=WIDE, stage=1),
    make_case("zero 2 x 2", "deepspeed", 2, size=FEW, shape=WIDE, stage=2),
    make_case("zero 2 x 2, activations", "deepspeed", 2, stage=2),
    make_case("zero 3 x 2", "deepspeed", 2, size=FEW, shape=WIDE, stage=3),
    make_case("zero 3 x 2, untied", "deepspeed", 2, size=FEW, shape=UNTIED, stage=3),
    make_case("megatron TP2, weights", "megatron", 2, size=FEW, shape=WIDE, tensor_parallel=2),
    make_case("megatron TP2", "megatron", 2, tensor_parallel=2),
    make_case("megatron TP2 SP", "megatron", 2, tensor_parallel=2, sequence_parallel=True),
    make_case(
        "megatron TP2 SP, full",
        "megatron",
        2,
        tensor_parallel=2,
        sequence_parallel=True,
        activation_checkpointing="full",
    ),
    make_case("megatron PP2", "megatron", 2, size=(4, 256, 16), pipeline_parallel=2),
    make_case("megatron PP2, untied", "megatron", 2, size=FEW, shape=UNTIED, pipeline_parallel=2),
    make_case(
        "megatron PP2 x2", "megatron", 2, size=(4, 256, 16), pipeline_parallel=2, virtual_pipeline=2
    ),
    make_case("megatron DP2", "megatron", 2, size=FEW, shape=WIDE),
    make_case(
        "megatron TP2 PP2",
        "megatron",
        4,
        size=(4, 128, 16),
        tensor_parallel=2,
        pipeline_parallel=2,
    ),
]
TOLERANCE = 0.1


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("word", nargs="?", default="", help="measure cases with this in their name")
    options = parser.parse_args()
    print(f"{'':26}{'measured':>10}{'predicted':>11}  MiB{'ratio':>8}  largest part")
    is_off = False
    for case in CASES:
        if options.word in case.name:
            measured, predicted = measure(case), case.predict()
            ratio = predicted.total / measured
            is_off |= abs(ratio - 1) > TOLERANCE
            figures = f"{measured / MIB:10.1f}{predicted.total / MIB:11.1f}     {ratio:8.3f}"
            print(f"{case.name:26}{figures}  {predicted.largest}", flush=True)
    sys.exit(is_off)


if __name__ == "__main__":
    main()
