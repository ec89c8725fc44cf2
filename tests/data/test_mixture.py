from __future__ import annotations

import pytest

from nemo_like.core.errors import ConfigError
from nemo_like.data.mixture import describe_mixture, plan_draws

BLOCKS = {"books": 60, "law": 30, "mail": 10}


def test_without_a_table_every_block_comes_once() -> None:
    assert plan_draws(BLOCKS) == BLOCKS


def test_weights_share_out_the_epoch_exactly() -> None:
    assert plan_draws(BLOCKS, weights={"books": 1, "law": 1, "mail": 2}) == {
        "books": 25,
        "law": 25,
        "mail": 50,
    }


def test_what_remains_goes_to_the_largest_remainders() -> None:
    # Quotas 28.571, 28.571, 42.857: two of the three get one more, the first of equals first.
    draws = plan_draws(BLOCKS, weights={"books": 2, "law": 2, "mail": 3})
    assert draws == {"books": 29, "law": 28, "mail": 43}


@pytest.mark.parametrize("weights", [(0.1, 0.2, 0.7), (1 / 3, 1 / 3, 1 / 3), (5, 1e-9, 2)])
def test_draws_by_weight_always_fill_the_epoch(weights: tuple[float, ...]) -> None:
    draws = plan_draws(BLOCKS, weights=dict(zip(BLOCKS, weights, strict=True)))
    assert sum(draws.values()) == 100


def test_a_zero_weight_leaves_a_subset_out_and_shortens_the_epoch() -> None:
    draws = plan_draws(BLOCKS, weights={"books": 0, "law": 1, "mail": 1})
    assert draws == {"books": 0, "law": 20, "mail": 20}


def test_epochs_repeat_and_shorten_and_default_to_one() -> None:
    assert plan_draws(BLOCKS, epochs={"books": 0.5, "mail": 3}) == {
        "books": 30,
        "law": 30,
        "mail": 30,
    }


def test_zero_epochs_leave_a_subset_out() -> None:
    assert plan_draws(BLOCKS, epochs={"books": 0}) == {"books": 0, "law": 30, "mail": 10}


def test_an_unknown_subset_is_reported_with_the_nearest_and_all() -> None:
    with pytest.raises(
        ConfigError,
        match=r"mixture.epochs.boks: no such subset; did you mean 'books'.*books, law, mail",
    ):
        plan_draws(BLOCKS, epochs={"boks": 2})


def test_a_missing_weight_is_an_error() -> None:
    with pytest.raises(ConfigError, match="names no weight for subset 'mail'"):
        plan_draws(BLOCKS, weights={"books": 1, "law": 1})


def test_all_faults_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_draws(BLOCKS, weights={"books": -1, "lwa": 1, "mail": float("nan")})
    assert len(caught.value.faults) == 4
    assert "mixture.weights.books=-1" in str(caught.value)


def test_both_tables_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"mixture.weights and mixture.epochs"):
        plan_draws(BLOCKS, weights=dict.fromkeys(BLOCKS, 1), epochs={})


def test_only_zero_weights_are_an_error() -> None:
    with pytest.raises(ConfigError, match="no subset with a weight above 0 has any text"):
        plan_draws({"books": 5, "law": 0}, weights={"books": 0, "law": 1})


def test_the_table_says_weight_epochs_and_share() -> None:
    section = describe_mixture(
        names=["books", "law"],
        documents=[3, 4],
        tokens=[1000, 500],
        num_blocks=[10, 5],
        draws=[10, 30],
        drawn=[20, 60],
    )
    assert section.table is not None
    assert section.table.rows == [
        ["books", 3, 1000, 0.25, 2.0, 0.25],
        ["law", 4, 500, 0.75, 12.0, 0.75],
        ["total", 7, 1500, 1.0, 80 / 15, 1.0],
    ]
    assert section.table.emphasis == [2]
