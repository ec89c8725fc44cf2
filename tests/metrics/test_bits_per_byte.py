import math
import random

import pytest

from nemo_like.core.errors import ConfigError
from nemo_like.metrics.bits_per_byte import (
    PILE_WEIGHTS,
    BitsPerByte,
    TextLosses,
    Weights,
    choose_weights,
)


def test_the_three_aggregates_by_hand():
    figures = BitsPerByte.from_bits(
        {"a": 200.0, "b": 30.0}, {"a": 100, "b": 10}, Weights({"a": 1.0, "b": 3.0}, "test")
    )
    assert figures.by_subset == {"a": 2.0, "b": 3.0}
    assert figures.pooled == 230 / 110
    assert figures.weighted == (1 * 2.0 + 3 * 3.0) / 4
    assert figures.mean == 2.5


def test_weights_by_bytes_give_the_pooled_figure():
    num_bytes = {"a": 64, "b": 16}
    figures = BitsPerByte.from_bits({"a": 96.0, "b": 48.0}, num_bytes, choose_weights(num_bytes))
    assert figures.weighted == figures.pooled


def test_one_nat_is_one_over_ln_two_bits():
    losses = TextLosses()
    losses.count_document("a", 2)
    losses.add_piece("a", math.log(2))
    losses.add_piece("a", 3 * math.log(2))
    assert losses.compute_bits() == {"a": pytest.approx(4.0)}


def test_the_sum_does_not_depend_on_the_order_of_the_pieces():
    draw = random.Random(0)
    pieces = [draw.expovariate(1) * 10 ** draw.randint(-8, 8) for _ in range(1000)]
    bits = set()
    plain = set()
    for _ in range(20):
        draw.shuffle(pieces)
        losses = TextLosses()
        losses.count_document("a", 1)
        for nats in pieces:
            losses.add_piece("a", nats)
        bits.add(losses.compute_bits()["a"])
        plain.add(sum(pieces))
    assert len(bits) == 1
    assert len(plain) > 1


def test_documents_without_tokens_count_their_bytes():
    losses = TextLosses()
    losses.count_document("a", 7)
    losses.count_document("a", 5)
    assert losses.compute_bits() == {"a": 0.0}
    assert (losses.num_bytes, losses.num_documents) == ({"a": 12}, {"a": 2})


def test_a_given_mixture_decides():
    weights = choose_weights({"ArXiv": 5, "Github": 7}, {"ArXiv": 0.25, "Github": 0.5, "other": 9})
    assert weights == Weights({"ArXiv": 0.25, "Github": 0.5}, "the given mixture")


def test_published_weights_are_taken_where_all_names_match():
    weights = choose_weights({"ArXiv": 5, "Github": 7})
    assert weights.by_subset == {"ArXiv": 8.96, "Github": 7.59}
    assert "Gao et al. 2020" in weights.source
    assert choose_weights({"ArXiv": 5, "mine": 7}) == Weights(
        {"ArXiv": 5, "mine": 7}, "bytes, as no mixture is known"
    )


def test_published_weights_add_up_to_all_of_the_pile():
    assert len(PILE_WEIGHTS) == 22
    assert math.fsum(PILE_WEIGHTS.values()) == pytest.approx(100)


@pytest.mark.parametrize("mixture", [{"a": 1.0}, {"a": 1.0, "b": 0.0}, {"a": 1.0, "b": -2.0}])
def test_a_mixture_without_weight_for_a_subset_is_refused(mixture):
    with pytest.raises(ConfigError, match=f"has {{'b': {mixture.get('b')}}}"):
        choose_weights({"a": 1, "b": 1}, mixture)
