"""The page that a run leaves behind: one HTML file that needs nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from nemo_like.core.summary import Section, Table
from nemo_like.tracking.chart import Line, render_chart
from nemo_like.tracking.curve import choose_span, smooth
from nemo_like.tracking.style import STYLE
from nemo_like.tracking.wording import (
    find_number_columns,
    format_cell,
    format_duration,
    format_number,
    show_controls,
)

Curves = Mapping[str, tuple[np.ndarray, np.ndarray]]

# Nothing is loaded and nothing runs, whatever a sample or a configuration holds.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# Shown with the loss, or no curve to look at.
_NOT_SMALL = ("train/loss", "val/loss", "train/units")
_FROM_ZERO = ("perf/", "train/lr", "train/grad_norm")
# In a section of their own.
_MACHINE = "machine/"
_YAML_LINE = re.compile(
    r"^(?P<indent>[\s-]*)(?P<key>[^\s:#'\"][^:#]*)(?P<colon>:)(?P<value>\s.*|)$"
)


@dataclass(kw_only=True)
class RunFacts:
    """What stands at the top of the page and in ``summary.json``."""

    name: str
    steps: int
    """Optimizer steps done over the whole run."""
    duration_s: float
    """Wall-clock time of this process in training, validation and checkpoints included."""
    units_per_s: float | None = None
    """Throughput of training steps alone, the median of the run."""
    unit: str = "tokens"
    val_loss: float | None = None
    """Of the last validation."""
    num_parameters: int | None = None
    finished: str = ""
    """Date and time for the reader."""


def write_report(
    path: str | Path,
    *,
    facts: RunFacts,
    curves: Curves,
    sections: Sequence[Section] = (),
    config: str = "",
    environment: Mapping[str, Any] | None = None,
) -> None:
    """Writes the page; an older one is replaced whole.

    Args:
        path: The HTML file.
        facts: Top of the page.
        curves: As ``read_metrics`` gives them.
        sections: Tables and texts, in order.
        config: The composed configuration, YAML.
        environment: As ``collect_environment`` gives it.
    """
    path = Path(path)
    title = escape(facts.name)
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>",
        _render_header(facts),
        _render_curves(curves),
        *map(_render_section, sections),
        _render_machine(curves),
    ]
    if config:
        parts.append(
            "<details>\n<summary>Configuration</summary>\n"
            f"<div><pre>{highlight_yaml(config)}</pre></div>\n</details>"
        )
    if environment:
        parts.append(
            f"<section>\n<h2>Environment</h2>\n{_render_environment(environment)}\n</section>"
        )
    parts.append("</main>\n</body>\n</html>\n")
    hidden = path.with_name(f".{path.name}.new")
    hidden.write_text("\n".join(part for part in parts if part), encoding="utf-8", errors="replace")
    os.replace(hidden, path)


def highlight_yaml(text: str) -> str:
    """YAML as HTML: keys, numbers, words and remarks told apart, everything escaped."""
    return "\n".join(_highlight_line(line) for line in show_controls(text).rstrip().split("\n"))


def _highlight_line(line: str) -> str:
    if line.lstrip().startswith("#"):
        return f'<span class="r">{escape(line)}</span>'
    found = _YAML_LINE.match(line)
    if found is None:
        indent = line[: len(line) - len(line.lstrip(" -"))]
        return escape(indent) + _highlight_value(line[len(indent) :])
    value = found["value"]
    space = value[: len(value) - len(value.lstrip())]
    key = f'<span class="k">{escape(found["key"])}</span>'
    return f"{escape(found['indent'])}{key}:{space}{_highlight_value(value.strip())}"


def _highlight_value(value: str) -> str:
    if re.fullmatch(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?", value):
        return f'<span class="n">{escape(value)}</span>'
    if value in ("true", "false", "null"):
        return f'<span class="w">{value}</span>'
    return escape(value)


def _render_header(facts: RunFacts) -> str:
    cells = [("Steps", f"{facts.steps:,}", ""), ("Time", format_duration(facts.duration_s), "")]
    if facts.units_per_s is not None:
        cells.append(("Throughput", format_number(facts.units_per_s), f"{facts.unit}/s"))
    if facts.val_loss is not None:
        cells.append(("Final validation loss", format_cell(facts.val_loss), ""))
    if facts.num_parameters is not None:
        cells.append(("Parameters", format_number(facts.num_parameters), ""))
    shown = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}"
        + (f" <small>{escape(unit)}</small>" if unit else "")
        + "</dd></div>"
        for name, value, unit in cells
    )
    finished = f"<p>{escape(facts.finished)}</p>" if facts.finished else ""
    return f'<header>\n<h1>{escape(facts.name)}</h1>{finished}\n<dl class="facts">{shown}</dl>\n</header>'


def _render_curves(curves: Curves) -> str:
    lines = []
    if "train/loss" in curves:
        steps, values = curves["train/loss"]
        smoothed = smooth(values, span=choose_span(len(values)))
        lines.append(Line(label="training", steps=steps, values=values, is_faint=True))
        lines.append(Line(label="training", steps=steps, values=smoothed))
    if "val/loss" in curves:
        steps, values = curves["val/loss"]
        lines.append(
            Line(label="validation", steps=steps, values=values, color="b", has_points=True)
        )
    large = render_chart(lines) if lines else ""
    small = []
    for name, (steps, values) in sorted(curves.items(), key=_judge_first):
        # One point is no curve.
        if name in _NOT_SMALL or name.startswith(_MACHINE) or len(steps) < 2:
            continue
        color = {"v": "b", "p": "d"}.get(name[0], "c")
        line = Line(
            label=name, steps=steps, values=values, color=color, has_points=name.startswith("val/")
        )
        chart = render_chart([line], width=380, height=170, from_zero=name.startswith(_FROM_ZERO))
        small.append(f"<figure><figcaption>{escape(name)}</figcaption>{chart}</figure>")
    if not large and not small:
        return ""
    grid = f'<div class="small">{"".join(small)}</div>' if small else ""
    return f"<section>\n<h2>Loss by optimizer step</h2>\n{large}{grid}\n</section>"


def _render_machine(curves: Curves) -> str:
    """Memory and load over the steps: the mean over the ranks, and least and most where there are several."""
    figures = []
    for name, (steps, values) in sorted(curves.items()):
        metric = name.removeprefix(_MACHINE)
        if not name.startswith(_MACHINE) or name.endswith(("_min", "_max")) or len(steps) < 2:
            continue
        lines = [
            Line(label=label, steps=curve[0], values=curve[1], color=color)
            for label, color in (("min", "c"), ("max", "b"))
            if (curve := curves.get(f"{name}_{label}")) is not None
        ]
        lines.append(Line(label="mean", steps=steps, values=values, color="d"))
        chart = render_chart(lines, width=380, height=170, from_zero=True)
        figures.append(f"<figure><figcaption>{escape(metric)}</figcaption>{chart}</figure>")
    if not figures:
        return ""
    return f'<section>\n<h2>Machine by optimizer step</h2>\n<div class="small">{"".join(figures)}</div>\n</section>'


def _judge_first(item: tuple[str, Any]) -> tuple[int, str]:
    """Order of the small charts: what the run achieved, how it learned, how fast."""
    stage = item[0].partition("/")[0]
    return {"val": 0, "train": 1, "perf": 3}.get(stage, 2), item[0]


def _render_section(section: Section) -> str:
    parts = [f"<section>\n<h2>{escape(section.title)}</h2>"]
    if section.table is not None:
        parts.append(_render_table(section.table))
    if section.text:
        parts.append(f"<pre>{escape(show_controls(section.text))}</pre>")
    if section.note:
        parts.append(f'<p class="note">{escape(section.note)}</p>')
    return "\n".join([*parts, "</section>"])


def _render_table(table: Table) -> str:
    classes = [' class="number"' if is_number else "" for is_number in find_number_columns(table)]
    head = "".join(
        f"<th{kind}>{escape(name)}</th>" for name, kind in zip(table.columns, classes, strict=True)
    )
    rows = []
    for index, row in enumerate(table.rows):
        cells = "".join(
            f"<td{kind}>{escape(show_controls(format_cell(cell)))}</td>"
            for cell, kind in zip(row, classes, strict=True)
        )
        rows.append(
            f'<tr class="emphasis">{cells}</tr>' if index in table.emphasis else f"<tr>{cells}</tr>"
        )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _render_environment(environment: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><td class="key">{escape(name)}</td><td class="value">{escape(show_controls(value))}</td></tr>'
        for name, value in _flatten(environment)
    )
    return f"<table><tbody>{rows}</tbody></table>"


def _flatten(node: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested values as rows; what is not there is left out."""
    rows: list[tuple[str, str]] = []
    for name, value in node.items():
        if name == "packages":
            rows.append(
                (name, ", ".join(f"{package} {version}" for package, version in value.items()))
            )
        elif isinstance(value, Mapping):
            rows += _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            words = [
                ", ".join(map(str, v.values())) if isinstance(v, Mapping) else str(v) for v in value
            ]
            if words:
                rows.append(
                    (prefix + name, " ".join(words) if name == "command" else "; ".join(words))
                )
        elif value is not None:
            rows.append((prefix + name, str(value)))
    return rows
