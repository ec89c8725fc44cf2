import copy
import logging

import pytest
import torch
from torch import nn

from nemo_like.optim import Muon, muon
from nemo_like.optim.muon import MuonOptimizer


def build_network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Embedding(9, 6), nn.Linear(6, 18), nn.Linear(18, 6), nn.Linear(6, 6), nn.LayerNorm(6)
    )
    return layers.to(dtype)


def set_gradients(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = noise.to(parameter.dtype)


def get_matrices(module: nn.Module) -> list[nn.Parameter]:
    return [child.weight for child in module if isinstance(child, nn.Linear)]


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw", "spectral_unclamped"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_matrices_move_as_torchs_muon_moves_them(monkeypatch, adjust_lr_fn, nesterov):
    # torch rounds to BF16 whatever it is given; here it is to compute exactly, on a copy as there.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.double().clone())
    ours, theirs = build_network(torch.float64), build_network(torch.float64)
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.2, "ns_steps": 4}
    optimizer = Muon(nesterov=nesterov, adjust_lr_fn=adjust_lr_fn, **options).build(ours)
    reference = torch.optim.Muon(
        get_matrices(theirs), nesterov=nesterov, adjust_lr_fn=adjust_lr_fn, **options
    )
    for step in range(4):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step()
        reference.step()
    for actual, expected in zip(get_matrices(ours), get_matrices(theirs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-10)


def test_everything_else_moves_as_adamw_moves_it():
    ours, theirs = build_network(), build_network()
    optimizer = Muon(adamw_lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2).build(ours)
    others = [p for p in theirs.parameters() if p.ndim == 1 or p is theirs[0].weight]
    reference = torch.optim.AdamW(
        others, lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.0, fused=True
    )
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step()
        reference.step()
    for name, parameter in ours.named_parameters():
        if parameter.ndim == 1 or parameter is ours[0].weight:
            assert torch.equal(parameter, theirs.get_parameter(name)), name


def test_matrices_of_one_shape_computed_together_move_as_one_by_one(monkeypatch):
    together, alone = build_network(torch.float64), build_network(torch.float64)
    set_gradients(together, 1)
    set_gradients(alone, 1)
    Muon().build(alone).step()
    monkeypatch.setattr(muon, "_batch_by_shape", lambda parameters: [[p] for p in parameters])
    batches = {}
    for parameter in get_matrices(together):
        batches.setdefault(tuple(sorted(parameter.shape)), []).append(parameter)
    assert [len(batch) for batch in batches.values()] == [2, 1]  # 6 x 18 and 18 x 6 are one
    monkeypatch.setattr(muon, "_batch_by_shape", lambda parameters: batches.values())
    Muon().build(together).step()
    for actual, expected in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_batches_hold_one_shape_and_are_bounded_off_the_cpu(monkeypatch):
    shapes = [(2, 3), (3, 2), (2, 3), (4, 4), (2, 3)]
    parameters = [torch.empty(shape, device="meta") for shape in shapes]
    assert [len(batch) for batch in muon._batch_by_shape(parameters)] == [4, 1]
    monkeypatch.setattr(muon, "_MAX_STACKED", 13)
    assert [len(batch) for batch in muon._batch_by_shape(parameters)] == [2, 2, 1]
    on_cpu = [torch.empty(shape) for shape in shapes]
    assert [len(batch) for batch in muon._batch_by_shape(on_cpu)] == [1, 1, 1, 1, 1]


def test_the_iteration_runs_in_bf16_only_where_that_is_quick(monkeypatch):
    for is_fast, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(
            "nemo_like.core.precision.has_fast_bf16", lambda device, is_fast=is_fast: is_fast
        )
        assert muon._choose_dtype(torch.empty(1)) == expected
        assert muon._choose_dtype(torch.empty(1, dtype=torch.float64)) == torch.float64


def test_state_round_trips_bit_for_bit_and_holds_nothing_but_tensors():
    network = build_network()
    optimizer = Muon().build(network)
    for step in range(2):
        set_gradients(network, step)
        optimizer.step()
    resumed = copy.deepcopy(network)
    optimizer_2 = Muon().build(resumed)
    state = optimizer.state_dict()
    assert {type(value) for entry in state["state"].values() for value in entry.values()} == {
        torch.Tensor
    }
    optimizer_2.load_state_dict(copy.deepcopy(state))
    for step in range(2, 4):
        for module, each in ((network, optimizer), (resumed, optimizer_2)):
            set_gradients(module, step)
            each.step()
    for actual, expected in zip(resumed.parameters(), network.parameters(), strict=True):
        assert torch.equal(actual, expected)


def test_a_schedule_scales_both_learning_rates():
    optimizer = Muon(lr=0.02, adamw_lr=0.004).build(build_network())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert {(group["algorithm"], group["lr"]) for group in optimizer.param_groups} == {
        ("muon", 0.01),
        ("adamw", 0.002),
    }


def test_named_matrices_go_to_adamw_and_decay_there():
    network = build_network()
    optimizer = Muon(weight_decay=0.3, adamw_parameters=["3.*"]).build(network)
    by_kind = {
        (group["algorithm"], group["weight_decay"]): [id(p) for p in group["params"]]
        for group in optimizer.param_groups
    }
    assert by_kind["adamw", 0.3] == [id(network[3].weight)]
    assert by_kind["muon", 0.3] == [id(network[1].weight), id(network[2].weight)]


def test_parameters_without_a_gradient_stay_and_have_no_state():
    network = build_network()
    before = copy.deepcopy(network.state_dict())
    optimizer = Muon().build(network)
    network[3].weight.grad = torch.randn(6, 6)
    optimizer.step()
    moved = {
        name for name, value in network.state_dict().items() if not torch.equal(value, before[name])
    }
    assert moved == {"3.weight"}
    assert len(optimizer.state) == 1


def test_a_step_runs_the_closure_with_gradients_and_gives_its_loss():
    network = build_network()
    optimizer = Muon().build(network)

    def closure():
        loss = network(torch.arange(4)).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    assert len(optimizer.state) == len(list(network.parameters()))


def test_what_muon_gets_is_told(caplog):
    with caplog.at_level(logging.INFO):
        Muon().build(build_network())
    assert (
        "Muon (float32): 252 parameters; AdamW (fused): 0 parameters decay, 96 do not"
        in caplog.text
    )


def test_what_muon_cannot_have_is_refused():
    with pytest.raises(ValueError, match="Embedding has no matrix for Muon"):
        Muon().build(nn.Embedding(3, 3))
    with pytest.raises(
        ValueError, match=r"'4\.w\*' matches none of the 3 matrices.*1\.weight, 2\.weight"
    ):
        Muon(adamw_parameters=["4.w*"]).build(build_network())
    with pytest.raises(ValueError, match=r"shape \(3,\) is no matrix"):
        MuonOptimizer([{"params": [nn.Parameter(torch.zeros(3))], "algorithm": "muon"}])
