"""``nemo-like plan``: what a run takes on given devices under every strategy, and which one to take."""

from __future__ import annotations

import argparse
import json

from nemo_like.cli.parser import add_config_dir, make_parser
from nemo_like.core.compose import compose_template
from nemo_like.core.errors import ConfigError
from nemo_like.strategies.planning.choice import Devices, choose, fit_micro_batch, row_of
from nemo_like.strategies.planning.limits import find_divisors, name_nearest
from nemo_like.strategies.planning.plan import find_strategy, read_plan
from nemo_like.strategies.planning.size import measure_machine, parse_bytes
from nemo_like.strategies.planning.table import (
    describe_devices,
    describe_work,
    explain,
    format_table,
    join_lines,
    to_data,
)
from nemo_like.strategies.planning.work import read_work

_DESCRIPTION = """\
Predicts memory and communication of a run under every strategy, and chooses one. Needs no GPU, no weights, no data."""
_EPILOG = """\
examples: nemo-like plan +conf=llm/llama3_70b --devices 64 --device-memory 80GiB --devices-per-node 8
          nemo-like plan +conf=llm/quickstart data.seq_len=1024 strategy=fsdp --devices 2

rows:     > is the choice, ? what was asked for with strategy=...
columns:  micro is micro_batch_size, again what the backward pass computes again (activation_checkpointing); then
          memory of the fullest device at its fullest moment; sent is what a device sends in a step; time is that
          of a step in units of its arithmetic, an estimate to compare plans by."""


def main(arguments: list[str]) -> int:
    """Prints the table, or says that nothing fits with exit code 1."""
    parser = make_parser("plan", _DESCRIPTION, _EPILOG)
    parser.add_argument("what", nargs="*", help="what follows `nemo-like run <verb>`")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="over all nodes (1)")
    parser.add_argument("--devices-per-node", type=int, metavar="N", help="8, or all if fewer")
    text = "of one device, such as 80GiB; without it, devices are processes on this machine's CPU"
    parser.add_argument("--device-memory", metavar="SIZE", help=text)
    parser.add_argument("--verb", default="pretrain", help="what the run is for (pretrain)")
    parser.add_argument("--all", action="store_true", help="every kind of plan, not the best three")
    parser.add_argument("--json", action="store_true", help="plain data: bytes, and overrides")
    add_config_dir(parser)
    options = parser.parse_intermixed_args(arguments)
    devices = _read_devices(options)
    where = [f"trainer.devices={devices.per_node}"]
    if devices.count > devices.per_node:
        where.append(f"trainer.num_nodes={devices.count // devices.per_node}")
    line = [*(f"--config-dir={folder}" for folder in options.config_dir), *options.what, *where]
    config = compose_template(options.verb, line).config
    work = read_work(config, platform="gpu" if options.device_memory else "cpu")
    if work is None:
        raise ConfigError(
            [
                "nemo-like plan: needs model.network (the shape of a decoder), data.seq_len and "
                "data.global_batch_size; a shape that is read from a folder (model.init_from) is not known "
                "before the run"
            ]
        )
    choice = choose(work, devices)
    if options.json:
        print(json.dumps({**to_data(choice), "devices": where}, indent=1))
        return 0 if choice.chosen is not None else 1
    select = []
    if choice.chosen is not None:
        select = [f"select it: {' '.join([*choice.chosen.plan.overrides(), *where])}"]
    asked, notes = None, []
    strategy = find_strategy(config.strategy)
    if strategy is not None and any(text.startswith("strategy") for text in options.what):
        plan = read_plan(strategy, config.strategy, devices.count)
        if config.strategy.get("micro_batch_size") == "auto":
            plan = fit_micro_batch(plan, work, devices)
        asked = row_of(plan, work, devices)
        if config.strategy.get("micro_batch_size") == "auto":
            why = "the largest that fits" if asked.fits else "the smallest, and it does not fit"
            notes = [
                f"strategy.micro_batch_size=auto: {plan.micro_batch_size} is assumed, {why} by this estimate; the run "
                "itself tries what fits"
            ]
    text = join_lines(
        [describe_work(work), describe_devices(devices)],
        format_table(choice, devices, limit=None if options.all else 3, asked=asked),
        [*explain(choice, devices), *select, *notes],
    )
    print(text)
    return 0 if select else 1


def _read_devices(options: argparse.Namespace) -> Devices:
    """What the options say.

    Raises:
        ConfigError: Values that cannot be; all of them.
    """
    faults = []
    count, per_node = options.devices, options.devices_per_node
    if per_node is None:
        per_node = min(max(count, 1), 8)
    for name, value in (("--devices", count), ("--devices-per-node", per_node)):
        if value < 1:
            faults.append(f"{name} {value}: must be at least 1")
    if not faults and count > per_node and count % per_node:
        near = name_nearest(per_node, find_divisors(count))
        faults.append(
            f"--devices-per-node {per_node}: must divide --devices {count}, all nodes are alike; {near}"
        )
    memory = 0
    if options.device_memory is not None:
        try:
            memory = parse_bytes(options.device_memory)
        except ValueError as error:
            faults.append(f"--device-memory {error}")
    if faults:
        raise ConfigError(faults)
    per_node = min(count, per_node)
    return Devices(count=count, per_node=per_node, memory=memory or measure_machine() // per_node)
