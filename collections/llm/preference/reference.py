"""Log-probabilities of all pairs under the model that training starts from: computed once, kept on disk."""
# Shapes: N = all pairs, C = pairs of one file; the rows of (2, N) are the better answers, then the worse.

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemo_like.data.corpus import hash_key

from ..adapters.folder import open_adapter
from ..decoder.source import open_source
from .batch import compute_log_probs
from .data import PreferenceDataModule

if TYPE_CHECKING:
    from ..decoder.model import DecoderModel

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
FILE_PAIRS = 256
"""Pairs of one file: what an interrupted computation loses at most, on each rank."""
_KEY = "log_probs"


def load_reference(model: DecoderModel, data: PreferenceDataModule) -> Tensor:
    """The log-probabilities of a run; every rank calls this, and each computes its share of what is not there yet.

    They are those of the starting weights, also where the run goes on from a checkpoint. The starting model is opened
    beside the one that is trained, on each rank whole, and let go again.

    Args:
        model: Says where training starts.
        data: The pairs.

    Returns:
        float64 (2, N), on the CPU.
    """
    strategy: Any = model.trainer.strategy
    folder = data.cache_dir / "references" / _name_reference(model, data)
    return compute_once(
        folder,
        num_pairs=data.num_pairs,
        make_compute=lambda: _make_compute(model, data),
        rank=strategy.data_parallel_rank,
        size=strategy.data_parallel_size,
        barrier=strategy.barrier,
    )


def _name_reference(model: DecoderModel, data: PreferenceDataModule) -> str:
    """Changes with the pairs, the weights, and the type that they are computed in."""
    assert model.init_from is not None, "checked by the objective"
    base = model.base or open_source(Path(model.init_from)).identify()
    adapter: dict[str, Any] | None = None
    if model.adapter is not None:
        adapter = model.adapter.describe()
        if model.adapter.init_from is not None:
            start = open_adapter(model.adapter.init_from, model.shape).tensors
            adapter["sha256"] = _hash_tensors(start)
    precision = str(model.trainer.precision)
    return hash_key([FORMAT_VERSION, data.pairs_key, base.sha256, adapter, precision])


def _hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


Compute = Callable[[Sequence[int]], Tensor]
"""Numbers of C pairs to their log-probabilities, (2, C)."""


def _make_compute(model: DecoderModel, data: PreferenceDataModule) -> Compute:
    from ..decoder.model import DecoderModel

    strategy: Any = model.trainer.strategy
    with torch.random.fork_rng(devices=[]):  # a new adapter draws, and computes nothing
        start = DecoderModel(init_from=model.init_from, adapter=model.adapter)
    network = start.network.to(strategy.root_device).eval()

    @torch.no_grad()
    def compute(pair_ids: Sequence[int]) -> Tensor:
        parts = []
        for ids in _cut(pair_ids, size=strategy.micro_batch_size, border=len(data.prepared.train)):
            batch = strategy.batch_to_device(data.read_pairs(ids), strategy.root_device)
            with model.trainer.precision_plugin.forward_context():
                parts.append(compute_log_probs(network, batch).cpu())
        return torch.cat(parts, dim=1)

    return compute


def _cut(pair_ids: Sequence[int], *, size: int, border: int) -> Iterator[Sequence[int]]:
    """Batches, none of which holds pairs of both splits."""
    for split in (
        [it for it in pair_ids if it < border],
        [it for it in pair_ids if it >= border],
    ):
        for first in range(0, len(split), size):
            yield split[first : first + size]


def compute_once(
    folder: Path,
    *,
    num_pairs: int,
    make_compute: Callable[[], Compute],
    rank: int = 0,
    size: int = 1,
    barrier: Callable[[], Any] = lambda: None,
) -> Tensor:
    """Computes what the files in a folder do not hold yet; each file appears whole or not at all.

    Args:
        folder: Of these pairs under this model.
        num_pairs: N.
        make_compute: Opens the model; called only if something is missing.
        rank: This process among those that share the work.
        size: How many they are.
        barrier: Waits for them. Those that do not see this folder do all by themselves.

    Returns:
        (2, N), the same on all ranks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"{first:08}.safetensors": first for first in range(0, num_pairs, FILE_PAIRS)}
    known = {path: found for path in files if (found := _read(path)) is not None}
    compute: Compute | None = None
    for is_own_turn in (True, False):
        for number, (path, first) in enumerate(files.items()):
            if path in known or (is_own_turn and number % size != rank):
                continue
            found = None if is_own_turn else _read(path)  # of another rank
            if found is None:
                compute = compute or make_compute()
                found = compute(range(first, min(first + FILE_PAIRS, num_pairs)))
                _write(path, found)
                logger.info(
                    "reference: %d of %d pairs", min(first + FILE_PAIRS, num_pairs), num_pairs
                )
            known[path] = found
        barrier()
    return torch.cat([known[path] for path in files], dim=1)


def _read(path: Path) -> Tensor | None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)[_KEY]
    except FileNotFoundError:
        return None
    except (SafetensorError, KeyError) as error:
        logger.warning("%s: is damaged and computed anew: %s", path, error)
        return None


def _write(path: Path, log_probs_2C: Tensor) -> None:
    from safetensors.torch import save_file

    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    save_file({_KEY: log_probs_2C.contiguous()}, part)
    os.replace(part, path)
