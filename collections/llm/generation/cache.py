"""Keys and values of the tokens read so far: allocated once, written in place, one row a request.

The interface that schedulers and speculative decoding stand on::

    cache = KeyValueCache.build(network, num_rows=8, cache_size=1024)
    step = cache.append([5, 3], rows=[0, 1])                 # places for the next 5 and 3 tokens of two rows
    hidden_BTD = network.compute_hidden(tokens_BT, cache=step)   # (2, 5) ids, the second row padded on its right
    cache.lengths                                            # tokens of each row, known without asking a device
    cache.rollback([0], [2])                                 # row 0 forgets all but its first 2 tokens
    cache.copy([0], [7])                                     # row 7 becomes a copy of row 0
    cache.free(0)                                            # row 0 is empty

A step costs least when its rows are a ``range`` (their part of the cache is a view, else it is copied), so a scheduler
keeps running requests in the first rows: it copies the last one into the row that became free.

Token ``i`` of a row has position ``i``, whatever its neighbours. Without eviction it lies in slot ``i``, so attention
reads the filled slots only, and rows of unequal length need a mask but no padding. With eviction the slots are a ring:
position ``i`` lies in slot ``i % cache_size``, or behind the sinks in a ring of their own. A query at position ``i``
then sees

* ``sliding_window``: the last ``cache_size`` tokens, itself included;
* ``attention_sinks``: the first ``num_sinks`` tokens and the last ``cache_size - num_sinks``. Among the last tokens
  distances are true ones; the distance to a sink is counted within the cache, as if what was evicted had never been
  (Xiao et al. 2023, arXiv:2309.17453): from ``min(i, cache_size - 1)`` to the sink's own position.
"""
# Shapes: L = layers, R = rows of the cache, B = rows of a step, T = new tokens, H = query heads, K = key/value heads,
# S = slots that are read, C = channels of a head, N = tokens that are written, P = sinks.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from nemo_like.nn.mask import build_mask
from nemo_like.nn.rope import RotaryPositions, rotate

from .config import EvictionPolicy

if TYPE_CHECKING:
    from ..decoder.network import DecoderNetwork


