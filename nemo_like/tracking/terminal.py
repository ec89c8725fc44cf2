"""The sections of a report, on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

from nemo_like.core.summary import Section, Table
from nemo_like.tracking.wording import find_number_columns, format_cell, show_controls

if TYPE_CHECKING:
    import rich.table


def print_sections(
    sections: Iterable[Section], *, file: TextIO | None = None, width: int | None = None
) -> None:
    """Prints tables, texts and notes; colours only where the output is a terminal.

    Args:
        sections: In the order of the page.
        file: None is standard output.
        width: In characters; None asks the terminal.
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    # No markup, no highlighting: a generated sample is shown as it is.
    console = Console(
        file=file, width=width, markup=False, highlight=False, emoji=False, soft_wrap=False
    )
    for section in sections:
        console.print()
        console.print(Text(section.title, style="bold"))
        if section.table is not None:
            console.print(_build_table(section.table))
        if section.text:
            console.print(Padding(Text(show_controls(section.text)), (0, 2)))
        if section.note:
            console.print(Text(section.note, style="dim"))


def _build_table(table: Table) -> rich.table.Table:
    from rich import box
    from rich.table import Table as RichTable

    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name, is_number in zip(table.columns, find_number_columns(table), strict=True):
        shown.add_column(name, justify="right" if is_number else "left")
    for index, row in enumerate(table.rows):
        shown.add_row(
            *(show_controls(format_cell(cell)) for cell in row),
            style="bold" if index in table.emphasis else None,
        )
    return shown
