"""Lightning callbacks: checkpointing, metrics, progress, reports."""

from typing import TYPE_CHECKING

from nemo_like.core.lazy import lazy_names

if TYPE_CHECKING:
    from nemo_like.callbacks.checkpointing import Checkpointing
    from nemo_like.callbacks.guard import NonfiniteGuard
    from nemo_like.callbacks.machine import MachineMonitor
    from nemo_like.callbacks.metrics import MetricsWriter
    from nemo_like.callbacks.preemption import Preemption
    from nemo_like.callbacks.progress import ProgressBar
    from nemo_like.callbacks.report import Report
    from nemo_like.callbacks.spike import LossSpikes

__all__ = [
    "Checkpointing",
    "LossSpikes",
    "MachineMonitor",
    "MetricsWriter",
    "NonfiniteGuard",
    "Preemption",
    "ProgressBar",
    "Report",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Checkpointing": ".checkpointing",
        "LossSpikes": ".spike",
        "MachineMonitor": ".machine",
        "MetricsWriter": ".metrics",
        "NonfiniteGuard": ".guard",
        "Preemption": ".preemption",
        "ProgressBar": ".progress",
        "Report": ".report",
    },
)
