"""Optimizers, schedules and parameter groups."""

from typing import TYPE_CHECKING

from nemo_like.core.lazy import lazy_names

if TYPE_CHECKING:
    from nemo_like.optim.adamw import AdamW
    from nemo_like.optim.adamw_8bit import AdamW8bit
    from nemo_like.optim.muon import Muon
    from nemo_like.optim.schedule import ConstantSchedule, CosineSchedule, LinearSchedule

__all__ = [
    "AdamW",
    "AdamW8bit",
    "ConstantSchedule",
    "CosineSchedule",
    "LinearSchedule",
    "Muon",
]

__getattr__ = lazy_names(
    __name__,
    {
        "AdamW": ".adamw",
        "AdamW8bit": ".adamw_8bit",
        "Muon": ".muon",
        "ConstantSchedule": ".schedule",
        "CosineSchedule": ".schedule",
        "LinearSchedule": ".schedule",
    },
)
