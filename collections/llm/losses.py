"""Cross-entropy of a language model without ever holding all its logits."""
# Shapes: B = blocks, T = tokens, D = model width, V = vocabulary, N = B * T tokens, C = tokens of one chunk.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

# Logits of one chunk. On a CPU 16 MiB in fp32: they stay in the cache, and glibc takes them from its heap (beyond
# 32 MiB it maps fresh pages each time). On a GPU 1 GiB. Never fewer than 256 tokens, because the gradient of the
# weight is read and written once a chunk, which has to be little against the chunk's products.
CPU_CHUNK_LOGITS = 2**22
GPU_CHUNK_LOGITS = 2**28
MIN_CHUNK_TOKENS = 256
_NO_TARGET = -100


def chunked_cross_entropy_sum(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    chunk_tokens: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Sums the cross-entropy of the logits ``hidden @ weight.T`` over all targets.

    The same as ``F.cross_entropy(logits, targets, reduction="sum")``. Logits exist for one chunk of tokens at a time;
    the gradients are computed along with them, with the same three matrix products as the plain way, and backward only
    multiplies them by the gradient that arrives. Under autocast the products run in its type; softmax and sums run in
    float32 at least.

    Args:
        hidden_BTD: (..., D) hidden states behind the final norm.
        weight_VD: Output matrix.
        targets_BT: int64, (...), 0 to V - 1, or ``ignore_index`` where there is no target.
        chunk_tokens: C, at least 1; None takes as many as a fixed number of logits allows.
        ignore_index: Marks tokens without a target; they add 0 and get a gradient of 0.

    Returns:
        A scalar, float32 (float64 for float64 inputs); 0 if there are no targets. Its backward runs once.

    Raises:
        ValueError: ``chunk_tokens`` is below 1.
    """
    hidden_ND, targets_N = hidden_BTD.flatten(0, -2), targets_BT.flatten()
    size = _choose_chunk_tokens(chunk_tokens, weight_VD)
    if torch.is_grad_enabled() and (hidden_BTD.requires_grad or weight_VD.requires_grad):
        total: Tensor = _CrossEntropySum.apply(hidden_ND, weight_VD, targets_N, size, ignore_index)
        return total
    return _token_losses(hidden_ND, weight_VD, targets_N, size, ignore_index).sum()


@torch.no_grad()
def token_losses(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    chunk_tokens: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Computes the cross-entropy of each token, for evaluation; no gradient.

    Args:
        hidden_BTD: (..., D) hidden states behind the final norm.
        weight_VD: Output matrix.
        targets_BT: int64, (...), 0 to V - 1, or ``ignore_index``.
        chunk_tokens: As in :func:`chunked_cross_entropy_sum`.
        ignore_index: Marks tokens without a target; their loss is 0.

    Returns:
        (B, T) in nats, float32 (float64 for float64 inputs).

    Raises:
        ValueError: ``chunk_tokens`` is below 1.
    """
    size = _choose_chunk_tokens(chunk_tokens, weight_VD)
    hidden_ND, targets_N = hidden_BTD.flatten(0, -2), targets_BT.flatten()
    loss_N = _token_losses(hidden_ND, weight_VD, targets_N, size, ignore_index)
    return loss_N.view_as(targets_BT)


def token_log_probs(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, chunk_tokens: int | None = None
) -> Tensor:
    """Computes the log-probability of each target, with a gradient that may differ from token to token.

    The loss of a preference weighs the tokens of an answer by what all of them come to, so no sum can be taken on the
    way. Logits exist for one chunk at a time. The gradient of the hidden states is computed along with them; only where
    the output matrix is trained, too, backward makes the logits once more.

    Args:
        hidden_ND: Hidden states behind the final norm, of scored tokens only.
        weight_VD: Output matrix.
        targets_N: int64, 0 to V - 1.
        chunk_tokens: As in :func:`chunked_cross_entropy_sum`.

    Returns:
        (N,) in nats, float32 (float64 for float64 inputs).

    Raises:
        ValueError: ``chunk_tokens`` is below 1.
    """
    size = _choose_chunk_tokens(chunk_tokens, weight_VD)
    if torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad):
        log_probs_N: Tensor = _TokenLogProbs.apply(hidden_ND, weight_VD, targets_N, size)
        return log_probs_N
    return -_token_losses(hidden_ND, weight_VD, targets_N, size, _NO_TARGET)


