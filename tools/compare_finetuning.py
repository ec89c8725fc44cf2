"""Fine-tunes a model on the same conversations twice, here and with peft and transformers' Trainer, and shows both.

    python tools/prepare_instructions.py 'corpus/*.jsonl.zst' --to instructions
    python tools/compare_finetuning.py models/smollm2 instructions --steps 50

Equal for both: samples of at most --seq-len tokens with the template of the tokenizer, of which the answers are learnt,
padded batches, LoRA of rank 16 and alpha 32 on all matrices of the blocks (over the weights, and over NF4), AdamW
without decay at a constant rate, gradients clipped at 1, fp32. The order of samples is each side's own. The loss is the
mean over all answer tokens of the first --val-samples of val.jsonl, before and after; memory is a process's peak.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LEARNING_RATE = 2e-4


def read_encoded(path: Path, tokenizer: Any, encoder: Any, seq_len: int) -> list[Any]:
    """The samples of a file that are short enough."""
    from nemo_like.collections.llm.finetune.samples import read_sample

    rows = path.read_text("utf-8").splitlines()
    samples = [encoder.encode(read_sample(json.loads(row))) for row in rows]
    # The last token is no input.
    return [sample for sample in samples if len(sample.ids_T) <= seq_len + 1]


def collate(samples: list[Any]) -> dict[str, Any]:
    """Pads on the right; what is not learnt has no label."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = [torch.as_tensor(sample.ids_T).long() for sample in samples]
    labels = [
        row.masked_fill(~torch.as_tensor(sample.is_learnt_T).bool(), -100)
        for row, sample in zip(ids, samples, strict=True)
    ]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def measure_loss(model: Any, samples: list[Any], batch: int) -> float:
    """Mean over all answer tokens."""
    import torch

    total, count = 0.0, 0
    model.eval()
    with torch.no_grad():
        for first in range(0, len(samples), batch):
            inputs = collate(samples[first : first + batch])
            labels = inputs["labels"][:, 1:]
            logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            total += float(
                torch.nn.functional.cross_entropy(
                    logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum"
                )
            )
            count += int((labels != -100).sum())
    return total / count


def train_peft(arguments: argparse.Namespace) -> dict[str, float]:
    """The peer, in this process."""
    import peft
    import torch
    import transformers

    from nemo_like.collections.llm.finetune.chat import open_chat_template
    from nemo_like.collections.llm.finetune.encode import SampleEncoder
    from nemo_like.collections.llm.finetune.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(arguments.folder)
    encoder = SampleEncoder(tokenizer, open_chat_template(tokenizer))
    train, val = (
        read_encoded(arguments.data / f"{name}.jsonl", tokenizer, encoder, arguments.seq_len)
        for name in ("train", "val")
    )
    options: dict[str, Any] = {"dtype": torch.float32}
    if arguments.method == "qlora":
        options["quantization_config"] = transformers.BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
        options["device_map"] = "cpu"
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(arguments.folder, **options)
    config = peft.LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model, config)
    before = measure_loss(model, val, arguments.batch)
    settings = transformers.TrainingArguments(
        output_dir=str(arguments.runs / "peer"),
        per_device_train_batch_size=arguments.batch,
        max_steps=arguments.steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=0,
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=model, args=settings, train_dataset=train, data_collator=collate
    )
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    return {"before": before, "after": measure_loss(model, val, arguments.batch), "s": seconds}


