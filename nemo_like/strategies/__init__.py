"""Lightning strategies that take a whole optimizer step at once."""

from typing import TYPE_CHECKING

from nemo_like.core.lazy import lazy_names

if TYPE_CHECKING:
    from nemo_like.strategies.ddp import DDPStrategy as DDPStrategy
    from nemo_like.strategies.registry import register as register

__all__ = ["DDPStrategy", "register"]

__getattr__ = lazy_names(__name__, {"DDPStrategy": ".ddp", "register": ".registry"})
