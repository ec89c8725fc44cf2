"""From a command line to a trained model: compose, check, build, fit."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nemo_like.core import notice
from nemo_like.core.build import build
from nemo_like.core.compose import SCHEMA_KEY, Composed, compose
from nemo_like.core.console import process_rank, setup_logging
from nemo_like.core.errors import ConfigError, NemoLikeError
from nemo_like.core.launch import agree, find_launch_faults
from nemo_like.core.lifeline import LAST_WORDS
from nemo_like.core.requeue import requeue_job
from nemo_like.core.resume_point import find_resume_point, is_finished, read_step
from nemo_like.core.schema import load_class
from nemo_like.core.status import STATUS_FILE, State, write_status

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from nemo_like.core.config import RunConfig

logger = logging.getLogger(__name__)

EXIT_CONFIG = 2
"""The configuration cannot be run; nothing was started."""
EXIT_FAILED = 1
"""The run started and failed. Early stops have codes of their own: see :mod:`nemo_like.core.notice`."""
# Settings that may change between two starts of a run without changing what it learns so far.
_FREE_KEYS = (
    "resume",
    "checkpoint",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.max_time",
    "trainer.threads",
    "trainer.max_nonfinite_steps",
    "trainer.val_weights",
    "strategy",
    "callbacks",
    "loggers",
)


def main(config_name: str = "pretrain", argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a script: ``python examples/llm/pretrain.py +conf=llm/quickstart trainer.max_steps=100``.

    Args:
        config_name: Primary configuration in ``conf/``.
        argv: Overrides; None takes those of the process.
    """
    # Before what takes long to import: a scheduler does not wait until a run is ready.
    with notice.listen():
        code = _run(config_name, sys.argv[1:] if argv is None else argv)
    sys.exit(code)


def _run(config_name: str, argv: Sequence[str]) -> int:
    """Trains and gives the exit code."""
    setup_logging()
    try:
        agree("START_TIME", time.strftime("%Y-%m-%d_%H-%M-%S"))
        train(compose(config_name, argv))
    except ConfigError as error:
        for fault in error.faults:
            sys.stderr.write(f"error: {fault}\n")
        return EXIT_CONFIG
    except NemoLikeError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    except notice.StopRun as stop:
        return int(stop.code or 0)
    return 0


def train(composed: Composed) -> pl.Trainer | None:
    """Trains what a checked configuration describes, from the newest checkpoint of its run folder if there is one.

    Returns:
        The trainer after the run; None where the run folder says that the run is finished already.

    Raises:
        ConfigError: A value that only the finished objects can judge (vocabulary against tokenizer).
        StopRun: It was told to stop early.
    """
    config: RunConfig = composed.config
    faults = [
        *find_launch_faults(devices=config.trainer.devices, num_nodes=config.trainer.num_nodes)
    ]
    if faults:
        raise ConfigError(faults)
    run_dir = choose_run_dir(Path(config.run_dir), resume=config.resume)
    checkpoint = _newest_checkpoint(run_dir, config, composed.tree)
    if checkpoint is not None and is_finished(checkpoint, config, run_dir):
        logger.info(
            "%s is finished at step %d; raise trainer.max_steps to go on, or start anew with resume=never",
            run_dir,
            read_step(checkpoint),
        )
        return None
    if checkpoint is not None:
        logger.info("continuing %s from %s", run_dir, checkpoint.name)
    status = _Status(run_dir, step=0 if checkpoint is None else read_step(checkpoint))
    status.note("running")
    LAST_WORDS.append(status.note_failure)
    try:
        _fit(composed.replace_run_dir(run_dir), run_dir, checkpoint, status)
    except notice.StopRun as stop:
        if not stop.is_settled:
            _settle_early(stop, config, status)
        raise
    except BaseException as error:
        status.note_failure(f"{type(error).__name__}: {error}".partition("\n")[0])
        raise
    finally:
        LAST_WORDS.remove(status.note_failure)
    status.note("finished")
    return status.trainer