def run_ours(arguments: argparse.Namespace, name: str, *words: str) -> float:
    """A run of the real command; gives its validation loss."""
    run_dir = arguments.runs / name
    command = [
        sys.executable,
        str(ROOT / "examples/llm/finetune.py"),
        f"+conf=llm/sft_{arguments.method}",
        f"model.init_from={arguments.folder}",
        f"data.files={arguments.data}/train.jsonl",
        f"data.validation_files={arguments.data}/val.jsonl",
        f"data.cache_dir={arguments.runs}/cache",
        "data.held_out_fraction=null",
        "data.packing=false",
        "data.too_long=drop",
        f"data.seq_len={arguments.seq_len}",
        f"data.global_batch_size={arguments.batch}",
        f"strategy.micro_batch_size={arguments.batch}",
        "schedule=constant",
        "schedule.warmup_steps=0",
        "trainer.log_every_n_steps=5",
        f"run_dir={run_dir}",
        "resume=never",
        "callbacks.samples=null",
        "callbacks.report=null",
        *words,
    ]
    subprocess.run(command, check=True)
    rows = [json.loads(row) for row in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return float([row["val/loss"] for row in rows if "val/loss" in row][-1])


def train_ours(arguments: argparse.Namespace) -> dict[str, float]:
    """The command that a user types, in processes of its own; memory is that of the longest."""
    untouched = ["trainer.max_steps=1", "trainer.val_every_n_steps=1", "optim.lr=1e-12"]
    before = run_ours(arguments, f"{arguments.method}_before", *untouched)
    start = time.perf_counter()
    after = run_ours(
        arguments,
        arguments.method,
        f"trainer.max_steps={arguments.steps}",
        f"trainer.val_every_n_steps={arguments.steps}",
        f"optim.lr={LEARNING_RATE}",
    )
    whole_s = time.perf_counter() - start
    rows = [
        json.loads(row)
        for row in (arguments.runs / arguments.method / "metrics.jsonl").read_text().splitlines()
    ]
    times = [row["time"] for row in rows if "train/loss" in row]
    steps = [row["step"] for row in rows if "train/loss" in row]
    # Of the training alone, as the peer's: from the first record to the last.
    step_s = (times[-1] - times[0]) / (steps[-1] - steps[0]) if len(steps) > 1 else whole_s
    return {"before": before, "after": after, "s": step_s * arguments.steps}


def main() -> None:
    """Runs both in turn and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="Hugging Face folder of a model")
    parser.add_argument("data", type=Path, help="folder with train.jsonl and val.jsonl")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--val-samples", type=int, default=160)
    parser.add_argument("--methods", nargs="+", default=["lora", "qlora"])
    parser.add_argument("--runs", type=Path, default=Path("runs/compare_finetuning"))
    parser.add_argument("--only", choices=["ours", "peft"], help=argparse.SUPPRESS)
    parser.add_argument("--method", default="lora", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        figures = (train_ours if arguments.only == "ours" else train_peft)(arguments)
        who = resource.RUSAGE_CHILDREN if arguments.only == "ours" else resource.RUSAGE_SELF
        print("FIGURES " + json.dumps({**figures, "gb": resource.getrusage(who).ru_maxrss / 2**20}))
        return
    data = arguments.runs / "data"
    data.mkdir(parents=True, exist_ok=True)
    for name, most in (("train", None), ("val", arguments.val_samples)):
        rows = (arguments.data / f"{name}.jsonl").read_text("utf-8").splitlines()[:most]
        (data / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    print("| method | by | loss before | after | s | peak GB |\n|---|---|---:|---:|---:|---:|")
    for method in arguments.methods:
        for owner in ("ours", "peft"):
            words = [*sys.argv[1:2], str(data), "--only", owner, "--method", method]
            words += [f"--steps={arguments.steps}", f"--batch={arguments.batch}"]
            words += [f"--seq-len={arguments.seq_len}", f"--runs={arguments.runs}"]
            done = subprocess.run(
                [sys.executable, __file__, *words],
                capture_output=True,
                text=True,
                env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
            )
            if done.returncode:
                raise SystemExit(done.stdout + done.stderr)
            line = next(it for it in done.stdout.splitlines() if it.startswith("FIGURES "))
            found = json.loads(line.removeprefix("FIGURES "))
            print(
                f"| {method} | {owner} | {found['before']:.4f} | {found['after']:.4f} | {found['s']:.0f} | "
                f"{found['gb']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
