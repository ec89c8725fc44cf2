"""Plans as text and as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nemo_like.core.units import format_count
from nemo_like.strategies.planning.choice import USABLE, Choice, Devices, Row
from nemo_like.strategies.planning.size import format_bytes
from nemo_like.strategies.planning.work import Work

_HEADS = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "logits": "logits",
    "buffers": "buffers",
}


def describe_work(work: Work) -> str:
    """One line: what a step is."""
    optimizer = {"adamw": "AdamW", "muon": "Muon"}[work.optimizer]
    return (
        f"{format_count(work.shape.count_parameters())} parameters, {work.global_batch_size:,} samples of "
        f"{work.seq_len:,} tokens a step, {work.precision}, {optimizer}"
    )


def describe_devices(devices: Devices) -> str:
    """One line: what it runs on."""
    nodes = f", {devices.per_node} a node" if devices.count > devices.per_node else ""
    return (
        f"{devices.count} x {format_bytes(devices.memory)}{nodes}; {USABLE:.0%} of it, "
        f"{format_bytes(devices.usable)}, may be planned with"
    )


def format_table(
    choice: Choice, devices: Devices, *, limit: int | None = None, asked: Row | None = None
) -> list[str]:
    """One line a plan, those that fit first.

    Args:
        choice: What to show.
        devices: That it was made for.
        limit: How many of each strategy, of those that fit and of the others; None is all.
        asked: A plan to show above them, as it is.
    """
    fitting = [it for it in choice.rows if it.fits]
    others = [it for it in choice.rows if not it.fits]
    shown = [*_first_of_each(fitting, limit), *_first_of_each(others, limit)]
    if choice.chosen is not None and choice.chosen not in shown:
        shown.insert(0, choice.chosen)
    head = ["", "plan", "micro", "again", *_HEADS.values(), "total", "sent", "time", ""]
    marks = ["?"] * (asked is not None) + [">" if it is choice.chosen else "" for it in shown]
    every = [*([asked] if asked is not None else []), *shown]
    rows = [_format_row(it, devices, mark) for it, mark in zip(every, marks, strict=True)]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if i in (0, 1, len(head) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *rows]
    ]
    hidden = len(choice.rows) - len(shown)
    return [*lines, f"   ... and {hidden} more (--all)"] if hidden else lines


def _first_of_each(rows: list[Row], limit: int | None) -> list[Row]:
    counts: dict[str, int] = {}
    shown = []
    for row in rows:
        strategy = row.plan.strategy
        counts[strategy] = counts.get(strategy, 0) + 1
        if limit is None or counts[strategy] <= limit:
            shown.append(row)
    return shown


def _format_row(row: Row, devices: Devices, mark: str) -> list[str]:
    parts = row.memory.parts()
    why = "" if row.fits else f"does not fit: {_HEADS[row.memory.largest]} too large"
    if row.memory.host > devices.host:
        why = f"does not fit: {format_bytes(row.memory.host)} on the host of each device"
    return [
        mark or " ",
        row.plan.label,
        str(row.plan.micro_batch_size),
        row.plan.activation_checkpointing,
        *(format_bytes(parts[name]) for name in _HEADS),
        format_bytes(row.memory.total),
        format_bytes(row.cost.sent_bytes),
        f"{row.cost.ratio:.2f}",
        why,
    ]


def explain(choice: Choice, devices: Devices) -> list[str]:
    """Why the chosen plan; or what is missing where none fits."""
    chosen = choice.chosen
    if chosen is None:
        rows = [it for it in choice.rows if it.memory.host <= devices.host]
        least = min(rows, key=lambda it: it.memory.total)
        missing = format_bytes(least.memory.total - devices.usable)
        return [
            f"no plan fits: the smallest, {least.plan.label}, needs {format_bytes(least.memory.total)} a device, "
            f"{missing} more than there is; take more devices, or a shorter data.seq_len"
        ]
    cost, fitting = chosen.cost, [it for it in choice.rows if it.fits]
    shares = {
        "small or blank micro-batches": cost.small_s,
        "computing again": cost.recompute_s,
        "waiting in the pipeline": cost.wait_s,
        "communication that nothing hides": cost.communication_s,
    }
    parts = [
        f"{name} {it / cost.compute_s:.0%}"
        for name, it in shares.items()
        if it >= 0.005 * cost.compute_s
    ]
    why = "nothing else fits"
    if len(fitting) > 1:
        why = (
            f"of {len(fitting)} kinds of plans that fit it is the quickest by estimate, or the simplest of those "
            "within 2 %"
        )
    lines = [
        f"chosen: {chosen.plan.label}, micro_batch_size {chosen.plan.micro_batch_size}, activation_checkpointing "
        f"{chosen.plan.activation_checkpointing}: {format_bytes(chosen.memory.total)} a device",
        f"because: {why}; a step takes {cost.ratio:.2f} times its arithmetic"
        + (f" ({', '.join(parts)})" if parts else ""),
    ]
    if (next_best := choice.runner_up) is not None:
        lines.append(f"next best: {next_best.plan.label}, {next_best.cost.ratio:.2f}")
    if chosen.memory.host:
        lines.append(f"on the host: {format_bytes(chosen.memory.host)} for each device")
    return lines


def to_data(choice: Choice) -> dict[str, Any]:
    """The whole choice as plain data, for ``--json``; bytes and seconds."""
    chosen = choice.chosen
    return {
        "chosen": None if chosen is None else chosen.plan.overrides(),
        "plans": [_row_to_data(it, is_chosen=it is chosen) for it in choice.rows],
    }


def _row_to_data(row: Row, *, is_chosen: bool) -> dict[str, Any]:
    return {
        "plan": row.plan.label,
        "fits": row.fits,
        "chosen": is_chosen,
        "overrides": row.plan.overrides(),
        "memory_bytes": {**row.memory.parts(), "total": row.memory.total, "host": row.memory.host},
        "largest": row.memory.largest,
        "sent_bytes": row.cost.sent_bytes,
        "time_ratio": round(row.cost.ratio, 4),
    }


def join_lines(*parts: Iterable[str]) -> str:
    """Parts of a text with an empty line between them."""
    return "\n\n".join("\n".join(part) for part in parts)
