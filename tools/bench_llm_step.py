"""A training step of our decoder against transformers and a bare torch loop.

python tools/bench_llm_step.py                    # 17.3 M parameters, batch 4 x 256, fp32: time and memory
python tools/bench_llm_step.py --vocab 131072 --repeats 0     # memory alone, with a large vocabulary

All three start from the same weights, and their first losses are compared, so that they do the same work: forward,
mean cross-entropy over all tokens, backward, fused AdamW. They run in turn, again and again; medians over all steps.
Memory is measured in processes of their own: what PyTorch's allocator has given out at the peak of a step (weights,
gradients and optimizer state included), and the growth of the resident set. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nemo_like.collections.llm.decoder import DecoderConfig, DecoderNetwork
from nemo_like.collections.llm.decoder.convert import config_to_hf, state_to_hf
from nemo_like.collections.llm.losses import chunked_cross_entropy_sum
from nemo_like.core.extras import require
from nemo_like.optim import AdamW

# Shapes: B = batch, T = tokens, D = width, H = heads, C = channels of a head, V = vocabulary.
Loss = Callable[[Tensor, Tensor], Tensor]
CONTESTANTS = ("ours", "transformers", "bare")


class BareLayer(nn.Module):
    """One block of the bare loop."""

    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__()
        width, inner = shape.hidden_size, shape.intermediate_size
        self.num_heads = shape.num_heads
        self.norm1 = nn.RMSNorm(width, eps=shape.norm_eps)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.norm2 = nn.RMSNorm(width, eps=shape.norm_eps)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
        """Maps the residual stream."""
        y_BTD = self.norm1(x_BTD)
        q, k, v = (
            part(y_BTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )

        def turn(z_BHTC: Tensor) -> Tensor:
            first, second = z_BHTC.chunk(2, dim=-1)
            return z_BHTC * cos_TC + torch.cat((-second, first), dim=-1) * sin_TC

        mixed = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        x_BTD = x_BTD + self.o(mixed.transpose(1, 2).flatten(2))
        y_BTD = self.norm2(x_BTD)
        mapped_BTD: Tensor = self.down(F.silu(self.gate(y_BTD)) * self.up(y_BTD))
        return x_BTD + mapped_BTD


class BareNetwork(nn.Module):
    """The same network in as few lines as it takes; tied embeddings, no options."""

    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(BareLayer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        channel = torch.arange(0, shape.head_size, 2) / shape.head_size
        angle = torch.arange(shape.max_positions)[:, None] / shape.rope_theta**channel
        self.cos, self.sin = (
            torch.cat((angle, angle), -1).cos(),
            torch.cat((angle, angle), -1).sin(),
        )

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits."""
        num_tokens = tokens_BT.size(1)
        x_BTD = self.embedding(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, self.cos[:num_tokens], self.sin[:num_tokens])
        return F.linear(self.norm(x_BTD), self.embedding.weight)


