"""Randomness as a function of (seed, step, rank).

The generators are set anew at every optimizer step, so dropout in step 17 does not depend on what was drawn before it:
a validation, a sample, a restart. Loaders and samplers bring generators of their own.
"""

from __future__ import annotations

import random

import numpy as np
import torch

# Odd 64-bit constants of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def derive_seed(seed: int, *path: int) -> int:
    """A 63-bit seed for one purpose, independent of its neighbours.

    Args:
        seed: The seed of the run.
        path: What it is for, e.g. (step, rank); the order matters.
    """
    state = 0
    for part in (seed, *path):
        state = (state ^ (part & _MASK)) & _MASK
        state = (state + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * _MIX_1) & _MASK
        state = ((state ^ (state >> 27)) * _MIX_2) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_all(seed: int) -> None:
    """Seeds Python, NumPy and torch on all devices."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Sets all generators for one optimizer step of one data-parallel rank."""
    value = derive_seed(seed, step, rank)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    # torch.manual_seed also notes a trace-back for every kind of accelerator that is not there, which takes longer
    # than a small step.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