class _Status:
    """How a run stands, kept in its folder by rank zero."""

    def __init__(self, run_dir: Path, *, step: int) -> None:
        self.path, self.step = run_dir / STATUS_FILE, step
        self.trainer: pl.Trainer | None = None

    def note(self, state: State, reason: str = "") -> None:
        if self.trainer is not None:
            self.step = max(self.step, self.trainer.global_step)
        if process_rank() == 0:
            write_status(self.path, state, step=self.step, reason=reason)

    def note_failure(self, reason: str) -> None:
        # What went wrong is to be seen, not that a full disk has no room for this file either.
        with suppress(OSError):
            self.note("failed", reason)


def _fit(composed: Composed, run_dir: Path, checkpoint: Path | None, status: _Status) -> None:
    """Builds a run and trains it."""
    notice.leave_if_asked()
    composed = choose_strategy(composed)
    if process_rank() == 0:
        _write_atomically(run_dir / "config.yaml", composed.yaml)
    trainer, model, datamodule = build_run(composed.config, run_dir)
    status.trainer = trainer
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if not any(getattr(it, "heeds_notices", False) for it in callbacks):
        # Nobody would act on a flag, so signals do again what they did.
        notice.stop_listening()
    notice.leave_if_asked()
    # That was done when it was chosen, if it was asked for.
    trainer.strategy.verify_checkpoints = False  # type: ignore[attr-defined]
    trainer.fit(model, datamodule=datamodule, ckpt_path=checkpoint)


def _settle_early(stop: notice.StopRun, config: RunConfig, status: _Status) -> None:
    """What is left to do where a run of one process leaves before its first step: there is nothing to save."""
    notice.ignore()
    logger.info("stopped by %s: nothing was trained; the same command goes on", stop.reason)
    status.note("stopped", stop.reason)
    nodes = [it for it in config.callbacks.values() if it and "Preemption" in it["_target_"]]
    if stop.code == notice.EXIT_STOPPED and all(it.get("requeue", True) for it in nodes):
        requeue_job()


def choose_strategy(composed: Composed) -> Composed:
    """The same run with its strategy decided, where it is one that chooses (``strategy=auto``); alike on all ranks.

    A strategy chooses if its class has ``resolve(config, devices=, devices_per_node=, device_memory_bytes=)``, which
    gives the component to build in its place.
    """
    config: RunConfig = composed.config
    resolve = getattr(load_class(config.strategy["_target_"]), "resolve", None)
    if resolve is None:
        return composed
    import torch

    devices: Any = config.trainer.devices
    has_gpus = config.trainer.accelerator != "cpu" and torch.cuda.is_available()
    if devices == "auto":
        devices = torch.cuda.device_count() if has_gpus else 1
    memory = torch.cuda.get_device_properties(0).total_memory if has_gpus else None
    component = resolve(
        config,
        devices=devices * config.trainer.num_nodes,
        devices_per_node=devices,
        device_memory_bytes=memory,
    )
    return composed.replace_strategy(json.loads(agree("STRATEGY", json.dumps(component))))


def build_run(config: RunConfig, run_dir: Path) -> tuple[pl.Trainer, Any, Any]:
    """Makes the objects of a run: trainer, model, data module."""
    import lightning.pytorch as pl
    import torch

    from nemo_like.core.console import quiet_lightning
    from nemo_like.core.precision import build_precision

    quiet_lightning()
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    allow = config.allow_targets
    strategy = build(config.strategy, path="strategy", allow=allow)
    model = _build_model(config, strategy)
    datamodule = build(config.data, path="data", allow=allow)
    callbacks = [
        build(node, path=f"callbacks.{name}", allow=allow)
        for name, node in config.callbacks.items()
        if node
    ]
    loggers = [
        build(node, path=f"loggers.{name}", allow=allow)
        for name, node in config.loggers.items()
        if node
    ]
    options = config.trainer
    accelerator = options.accelerator
    if accelerator == "auto":
        accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    if accelerator == "gpu":
        _check_gpus(options.devices, torch.cuda.device_count())
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        strategy=strategy,
        plugins=[build_precision(options.precision, "cuda" if accelerator == "gpu" else "cpu")],
        max_steps=options.max_steps,
        max_epochs=-1,
        log_every_n_steps=options.log_every_n_steps,
        check_val_every_n_epoch=None,
        val_check_interval=options.val_every_n_steps or options.max_steps,
        limit_val_batches=1.0 if options.val_batches is None else options.val_batches,
        num_sanity_val_steps=0,
        deterministic=options.deterministic,
        callbacks=callbacks,
        logger=loggers or False,
        default_root_dir=run_dir,
        # Ours, or none: Lightning's would work against the exact order and the one bar.
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return trainer, model, datamodule


