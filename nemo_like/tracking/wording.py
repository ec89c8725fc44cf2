"""Numbers and text as a reader wants them, on a terminal and on a page."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from nemo_like.core.summary import Table
from nemo_like.core.units import format_count

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_EMPTY = ("", "-")


def format_cell(cell: str | int | float) -> str:
    """Floats with four digits behind the point, integers with thousands separators, text as it is."""
    if isinstance(cell, bool | str):
        return str(cell)
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:,.4f}" if math.isfinite(cell) else str(cell)


def format_duration(seconds: float) -> str:
    """A time as on a watch: ``0:42``, ``12:05``, ``1:02:03``, ``2 d 03:04``."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}"
    return f"{hour}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def format_number(value: float) -> str:
    """A size that need not be exact: ``16.4 k``, ``5.8 M``, ``2.35``."""
    return format_count(value) if value >= 100 else f"{value:.3g}"


def show_controls(text: str) -> str:
    """Text without the power to move a cursor: control characters become visible ones.

    A generated sample may hold any byte. Line feeds and tabs stay.
    """
    return _CONTROL.sub(
        lambda found: chr(0x2400 + ord(found[0])) if found[0] < " " else "\ufffd", text
    )


def find_number_columns(table: Table) -> list[bool]:
    """Whether each column holds numbers, which are set to the right."""
    return [_is_number_column([row[i] for row in table.rows]) for i in range(len(table.columns))]


def _is_number_column(cells: Sequence[str | int | float]) -> bool:
    filled = [cell for cell in cells if cell not in _EMPTY]
    return bool(filled) and not any(isinstance(cell, str | bool) for cell in filled)
