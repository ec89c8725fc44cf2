"""The strategy that is chosen when a run starts."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from typing import Any, Literal

from nemo_like.core.errors import ConfigError
from nemo_like.strategies.planning.choice import STRATEGIES, Choice, Devices, choose
from nemo_like.strategies.planning.plan import Strategy
from nemo_like.strategies.planning.size import measure_machine, parse_bytes
from nemo_like.strategies.planning.table import (
    describe_devices,
    describe_work,
    explain,
    format_table,
)
from nemo_like.strategies.planning.work import read_work

logger = logging.getLogger(__name__)

_PACKAGES: dict[Strategy, str] = {"deepspeed": "deepspeed", "megatron": "megatron"}


class AutoStrategy:
    """Stands for the strategy that :meth:`resolve` chooses; it is never built itself.

    Raises:
        ConfigError: Always: a run resolves it before it builds anything.
    """

    def __init__(self, **options: Any) -> None:
        raise ConfigError(
            [
                "strategy=auto: is for a run that is composed from files; here name a strategy: ddp, fsdp, ..."
            ]
        )

    @staticmethod
    def resolve(
        run_config: Any,
        *,
        devices: int,
        devices_per_node: int,
        device_memory_bytes: int | None,
        platform: Literal["cpu", "gpu"] | None = None,
    ) -> dict[str, Any]:
        """Chooses a strategy for a run and says why.

        Args:
            run_config: The checked ``RunConfig``; its ``strategy`` may say ``device_memory``.
            devices: Processes over all nodes.
            devices_per_node: Processes of a node.
            device_memory_bytes: Of a device; None takes that of the machine, divided by the processes of a node.
            platform: None tells by the accelerator, and where that is ``auto`` by ``device_memory_bytes``: what has
                memory of its own is a GPU.

        Returns:
            The component to build in its place.

        Raises:
            ConfigError: Nothing fits, or what a step needs cannot be told from the configuration.
        """
        if platform is None:
            accelerator = run_config.trainer.accelerator
            has_own = device_memory_bytes is not None
            platform = (
                "gpu" if accelerator == "gpu" or (accelerator == "auto" and has_own) else "cpu"
            )
        said: str | None = run_config.strategy.get("device_memory")
        memory = parse_bytes(said) if said is not None else device_memory_bytes
        if memory is None:
            memory = measure_machine() // devices_per_node
        work = read_work(run_config, platform=platform)
        if work is None:
            raise ConfigError(
                [
                    "strategy=auto: needs model.network (the shape), data.seq_len and data.global_batch_size to tell "
                    "what a step takes; give them, or name a strategy: ddp, fsdp, deepspeed, megatron"
                ]
            )
        there = Devices(count=devices, per_node=devices_per_node, memory=memory)
        choice = choose(work, there, strategies=[it for it in STRATEGIES if is_installed(it)])
        lines = [
            describe_work(work),
            describe_devices(there),
            *format_table(choice, there, limit=2),
        ]
        for line in [*lines, *explain(choice, there)]:
            logger.info("%s", line)
        return _component(choice, there, run_config.strategy)


def _component(choice: Choice, devices: Devices, settings: Mapping[str, Any]) -> dict[str, Any]:
    if choice.chosen is None:
        raise ConfigError([f"strategy=auto: {line}" for line in explain(choice, devices)])
    kept = ("start_method", "process_group_backend", "timeout_s")
    return {
        **choice.chosen.plan.component(),
        **{key: settings[key] for key in kept if key in settings},
    }


def is_installed(strategy: Strategy) -> bool:
    """Whether what a strategy stands on is there."""
    package = _PACKAGES.get(strategy)
    return package is None or importlib.util.find_spec(package) is not None