class KeyValueCache:
    """Keys and values of all layers, for a fixed number of rows and slots.

    Args:
        num_layers: L.
        num_rows: R, the requests that can be held at once.
        num_kv_heads: K.
        head_dim: C.
        cache_size: Slots a row.
        rotary: Of the network; sinks are turned by it.
        eviction_policy: What happens when a row is full: ``error`` refuses, the others forget.
        num_sinks: P, used by ``attention_sinks`` only.
        window: Tokens that the network itself lets a token see, itself included; None is all.
        dtype: Of keys and values.
        device: Where they lie.

    Raises:
        ValueError: A number is out of range.

    Attributes:
        lengths: Tokens of each row so far, evicted ones included. To be read only.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_rows: int,
        num_kv_heads: int,
        head_dim: int,
        cache_size: int,
        rotary: RotaryPositions,
        eviction_policy: EvictionPolicy = "error",
        num_sinks: int = 4,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        if cache_size < 1:
            raise ValueError(f"cache_size={cache_size}: must be at least 1")
        if eviction_policy != "attention_sinks":
            num_sinks = 0
        elif not 0 < num_sinks < cache_size:
            raise ValueError(f"num_sinks={num_sinks}: must be above 0 and below {cache_size=}")
        if eviction_policy == "attention_sinks" and window is not None and cache_size > window:
            raise ValueError(
                f"cache_size={cache_size}: with attention_sinks it must be at most {window}, the window of the "
                "model, which would see no sink beyond it"
            )
        if eviction_policy == "sliding_window" and window is not None:
            cache_size = min(cache_size, window)
        self.cache_size, self.eviction_policy = cache_size, eviction_policy
        self.num_rows, self.num_sinks, self.rotary = num_rows, num_sinks, rotary
        # A ring is no longer than the window, so its slots need no mask.
        self.window = window if eviction_policy == "error" else None
        shape = (num_layers, num_rows, num_kv_heads, cache_size, head_dim)
        # Zeros, because a slot behind the end of a row is multiplied by a weight of zero.
        self.keys_LRKSC = torch.zeros(shape, dtype=dtype, device=device)
        self.values_LRKSC = torch.zeros(shape, dtype=dtype, device=device)
        self.sinks_LRKPC = self.keys_LRKSC.new_zeros(*shape[:3], num_sinks, head_dim)
        self.lengths = [0] * num_rows

    @classmethod
    def build(
        cls,
        network: DecoderNetwork,
        *,
        num_rows: int,
        cache_size: int,
        eviction_policy: EvictionPolicy = "error",
        num_sinks: int = 4,
    ) -> KeyValueCache:
        """A cache for this network, on its device and in its type."""
        shape, weight = network.shape, network.embedding.weight
        return cls(
            num_layers=shape.num_layers,
            num_rows=num_rows,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_size,
            cache_size=cache_size,
            rotary=network.positions,
            eviction_policy=eviction_policy,
            num_sinks=num_sinks,
            window=shape.sliding_window,
            dtype=weight.dtype,
            device=weight.device,
        )

    def append(self, counts: Sequence[int], *, rows: Sequence[int] | None = None) -> Step:
        """Reserves places for the next tokens of some rows.

        Every step must be computed, in the order in which steps were reserved.

        Args:
            counts: New tokens of each row, at least 1; rows with fewer than the largest count are padded on the right,
                and their padding is never seen.
            rows: Which rows of the cache, each once; None is the first ``len(counts)``.

        Returns:
            What ``network.compute_hidden(tokens_BT, cache=...)`` takes.

        Raises:
            ValueError: A row is full and the policy is ``error``.
        """
        rows = range(len(counts)) if rows is None else rows
        starts = [self.lengths[row] for row in rows]
        for row, start, count in zip(rows, starts, counts, strict=True):
            if self.eviction_policy == "error" and start + count > self.cache_size:
                raise ValueError(
                    f"row {row}: {start} + {count} tokens do not fit cache_size={self.cache_size}; give a larger one, "
                    "or an eviction_policy that forgets"
                )
        for row, start, count in zip(rows, starts, counts, strict=True):
            self.lengths[row] = start + count
        longest, size = max(counts), self.cache_size
        if longest > 1 and max(self.lengths[row] for row in rows) > size:
            return WrappingStep(self, rows, starts, counts)
        if self.num_sinks and max(starts) >= size:
            self._turn_sinks([(r, n) for r, n in zip(rows, starts, strict=True) if n >= size])
        return InPlaceStep(self, rows, starts, counts)

    def _turn_sinks(self, places: list[tuple[int, int]]) -> None:
        """Moves the sinks of full rows along, so that a query at its true position sees them at their distance.

        Args:
            places: Row and position of the query.
        """
        index, size = [row for row, _ in places], self.cache_size
        first = [row for row, position in places if position == size]
        if first:
            self.sinks_LRKPC[:, first] = self.keys_LRKSC[:, first, :, : self.num_sinks]
        shift_B1 = torch.tensor([[position - size + 1] for _, position in places])
        turned = rotate(
            self.sinks_LRKPC[:, index], self.rotary(shift_B1.to(self.keys_LRKSC.device))
        )
        self.keys_LRKSC[:, index, :, : self.num_sinks] = turned

    def slot(self, position: int) -> int:
        """Where the token at a position lies."""
        if position < self.cache_size:
            return position
        sinks = self.num_sinks
        return sinks + (position - sinks) % (self.cache_size - sinks)

    def rollback(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Forgets the newest tokens of some rows, which costs nothing.

        Args:
            rows: Rows of the cache.
            lengths: How many tokens each keeps.

        Raises:
            ValueError: A row has fewer tokens, or has evicted some, which cannot come back.
        """
        for row, length in zip(rows, lengths, strict=True):
            had = self.lengths[row]
            if not 0 <= length <= had:
                raise ValueError(f"row {row}: cannot roll back to {length} tokens, it has {had}")
            if had > self.cache_size and length != had:
                raise ValueError(
                    f"row {row}: cannot roll back to {length} of {had} tokens: cache_size={self.cache_size} "
                    "and the older ones are evicted"
                )
        for row, length in zip(rows, lengths, strict=True):
            self.lengths[row] = length

    def free(self, row: int) -> None:
        """Empties a row for the next request."""
        self.lengths[row] = 0

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Makes some rows copies of others; all are read before any is written.

        Args:
            sources: Rows that are read, any of them more than once.
            targets: Rows that are written, each once.
        """
        pairs = [(s, t) for s, t in zip(sources, targets, strict=True) if s != t]
        if not pairs:
            return
        read, written = [source for source, _ in pairs], [target for _, target in pairs]
        lengths = [self.lengths[row] for row in read]
        filled = min(max(lengths), self.cache_size)
        for tensor in (self.keys_LRKSC, self.values_LRKSC):
            tensor[:, written, :, :filled] = tensor[:, read, :, :filled]
        if self.num_sinks:
            self.sinks_LRKPC[:, written] = self.sinks_LRKPC[:, read]
        for row, length in zip(written, lengths, strict=True):
            self.lengths[row] = length


@dataclass(slots=True)
class _LayerInPlace:
    """One layer of a step whose tokens are written before they are looked at."""

    keys_BKSC: Tensor
    values_BKSC: Tensor
    new_keys: Tensor
    new_values: Tensor
    is_fresh: bool
    step: InPlaceStep

    def attend(self, query_BHTC: Tensor, key_BKTC: Tensor, value_BKTC: Tensor) -> Tensor:
        """Writes and attends."""
        step = self.step
        if step.write_index is None:
            self.new_keys.copy_(key_BKTC)
            self.new_values.copy_(value_BKTC)
        else:
            row_N, slot_N, batch_N, token_N = step.write_index
            self.new_keys[row_N, :, slot_N] = key_BKTC[batch_N, :, token_N]
            self.new_values[row_N, :, slot_N] = value_BKTC[batch_N, :, token_N]
        if self.is_fresh:
            keys, values = key_BKTC, value_BKTC
        elif step.read_index is None:
            keys, values = self.keys_BKSC, self.values_BKSC
        else:
            keys, values = self.keys_BKSC[step.read_index], self.values_BKSC[step.read_index]
        return F.scaled_dot_product_attention(
            query_BHTC,
            keys,
            values,
            attn_mask=step.mask_B1TS,
            is_causal=step.is_causal,
            enable_gqa=query_BHTC.size(1) != keys.size(1),
        )


class InPlaceStep:
    """A step that evicts nothing that its tokens see: decoding, prefill, and what goes between.

    Args:
        cache: The cache.
        rows: Of the cache.
        starts: Tokens of each row before the step.
        counts: New tokens of each row.
    """

    def __init__(
        self, cache: KeyValueCache, rows: Sequence[int], starts: list[int], counts: Sequence[int]
    ) -> None:
        self.cache, self.rows, self.starts, self.counts = cache, rows, starts, counts
        device = cache.keys_LRKSC.device
        longest, first, last = max(counts), min(starts), max(starts)
        self.is_even = first == last
        self.positions_BT = torch.arange(first, first + longest, device=device).unsqueeze(0)
        if not self.is_even:
            starts_B1 = torch.tensor(starts, device=device).unsqueeze(1)
            self.positions_BT = starts_B1 + torch.arange(longest, device=device)
        # A prompt looks at itself only, so that plain causal attention serves it.
        is_fresh = last == 0 and longest > 1
        end = min(last + longest, cache.cache_size)
        begin = 0 if cache.window is None else max(0, first + 1 - cache.window)
        self.is_causal, self.mask_B1TS = False, None
        if is_fresh:
            seen = build_mask(longest, window=cache.window, device=device)
            self.is_causal = seen is None
            self.mask_B1TS = None if seen is None else self._to_bias(seen)
        elif longest > 1 or not self.is_even:
            self.mask_B1TS = self._to_bias(self._find_seen(begin, end))
        is_view = isinstance(rows, range) and rows.step == 1
        self.read_index = None if is_view else torch.tensor(rows, device=device)
        self.write_index = None if is_view and self.is_even else self._index_slots(device)
        self.layers = self._cut_layers(is_fresh, begin, end, longest)

    def _to_bias(self, seen: Tensor) -> Tensor:
        """As numbers to add, made once for all layers."""
        bias = torch.zeros(seen.shape, dtype=self.cache.keys_LRKSC.dtype, device=seen.device)
        return bias.masked_fill_(~seen, -torch.inf)

    def _find_seen(self, begin: int, end: int) -> Tensor:
        slot_S = torch.arange(begin, end, device=self.positions_BT.device)
        position_BT1 = self.positions_BT.unsqueeze(-1)
        seen_BTS = slot_S <= position_BT1  # a full ring: every slot lies below the position
        if self.cache.window is not None:
            seen_BTS &= slot_S > position_BT1 - self.cache.window
        return seen_BTS.unsqueeze(1)

    def _index_slots(self, device: torch.device) -> tuple[Tensor, ...]:
        """Row, slot, row of the step and token of each real token."""
        places = [
            (row, self.cache.slot(start + token), batch, token)
            for batch, (row, start, count) in enumerate(
                zip(self.rows, self.starts, self.counts, strict=True)
            )
            for token in range(count)
        ]
        return tuple(torch.tensor(places, device=device).unbind(1))

    def _cut_layers(
        self, is_fresh: bool, begin: int, end: int, longest: int
    ) -> list[_LayerInPlace]:
        cache, rows = self.cache, self.rows
        parts: list[
            list[Tensor]
        ] = []  # keys and values that are read, keys and values that are written
        tensors = [cache.keys_LRKSC, cache.values_LRKSC]
        if self.read_index is None:
            tensors = [it[:, rows[0] : rows[-1] + 1] for it in tensors]
        # What is not read is cut all the same: one call for all layers.
        parts += [list(it[:, :, :, begin:end].unbind(0)) for it in tensors]
        if self.write_index is None:
            slot = cache.slot(self.starts[0])
            parts += [list(it[:, :, :, slot : slot + longest].unbind(0)) for it in tensors]
        else:
            parts += [list(cache.keys_LRKSC.unbind(0)), list(cache.values_LRKSC.unbind(0))]
        return [
            _LayerInPlace(old_keys, old_values, keys, values, is_fresh, self)
            for old_keys, old_values, keys, values in zip(*parts, strict=True)
        ]


@dataclass(slots=True)
class _LayerWrapping:
    """One layer of a step that overwrites slots which its first tokens still see."""

    index: int
    step: WrappingStep

    def attend(self, query_BHTC: Tensor, key_BKTC: Tensor, value_BKTC: Tensor) -> Tensor:
        """Attends to the old slots and the new tokens side by side, then writes what stays."""
        step, cache = self.step, self.step.cache
        old_BKSC = cache.keys_LRKSC[self.index, step.rows_B]
        if cache.num_sinks:
            # Full rows hold turned sinks; here each query turns itself instead.
            sinks = cache.sinks_LRKPC[self.index, step.rows_B]
            kept = torch.where(step.was_full_B111, sinks, old_BKSC[:, :, : cache.num_sinks])
            old_BKSC[:, :, : cache.num_sinks] = kept
        keys = torch.cat((old_BKSC, key_BKTC), dim=2)
        values = torch.cat((cache.values_LRKSC[self.index, step.rows_B], value_BKTC), dim=2)
        is_grouped = query_BHTC.size(1) != keys.size(1)
        if not cache.num_sinks:
            mixed = F.scaled_dot_product_attention(
                query_BHTC, keys, values, attn_mask=step.seen_B1TS, enable_gqa=is_grouped
            )
        else:
            # One product for two rotations: a sink has zeros where the true position is multiplied, others where
            # the position in the cache is.
            near = rotate(query_BHTC.transpose(1, 2), step.turns_back).transpose(1, 2)
            keys = torch.cat(
                (keys.masked_fill(step.is_sink_B1S1, 0), keys.masked_fill(~step.is_sink_B1S1, 0)),
                -1,
            )
            mixed = F.scaled_dot_product_attention(
                torch.cat((query_BHTC, near), dim=-1),
                keys,
                F.pad(values, (0, values.size(-1))),
                attn_mask=step.seen_B1TS,
                scale=query_BHTC.size(-1) ** -0.5,
                enable_gqa=is_grouped,
            )[..., : values.size(-1)]
        self._write(key_BKTC, value_BKTC)
        return mixed

    def _write(self, key_BKTC: Tensor, value_BKTC: Tensor) -> None:
        step, cache = self.step, self.step.cache
        row_N, slot_N, batch_N, token_N = step.write_index
        cache.keys_LRKSC[self.index, row_N, :, slot_N] = key_BKTC[batch_N, :, token_N]
        cache.values_LRKSC[self.index, row_N, :, slot_N] = value_BKTC[batch_N, :, token_N]
        if cache.num_sinks and step.filled:
            kept = cache.keys_LRKSC[self.index, step.filled, :, : cache.num_sinks]
            cache.sinks_LRKPC[self.index, step.filled] = kept


class WrappingStep:
    """A step of several tokens in which a row outgrows its slots; exact, and slower.

    Args:
        cache: The cache.
        rows: Of the cache.
        starts: Tokens of each row before the step.
        counts: New tokens of each row.
    """

    def __init__(
        self, cache: KeyValueCache, rows: Sequence[int], starts: list[int], counts: Sequence[int]
    ) -> None:
        self.cache = cache
        device, size, sinks = cache.keys_LRKSC.device, cache.cache_size, cache.num_sinks
        self.rows_B = torch.tensor(list(rows), device=device)
        starts_B1 = torch.tensor(starts, device=device).unsqueeze(1)
        self.positions_BT = starts_B1 + torch.arange(max(counts), device=device)
        # The position that each slot holds; below 0 it holds none.
        slot_S = torch.arange(size, device=device)
        behind_BS = (starts_B1 - 1 - slot_S) % (size - sinks)
        held_BS = torch.where(
            (starts_B1 <= size) | (slot_S < sinks), slot_S, starts_B1 - 1 - behind_BS
        )
        held_BS = held_BS.masked_fill(slot_S >= starts_B1, -1)
        column_B1S = torch.cat((held_BS, self.positions_BT), dim=1).unsqueeze(1)
        row_BT1 = self.positions_BT.unsqueeze(2)
        seen = (row_BT1 - column_B1S < size - sinks) | (column_B1S < sinks)
        seen &= (column_B1S >= 0) & (column_B1S <= row_BT1)
        self.seen_B1TS = seen.unsqueeze(1)
        self.is_sink_B1S1 = ((column_B1S >= 0) & (column_B1S < sinks)).unsqueeze(-1)
        self.was_full_B111 = (starts_B1 > size)[:, :, None, None]
        self.turns_back = cache.rotary(-(self.positions_BT - size + 1).clamp(min=0))
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        self.filled = [
            row for row, start, end in zip(rows, starts, ends, strict=True) if start <= size < end
        ]
        places = [
            (row, cache.slot(position), batch, position - start)
            for batch, (row, start, end) in enumerate(zip(rows, starts, ends, strict=True))
            for position in range(start, end)
            if position < sinks or position >= end - (size - sinks)
        ]
        self.write_index = torch.tensor(places, device=device).unbind(1)
        self.layers = [_LayerWrapping(index, self) for index in range(len(cache.keys_LRKSC))]


Step = InPlaceStep | WrappingStep
"""What :meth:`KeyValueCache.append` gives."""
