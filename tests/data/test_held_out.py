from __future__ import annotations

import pytest

from nemo_like.data.held_out import is_held_out

TEXTS = [f"document {number}" for number in range(4000)]


def test_the_choice_is_the_same_in_every_version() -> None:
    # Held-out sets of old runs would be trained on if this changed.
    chosen = [text for text in TEXTS[:60] if is_held_out(text, 0.1)]
    assert chosen == [f"document {i}" for i in (21, 22, 51, 55, 59)]


def test_the_share_is_about_the_fraction() -> None:
    assert 140 < sum(is_held_out(text, 0.05) for text in TEXTS) < 260


def test_a_larger_fraction_holds_out_what_a_smaller_one_did() -> None:
    small = {text for text in TEXTS if is_held_out(text, 0.01)}
    large = {text for text in TEXTS if is_held_out(text, 0.02)}
    assert small < large


def test_none_and_all_are_exact() -> None:
    assert not any(is_held_out(text, 0) for text in TEXTS)
    assert all(is_held_out(text, 1) for text in TEXTS)


@pytest.mark.parametrize("fraction", [-0.1, 1.5])
def test_a_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=rf"fraction={fraction}"):
        is_held_out("text", fraction)
