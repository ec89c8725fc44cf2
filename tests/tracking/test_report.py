"""report.html: whole, alone in one file, and safe whatever a model has written."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from nemo_like.core.summary import Section, Table
from nemo_like.tracking.report import RunFacts, highlight_yaml, write_report

FACTS = RunFacts(
    name="tiny <run>", steps=1200, duration_s=3725.4, units_per_s=16412.0, val_loss=3.16234
)
STEPS = np.arange(10, 1210, 10)
CURVES = {
    "train/loss": (STEPS, 3 + 5 * np.exp(-STEPS / 200)),
    "val/loss": (STEPS[9::10], 3.1 + 5 * np.exp(-STEPS[9::10] / 200)),
    "train/lr": (STEPS, 1e-3 * np.ones(len(STEPS))),
    "perf/once": (STEPS[:1], np.ones(1)),
}


class _Reader(HTMLParser):
    """Checks that tags are closed in order, and keeps texts by the tag that holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.append((self.open[-1], data))


def _read(path: Path) -> tuple[str, _Reader]:
    page = path.read_text(encoding="utf-8")
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return page, reader


def _write(folder: Path, *sections: Section, **extra: object) -> tuple[str, _Reader]:
    path = folder / "report.html"
    write_report(path, facts=FACTS, curves=CURVES, sections=sections, **extra)  # type: ignore[arg-type]
    return _read(path)


def test_facts_stand_at_the_top(tmp_path: Path) -> None:
    _, reader = _write(tmp_path)
    shown = [text for tag, text in reader.texts if tag in ("h1", "dt", "dd", "small")]
    assert shown[0] == "tiny <run>"
    assert shown[1:] == [
        *("Steps", "1,200", "Time", "1:02:05", "Throughput", "16.4 k ", "tokens/s"),
        *("Final validation loss", "3.1623"),
    ]


def test_the_page_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    page, reader = _write(
        tmp_path, config="a: http://example.org/x\n", environment={"python": "3.11"}
    )
    assert not re.search(r"<(script|link|img|iframe|object)|@import|url\(", page)
    assert not [
        name for name, _ in reader.attributes if name in ("src", "href") or name.startswith("on")
    ]
    assert "default-src 'none'" in page


def test_a_sample_is_shown_as_it_was_generated(tmp_path: Path) -> None:
    sample = "<script>alert('&amp;')</script>\n\n    if a < b:\n\tx\x00\x1b[31m\ud800"
    page, reader = _write(tmp_path, Section(title="A generated sample", text=sample))
    (shown,) = [text for tag, text in reader.texts if tag == "pre"]
    assert shown == "<script>alert('&amp;')</script>\n\n    if a < b:\n\tx\u2400\u241b[31m\ufffd"
    assert "<script>" not in page


def test_numbers_stand_to_the_right_with_four_digits_and_thousands(tmp_path: Path) -> None:
    table = Table(
        columns=["subset", "bytes", "bits per byte", "note"],
        rows=[["novels", 1234567, 1.5, "a"], ["all", "", float("nan"), 3]],
        emphasis=[1],
    )
    page, _ = _write(tmp_path, Section(title="Held-out text", table=table, note="lower is better"))
    assert (
        '<th>subset</th><th class="number">bytes</th><th class="number">bits per byte</th><th>note</th>'
        in page
    )
    assert (
        '<tr><td>novels</td><td class="number">1,234,567</td><td class="number">1.5000</td><td>a</td></tr>'
        '<tr class="emphasis"><td>all</td><td class="number"></td><td class="number">nan</td><td>3</td></tr>'
    ) in page
    assert '<p class="note">lower is better</p>' in page


def test_curves_of_more_than_one_point_are_drawn(tmp_path: Path) -> None:
    page, reader = _write(tmp_path)
    captions = [text for tag, text in reader.texts if tag == "figcaption"]
    assert captions == ["train/lr"]
    assert page.count("<svg") == 2
    assert "validation, step 100: 6.1327" in page
    assert "nan" not in page


def test_spikes_and_gaps_stay_inside_the_picture(tmp_path: Path) -> None:
    values = 3 + 5 * np.exp(-STEPS / 200)
    values[50], values[60] = 1e9, np.nan
    write_report(tmp_path / "report.html", facts=FACTS, curves={"train/loss": (STEPS, values)})
    _, reader = _read(tmp_path / "report.html")
    points = [value for name, value in reader.attributes if name == "points"]
    assert len(points) == 3  # the raw curve in two pieces, the smoothed one in one
    heights = [float(point.split(",")[1]) for line in points for point in line.split()]
    assert min(heights) > 0
    assert max(heights) < 300


def test_without_curves_there_is_still_a_page(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", facts=FACTS, curves={})
    page, _ = _read(tmp_path / "report.html")
    assert "<svg" not in page


def test_configuration_is_folded_away_and_every_character_of_it_kept(tmp_path: Path) -> None:
    config = "# composed\nname: <b>\ntrainer:\n  lr: 1.0e-05\n  on: true\n  list:\n  - a: 1\n  - pkg://x.y/*.zst\n"
    config += "  url: 'a: b'\n"
    _, reader = _write(tmp_path, config=config)
    assert ("summary", "Configuration") in reader.texts
    start = next(i for i, (tag, text) in enumerate(reader.texts) if text == "# composed")
    assert "".join(text for _, text in reader.texts[start:]).startswith(config.rstrip())


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("lr: 1.0e-05", '<span class="k">lr</span>: <span class="n">1.0e-05</span>'),
        ("  on: null", '  <span class="k">on</span>: <span class="w">null</span>'),
        ("- 8", '- <span class="n">8</span>'),
        ("version: 1.2.3", '<span class="k">version</span>: 1.2.3'),
        ("# a: 1", '<span class="r"># a: 1</span>'),
        ("", ""),
    ],
)
def test_yaml_is_coloured_by_kind(line: str, shown: str) -> None:
    assert highlight_yaml(line + "\nx") == shown + "\nx"


def test_environment_is_a_table_of_what_there_is(tmp_path: Path) -> None:
    environment = {
        "packages": {"torch": "2.14", "numpy": "2.4"},
        "cpu": {"model": "A&B", "cores": 2},
        "devices": [{"name": "H200", "memory_gib": 139.8}],
        "git": None,
        "command": ["a.py", "x=1"],
    }
    _, reader = _write(tmp_path, environment=environment)
    cells = [text for tag, text in reader.texts if tag == "td"]
    assert cells == [
        *("packages", "torch 2.14, numpy 2.4", "cpu.model", "A&B", "cpu.cores", "2"),
        *("devices", "H200, 139.8", "command", "a.py x=1"),
    ]
