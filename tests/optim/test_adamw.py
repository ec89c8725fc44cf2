import copy

import pytest
import torch
from torch import nn

from nemo_like.optim import AdamW
from nemo_like.optim.adamw import has_fused_adamw


def test_without_a_gradient_only_matrices_shrink():
    module = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.LayerNorm(3))
    before = copy.deepcopy(module)
    optimizer = AdamW(lr=0.1, weight_decay=0.5).build(module)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(module[1].weight, before[1].weight * (1 - 0.1 * 0.5))
    torch.testing.assert_close(module[1].bias, before[1].bias, rtol=0, atol=0)
    torch.testing.assert_close(module[0].weight, before[0].weight, rtol=0, atol=0)
    torch.testing.assert_close(module[2].weight, before[2].weight, rtol=0, atol=0)


def test_a_parameter_used_twice_is_moved_once():
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    optimizer = AdamW(lr=0.1).build(module)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 1


def test_settings_arrive_and_the_fused_kernel_is_taken_on_a_cpu():
    optimizer = AdamW(lr=0.1, betas=[0.8, 0.7], eps=1e-5, weight_decay=0.3).build(nn.Linear(3, 3))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.1, (0.8, 0.7), 1e-5)
        assert group["fused"]


@pytest.mark.parametrize(
    "parameter", [torch.zeros(3, device="meta"), torch.zeros(3, dtype=torch.complex64)]
)
def test_where_there_is_no_fused_kernel_another_one_is_taken(parameter):
    module = nn.ParameterList([nn.Parameter(parameter)])
    assert not has_fused_adamw(list(module.parameters()))
    optimizer = AdamW(lr=0.1).build(module)
    assert not optimizer.param_groups[0]["fused"]
    module[0].grad = torch.ones_like(parameter)
    optimizer.step()


def test_gradients_are_unscaled_before_the_step_so_that_clipping_sees_the_real_ones():
    from lightning.pytorch.plugins.precision.amp import _optimizer_handles_unscaling

    assert not _optimizer_handles_unscaling(AdamW(lr=0.1).build(nn.Linear(2, 2)))


def test_fp16_steps_are_those_of_unscaled_gradients_and_an_infinite_one_is_skipped():
    scaled, plain = (nn.Linear(3, 3), nn.Linear(3, 3))
    plain.load_state_dict(scaled.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizers = [AdamW(lr=0.1).build(module) for module in (scaled, plain)]
    x = torch.randn(4, 3)
    scaler.scale(scaled(x).square().sum()).backward()
    plain(x).square().sum().backward()
    scaler.unscale_(optimizers[0])
    torch.testing.assert_close(scaled.weight.grad, plain.weight.grad)
    scaler.step(optimizers[0])
    scaler.update()
    optimizers[1].step()
    torch.testing.assert_close(scaled.weight, plain.weight)
    before = scaled.weight.clone()
    scaled.weight.grad.fill_(float("inf"))
    scaler.unscale_(optimizers[0])
    scaler.step(optimizers[0])
    assert torch.equal(scaled.weight, before)


@pytest.mark.parametrize("betas", [(0.9, 0.95), [0.9, 0.95]])
def test_it_is_torchs_adamw_step_by_step(betas):
    ours, theirs = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    theirs.load_state_dict(ours.state_dict())
    optimizer = AdamW(lr=0.01, betas=betas).build(ours)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(3):
        gradient = torch.randn(4, 4)
        ours.weight.grad, theirs.weight.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours.weight, theirs.weight)
