import torch
from torch.testing import assert_close

from nemo_like.nn.norm import RMSNorm


def test_rms_norm_follows_its_definition():
    norm = RMSNorm(6, eps=0.5).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 0.5).sqrt() * norm.weight
    assert_close(norm(x), expected)


def test_rms_norm_keeps_the_type_of_its_input():
    norm = RMSNorm(8)
    assert norm(torch.randn(2, 8).bfloat16()).dtype == torch.bfloat16
