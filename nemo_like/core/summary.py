"""What a run has to say for itself: sections that the terminal and the report page both show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Table:
    """A table with one header row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | int | float]]
    """Floats are shown with four digits behind the point, integers with thousands separators."""
    emphasis: Sequence[int] = field(default_factory=tuple)
    """Indices of the rows that a reader should see first (totals)."""


@dataclass(kw_only=True)
class Section:
    """A titled part of a report: a table, or text, and a note below it."""

    title: str
    table: Table | None = None
    text: str = ""
    """Shown as it is, line breaks kept (a generated sample)."""
    note: str = ""
