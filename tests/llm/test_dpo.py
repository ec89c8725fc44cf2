"""Preference losses: by hand, in the limits, and against trl; the log-probabilities that they stand on."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from nemo_like.collections.llm.data import IGNORE_INDEX
from nemo_like.collections.llm.losses import token_log_probs
from nemo_like.collections.llm.preference import Dpo, PreferenceBatch
from nemo_like.collections.llm.preference.batch import compute_log_probs, count_scored
from nemo_like.collections.llm.preference.losses import compute_preference_losses, compute_scores
from nemo_like.core.errors import ConfigError

_ = IGNORE_INDEX


class Bigrams(nn.Module):
    """A language model whose probabilities are a table: next token by the last one."""

    def __init__(self, table_VV: Tensor) -> None:
        super().__init__()
        self.logits_VV = nn.Parameter(table_VV.log())

    def compute_hidden(self, tokens_BT: Tensor, *, segments_BT: Tensor | None = None) -> Tensor:
        return self.logits_VV[tokens_BT]

    @property
    def output_weight_VD(self) -> Tensor:
        return torch.eye(len(self.logits_VV), dtype=self.logits_VV.dtype)


TABLE = torch.tensor(
    [[0.5, 0.25, 0.125, 0.125], [0.1, 0.2, 0.3, 0.4], [0.25] * 4, [0.7, 0.1, 0.1, 0.1]],
    dtype=torch.float64,
)


def make_pairs() -> PreferenceBatch:
    """Two pairs: prompt 0, answers 1 2 and 3; prompt 2 3, answers 0 and 1 1 0. The rows' ends are padding."""
    tokens_RT = torch.tensor([[0, 1, 0, 0], [2, 3, 0, 0], [0, 0, 0, 0], [2, 3, 1, 1]])
    targets_RT = torch.tensor([[1, 2, _, _], [_, 0, _, _], [3, _, _, _], [_, 1, 1, 0]])
    return PreferenceBatch(tokens_RT, targets_RT)


def test_log_probabilities_of_two_pairs_are_those_by_hand() -> None:
    batch = make_pairs()
    found = compute_log_probs(Bigrams(TABLE), batch)  # type: ignore[arg-type]
    by_hand = [
        [math.log(0.25 * 0.3), math.log(0.7)],
        [math.log(0.125), math.log(0.1 * 0.2 * 0.1)],
    ]
    assert_close(found.detach(), torch.tensor(by_hand, dtype=torch.float64))
    assert count_scored(batch).tolist() == [[2, 1], [1, 3]]
    assert int(Dpo().count_targets(batch)) == 2


def test_what_pads_a_row_never_counts() -> None:
    batch = make_pairs()
    expected = compute_log_probs(Bigrams(TABLE), batch)  # type: ignore[arg-type]
    batch.tokens_BT[[0, 0, 1, 1, 2, 2, 2], [2, 3, 2, 3, 1, 2, 3]] = 3
    assert torch.equal(compute_log_probs(Bigrams(TABLE), batch), expected)  # type: ignore[arg-type]


def test_a_blank_batch_has_no_pairs_and_a_gradient_of_zero() -> None:
    batch = make_pairs()
    batch.targets_BT.fill_(IGNORE_INDEX)
    network = Bigrams(TABLE)
    found = compute_log_probs(network, batch)  # type: ignore[arg-type]
    assert torch.equal(found, torch.zeros(2, 2, dtype=torch.float64))
    found.sum().backward()
    assert network.logits_VV.grad is not None
    assert not network.logits_VV.grad.any()
    assert int(Dpo().count_targets(batch)) == 0


@pytest.mark.parametrize("trains_weight", [False, True])
@pytest.mark.parametrize("chunk_tokens", [2, None])
def test_the_gradient_of_log_probabilities_is_that_of_log_softmax(
    trains_weight: bool, chunk_tokens: int | None
) -> None:
    torch.manual_seed(0)
    inputs = [
        torch.randn(5, 3, dtype=torch.float64, requires_grad=True),
        torch.randn(7, 3, dtype=torch.float64, requires_grad=trains_weight),
    ]
    targets_N, weights_N = torch.tensor([0, 6, 3, 3, 1]), torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0])
    trained = [it for it in inputs if it.requires_grad]
    found_N = token_log_probs(*inputs, targets_N, chunk_tokens=chunk_tokens)
    log_probs_NV = (inputs[0] @ inputs[1].T).log_softmax(dim=1)
    expected_N = log_probs_NV.gather(1, targets_N[:, None]).squeeze(1)
    assert_close(found_N, expected_N)
    with torch.no_grad():
        assert torch.equal(
            token_log_probs(*inputs, targets_N, chunk_tokens=chunk_tokens), found_N.detach()
        )
    found = torch.autograd.grad((found_N * weights_N).sum(), trained)
    assert_close(found, torch.autograd.grad((expected_N * weights_N).sum(), trained))