def _choose_chunk_tokens(chunk_tokens: int | None, weight_VD: Tensor) -> int:
    if chunk_tokens is None:
        budget = CPU_CHUNK_LOGITS if weight_VD.device.type == "cpu" else GPU_CHUNK_LOGITS
        return max(MIN_CHUNK_TOKENS, budget // weight_VD.size(0))
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: must be at least 1, or None")
    return chunk_tokens


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """The type of the matrix products: autocast's if it is on."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which many numbers are added up."""
    return torch.promote_types(dtype, torch.float32)


def _split_targets(targets_C: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Where to look, in range even where there is no target; and where there is none; (C, 1) each."""
    ignored_C1 = (targets_C == ignore_index).unsqueeze(1)
    return targets_C.unsqueeze(1).masked_fill(ignored_C1, 0), ignored_C1


def _make_buffer(hidden_ND: Tensor, weight_VD: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Memory for the logits of one chunk, used again and again."""
    num_rows = min(size, hidden_ND.size(0))
    return hidden_ND.new_empty(num_rows, weight_VD.size(0), dtype=_sum_dtype(dtype))


def _compute_logits(buffer_CV: Tensor, hidden_CD: Tensor, weight_VD: Tensor) -> Tensor:
    """Logits of a chunk in the memory of the last one; the last chunk of all may be shorter."""
    logits_CV = buffer_CV[: hidden_CD.size(0)]
    if hidden_CD.dtype == logits_CV.dtype:
        return torch.mm(hidden_CD, weight_VD.T, out=logits_CV)
    return logits_CV.copy_(hidden_CD @ weight_VD.T)


def _exponentiate(
    logits_CV: Tensor, target_C1: Tensor, ignored_C1: Tensor
) -> tuple[Tensor, Tensor]:
    """Turns logits into ``exp(logit - largest)`` in place; gives the losses and the sums of rows, (C, 1) each."""
    largest_C1 = logits_CV.amax(dim=1, keepdim=True)
    picked_C1 = logits_CV.gather(1, target_C1)
    sum_C1 = logits_CV.sub_(largest_C1).exp_().sum(dim=1, keepdim=True)
    loss_C1 = sum_C1.log() + largest_C1 - picked_C1
    return loss_C1.masked_fill_(ignored_C1, 0), sum_C1


def _token_losses(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, size: int, ignore_index: int
) -> Tensor:
    num_tokens, dtype = hidden_ND.size(0), _compute_dtype(hidden_ND)
    buffer_CV = _make_buffer(hidden_ND, weight_VD, size, dtype)
    loss_N = buffer_CV.new_empty(num_tokens)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        weight_VD = weight_VD.to(dtype)
        for start in range(0, num_tokens, size):
            chunk = slice(start, start + size)
            target_C1, ignored_C1 = _split_targets(targets_N[chunk], ignore_index)
            logits_CV = _compute_logits(buffer_CV, hidden_ND[chunk].to(dtype), weight_VD)
            loss_N[chunk] = _exponentiate(logits_CV, target_C1, ignored_C1)[0].squeeze(1)
    return loss_N


class _CrossEntropySum(Function):
    """The sum and, in the same pass, its gradients; backward hands them out."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        size: int,
        ignore_index: int,
    ) -> Tensor:
        num_tokens, dtype = hidden_ND.size(0), _compute_dtype(hidden_ND)
        buffer_CV = _make_buffer(hidden_ND, weight_VD, size, dtype)
        total = buffer_CV.new_zeros(())
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        hidden_grad_ND = torch.empty_like(hidden_ND) if needs_hidden else None
        # Chunks are added up in float32: in bfloat16 each of them would lose what is below 2^-8 of the sum so far.
        weight_grad_VD = (
            torch.zeros_like(weight_VD, dtype=_sum_dtype(weight_VD.dtype)) if needs_weight else None
        )
        with torch.autocast(hidden_ND.device.type, enabled=False):
            compute_weight_VD = weight_VD.to(dtype)
            for start in range(0, num_tokens, size):
                chunk = slice(start, start + size)
                target_C1, ignored_C1 = _split_targets(targets_N[chunk], ignore_index)
                hidden_CD = hidden_ND[chunk].to(dtype)
                logits_CV = _compute_logits(buffer_CV, hidden_CD, compute_weight_VD)
                loss_C1, sum_C1 = _exponentiate(logits_CV, target_C1, ignored_C1)
                total += loss_C1.sum()
                # d loss / d logits = softmax - one hot.
                grad_CV = logits_CV.div_(sum_C1)
                grad_CV.scatter_(1, target_C1, grad_CV.gather(1, target_C1) - 1)
                grad_CV = grad_CV.to(dtype)
                # Rows without a target are zeroed in the narrow factor and the narrow product, not in the wide one.
                if hidden_grad_ND is not None:
                    hidden_grad_ND[chunk] = (grad_CV @ compute_weight_VD).masked_fill_(
                        ignored_C1, 0
                    )
                if weight_grad_VD is not None:
                    hidden_CD = hidden_CD.masked_fill(ignored_C1, 0)
                    if weight_grad_VD.dtype == dtype:
                        weight_grad_VD.addmm_(grad_CV.T, hidden_CD)
                    else:
                        weight_grad_VD += grad_CV.T @ hidden_CD
        if weight_grad_VD is not None:
            weight_grad_VD = weight_grad_VD.to(weight_VD.dtype)
        ctx.gradients = (hidden_grad_ND, weight_grad_VD)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if ctx.gradients is None:
            raise RuntimeError(
                "chunked_cross_entropy_sum: backward ran twice; its gradients are handed out once "
                "(they are not copied, a vocabulary's gradient is large), so compute the loss again"
            )
        hidden_grad_ND, weight_grad_VD = ctx.gradients
        ctx.gradients = None
        if hidden_grad_ND is not None:
            hidden_grad_ND.mul_(grad)
        if weight_grad_VD is not None:
            weight_grad_VD.mul_(grad)
        return hidden_grad_ND, weight_grad_VD, None, None, None


class _TokenLogProbs(Function):
    """Log-probabilities, and in the same pass what each of them is by its hidden state."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, size: int
    ) -> Tensor:
        dtype = ctx.dtype = _compute_dtype(hidden_ND)
        ctx.size = size
        buffer_CV = _make_buffer(hidden_ND, weight_VD, size, dtype)
        loss_N = buffer_CV.new_empty(hidden_ND.size(0))
        slope_ND = torch.empty_like(hidden_ND)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            compute_weight_VD = weight_VD.to(dtype)
            for start in range(0, hidden_ND.size(0), size):
                chunk = slice(start, start + size)
                hidden_CD = hidden_ND[chunk].to(dtype)
                logits_CV = _compute_logits(buffer_CV, hidden_CD, compute_weight_VD)
                loss_C1, grad_CV = _differentiate(logits_CV, targets_N[chunk])
                loss_N[chunk] = loss_C1.squeeze(1)
                slope_ND[chunk] = -(grad_CV.to(dtype) @ compute_weight_VD)
        kept = (hidden_ND, weight_VD, targets_N) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(slope_ND, *kept)
        return -loss_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        slope_ND, *kept = ctx.saved_tensors
        hidden_grad_ND = slope_ND * grad_N.to(slope_ND.dtype).unsqueeze(1)
        if not kept:
            return hidden_grad_ND, None, None, None
        hidden_ND, weight_VD, targets_N = kept
        dtype, size = ctx.dtype, ctx.size
        buffer_CV = _make_buffer(hidden_ND, weight_VD, size, dtype)
        weight_grad_VD = torch.zeros_like(weight_VD, dtype=_sum_dtype(weight_VD.dtype))
        compute_weight_VD = weight_VD.to(dtype)
        for start in range(0, hidden_ND.size(0), size):
            chunk = slice(start, start + size)
            hidden_CD = hidden_ND[chunk].to(dtype)
            logits_CV = _compute_logits(buffer_CV, hidden_CD, compute_weight_VD)
            _, grad_CV = _differentiate(logits_CV, targets_N[chunk])
            grad_CV.mul_(-grad_N[chunk].unsqueeze(1))
            weight_grad_VD += grad_CV.to(dtype).T @ hidden_CD
        return hidden_grad_ND, weight_grad_VD.to(weight_VD.dtype), None, None


def _differentiate(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """The losses, (C, 1), and what they are by the logits (softmax - one hot), in the logits' memory."""
    target_C1, ignored_C1 = _split_targets(targets_C, _NO_TARGET)
    loss_C1, sum_C1 = _exponentiate(logits_CV, target_C1, ignored_C1)
    grad_CV = logits_CV.div_(sum_C1)
    return loss_C1, grad_CV.scatter_(1, target_C1, grad_CV.gather(1, target_C1) - 1)
