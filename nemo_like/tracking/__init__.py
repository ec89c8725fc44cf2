"""What a run leaves behind: metrics, plots, reports."""

from typing import TYPE_CHECKING

from nemo_like.core.lazy import lazy_names

if TYPE_CHECKING:
    from nemo_like.tracking.environment import collect_environment
    from nemo_like.tracking.logger import JsonlLogger, read_metrics
    from nemo_like.tracking.plot import plot_loss
    from nemo_like.tracking.report import RunFacts, write_report
    from nemo_like.tracking.terminal import print_sections

__all__ = [
    "JsonlLogger",
    "RunFacts",
    "collect_environment",
    "plot_loss",
    "print_sections",
    "read_metrics",
    "write_report",
]

__getattr__ = lazy_names(
    __name__,
    {
        "collect_environment": ".environment",
        "JsonlLogger": ".logger",
        "read_metrics": ".logger",
        "plot_loss": ".plot",
        "RunFacts": ".report",
        "write_report": ".report",
        "print_sections": ".terminal",
    },
)
