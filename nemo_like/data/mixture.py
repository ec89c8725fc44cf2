"""Mixtures: how often each subset of a corpus is drawn, and what was drawn in the end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from nemo_like.core.errors import ConfigError, suggest
from nemo_like.core.summary import Section, Table


def plan_draws(
    num_blocks: Mapping[str, int],
    *,
    weights: Mapping[str, float] | None = None,
    epochs: Mapping[str, float] | None = None,
) -> dict[str, int]:
    """Draws of each subset in one epoch.

    By weights, an epoch is as long as the subsets of positive weight together, and each gets its
    share of it (largest remainder, so the sum is exact). By epochs, each subset is drawn that many
    times its size, one time where the table does not name it. With neither, every block comes once.

    Args:
        num_blocks: Blocks of each subset.
        weights: Relative share of samples; must name every subset, 0 leaves one out.
        epochs: Passes over a subset within one epoch; need not be whole.

    Raises:
        ConfigError: Both tables are given, a name is unknown, a weight is missing or a number is
            out of range; all faults at once.
    """
    faults = []
    if weights is not None and epochs is not None:
        faults.append("mixture.weights and mixture.epochs: both are given; keep one")
    for kind, table in (("weights", weights), ("epochs", epochs)):
        faults += find_unknown(table or {}, num_blocks, f"mixture.{kind}")
        faults += [
            f"mixture.{kind}.{name}={number}: must be a number from 0 up"
            for name, number in (table or {}).items()
            if not 0 <= number < float("inf")
        ]
    if weights is not None:
        faults += [
            f"mixture.weights: names no weight for subset {name!r}; give it one, 0 leaves it out"
            for name in num_blocks
            if name not in weights
        ]
        if not faults and not any(weights[name] and num_blocks[name] for name in num_blocks):
            faults.append("mixture.weights: no subset with a weight above 0 has any text")
    if faults:
        raise ConfigError(faults)
    if weights is None:
        times = epochs or {}
        return {name: int(times.get(name, 1) * blocks + 0.5) for name, blocks in num_blocks.items()}
    total = sum(blocks for name, blocks in num_blocks.items() if weights[name])
    weight_sum = sum(weights[name] for name in num_blocks)
    quotas = {name: total * weights[name] / weight_sum for name in num_blocks}
    draws = {name: int(quota) for name, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda name: draws[name] - quotas[name])
    for name in by_remainder[: total - sum(draws.values())]:
        draws[name] += 1
    return draws


def find_unknown(names: Collection[str], known: Collection[str], place: str) -> list[str]:
    """A line for each name that is no subset, with the nearest one.

    Args:
        names: What a configuration names.
        known: The subsets that there are.
        place: Key path of the names, for the text.
    """
    return [
        f"{place}.{name}: no such subset{suggest(name, known)}; there are: {', '.join(sorted(known))}"
        for name in names
        if name not in known
    ]


def describe_mixture(
    *,
    names: Sequence[str],
    documents: Sequence[int],
    tokens: Sequence[int],
    num_blocks: Sequence[int],
    draws: Sequence[int],
    drawn: Sequence[int],
    note: str = "",
) -> Section:
    """The composition of what a run reads, as a table.

    Args:
        names: Subsets; all sequences have one entry for each.
        documents: Documents in the training split.
        tokens: Stored tokens in the training split.
        num_blocks: Blocks that these make.
        draws: Draws in one epoch.
        drawn: Samples drawn by the run.
        note: Printed below.
    """
    epoch, total = max(sum(draws), 1), max(sum(drawn), 1)
    rows: list[list[str | int | float]] = [
        [
            name,
            documents[i],
            tokens[i],
            draws[i] / epoch,
            drawn[i] / max(num_blocks[i], 1),
            drawn[i] / total,
        ]
        for i, name in enumerate(names)
    ]
    rows.append(
        [
            "total",
            sum(documents),
            sum(tokens),
            sum(draws) / epoch,
            sum(drawn) / max(sum(num_blocks), 1),
            sum(drawn) / total,
        ]
    )
    return Section(
        title="Training text",
        table=Table(
            columns=["subset", "documents", "tokens", "weight", "epochs", "share"],
            rows=rows,
            emphasis=[len(names)],
        ),
        note=note,
    )
