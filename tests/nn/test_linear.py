import pytest
import torch
from torch.testing import assert_close

from nemo_like.nn.linear import Embedding, Linear


@pytest.mark.parametrize("kind", [Linear, Embedding])
def test_weights_have_the_stated_width(kind):
    weight = kind(200, 300, init_std=0.05).weight
    assert_close(weight.std(), torch.tensor(0.05), rtol=0.03, atol=0)
    assert_close(weight.mean(), torch.tensor(0.0), rtol=0, atol=1e-3)


def test_biases_start_at_zero():
    assert torch.equal(Linear(3, 4, bias=True, init_std=1.0).bias, torch.zeros(4))