def _check_gpus(wanted: int | str, there: int) -> None:
    """Refuses what no process could get."""
    if there == 0:
        raise ConfigError(
            ["trainer.accelerator=gpu: this machine has no GPU; set trainer.accelerator=cpu"]
        )
    if isinstance(wanted, int) and wanted > there:
        raise ConfigError(
            [
                f"trainer.devices={wanted}: this machine has {there} GPUs; set at most that many, or "
                "trainer.accelerator=cpu, where any number of processes runs"
            ]
        )


def _build_model(config: RunConfig, strategy: Any) -> Any:
    import torch

    from nemo_like.core.seed import derive_seed, seed_all

    # Weights are drawn alike on all ranks; training steps seed themselves.
    seed_all(derive_seed(config.seed, 0))
    model_class: Any = load_class(config.model["_target_"])
    # Where no rank can hold all weights, none are made: the strategy has each rank draw its part.
    is_empty = getattr(strategy, "fills_weights", False) and model_class.can_start_empty
    with torch.device("meta") if is_empty else nullcontext():
        model = build(config.model, path="model", allow=config.allow_targets)
    model.optim = build(config.optim, path="optim", allow=config.allow_targets)
    model.schedule = build(config.schedule, path="schedule", allow=config.allow_targets)
    model.seed = config.seed
    model.gradient_clip_norm = config.trainer.gradient_clip_norm
    model.val_weights = config.trainer.val_weights
    return model


def choose_run_dir(wanted: Path, *, resume: str) -> Path:
    """The folder of this run, the same on all ranks: the wanted one, or with ``resume=never`` the next free name."""
    chosen = wanted
    if resume == "never":
        number = 2
        while chosen.exists() and any(chosen.iterdir()):
            chosen = wanted.with_name(f"{wanted.name}-{number}")
            number += 1
    return Path(agree("RUN_DIR", str(chosen)))


def _newest_checkpoint(run_dir: Path, config: RunConfig, tree: Mapping[str, Any]) -> Path | None:
    if config.resume == "never":
        return None
    newest = find_resume_point(run_dir / "checkpoints", verify=config.checkpoint.verify)
    if newest is not None:
        _warn_of_changes(run_dir / "config.yaml", tree)
    return newest


def _warn_of_changes(saved: Path, tree: Mapping[str, Any]) -> None:
    """Names the settings that differ from those the run was started with."""
    from omegaconf import OmegaConf

    if not saved.is_file():
        return
    before = _flatten(OmegaConf.to_container(OmegaConf.load(saved)))
    before.pop(SCHEMA_KEY, None)
    after = _flatten(tree)
    for key in sorted(before.keys() | after.keys()):
        if key.startswith(_FREE_KEYS) or before.get(key) == after.get(key):
            continue
        logger.warning(
            "continuing with another %s: %s, it was %s", key, after.get(key), before.get(key)
        )


def _flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(node, Mapping):
        return {
            key: value
            for name, item in node.items()
            for key, value in _flatten(item, f"{prefix}{name}.").items()
        }
    return {prefix.rstrip("."): node}


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}.new")
    hidden.write_text(text, encoding="utf-8")
    hidden.rename(path)
