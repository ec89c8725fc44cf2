"""Which parameters are split over which mesh axis: data, read by the strategies."""

from __future__ import annotations

import re
from collections.abc import Mapping

TENSOR_AXIS = "tensor"
"""Mesh axis of tensor parallelism."""

SPLIT_DIMS: Mapping[str, Mapping[str, int]] = {
    # Rows of the vocabulary.
    "embedding.weight": {TENSOR_AXIS: 0},
    "output.weight": {TENSOR_AXIS: 0},
    # Column-parallel: each rank makes some of the heads or inner channels.
    "layers.*.attention.query.weight": {TENSOR_AXIS: 0},
    "layers.*.attention.query.bias": {TENSOR_AXIS: 0},
    "layers.*.attention.key.weight": {TENSOR_AXIS: 0},
    "layers.*.attention.key.bias": {TENSOR_AXIS: 0},
    "layers.*.attention.value.weight": {TENSOR_AXIS: 0},
    "layers.*.attention.value.bias": {TENSOR_AXIS: 0},
    "layers.*.mlp.gate.weight": {TENSOR_AXIS: 0},
    "layers.*.mlp.up.weight": {TENSOR_AXIS: 0},
    # Row-parallel: each rank maps its part of the input, and the results are summed; the bias is added once.
    "layers.*.attention.output.weight": {TENSOR_AXIS: 1},
    "layers.*.attention.output.bias": {},
    "layers.*.mlp.down.weight": {TENSOR_AXIS: 1},
    # Whole on every rank. The norms of queries and keys see some of the heads on each, so their gradients are summed.
    "layers.*.attention.query_norm.weight": {},
    "layers.*.attention.key_norm.weight": {},
    "layers.*.attention_norm.weight": {},
    "layers.*.mlp_norm.weight": {},
    "norm.weight": {},
}
"""Name pattern (``*`` is a number) -> mesh axis -> tensor dimension that is cut along it. Each parameter matches one.

Key and value rows can be cut only into as many parts as there are key/value heads.
"""


def find_split_dims(name: str) -> Mapping[str, int]:
    """How a parameter is cut.

    Args:
        name: Canonical name, ``layers.3.mlp.up.weight``.

    Returns:
        Mesh axis -> tensor dimension; empty if the parameter is whole on every rank.

    Raises:
        KeyError: No pattern matches.
    """
    pattern = re.sub(r"\.\d+\.", ".*.", name)
    if pattern not in SPLIT_DIMS:
        raise KeyError(f"{name}: no pattern in SPLIT_DIMS says how it is split; add {pattern!r}")
    return SPLIT_DIMS[pattern]
