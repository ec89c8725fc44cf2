# Shapes: B = rows, T = tokens, D = width, H = heads, C = channels.
import dataclasses

import pytest
import torch
from torch.testing import assert_close

from nemo_like.collections.llm.decoder import DecoderConfig, DecoderNetwork
from nemo_like.collections.llm.generation import KeyValueCache
from nemo_like.nn.rope import rotate

TINY = DecoderConfig(
    vocab_size=50,
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=40,
    max_positions=64,
    init_std=0.3,
)
SHAPES = {
    "llama": TINY,
    "mistral": dataclasses.replace(TINY, sliding_window=5, num_kv_heads=1, tie_embeddings=False),
    "qwen2": dataclasses.replace(TINY, qkv_bias=True, num_kv_heads=None),
    "qwen3": dataclasses.replace(TINY, qk_norm=True, head_dim=10),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
# How 20 tokens come: one by one, a prompt and then one by one, in pieces, all at once.
PIECES = {
    "one by one": [1] * 20,
    "prompt first": [9] + [1] * 11,
    "pieces": [3, 1, 6, 1, 1, 8],
    "at once": [20],
}
every_cut = pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)


def make_network(shape, *, num_layers=None):
    torch.manual_seed(0)
    if num_layers is not None:
        shape = dataclasses.replace(shape, num_layers=num_layers)
    network = DecoderNetwork(shape).double().eval()
    for name, parameter in network.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter)
    return network.requires_grad_(False)


def make_tokens(num_rows=1, num_tokens=20):
    return torch.randint(0, 50, (num_rows, num_tokens), generator=torch.Generator().manual_seed(5))


def read(network, cache, tokens_BT, pieces, rows=None):
    hidden = [
        network.compute_hidden(part, cache=cache.append([part.size(1)] * len(part), rows=rows))
        for part in tokens_BT.split(pieces, dim=1)
    ]
    return torch.cat(hidden, dim=1)


@every_cut
@every_shape
def test_reading_with_a_cache_equals_reading_all_at_once(shape, pieces):
    network, tokens_BT = make_network(shape), make_tokens(3)
    cache = KeyValueCache.build(network, num_rows=3, cache_size=20)
    assert_close(read(network, cache, tokens_BT, pieces), network.compute_hidden(tokens_BT))
    assert cache.lengths == [20, 20, 20]


@every_cut
@every_shape
def test_a_sliding_cache_equals_a_network_with_that_window(shape, pieces):
    network, tokens_BT = make_network(shape), make_tokens(2)
    for size in (3, 7):
        window = min(size, shape.sliding_window or size)
        windowed = make_network(dataclasses.replace(shape, sliding_window=window))
        cache = KeyValueCache.build(
            network, num_rows=2, cache_size=size, eviction_policy="sliding_window"
        )
        hidden_BTD = read(network, cache, tokens_BT, pieces)
        assert_close(hidden_BTD, windowed.compute_hidden(tokens_BT))


class Recomputing:
    """Attention over all tokens with the mask and the distances of ``attention_sinks``, query by query."""

    def __init__(self, network, num_tokens, *, cache_size, num_sinks):
        self.rotary, self.size, self.num_sinks = network.positions, cache_size, num_sinks
        self.positions_BT = torch.arange(num_tokens).unsqueeze(0)
        self.layers = [self] * network.shape.num_layers

    def attend(self, query_BHTC, key_BKTC, value_BKTC):
        group = query_BHTC.size(1) // key_BKTC.size(1)
        key_BHTC = key_BKTC.repeat_interleave(group, dim=1)
        value_BHTC = value_BKTC.repeat_interleave(group, dim=1)
        mixed = []
        for i in range(query_BHTC.size(2)):
            seen = [
                j for j in range(i + 1) if j < self.num_sinks or i - j < self.size - self.num_sinks
            ]
            query_BHC = query_BHTC[:, :, i]
            back = min(i, self.size - 1) - i
            turns = self.rotary(torch.tensor([[back]]))
            turned_BHC = rotate(query_BHC.unsqueeze(1), turns)[:, 0]
            scores = [
                ((turned_BHC if j < self.num_sinks else query_BHC) * key_BHTC[:, :, j]).sum(-1)
                for j in seen
            ]
            weights = (torch.stack(scores, -1) / query_BHC.size(-1) ** 0.5).softmax(-1)
            mixed.append(torch.einsum("bhj,bhjc->bhc", weights, value_BHTC[:, :, seen]))
        return torch.stack(mixed, dim=2)


