# Shapes: B = blocks, T = tokens, D = width, V = vocabulary.
import math

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from nemo_like.collections.llm.losses import chunked_cross_entropy_sum, token_losses

B, T, D, V = 3, 7, 5, 11


def make_inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden_BTD = torch.randn(B, T, D, generator=generator, dtype=dtype, requires_grad=True)
    weight_VD = torch.randn(V, D, generator=generator, dtype=dtype, requires_grad=True)
    targets_BT = torch.randint(0, V, (B, T), generator=generator)
    targets_BT[0, 3:] = -100
    targets_BT[2] = -100
    return hidden_BTD, weight_VD, targets_BT


def plain_sum(hidden_BTD, weight_VD, targets_BT):
    logits_BTV = hidden_BTD @ weight_VD.T
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")


@pytest.mark.parametrize("chunk_tokens", [1, 4, 7, 100, None])
def test_chunked_loss_and_gradients_equal_those_of_torch(chunk_tokens):
    hidden, weight, targets = make_inputs()
    expected = plain_sum(hidden, weight, targets)
    expected_grads = torch.autograd.grad(0.37 * expected, (hidden, weight))
    got = chunked_cross_entropy_sum(hidden, weight, targets, chunk_tokens=chunk_tokens)
    assert_close(got, expected)
    assert_close(torch.autograd.grad(0.37 * got, (hidden, weight)), expected_grads)


def test_gradients_pass_gradcheck():
    hidden, weight, targets = make_inputs()

    class AnewEachTime(torch.autograd.Function):
        """gradcheck runs backward on one graph again and again; the loss hands its gradients out once."""

        @staticmethod
        def forward(ctx, *inputs):
            ctx.save_for_backward(*inputs)
            return chunked_cross_entropy_sum(*inputs, targets, chunk_tokens=4)

        @staticmethod
        def backward(ctx, grad):
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            with torch.enable_grad():
                total = chunked_cross_entropy_sum(*inputs, targets, chunk_tokens=4)
            return torch.autograd.grad(total, inputs, grad)

    assert torch.autograd.gradcheck(AnewEachTime.apply, (hidden, weight))


def test_loss_of_equal_logits_is_the_log_of_the_vocabulary():
    total = chunked_cross_entropy_sum(
        torch.zeros(2, 3, D), torch.randn(V, D), torch.tensor([[1, 2, 3], [4, -100, 0]])
    )
    assert_close(total, torch.tensor(5 * math.log(V)))


def test_no_targets_give_zero_and_zero_gradients():
    hidden, weight, targets = make_inputs()
    total = chunked_cross_entropy_sum(hidden, weight, torch.full_like(targets, -100))
    total.backward()
    assert total.item() == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_another_ignore_index_is_respected():
    hidden, weight, targets = make_inputs()
    expected = plain_sum(hidden, weight, targets)
    marked = torch.where(targets == -100, 7_000, targets)
    assert_close(chunked_cross_entropy_sum(hidden, weight, marked, ignore_index=7_000), expected)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_one_side_can_be_trained(frozen):
    hidden, weight, targets = make_inputs()
    fixed, trained = (hidden, weight) if frozen == "hidden" else (weight, hidden)
    expected = torch.autograd.grad(plain_sum(hidden, weight, targets), trained)
    fixed.requires_grad_(False)
    total = chunked_cross_entropy_sum(hidden, weight, targets, chunk_tokens=5)
    assert_close(torch.autograd.grad(total, trained), expected)


def test_without_gradients_only_the_forward_pass_runs():
    hidden, weight, targets = make_inputs()
    expected = plain_sum(hidden, weight, targets)
    with torch.no_grad():
        total = chunked_cross_entropy_sum(hidden, weight, targets, chunk_tokens=4)
    assert total.grad_fn is None
    assert_close(total, expected.detach())


def test_autocast_multiplies_in_bfloat16_and_sums_in_float32():
    hidden, weight, targets = make_inputs(torch.float32)
    rounded = [x.detach().bfloat16() for x in (hidden, weight)]
    logits = (rounded[0] @ rounded[1].T).float()
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    expected_grads = torch.autograd.grad(plain_sum(hidden, weight, targets), (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        total = chunked_cross_entropy_sum(hidden, weight, targets, chunk_tokens=4)
        losses = token_losses(hidden, weight, targets, chunk_tokens=4)
    total.backward()
    assert total.dtype == losses.dtype == torch.float32
    assert_close(total, expected)
    assert_close(losses.sum(), expected)
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert_close((hidden.grad, weight.grad), expected_grads, rtol=5e-2, atol=5e-2)


def test_chunks_are_added_up_in_float32_when_weights_are_bfloat16():
    # 512 equal tokens, one a chunk: a bfloat16 sum would stop growing at 256 times one of them.
    hidden = torch.ones(512, 1, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(512, 1, dtype=torch.int64)
    chunked_cross_entropy_sum(hidden, weight, targets, chunk_tokens=1).backward()
    assert_close(weight.grad, torch.tensor([[-256.0], [256.0]], dtype=torch.bfloat16))


def test_extreme_logits_stay_finite():
    hidden = torch.full((1, 1, 1), 1e4, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    total = chunked_cross_entropy_sum(hidden, weight, torch.tensor([[1]]))
    total.backward()
    assert_close(total, torch.tensor(2e4))
    assert_close(hidden.grad, torch.tensor([[[2.0]]]))


def test_token_losses_equal_those_of_torch_token_by_token():
    hidden, weight, targets = make_inputs()
    expected = F.cross_entropy((hidden @ weight.T).transpose(1, 2), targets, reduction="none")
    got = token_losses(hidden, weight, targets, chunk_tokens=4)
    assert not got.requires_grad
    assert_close(got, expected.detach())


def test_second_backward_is_refused():
    hidden, weight, targets = make_inputs()
    total = chunked_cross_entropy_sum(hidden, weight, targets)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="chunked_cross_entropy_sum: backward ran twice"):
        total.backward()


@pytest.mark.parametrize("compute", [chunked_cross_entropy_sum, token_losses])
def test_empty_chunks_are_refused(compute):
    with pytest.raises(ValueError, match="chunk_tokens=0: must be at least 1"):
        compute(*make_inputs(), chunk_tokens=0)


@pytest.mark.parametrize("compute", [chunked_cross_entropy_sum, token_losses])
def test_logits_are_never_whole(compute):
    class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.numel = max(self.numel, out.numel())
            return out

    vocab, tokens = 50_000, 600
    hidden = torch.randn(1, tokens, 2, requires_grad=True)
    weight = torch.randn(vocab, 2, requires_grad=True)
    with LargestTensor() as largest:
        compute(hidden, weight, torch.zeros(1, tokens, dtype=torch.int64))
    assert largest.numel == 256 * vocab
