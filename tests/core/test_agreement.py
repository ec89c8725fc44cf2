"""What one rank asks for, all ranks know at the same call."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from nemo_like.core.agreement import Agreement, Flag
from nemo_like.testing.world import run_world


def test_one_process_agrees_at_once() -> None:
    agreement = Agreement.among_ranks()
    agreement.raise_flag(Flag.SAVE)
    assert agreement.agreed == Flag.SAVE
    agreement.raise_flag(Flag.STOP, cause=3)
    assert agreement.exchange() == Flag.SAVE | Flag.STOP
    assert agreement.cause == 3
    agreement.clear(Flag.SAVE)
    assert (agreement.agreed, agreement.cause) == (Flag.STOP, 3)
    agreement.clear(Flag.STOP)
    assert (agreement.exchange(), agreement.cause) == (Flag(0), 0)
    agreement.close()


def test_sources_are_asked_before_an_exchange() -> None:
    agreement = Agreement()
    agreement.sources.append(lambda: agreement.raise_flag(Flag.FAILED))
    assert agreement.agreed == Flag(0)
    assert agreement.exchange() == Flag.FAILED


def agree_in_turn() -> list[tuple[int, int]]:
    rank, seen = dist.get_rank(), []
    agreement = Agreement.among_ranks()
    for step in range(12):
        if step == 2 and rank == 1:
            agreement.raise_flag(Flag.STOP, cause=15)
        if step == 2 and rank == 2:
            agreement.raise_flag(Flag.STOP | Flag.SAVE, cause=10)
        if step == 6 and rank == 0:
            thread = threading.Thread(target=agreement.raise_flag, args=(Flag.FAILED,))
            thread.start()
            thread.join()
        # Whoever is late changes nothing: what is known depends on the number of the call alone.
        time.sleep(0.02 * ((rank + step) % 3))
        agreement.exchange()
        seen.append((int(agreement.agreed), agreement.cause))
        if step == 4:
            agreement.clear(Flag.STOP)
    agreement.close()
    agreement.close()
    return seen


@pytest.mark.dist
def test_three_ranks_know_the_union_one_call_later() -> None:
    nothing, both, save, failed = (0, 0), (3, 15), (2, 0), (6, 0)
    expected = [nothing] * 3 + [both] * 2 + [save] * 2 + [failed] * 5
    assert run_world(3, agree_in_turn) == [expected] * 3


def fail_alone() -> bool:
    agreement = Agreement.among_ranks()
    agreement.exchange()
    if dist.get_rank() == 1:
        agreement.exchange()  # the other rank never comes to this one
        agreement.abandon()
        agreement.close()
    else:
        torch.zeros(1)
        agreement.abandon()
    return True


@pytest.mark.dist
def test_a_rank_that_fails_waits_for_nobody() -> None:
    assert run_world(2, fail_alone, timeout_s=60) == [True, True]
