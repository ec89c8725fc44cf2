import torch
from torch.testing import assert_close

from nemo_like.nn.mlp import SwiGLU


def test_swiglu_follows_its_definition():
    mlp = SwiGLU(3, 5, init_std=1.0, output_init_std=1.0).double()
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    gate = x @ mlp.gate.weight.T
    expected = (gate * torch.sigmoid(gate) * (x @ mlp.up.weight.T)) @ mlp.down.weight.T
    assert_close(mlp(x), expected)


def test_matrices_start_at_their_own_widths():
    mlp = SwiGLU(200, 300, init_std=0.5, output_init_std=0.1)
    widths = [mlp.gate.weight.std(), mlp.up.weight.std(), mlp.down.weight.std()]
    assert_close(torch.stack(widths), torch.tensor([0.5, 0.5, 0.1]), rtol=0.03, atol=0)