def build(name: str, shape: DecoderConfig) -> tuple[Loss, torch.optim.Optimizer]:
    """The loss and the optimizer of a contestant; the same weights for all."""
    torch.manual_seed(0)
    ours = DecoderNetwork(shape)
    if name == "ours":

        def our_loss(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
            hidden_BTD = ours.compute_hidden(tokens_BT)
            total = chunked_cross_entropy_sum(hidden_BTD, ours.output_weight_VD, targets_BT)
            return total / targets_BT.numel()

        return our_loss, AdamW(lr=1e-4).build(ours)
    network: Any
    if name == "transformers":
        transformers = require("transformers")
        config = transformers.LlamaConfig(**config_to_hf(shape))
        network = transformers.LlamaForCausalLM(config)
        network.load_state_dict(state_to_hf(ours.state_dict(), shape), strict=False)
    else:
        network = BareNetwork(shape)
        for theirs, mine in zip(network.parameters(), ours.parameters(), strict=True):
            theirs.data.copy_(mine.data)
    network.train()

    def plain_loss(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        if name == "transformers":
            logits_BTV = network(tokens_BT, use_cache=False).logits
        else:
            logits_BTV = network(tokens_BT)
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    return plain_loss, torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)


def make_step(name: str, shape: DecoderConfig, batch: int, tokens: int) -> Callable[[], float]:
    """A function that does one training step and gives its loss."""
    compute_loss, optimizer = build(name, shape)
    generator = torch.Generator().manual_seed(1)
    block = torch.randint(0, shape.vocab_size, (batch, tokens + 1), generator=generator)

    def step() -> float:
        loss = compute_loss(block[:, :-1], block[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def measure_times(shape: DecoderConfig, options: argparse.Namespace) -> None:
    """Prints a table of times."""
    steps = {name: make_step(name, shape, options.batch, options.tokens) for name in CONTESTANTS}
    losses = {name: step() for name, step in steps.items()}
    print("first losses: " + ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items()))
    if max(losses.values()) - min(losses.values()) > 1e-4:
        sys.exit("the contestants do not compute the same thing")
    wall: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    cpu: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for _ in range(options.repeats):
        for name, step in steps.items():
            for _ in range(options.steps):
                started = time.perf_counter(), time.process_time()
                step()
                wall[name].append(time.perf_counter() - started[0])
                cpu[name].append(time.process_time() - started[1])
    medians = {name: statistics.median(times) for name, times in wall.items()}
    best = min(medians.values())
    print(f"{'':14}{'ms a step':>11}{'quartiles':>16}{'CPU ms':>10}{'tokens/s':>10}{'speed':>8}")
    for name in CONTESTANTS:
        low, _, high = statistics.quantiles(wall[name], n=4)
        rate = options.batch * options.tokens / medians[name]
        print(
            f"{name:14}{medians[name] * 1e3:11.1f}{f'{low * 1e3:.0f}-{high * 1e3:.0f}':>16}"
            f"{statistics.median(cpu[name]) * 1e3:10.1f}{rate:10.0f}{best / medians[name]:8.3f}"
        )


def read_status(field: str) -> int:
    """A size of this process in bytes. Not ru_maxrss: a new process inherits that of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def measure_memory_here(
    kind: str, name: str, shape: DecoderConfig, options: argparse.Namespace
) -> int:
    """Peak bytes of two steps in this process, by the allocator's account or by the resident set."""
    if kind == "resident":
        before = read_status("VmRSS")
        step = make_step(name, shape, options.batch, options.tokens)
        step(), step()
        return read_status("VmHWM") - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        step = make_step(name, shape, options.batch, options.tokens)
        step(), step()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_bytes())["traceEvents"]
    totals = [event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]"]
    return int(max(totals))


def measure_memory(arguments: list[str]) -> None:
    """Prints a table of peaks, each from a process of its own."""
    peaks: dict[str, dict[str, float]] = {}
    for name in CONTESTANTS:
        peaks[name] = {}
        for kind in ("allocated", "resident"):
            command = [
                sys.executable,
                __file__,
                *arguments,
                "--memory-of",
                name,
                "--memory-kind",
                kind,
            ]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            peaks[name][kind] = int(done.stdout.split()[-1]) / 2**20
    print(f"{'':14}{'allocated MiB':>15}{'to bare':>9}{'resident MiB':>15}{'to bare':>9}")
    for name, row in peaks.items():
        cells = [f"{row[kind]:15.1f}{row[kind] / peaks['bare'][kind]:9.3f}" for kind in row]
        print(f"{name:14}{''.join(cells)}")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--repeats", type=int, default=7, help="turns of each contestant; 0 measures memory alone"
    )
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--memory-of", choices=CONTESTANTS, help="for the tool's own processes")
    parser.add_argument("--memory-kind", choices=["allocated", "resident"], default="allocated")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = DecoderConfig(
        vocab_size=options.vocab,
        hidden_size=384,
        num_layers=8,
        num_heads=6,
        intermediate_size=1024,
        max_positions=max(256, options.tokens),
    )
    if options.memory_of:
        print(measure_memory_here(options.memory_kind, options.memory_of, shape, options))
        return
    print(
        f"{shape.count_parameters():,} parameters, {options.batch} x {options.tokens} tokens, fp32, "
        f"{options.threads} threads, torch {torch.__version__}"
    )
    if options.repeats:
        measure_times(shape, options)
    measure_memory(sys.argv[1:])


if __name__ == "__main__":
    main()
