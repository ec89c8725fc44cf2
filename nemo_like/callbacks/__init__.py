"""Lightning callbacks: checkpointing, metrics, progress, reports."""

from typing import TYPE_CHECKING

from nemo_like.core.lazy import lazy_names

if TYPE_CHECKING:
    from nemo_like.callbacks.checkpointing import Checkpointing
    from nemo_like.callbacks.metrics import MetricsWriter
    from nemo_like.callbacks.progress import ProgressBar
    from nemo_like.callbacks.report import Report

__all__ = ["Checkpointing", "MetricsWriter", "ProgressBar", "Report"]

__getattr__ = lazy_names(
    __name__,
    {
        "Checkpointing": ".checkpointing",
        "MetricsWriter": ".metrics",
        "ProgressBar": ".progress",
        "Report": ".report",
    },
)
