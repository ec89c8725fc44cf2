"""Requests that come and go at every token, computed together, each as it would be alone."""
# Shapes: B = running requests, V = vocabulary.

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_like.core.errors import ConfigError
from nemo_like.text.tokenizer import Tokenizer

from ..generation.cache import KeyValueCache
from ..generation.config import GenerationConfig
from ..generation.generate import Prompt, compute_logits, encode_prompt
from ..generation.request import Request, choose_tokens
from .config import DEFAULT_CACHE_SIZE, HIGHEST_PRIORITY, EngineConfig
from .errors import (
    EngineStoppedError,
    QueueFullError,
    RequestCancelledError,
    RequestFailedError,
    RequestTimeoutError,
    RequestTooLongError,
)
from .handle import Handle
from .monitor import EngineStatistics, Monitor
from .rows import Rows
from .waiting import WaitingQueue

if TYPE_CHECKING:
    from ..decoder.network import DecoderNetwork

logger = logging.getLogger(__name__)

_PER_ENGINE = ("cache_size", "eviction_policy", "num_sinks")
"""Fields of a request's configuration that the engine's own decides."""


class Engine:
    """Generates for many requests at once.

    A step gives every running request its next token and then reads ``prefill_tokens`` of the prompts of newcomers at
    most. Who has ended leaves his row at once, and the next one waiting takes it in the same step. Either
    :meth:`step` is called by hand, or :meth:`start` has a thread do it; :meth:`submit` may be called from any thread.

        with Engine(network, tokenizer) as engine:  # starts the thread, and stops it
            for piece in engine.submit("Once upon a time"):
                print(piece, end="")

    Args:
        network: Computes on its own device; is in evaluation mode until :meth:`close`.
        tokenizer: Of the network.
        config: None is the default.
        clock: Seconds that never go back.

    Raises:
        ConfigError: The configuration has faults.
    """

    def __init__(
        self,
        network: DecoderNetwork,
        tokenizer: Tokenizer,
        config: EngineConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = config or EngineConfig()
        longest = network.shape.max_positions
        faults = list(config.check())
        if config.cache_size is not None and config.cache_size > longest:
            faults.append(f"cache_size={config.cache_size}: the model is meant for {longest}")
        if faults:
            raise ConfigError(faults)
        self.network, self.tokenizer, self.config = network, tokenizer, config
        self.cache = KeyValueCache.build(
            network,
            num_rows=config.max_batch,
            cache_size=config.cache_size or min(DEFAULT_CACHE_SIZE, longest),
            eviction_policy=config.eviction_policy,
            num_sinks=config.num_sinks,
        )
        self._was_training = network.training
        network.eval()
        self._clock, self._monitor = clock, Monitor()
        self._rows = Rows(self.cache)
        # Guards what submit() and the stepping thread share: the queue, and whether it is open.
        self._changed = threading.Condition()
        self._waiting = WaitingQueue(ageing_s=config.ageing_s)
        self._refusal: str | None = None
        self._ends_at_s: float | None = None
        self._thread: threading.Thread | None = None

    def submit(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        seed: int | None = None,
        priority: int = 0,
        max_time_s: float | None = None,
        listener: Callable[[], None] | None = None,
    ) -> Handle:
        """Puts a request in the queue.

        Args:
            prompt: A text, read as the start of a document, or token ids, read as they are.
            config: None is the default; no beams, and nothing about the cache, which is the engine's.
            seed: None is that of the configuration, or a drawn one.
            priority: Higher goes first, -10 to 10; a step is worth ``ageing_s`` seconds of waiting.
            max_time_s: Seconds after which the request fails, waiting included.
            listener: Called on the engine's thread after each token and at the end; must be quick.

        Raises:
            ConfigError: The configuration has faults, or a token is none of the model's.
            RequestTooLongError: Prompt and ``max_tokens`` do not fit the cache.
            QueueFullError: ``max_waiting`` requests wait.
            EngineStoppedError: The engine is closed, or broke down.
        """
        config = config or GenerationConfig()
        tokens = encode_prompt(self.tokenizer, prompt)
        self._check(tokens, config, priority)
        request = Request(
            self.tokenizer, tokens, config, seed=config.seed if seed is None else seed
        )
        now_s = self._clock()
        handle = Handle(
            request,
            priority=priority,
            arrived_s=now_s,
            deadline_s=None if max_time_s is None else now_s + max_time_s,
            listener=listener,
            wake=self._wake,
        )
        with self._changed:
            if self._refusal is not None:
                raise EngineStoppedError(self._refusal)
            if len(self._waiting) >= self.config.max_waiting:
                self._monitor.refused += 1
                wait_s = self._monitor.estimate_wait_s(now_s=now_s)
                raise QueueFullError(
                    f"{len(self._waiting)} requests wait, as many as may; try again in {wait_s} s",
                    retry_after_s=wait_s,
                )
            self._waiting.push(handle)
            self._changed.notify_all()
        return handle

    def _check(self, tokens: Sequence[int], config: GenerationConfig, priority: int) -> None:
        faults = list(config.check())
        if config.num_beams > 1:
            faults.append(f"num_beams={config.num_beams}: the engine has no beam search")
        for name in _PER_ENGINE:
            value, default = (
                getattr(config, name),
                GenerationConfig.__dataclass_fields__[name].default,
            )
            if value != default:
                faults.append(f"{name}={value}: the engine's own configuration decides about it")
        if not -HIGHEST_PRIORITY <= priority <= HIGHEST_PRIORITY:
            faults.append(
                f"priority={priority}: must lie between -{HIGHEST_PRIORITY} and {HIGHEST_PRIORITY}"
            )
        size = self.network.shape.vocab_size
        bad = next((it for it in tokens if not 0 <= it < size), None)
        if bad is not None:
            faults.append(f"prompt: token {bad} is none of the model's, which are 0 to {size - 1}")
        if not tokens:
            faults.append("prompt: holds no token")
        if faults:
            raise ConfigError(faults)
        need = self.count_places(len(tokens), config.max_tokens)
        if self.config.eviction_policy == "error" and need > self.cache.cache_size:
            raise RequestTooLongError(
                [
                    f"prompt: {len(tokens)} tokens and max_tokens={config.max_tokens} need {need} places, "
                    f"a request has {self.cache.cache_size}; shorten one"
                ]
            )

    @staticmethod
    def count_places(num_prompt: int, max_tokens: int) -> int:
        """Places in a row that so many tokens need; the last one is never read."""
        return num_prompt + max(max_tokens - 1, 0)

    @torch.inference_mode()
    def step(self) -> bool:
        """Gives each running request a token, and reads prompts.

        Returns:
            Whether any request is left.
        """
        self._sweep()
        generated = self._decode() + self._prefill()
        self._monitor.count_step(generated, now_s=self._clock())
        return bool(self._waiting) or bool(self._rows.occupied)

    def _sweep(self) -> None:
        """Ends what was cancelled, took too long, or has nothing to do."""
        now_s = self._clock()
        with self._changed:
            gone = self._waiting.take_where(lambda it: self._find_end(it, now_s) is not None)
        for handle in gone:
            self._end(handle, self._find_end(handle, now_s))
        for handle in list(self._rows.occupied):
            error = self._find_end(handle, now_s)
            if error is not None:
                self._rows.vacate(handle)
                self._end(handle, error)

    def _find_end(self, handle: Handle, now_s: float) -> Exception | None:
        count = len(handle.request.tokens)
        if handle.is_cancelled:
            return RequestCancelledError(f"cancelled after {count} tokens")
        if handle.deadline_s is not None and now_s >= handle.deadline_s:
            limit_s = handle.deadline_s - handle.arrived_s
            return RequestTimeoutError(f"not done after {limit_s:g} s: {count} tokens so far")
        if self._ends_at_s is not None and (now_s >= self._ends_at_s or handle.state == "waiting"):
            return EngineStoppedError(f"{self._refusal}: {count} tokens so far")
        return None

    def _end(self, handle: Handle, error: Exception | None) -> None:
        """Settles the account of a request that has no row any more; with an error it fails."""
        if error is not None:
            handle.fail(error, now_s=self._clock())
        self._monitor.count_end(handle)
        try:
            handle.announce()
        except Exception:  # a listener is somebody else's code
            logger.exception("the listener of a request that ended raised")

    def _decode(self) -> int:
        running = list(self._rows.running)
        if not running:
            return 0
        tokens = [handle.request.tokens[-1:] for handle in running]
        try:
            step = self.cache.append([1] * len(running), rows=range(len(running)))
            logits_BV = compute_logits(self.network, tokens, step)
            return self._choose(logits_BV, running)
        except Exception as error:  # the device's; which request it was cannot be told
            for handle in running:
                self._give_up(handle, error)
            return 0

    def _prefill(self) -> int:
        generated, budget = 0, self.config.prefill_tokens
        while budget > 0 and (self._rows.newcomer is not None or self._admit()):
            handle = self._rows.newcomer
            assert handle is not None, "just admitted"
            row, prompt = len(self._rows.running), handle.request.prompt
            left = prompt[self.cache.lengths[row] :]
            if len(left) > budget < self.config.prefill_tokens:
                break  # whole in the next step, rather than in two small pieces
            chunk = left[:budget]
            budget -= len(chunk)
            try:
                step = self.cache.append([len(chunk)], rows=range(row, row + 1))
                if len(chunk) < len(left):
                    device = self.network.output_weight_VD.device
                    self.network.compute_hidden(torch.tensor([chunk], device=device), cache=step)
                else:
                    logits_BV = compute_logits(self.network, [chunk], step)
                    self._rows.settle()
                    generated += self._choose(logits_BV, [handle])
            except Exception as error:
                self._give_up(handle, error)
            self._monitor.prompt_tokens += len(chunk)
        return generated

    def _admit(self) -> bool:
        """Gives a row to the first who waits and needs one."""
        while self._rows.has_room:
            with self._changed:
                handle = self._waiting.pop() if self._waiting else None
            if handle is None:
                return False
            handle.state = "running"
            if handle.request.finish_reason is None:
                self._rows.place(handle)
                return True
            handle.finish(now_s=self._clock())  # it asked for no tokens
            self._end(handle, None)
        return False

    def _choose(self, logits_BV: Tensor, handles: Sequence[Handle]) -> int:
        """Takes the next token of each, and those that end out of their rows; gives how many tokens there were."""
        # A network that computes NaN for a row does so in its first column, too.
        is_finite = logits_BV[:, 0].isfinite().tolist()
        choices = choose_tokens(logits_BV, [handle.request for handle in handles])
        now_s, generated = self._clock(), 0
        for handle, choice, is_sound in zip(handles, choices, is_finite, strict=True):
            if not is_sound:
                self._clean(handle)
                self._give_up(handle, ArithmeticError("the network's output is not finite"))
                continue
            try:
                handle.accept(*choice, now_s=now_s)
                generated += 1
                if not handle.is_over:
                    handle.announce()
                    continue
            except Exception as error:  # of its own tokens, or of its listener
                self._give_up(handle, error)
                continue
            self._rows.vacate(handle)
            self._end(handle, None)
        return generated

    def _clean(self, handle: Handle) -> None:
        """Removes what is not finite from a row: a weight of zero would not hide it from the next request."""
        row = self._rows.occupied.index(handle)
        cache = self.cache
        for tensor in (cache.keys_LRKSC, cache.values_LRKSC, cache.sinks_LRKPC):
            tensor[:, row].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _give_up(self, handle: Handle, cause: Exception) -> None:
        """Fails one request for a reason that is its own, or the device's."""
        if handle.is_over:
            return
        logger.error("a request failed", exc_info=cause)
        self._rows.vacate(handle)
        error = RequestFailedError(f"{type(cause).__name__}: {cause}")
        error.__cause__ = cause
        self._end(handle, error)

    def start(self) -> None:
        """Has a thread step while there are requests.

        Raises:
            RuntimeError: It has one already, or is closed.
        """
        if self._thread is not None or self._refusal is not None:
            raise RuntimeError("start(): the engine has its thread already, or is closed")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._has_work)
                if not self.step() and self._ends_at_s is not None:
                    return
        except Exception as error:
            logger.exception("the engine broke down")
            self._break_down(error)

    def _has_work(self) -> bool:
        return bool(self._waiting) or bool(self._rows.occupied) or self._ends_at_s is not None

    def _break_down(self, error: Exception) -> None:
        with self._changed:
            self._refusal = f"the engine broke down ({type(error).__name__}: {error})"
            left = [*self._waiting.take_where(lambda _: True), *self._rows.occupied]
        for handle in left:
            self._end(handle, EngineStoppedError(self._refusal))

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def drain(self, finish_s: float) -> None:
        """Takes no more requests, fails those that wait, and those that run ``finish_s`` seconds from now."""
        with self._changed:
            if self._refusal is None:
                self._refusal = "the engine is being stopped"
            self._ends_at_s = self._clock() + finish_s
            self._changed.notify_all()

    def close(self, finish_s: float = 0.0) -> None:
        """Drains, waits for the end, and puts the network's mode back; safe to call again.

        Args:
            finish_s: Seconds that running requests have.
        """
        self.drain(finish_s)
        if self._thread is not None:
            self._thread.join()
        else:
            while self.step():
                pass
        self.network.train(self._was_training)

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_sound(self) -> bool:
        """Whether it takes requests."""
        return self._refusal is None

    def summarize(self) -> EngineStatistics:
        """Figures as they are now."""
        with self._changed:
            waiting, running = len(self._waiting), len(self._rows.occupied)
        return self._monitor.summarize(waiting=waiting, running=running, now_s=self._clock())
