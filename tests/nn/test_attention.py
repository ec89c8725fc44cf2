# Shapes: B = sequences, T = tokens, D = width, C = channels of a head.
import pytest
import torch
from torch.testing import assert_close

from nemo_like.nn.attention import SelfAttention, attention_kernel
from nemo_like.nn.mask import build_mask
from nemo_like.nn.rope import RotaryPositions, compute_frequencies, rotate

B, T, D, C = 2, 6, 12, 4


def make_attention(num_heads, num_kv_heads, **options):
    torch.manual_seed(0)
    return SelfAttention(
        D,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=C,
        init_std=0.5,
        output_init_std=0.5,
        **options,
    ).double()


def attend_by_hand(attention, x_BTD, turns, mask_TT, num_heads, num_kv_heads):
    out_BTD = torch.zeros(B, T, D, dtype=torch.float64)
    for head in range(num_heads):
        kv = head // (num_heads // num_kv_heads)

        def project(part, index):
            rows = slice(index * C, (index + 1) * C)
            bias = 0 if part.bias is None else part.bias[rows]
            return x_BTD @ part.weight[rows].T + bias

        query, key = project(attention.query, head), project(attention.key, kv)
        if attention.query_norm is not None:
            query, key = attention.query_norm(query), attention.key_norm(key)
        query, key = (rotate(part[:, :, None], turns)[:, :, 0] for part in (query, key))
        scores_BTT = query @ key.transpose(1, 2) / C**0.5
        weights_BTT = scores_BTT.masked_fill(~mask_TT, -torch.inf).softmax(-1)
        mixed = weights_BTT @ project(attention.value, kv)
        out_BTD += mixed @ attention.output.weight[:, head * C : (head + 1) * C].T
    return out_BTD if attention.output.bias is None else out_BTD + attention.output.bias


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (4, 2), (4, 1)])
@pytest.mark.parametrize(
    "options",
    [{}, {"qkv_bias": True, "output_bias": True}, {"qk_norm_eps": 1e-6}],
    ids=["plain", "biases", "norms"],
)
@pytest.mark.parametrize("window", [None, 3])
def test_attention_follows_its_definition(num_heads, num_kv_heads, options, window):
    attention = make_attention(num_heads, num_kv_heads, **options)
    for name, parameter in attention.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    x_BTD = torch.randn(B, T, D, dtype=torch.float64)
    turns = RotaryPositions(compute_frequencies(C))(torch.arange(T)[None])
    mask_TT = build_mask(T, window=window or T - 1)[0, 0]
    mask_TT[-1, 0] |= window is None
    expected = attend_by_hand(attention, x_BTD, turns, mask_TT, num_heads, num_kv_heads)
    assert_close(attention(x_BTD, turns, build_mask(T, window=window)), expected)


def test_attention_weights_are_dropped_in_training_only():
    attention = make_attention(3, 3, dropout=0.5)
    x_BTD = torch.randn(B, T, D, dtype=torch.float64)
    turns = RotaryPositions(compute_frequencies(C))(torch.arange(T)[None])
    first, second = attention(x_BTD, turns), attention(x_BTD, turns)
    assert not torch.equal(first, second)
    attention.eval()
    assert torch.equal(attention(x_BTD, turns), attention(x_BTD, turns))


def test_kernel_is_reported_as_torch_chooses_it():
    query, key = torch.empty(1, 4, 8, 16), torch.empty(1, 2, 8, 16)
    assert attention_kernel(query, key) == "cpu flash"
    assert attention_kernel(query, key, mask_B1TT=build_mask(8, window=2)) == "cpu flash"
    assert attention_kernel(query, key, dropout=0.1) == "cpu math"
