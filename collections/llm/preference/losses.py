"""Losses of preferences, from log-probabilities alone."""
# Shapes: P = pairs; rows of (2, P) are the better answers, then the worse.

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from .config import LossKind


def compute_scores(
    log_probs_2P: Tensor, reference_2P: Tensor | None, num_tokens_2P: Tensor, *, kind: LossKind
) -> Tensor:
    """How much more likely each answer is than under the reference, (2, P).

    For ``sigmoid`` the log-ratio of the whole answer; for ``ipo`` the mean log-ratio of its tokens. The paper of IPO
    writes the former, but its authors take the mean, without which the loss would grow with the square of the length.

    Args:
        log_probs_2P: Log-probabilities of the answers under the policy.
        reference_2P: The same under the reference; None is a reference to which all answers are equally likely.
        num_tokens_2P: Scored tokens of each answer; 0 in blank pairs.
        kind: Of the loss.
    """
    ratios_2P = log_probs_2P if reference_2P is None else log_probs_2P - reference_2P
    return ratios_2P if kind == "sigmoid" else ratios_2P / num_tokens_2P.clamp(min=1)


def compute_preference_losses(
    scores_2P: Tensor, *, kind: LossKind, beta: float, label_smoothing: float = 0.0
) -> Tensor:
    """The loss of each pair, (P,).

    ``sigmoid`` is ``-log sigmoid(m)`` of the margin ``m = beta * (better - worse)`` (DPO, Rafailov et al. 2023,
    arXiv:2305.18290, equation 7); with smoothing the loss of the swapped pair is mixed in (conservative DPO, Mitchell
    2023). ``ipo`` is ``(better - worse - 1 / (2 beta))^2`` (Azar et al. 2023, arXiv:2310.12036, equation 17, whose tau
    is beta).

    Args:
        scores_2P: From :func:`compute_scores`.
        kind: Which.
        beta: Its weight of the reference.
        label_smoothing: Share of swapped pairs; of ``sigmoid``.
    """
    difference_P = scores_2P[0] - scores_2P[1]
    if kind == "ipo":
        return (difference_P - 1 / (2 * beta)).square()
    margin_P = beta * difference_P
    # log sigmoid(m) - log sigmoid(-m) = m, so the mixture needs one of the two; exact at 0, finite anywhere.
    return label_smoothing * margin_P - F.logsigmoid(margin_P)