def test_log_probabilities_under_autocast_are_products_in_bfloat16() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 8), torch.randn(10, 8)
    targets_N = torch.arange(6)
    logits = (hidden.bfloat16() @ weight.bfloat16().T).float()
    expected = logits.log_softmax(dim=1).gather(1, targets_N[:, None]).squeeze(1)
    hidden.requires_grad_()
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = token_log_probs(hidden, weight, targets_N)
    assert found.dtype == torch.float32
    assert_close(found.detach(), expected)
    found.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    plain = torch.autograd.grad(
        (hidden @ weight.T).log_softmax(dim=1).gather(1, targets_N[:, None]).sum(), (hidden, weight)
    )
    assert_close((hidden.grad, weight.grad), plain, rtol=5e-2, atol=5e-2)


def test_chunks_without_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="chunk_tokens=0: must be at least 1"):
        token_log_probs(torch.ones(1, 1), torch.ones(2, 1), torch.tensor([0]), chunk_tokens=0)


# Losses.

LOGS_2P = torch.tensor([[-3.0, -7.0, -1.0], [-4.0, -5.0, -9.0]], dtype=torch.float64)
REFERENCE_2P = torch.tensor([[-3.5, -6.0, -1.0], [-3.0, -6.5, -9.0]], dtype=torch.float64)
COUNTS_2P = torch.tensor([[2, 4, 1], [3, 5, 8]])


def compute(
    log_probs_2P: Tensor, reference_2P: Tensor | None, *, kind: Any = "sigmoid", **options: Any
) -> Tensor:
    scores_2P = compute_scores(log_probs_2P, reference_2P, COUNTS_2P, kind=kind)
    return compute_preference_losses(scores_2P, kind=kind, **{"beta": 0.5, **options})


def test_losses_are_those_of_the_formulas() -> None:
    margins = [0.5 * (0.5 + 1.0), 0.5 * (-1.0 - 1.5), 0.0]
    expected = [-math.log(1 / (1 + math.exp(-m))) for m in margins]
    assert_close(compute(LOGS_2P, REFERENCE_2P).tolist(), expected)
    swapped = [-math.log(1 / (1 + math.exp(m))) for m in margins]
    smooth = [0.9 * loss + 0.1 * other for loss, other in zip(expected, swapped, strict=True)]
    assert_close(compute(LOGS_2P, REFERENCE_2P, label_smoothing=0.1).tolist(), smooth)
    ipo = [(0.5 / 2 + 1.0 / 3 - 1) ** 2, (-1.0 / 4 - 1.5 / 5 - 1) ** 2, 1.0]
    assert_close(compute(LOGS_2P, REFERENCE_2P, kind="ipo").tolist(), ipo)
    free = [-math.log(1 / (1 + math.exp(-0.5 * m))) for m in (1.0, -2.0, 8.0)]
    assert_close(compute(LOGS_2P, None).tolist(), free)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_a_policy_that_is_the_reference_gives_log_2_exactly(smoothing: float) -> None:
    for dtype in (torch.float32, torch.float64):
        log_2 = torch.tensor(2.0, dtype=dtype).log()
        losses_P = compute(LOGS_2P.to(dtype), LOGS_2P.to(dtype), label_smoothing=smoothing)
        assert torch.equal(losses_P, log_2.expand(3))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_margins_of_any_size_stay_finite(smoothing: float) -> None:
    scores_2P = torch.tensor([[1e30, -1e30, 3e4], [0.0, 0.0, 0.0]], requires_grad=True)
    losses_P = compute_preference_losses(
        scores_2P, kind="sigmoid", beta=1.0, label_smoothing=smoothing
    )
    losses_P.sum().backward()
    expected = [smoothing * 1e30, (1 - smoothing) * 1e30, smoothing * 3e4]
    assert_close(losses_P.detach(), torch.tensor(expected))
    assert scores_2P.grad is not None
    assert_close(scores_2P.grad[0], torch.tensor([smoothing, smoothing - 1, smoothing]))