@every_cut
@pytest.mark.parametrize("shape", [SHAPES[it] for it in ("llama", "qwen2", "qwen3")])
@pytest.mark.parametrize(("size", "num_sinks"), [(8, 2), (5, 1), (6, 4)])
def test_a_cache_with_sinks_equals_recomputing_with_its_mask(shape, pieces, size, num_sinks):
    network, tokens_BT = make_network(shape), make_tokens(2)
    cache = KeyValueCache.build(
        network,
        num_rows=2,
        cache_size=size,
        eviction_policy="attention_sinks",
        num_sinks=num_sinks,
    )
    hidden_BTD = read(network, cache, tokens_BT, pieces)
    every = Recomputing(network, 20, cache_size=size, num_sinks=num_sinks)
    expected_BTD = network.compute_hidden(tokens_BT, cache=every)
    # Angles are float32, and a sum of two turns is rounded otherwise than one turn.
    assert_close(hidden_BTD, expected_BTD, rtol=0, atol=1e-5)


@every_cut
def test_with_sinks_one_layer_sees_what_a_text_of_sinks_and_newest_tokens_is(pieces):
    network, tokens_BT = make_network(TINY, num_layers=1), make_tokens(2)
    cache = KeyValueCache.build(
        network, num_rows=2, cache_size=8, eviction_policy="attention_sinks", num_sinks=2
    )
    hidden_BTD = read(network, cache, tokens_BT, pieces)
    for end in (8, 9, 13, 20):
        text_BT = torch.cat((tokens_BT[:, :2], tokens_BT[:, end - 6 : end]), dim=1)
        expected = network.compute_hidden(text_BT)[:, -1]
        assert_close(hidden_BTD[:, end - 1], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("policy", ["error", "sliding_window", "attention_sinks"])
@every_shape
def test_rows_of_unequal_length_equal_rows_alone(shape, policy):
    network, size = make_network(shape), 32 if policy == "error" else 5
    options = {"cache_size": size, "eviction_policy": policy, "num_sinks": 2}
    lengths, tokens_BT = [9, 3, 1, 6], make_tokens(4)

    def run(rows):
        cache = KeyValueCache.build(network, num_rows=len(rows), **options)
        counts = [lengths[row] for row in rows]
        prompt_BT = tokens_BT[rows, : max(counts)].clone()
        for index, count in enumerate(counts):
            prompt_BT[index, count:] = 7 + index  # padding
        hidden_BTD = network.compute_hidden(prompt_BT, cache=cache.append(counts))
        parts = [hidden_BTD[torch.arange(len(rows)), torch.tensor(counts) - 1]]
        # Three at once for all, as a speculative step does; then one by one.
        for width, repeats in ((3, 1), (1, 8)):
            for _ in range(repeats):
                at = torch.tensor(cache.lengths)[:, None] + torch.arange(width)
                next_BT = tokens_BT[torch.tensor(rows)[:, None], at]
                hidden_BTD = network.compute_hidden(
                    next_BT, cache=cache.append([width] * len(rows))
                )
                parts += hidden_BTD.unbind(1)
        return torch.stack(parts, dim=1)

    together = run([0, 1, 2, 3])
    for row in range(4):
        assert_close(together[row : row + 1], run([row]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("policy", ["error", "attention_sinks"])
def test_rows_may_come_in_any_order_and_counts_may_differ(policy):
    network, tokens_BT = make_network(TINY), make_tokens(4)
    expected = network.compute_hidden(tokens_BT)
    cache = KeyValueCache.build(network, num_rows=5, cache_size=20, eviction_policy=policy)
    hidden = network.compute_hidden(tokens_BT[[2, 0], :4], cache=cache.append([4, 2], rows=[4, 1]))
    assert_close(hidden[0], expected[2, :4])
    assert_close(hidden[1, :2], expected[0, :2])
    next_BT = torch.stack((tokens_BT[0, 2:7], tokens_BT[2, 4:9], tokens_BT[1, :5]))
    hidden = network.compute_hidden(next_BT, cache=cache.append([5, 3, 1], rows=[1, 4, 0]))
    assert_close(hidden[0], expected[0, 2:7])
    assert_close(hidden[1, :3], expected[2, 4:7])
    assert_close(hidden[2, :1], expected[1, :1])
    assert cache.lengths == [1, 7, 0, 0, 7]


def test_a_row_forgets_its_newest_tokens_and_goes_on():
    network, tokens_BT = make_network(TINY), make_tokens(2)
    cache = KeyValueCache.build(network, num_rows=2, cache_size=20)
    read(network, cache, tokens_BT[:, :5], [5])
    read(network, cache, 49 - tokens_BT[:, :6], [6])
    cache.rollback([0, 1], [5, 4])
    assert cache.lengths == [5, 4]
    next_BT = torch.stack((tokens_BT[0, 5:8], tokens_BT[1, 4:7]))
    hidden_BTD = network.compute_hidden(next_BT, cache=cache.append([3, 3]))
    expected = network.compute_hidden(tokens_BT)
    assert_close(hidden_BTD, torch.stack((expected[0, 5:8], expected[1, 4:7])))


@pytest.mark.parametrize("policy", ["error", "sliding_window", "attention_sinks"])
def test_rows_are_copied_and_used_again(policy):
    network, tokens_BT = make_network(TINY), make_tokens(3)
    size = 20 if policy == "error" else 6

    def build():
        return KeyValueCache.build(network, num_rows=3, cache_size=size, eviction_policy=policy)

    expected = [read(network, build(), row[None], [8, 1, 1, 1]) for row in tokens_BT[:, :11]]
    cache = build()
    read(network, cache, tokens_BT[:, :9], [8, 1])
    cache.free(1)
    assert cache.lengths == [9, 0, 9]
    cache.copy([2, 0], [0, 1])
    assert cache.lengths == [9, 9, 9]
    hidden = read(network, cache, tokens_BT[[2, 0, 2], 9:11], [1, 1])
    assert_close(hidden, torch.cat([expected[row][:, 9:] for row in (2, 0, 2)]))
    cache.free(1)
    assert_close(read(network, cache, tokens_BT[1:2, :11], [8, 1, 1, 1], rows=[1]), expected[1])


def test_nothing_of_a_former_request_leaks_into_the_next():
    network, tokens_BT = make_network(TINY), make_tokens(2)
    cache = KeyValueCache.build(network, num_rows=2, cache_size=20)
    read(network, cache, tokens_BT, [20])
    cache.free(0)
    cache.free(1)
    network.compute_hidden(tokens_BT[:, :9], cache=cache.append([9, 2]))
    hidden = network.compute_hidden(tokens_BT[:, 9:10], cache=cache.append([1, 1]))
    alone_BT = torch.cat((tokens_BT[1:, :2], tokens_BT[1:, 9:10]), dim=1)
    assert_close(hidden[1:], network.compute_hidden(alone_BT)[:, -1:])


def test_a_full_row_is_refused_and_nothing_is_reserved():
    network = make_network(TINY)
    cache = KeyValueCache.build(network, num_rows=2, cache_size=4)
    cache.append([3, 1])
    with pytest.raises(ValueError, match=r"row 0: 3 \+ 2 tokens do not fit cache_size=4"):
        cache.append([1, 2], rows=[1, 0])
    assert cache.lengths == [3, 1]


def test_what_was_evicted_does_not_come_back():
    cache = KeyValueCache.build(
        make_network(TINY), num_rows=1, cache_size=4, eviction_policy="sliding_window"
    )
    cache.append([4])
    cache.rollback([0], [2])
    cache.append([3])
    cache.rollback([0], [5])
    with pytest.raises(ValueError, match="row 0: cannot roll back to 4 of 5 tokens"):
        cache.rollback([0], [4])
    with pytest.raises(ValueError, match="row 0: cannot roll back to 6 tokens, it has 5"):
        cache.rollback([0], [6])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_size": 0}, "cache_size=0"),
        ({"cache_size": 4, "eviction_policy": "attention_sinks"}, "num_sinks=4.*cache_size=4"),
        (
            {"cache_size": 6, "eviction_policy": "attention_sinks"},
            "cache_size=6: .* at most 5, the window",
        ),
    ],
)
def test_caches_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        KeyValueCache.build(make_network(SHAPES["mistral"]), num_rows=1, **options)


def test_a_cache_knows_the_positions():
    network, tokens_BT = make_network(TINY), make_tokens()
    step = KeyValueCache.build(network, num_rows=1, cache_size=20).append([20])
    for name in ("segments_BT", "positions_BT"):
        with pytest.raises(ValueError, match=f"{name}: has no effect with a cache"):
            network.compute_hidden(tokens_BT, cache=step, **{name: torch.zeros_like(tokens_BT)})
