# Shapes: N = rows, V = vocabulary.
from collections import Counter

import pytest
import torch
from torch.testing import assert_close

from nemo_like.collections.llm.generation import GenerationConfig
from nemo_like.collections.llm.generation.sampling import (
    draw_tokens,
    filter_logits,
    penalize_repetition,
)
from nemo_like.core.extras import require

PROBABILITIES = [0.5, 0.1, 0.3, 0.1]


def keep(**options):
    logits_NV = torch.tensor([PROBABILITIES], dtype=torch.float64).log()
    filtered_NV = filter_logits(logits_NV, GenerationConfig(**options))
    return set(filtered_NV[0].softmax(-1).nonzero().flatten().tolist())


def test_filters_keep_what_they_say():
    assert keep() == {0, 1, 2, 3}
    assert keep(top_k=2) == {0, 2}
    assert keep(top_p=0.79) == {0, 2}
    assert keep(top_p=0.81) > {0, 2}
    assert keep(top_p=1e-9) == {0}
    assert keep(min_p=0.25) == {0, 2}
    assert keep(min_p=1.0) == {0}
    assert keep(top_k=2, top_p=0.6) == {0}  # of what top_k left, the first has 0.625
    assert keep(temperature=0.1, min_p=0.25) == {0}
    assert keep(temperature=1e-300) == {0}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_filtered_probabilities_equal_those_of_transformers(options):
    transformers = require("transformers")
    torch.manual_seed(1)
    logits_NV = 2 * torch.randn(4, 600)
    ids = torch.zeros(4, 1, dtype=torch.long)
    expected_NV = logits_NV
    names = {"temperature": "Temperature", "top_k": "TopK", "top_p": "TopP", "min_p": "MinP"}
    for name, value in options.items():
        warper = getattr(transformers, f"{names[name]}LogitsWarper")(value)
        expected_NV = warper(ids, expected_NV)
    filtered_NV = filter_logits(logits_NV, GenerationConfig(**options))
    assert_close(filtered_NV.softmax(-1), expected_NV.softmax(-1))
    assert torch.equal(filtered_NV.isfinite(), expected_NV.isfinite())


def test_repetition_penalty_equals_that_of_transformers():
    transformers = require("transformers")
    logits_NV = torch.randn(2, 30)
    ids = torch.tensor([[3, 4, 4], [29, 0, 3]])
    seen_NV = torch.zeros(2, 30, dtype=torch.bool).scatter(1, ids, True)
    expected_NV = transformers.RepetitionPenaltyLogitsProcessor(1.7)(ids, logits_NV.clone())
    assert torch.equal(penalize_repetition(logits_NV, seen_NV, 1.7), expected_NV)


def test_tokens_are_drawn_by_their_probability():
    logits_NV = torch.tensor([PROBABILITIES], dtype=torch.float64).log().repeat(4000, 1)
    logits_NV[:, 1] = -torch.inf
    generator = torch.Generator().manual_seed(0)
    counts = Counter(draw_tokens(logits_NV, [generator] * 4000))
    assert counts.keys() == {0, 2, 3}
    for token in counts:
        assert counts[token] / 4000 == pytest.approx(PROBABILITIES[token] / 0.9, abs=0.03)


def test_each_row_takes_one_number_of_its_own_generator():
    logits_NV = torch.randn(3, 20)
    together = draw_tokens(logits_NV, [torch.Generator().manual_seed(it) for it in range(3)])
    for row in range(3):
        generator = torch.Generator().manual_seed(row)
        assert draw_tokens(logits_NV[row : row + 1], [generator]) == [together[row]]
        other = torch.Generator().manual_seed(row)
        torch.rand((), dtype=torch.float64, generator=other)
        assert torch.equal(generator.get_state(), other.get_state())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"min_p": -0.1}, "min_p=-0.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"seed": -1}, "seed=-1"),
        ({"num_beams": 0}, "num_beams=0"),
        ({"num_beams": 2, "length_penalty": float("inf")}, "length_penalty=inf"),
        ({"stop": ["a", ""]}, "stop: holds an empty string"),
        ({"stop_tokens": [3, -2]}, r"stop_tokens=\[-2\]"),
        ({"logprobs": 101}, "logprobs=101"),
        ({"cache_size": 0}, "cache_size=0"),
        ({"eviction_policy": "lru"}, "eviction_policy='lru': must be one of error, sliding_window"),
        ({"num_sinks": 0}, "num_sinks=0"),
        ({"temperature": 0, "top_p": 0.5}, "top_p=0.5: has no effect with temperature=0"),
        ({"num_beams": 3, "top_k": 5}, "top_k=5: has no effect with num_beams=3"),
        ({"num_beams": 3, "temperature": 0.7}, "temperature=0.7: has no effect with num_beams=3"),
        ({"length_penalty": 0.5}, "length_penalty=0.5: has no effect with num_beams=1"),
    ],
    ids=str,
)
def test_faults_of_a_configuration_are_named(options, message):
    import re

    (fault,) = GenerationConfig(**options).check()
    assert re.match(message, fault)


def test_all_faults_are_listed_and_a_right_configuration_has_none():
    assert len(list(GenerationConfig(max_tokens=-1, top_p=2, stop=[""]).check())) == 3
    assert not list(GenerationConfig().check())
    assert not list(GenerationConfig(num_beams=4, temperature=0, length_penalty=0.8).check())
