from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from nemo_like.data.order import SampleOrder, derive_key, permute


def as_u64(*values: int) -> NDArray[np.uint64]:
    return np.array(values, dtype=np.uint64)


def permute_all(size: int, key: int) -> list[int]:
    found: list[int] = permute(np.arange(size, dtype=np.uint64), as_u64(size), as_u64(key)).tolist()
    return found


@pytest.mark.parametrize(
    "sizes", [range(1, 140), [255, 256, 257, 1000, 4095, 4096, 4097, 65537, 2**18 + 1]]
)
def test_a_permutation_hits_every_number_once(sizes: list[int]) -> None:
    for size in sizes:
        assert sorted(permute_all(size, key=size)) == list(range(size)), size


def test_a_permutation_of_a_huge_range_stays_inside_and_differs() -> None:
    size = 3 * 2**60 + 12345
    index = np.arange(5000, dtype=np.uint64) * np.uint64(600_000_000_000_000)
    out = permute(index, as_u64(size), as_u64(1))
    assert len(np.unique(out)) == 5000
    assert out.max() < size
    assert 0.45 < out.astype(float).mean() / size < 0.55


def test_sizes_and_keys_may_differ_from_element_to_element() -> None:
    index, size, key = as_u64(3, 3, 8, 0), as_u64(10, 1000, 10, 1), as_u64(1, 1, 2, 3)
    together = permute(index, size, key)
    alone = [int(permute(index[i : i + 1], size[i : i + 1], key[i : i + 1])[0]) for i in range(4)]
    assert together.tolist() == alone


def test_all_orders_of_four_samples_are_equally_likely() -> None:
    keys = np.array([derive_key(number) for number in range(6000)])
    images = [permute(np.full(6000, i, dtype=np.uint64), as_u64(4), keys) for i in range(4)]
    counts = Counter(zip(*(image.tolist() for image in images), strict=True))
    chi_squared = sum((count - 250) ** 2 / 250 for count in counts.values())
    assert len(counts) == 24
    assert chi_squared < 50  # 23 degrees of freedom: above 50 once in a thousand


def test_the_order_looks_shuffled() -> None:
    size = 20_000
    order = np.array(permute_all(size, key=7), dtype=float)
    places = np.arange(size)
    # Neighbours, neighbours of neighbours and places themselves say nothing about the sample.
    for lag in (1, 2, 3, 64):
        assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < 0.03
    assert abs(np.corrcoef(places, order)[0, 1]) < 0.03
    # As many samples stay in place, and as many pairs stay together, as in a random order: about one.
    assert (order == places).sum() < 10
    assert (np.diff(order) == 1).sum() < 10
    # Each tenth of the order draws evenly on each tenth of the samples.
    table, _, _ = np.histogram2d(places, order, bins=10)
    assert ((table - 200) ** 2 / 200).sum() < 140


def make_order(seed: int = 0, **changes: list[int]) -> SampleOrder:
    sizes = {"num_blocks": [7, 40, 13], "draws": [14, 10, 13]} | changes
    return SampleOrder(names=["a", "b", "c"], seed=seed, **sizes)


def count_ids(order: SampleOrder, start: int, stop: int) -> dict[int, int]:
    return Counter(order.sample_ids(start, stop).tolist())


def test_without_repetition_each_id_comes_once_an_epoch() -> None:
    order = make_order(draws=[7, 40, 13])
    for epoch in range(3):
        ids = order.sample_ids(60 * epoch, 60 * (epoch + 1)).tolist()
        assert sorted(ids) == list(range(60))
        assert ids != sorted(ids)


def test_epochs_have_different_orders() -> None:
    order = make_order(draws=[7, 40, 13])
    assert order.sample_ids(0, 60).tolist() != order.sample_ids(60, 120).tolist()


def test_seeds_have_different_orders() -> None:
    assert make_order(0).sample_ids(0, 37).tolist() != make_order(1).sample_ids(0, 37).tolist()


def test_a_subset_drawn_twice_shows_each_block_twice_in_every_epoch() -> None:
    counts = count_ids(make_order(), 0, 37)
    assert [counts[sample] for sample in range(7)] == [2] * 7


def test_a_subset_drawn_in_part_shows_all_blocks_before_it_repeats_one() -> None:
    order = make_order()  # subset b: 10 draws an epoch of 40 blocks, so 4 epochs
    counts = count_ids(order, 0, 4 * 37)
    assert [counts[sample] for sample in range(7, 47)] == [1] * 40


def test_any_stretch_of_the_order_is_the_same_as_the_whole() -> None:
    order = make_order()
    whole = order.sample_ids(0, 500)
    for start, stop in [(0, 1), (36, 38), (100, 311), (499, 500)]:
        assert np.array_equal(order.sample_ids(start, stop), whole[start:stop])


def test_the_order_is_the_same_in_every_version() -> None:
    # Resumed runs would repeat and miss samples if this changed.
    assert make_order(3).sample_ids(30, 42).tolist() == GOLDEN


def test_another_subset_leaves_the_blocks_of_the_first_alone() -> None:
    alone = SampleOrder(names=["a"], num_blocks=[50], draws=[50], seed=5)
    beside = SampleOrder(names=["a", "b"], num_blocks=[50, 20], draws=[50, 0], seed=5)
    assert set(alone.sample_ids(0, 50)) == set(beside.sample_ids(0, 50))


def test_a_subset_with_zero_draws_never_comes() -> None:
    order = make_order(draws=[14, 0, 13])
    ids = order.sample_ids(0, 270)
    assert not ((ids >= 7) & (ids < 47)).any()


@pytest.mark.parametrize("stop", [0, 1, 36, 37, 38, 500])
def test_counted_draws_are_what_was_drawn(stop: int) -> None:
    order = make_order()
    ids = order.sample_ids(0, stop)
    subsets = np.searchsorted([7, 47, 60], ids, side="right")
    assert order.count_draws(stop) == np.bincount(subsets, minlength=3).tolist()


def test_ten_million_blocks_are_sought_at_once() -> None:
    order = SampleOrder(names=["a"], num_blocks=[10_000_000], draws=[10_000_000], seed=0)
    assert len(set(order.sample_ids(9_000_000, 9_000_100).tolist())) == 100


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(ValueError, match="no subset of a, b, c is drawn"):
        make_order(draws=[0, 0, 0])


def test_draws_of_an_empty_subset_are_an_error() -> None:
    with pytest.raises(ValueError, match="subset 'b' has no blocks, 10 draws"):
        make_order(num_blocks=[7, 0, 13])


GOLDEN = [54, 4, 22, 47, 58, 21, 31, 5, 6, 14, 0, 3]
