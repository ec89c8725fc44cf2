"""Lightning strategies that take a whole optimizer step at once."""

from typing import TYPE_CHECKING

from nemo_like.core.lazy import lazy_names

if TYPE_CHECKING:
    from nemo_like.strategies.auto import AutoStrategy as AutoStrategy
    from nemo_like.strategies.ddp import DDPStrategy as DDPStrategy
    from nemo_like.strategies.deepspeed import DeepSpeedStrategy as DeepSpeedStrategy
    from nemo_like.strategies.fsdp import FSDPStrategy as FSDPStrategy
    from nemo_like.strategies.megatron import MegatronStrategy as MegatronStrategy
    from nemo_like.strategies.registry import register as register
    from nemo_like.strategies.strategy import StepStrategy as StepStrategy

__all__ = [
    "AutoStrategy",
    "DDPStrategy",
    "DeepSpeedStrategy",
    "FSDPStrategy",
    "MegatronStrategy",
    "StepStrategy",
    "register",
]

__getattr__ = lazy_names(
    __name__,
    {
        "AutoStrategy": ".auto",
        "DDPStrategy": ".ddp",
        "DeepSpeedStrategy": ".deepspeed",
        "FSDPStrategy": ".fsdp",
        "MegatronStrategy": ".megatron",
        "StepStrategy": ".strategy",
        "register": ".registry",
    },
)