def test_the_worse_answer_is_pushed_down_and_the_better_one_up() -> None:
    log_probs_2P = LOGS_2P.clone().requires_grad_()
    for kind in ("sigmoid", "ipo"):
        (grad_2P,) = torch.autograd.grad(
            compute(log_probs_2P, LOGS_2P, kind=kind).sum(), log_probs_2P
        )
        assert (grad_2P[0] < 0).all()
        assert (grad_2P[1] > 0).all()


def run_trl(
    log_probs_2P: Tensor, reference_2P: Tensor, kind: str, beta: float
) -> tuple[float, dict[str, float]]:
    """Loss and figures of trl's own code, for answers of COUNTS_2P tokens with the same log-probability each."""
    trl = pytest.importorskip("trl")
    lengths_R = COUNTS_2P.flatten()
    mask_RT = (torch.arange(1 + int(lengths_R.max())) >= 1) & (
        torch.arange(1 + int(lengths_R.max())) <= lengths_R[:, None]
    )
    per_token_RT = (log_probs_2P.flatten() / lengths_R)[:, None] * mask_RT[:, 1:]
    zeros_RT = torch.zeros_like(per_token_RT)
    outputs = SimpleNamespace(
        log_probs=per_token_RT, entropy=zeros_RT, mean_logits=zeros_RT, is_top1=zeros_RT.bool()
    )
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda it: it, gather_for_metrics=lambda it: it
    )
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False), accelerator=accelerator, aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[kind], loss_weights=[1.0],
        use_weighting=False, beta=beta, label_smoothing=0.0, _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    inputs = {
        "input_ids": mask_RT.long(), "attention_mask": torch.ones_like(mask_RT), "completion_mask": mask_RT.long(),
        "ref_chosen_logps": reference_2P[0], "ref_rejected_logps": reference_2P[1],
    }  # fmt: skip
    loss = trl.DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    figures = {name: values[-1] for name, values in trainer._metrics["eval"].items() if values}
    return float(loss), figures


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.filterwarnings("ignore")
def test_losses_and_figures_are_those_of_trl(beta: float) -> None:
    for kind in ("sigmoid", "ipo"):
        expected, figures = run_trl(LOGS_2P, REFERENCE_2P, kind, beta)
        found = compute(LOGS_2P, REFERENCE_2P, kind=kind, beta=beta)
        assert_close(float(found.mean()), expected)
    rewards_2P = beta * compute_scores(LOGS_2P, REFERENCE_2P, COUNTS_2P, kind="sigmoid")
    assert_close(float(rewards_2P[0].mean()), figures["rewards/chosen"])
    assert_close(float(rewards_2P[1].mean()), figures["rewards/rejected"])
    margins_P = rewards_2P[0] - rewards_2P[1]
    assert_close(float(margins_P.mean()), figures["rewards/margins"])
    assert_close(float((margins_P > 0).double().mean()), figures["rewards/accuracies"])
    # trl has no conservative loss any more; it is the mixture of its loss with that of swapped pairs.
    straight, _ = run_trl(LOGS_2P, REFERENCE_2P, "sigmoid", beta)
    COUNTS_2P.copy_(COUNTS_2P.flip(0))
    try:
        swapped, _ = run_trl(LOGS_2P.flip(0), REFERENCE_2P.flip(0), "sigmoid", beta)
    finally:
        COUNTS_2P.copy_(COUNTS_2P.flip(0))
    smooth = compute(LOGS_2P, REFERENCE_2P, beta=beta, label_smoothing=0.2)
    assert_close(float(smooth.mean()), 0.8 * straight + 0.2 * swapped)
    free, _ = run_trl(LOGS_2P, torch.zeros_like(LOGS_2P), "sigmoid", beta)
    assert_close(float(compute(LOGS_2P, None, beta=beta).mean()), free)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "objective.beta=0.0: must be a finite number above 0"),
        ({"label_smoothing": 0.5}, "label_smoothing=0.5: must be at least 0 and below 0.5"),
        ({"label_smoothing": 0.1, "loss": "ipo"}, "label_smoothing=0.1: has no effect with loss=ipo"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Dpo(**options)
