"""Sections on a terminal, and the words both outputs share."""

from __future__ import annotations

import io

import pytest

from nemo_like.core.summary import Section, Table
from nemo_like.tracking.terminal import print_sections
from nemo_like.tracking.wording import format_cell, format_duration, format_number, show_controls


def test_tables_line_up_and_text_keeps_its_line_breaks() -> None:
    table = Table(columns=["subset", "bytes"], rows=[["a", 5], ["bb", 12345]])
    out = io.StringIO()
    print_sections(
        [Section(title="T", table=table, text="x [red]\n  y\x1b[2J", note="n")], file=out, width=40
    )
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines[1:4] == ["T", "subset    bytes", "\u2500" * 15]
    assert lines[4:6] == ["a             5", "bb       12,345"]
    assert lines[6:] == ["  x [red]", "    y\u241b[2J", "n"]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0:00"),
        (42.4, "0:42"),
        (59.6, "1:00"),
        (725, "12:05"),
        (3723, "1:02:03"),
        (2 * 86400 + 11040, "2 d 03:04"),
    ],
)
def test_a_duration_reads_like_a_watch(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown


def test_an_endless_duration_is_not_a_number_of_minutes() -> None:
    assert format_duration(float("inf")) == "-:--"


def test_numbers_and_cells() -> None:
    assert [format_number(value) for value in (16412.0, 5.81e6, 512.3, 2.345)] == [
        "16.4 k",
        "5.8 M",
        "512",
        "2.35",
    ]
    assert [format_cell(cell) for cell in ("a", 1234, 1234.5, True)] == [
        "a",
        "1,234",
        "1,234.5000",
        "True",
    ]


def test_control_characters_become_visible() -> None:
    assert show_controls("a\tb\nc\x07\x7f\x85") == "a\tb\nc\u2407\ufffd\ufffd"
