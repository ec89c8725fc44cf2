"""Configuration of the loggers of this package."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class JsonlLoggerConfig:
    """Metrics as lines of JSON."""

    folder: str
    """Receives ``metrics.jsonl``; the run folder."""


@dataclass(kw_only=True)
class TensorBoardLoggerConfig:
    """Metrics as TensorBoard events."""

    folder: str
    """The run folder; the events go to ``tensorboard`` in it."""
