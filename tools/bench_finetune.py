"""Memory and time of a fine-tuning step: ours, and peft with transformers, one after the other.

    python tools/bench_finetune.py FOLDER [--batch 2 --seq-len 128 --steps 6 --rounds 2]

FOLDER is a Llama-shaped Hugging Face folder. Each method runs in a process of its own, in turn, --rounds times; shown
are the largest memory and the median time of a step over all rounds, its first step left out. Equal for all: AdamW,
fp32, random tokens of which every one is a target, activations computed again in the backward pass (--keep-
activations keeps them). LoRA: rank 16, alpha 32, all matrices of the blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

METHODS = [
    "ours full",
    "ours full, 8-bit AdamW",
    "ours lora",
    "ours dora",
    "ours qlora",
    "ours int8",
    "peft full",
    "peft lora",
    "peft qlora",
]
_GB = 2**30
Step = Callable[[Any], Any]


def read_resident_bytes() -> int:
    """Resident memory of this process now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class PeakMeter:
    """Largest resident memory while it runs: the kernel's own mark also counts what came before."""

    def __init__(self) -> None:
        self.peak = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_over.wait(0.002):
            self.peak = max(self.peak, read_resident_bytes())

    def stop(self) -> int:
        """Ends the measurement and gives the peak in bytes."""
        self._is_over.set()
        self._thread.join()
        return self.peak


def make_ours(folder: str, method: str, *, recompute: bool) -> tuple[Step, Any]:
    """Our model and optimizer."""
    from nemo_like.collections.llm.adapters import Lora
    from nemo_like.collections.llm.data import TextBatch
    from nemo_like.collections.llm.decoder import DecoderModel
    from nemo_like.optim import AdamW, AdamW8bit
    from nemo_like.strategies.activation import checkpoint_activations

    options: dict[str, dict[str, Any]] = {
        "lora": {},
        "dora": {"dora": True},
        "qlora": {"quantize": "nf4"},
        "int8": {"quantize": "int8"},
    }
    adapter = Lora(**options[method]) if method in options else None
    model = DecoderModel(init_from=folder, adapter=adapter).train()
    checkpoint_activations(model, "full" if recompute else "none")
    optim = AdamW8bit(lr=1e-4) if "8-bit" in method else AdamW(lr=1e-4)

    def run(tokens_BT: Any) -> Any:
        batch = TextBatch(tokens_BT[:, :-1], tokens_BT[:, 1:])
        return model.compute_loss_sum(batch) / batch.targets_BT.numel()

    return run, optim.build(model)


def make_peft(folder: str, method: str, *, recompute: bool) -> tuple[Step, Any]:
    """The same through transformers and peft."""
    import peft
    import torch
    import transformers

    options: dict[str, Any] = {"dtype": torch.float32, "low_cpu_mem_usage": True}
    if method == "qlora":
        quantization: Any = transformers.BitsAndBytesConfig
        options["quantization_config"] = quantization(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
        options["device_map"] = "cpu"
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    if method != "full":
        config = peft.LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, config)
    model.train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def run(tokens_BT: Any) -> Any:
        return model(input_ids=tokens_BT, labels=tokens_BT).loss

    return run, torch.optim.AdamW(trained, lr=1e-4, fused=True)


def measure(method: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs one method in this process."""
    import logging

    import torch

    logging.disable(logging.WARNING)
    owner, _, name = method.partition(" ")
    # What every method imports, so that the memory above this mark is that of the model.
    import nemo_like.collections.llm.decoder.model  # noqa: F401

    if owner == "peft":
        import peft  # noqa: F401
    before = read_resident_bytes()
    meter = PeakMeter()
    torch.manual_seed(0)
    make = make_ours if owner == "ours" else make_peft
    run, optimizer = make(arguments.folder, name, recompute=not arguments.keep_activations)
    loaded = meter.peak
    times, losses = [], []
    for _ in range(arguments.steps):
        tokens_BT = torch.randint(0, 1000, (arguments.batch, arguments.seq_len + 1))
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = run(tokens_BT)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
        losses.append(float(loss))
    return {
        "peak": meter.stop(),
        "before": before,
        "loading": loaded,
        "kernel_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "times": times[1:],
        "losses": losses,
    }


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="Hugging Face folder of the model")
    parser.add_argument("--batch", type=int, default=2, help="samples of a step")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=6, help="steps of each round")
    parser.add_argument("--rounds", type=int, default=2, help="how often each method has its turn")
    parser.add_argument(
        "--keep-activations", action="store_true", help="instead of computing them again"
    )
    parser.add_argument("--only", action="append", choices=METHODS, help="measure these alone")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child, arguments)))
        return
    found: dict[str, list[dict[str, Any]]] = {}
    methods = arguments.only or METHODS
    for _ in range(arguments.rounds):
        for method in methods:
            command = [sys.executable, __file__, *sys.argv[1:], "--child", method]
            # Freed blocks of this size and above go back to the system: what is measured is what is in use.
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**18)}
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=environment
            )
            if done.returncode:
                sys.exit(f"{method} failed:\n{done.stderr}")
            found.setdefault(method, []).append(json.loads(done.stdout.splitlines()[-1]))
    full = max(it["peak"] for it in found[methods[0]])
    print(
        f"{'':24} {'peak':>8} {'loading':>8} {'of it':>8} {'against':>9} {'step':>8} {'first':>8}"
    )
    print(f"{'':24} {'GB':>8} {'GB':>8} {'model GB':>8} {methods[0][:9]:>9} {'s':>8} {'loss':>8}")
    for method, runs in found.items():
        peak = max(it["peak"] for it in runs)
        above = max(it["peak"] - it["before"] for it in runs)
        step = statistics.median(time for it in runs for time in it["times"])
        loading = max(it["loading"] for it in runs)
        line = f"{method:24} {peak / _GB:8.2f} {loading / _GB:8.2f} {above / _GB:8.2f} {peak / full - 1:9.0%}"
        print(f"{line} {step:8.3f} {runs[0]['losses'][0]:8.4f}")


if __name__ == "__main__":
    main()
