# Shapes: B = requests, T = tokens, V = vocabulary.
import dataclasses

import pytest
import torch
from torch.testing import assert_close

from nemo_like.collections.llm.decoder import DecoderConfig, DecoderModel, DecoderNetwork
from nemo_like.collections.llm.generation import GenerationConfig, Request, Session
from nemo_like.collections.llm.generation.generate import generate, stream
from nemo_like.collections.llm.generation.layout import lay_out_for_decoding, project
from nemo_like.core.errors import ConfigError
from nemo_like.text.tokenizer import train_bpe

VOCAB = 257  # every byte, and the end of text
TOKENIZER = train_bpe(["ab"], vocab_size=VOCAB)
OFTEN = list(range(0, 250, 8))  # so many stop tokens that one is soon drawn
PROMPTS = ["a", "hello there", "", "x y z \u00fc"]


def make_network(*, max_positions=64, **options):
    torch.manual_seed(0)
    shape = DecoderConfig(
        vocab_size=VOCAB + 7,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        intermediate_size=32,
        max_positions=max_positions,
        init_std=0.5,
        **options,
    )
    return DecoderNetwork(shape)


def continue_by_hand(network, ids, count):
    for _ in range(count):
        logits_V = network(torch.tensor([ids]))[0, -1, :VOCAB]
        ids = [*ids, int(logits_V.argmax())]
    return ids


def exhaust(iterator):
    """What a generator yields, and behind it what it returns."""
    while True:
        try:
            yield next(iterator)
        except StopIteration as end:
            yield end.value
            return


def greedy(**options):
    return GenerationConfig(temperature=0, ignore_eos=True, **{"max_tokens": 12, **options})


def test_the_likeliest_tokens_are_those_of_the_whole_network_without_a_cache():
    network = make_network()
    (result,) = generate(network, TOKENIZER, ["ab"], greedy())
    ids = continue_by_hand(network, [TOKENIZER.prefix_id, *TOKENIZER.encode("ab")], 12)
    assert result.prompt_tokens + result.tokens == ids
    assert result.finish_reason == "length"
    assert result.seed is None
    assert result.text == TOKENIZER.decode(ids[3:]).rstrip("\ufffd")


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"seed": 5},
        {"seed": 5, "top_p": 0.8, "repetition_penalty": 1.3},
        {"seed": 5, "cache_size": 4, "num_sinks": 2, "eviction_policy": "attention_sinks"},
        {"num_beams": 3},
    ],
    ids=str,
)
def test_a_batch_of_unequal_prompts_equals_the_prompts_one_by_one(options, window):
    network = make_network(sliding_window=window)
    options = options if "num_beams" in options else {"logprobs": 2, **options}
    config = GenerationConfig(max_tokens=20, stop_tokens=OFTEN, **options)
    together = generate(network, TOKENIZER, PROMPTS, config)
    assert len({len(result.tokens) for result in together}) > 1
    for index, prompt in enumerate(PROMPTS):
        seeds = None if config.seed is None else [config.seed + index]
        (alone,) = generate(network, TOKENIZER, [prompt], config, seeds=seeds)
        result = together[index]
        assert (result.tokens, result.text, result.seed) == (alone.tokens, alone.text, alone.seed)
        for one, other in zip(result.logprobs or [], alone.logprobs or [], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_rows_that_end_leave_the_others_alone():
    network = make_network()
    config = GenerationConfig(max_tokens=40, stop_tokens=OFTEN)
    results = generate(network, TOKENIZER, ["q"] * 12, config, seeds=list(range(12)))
    assert len({len(result.tokens) for result in results}) > 3
    for seed, result in enumerate(results):
        (alone,) = generate(network, TOKENIZER, ["q"], config, seeds=[seed])
        assert result == alone


def test_a_seed_decides_and_the_global_generator_is_left_alone():
    network = make_network()
    before = torch.get_rng_state()
    config = GenerationConfig(max_tokens=12)
    results = generate(network, TOKENIZER, ["a"] * 3, config, seeds=[1, 1, 2])
    assert results[0].tokens == results[1].tokens != results[2].tokens
    drawn = generate(network, TOKENIZER, ["a"] * 2, config)
    assert drawn[0].seed != drawn[1].seed
    (again,) = generate(network, TOKENIZER, ["a"], config, seeds=[drawn[0].seed])
    assert again.tokens == drawn[0].tokens
    assert torch.equal(torch.get_rng_state(), before)


def test_log_probabilities_are_those_of_the_model_before_any_filter():
    network = make_network()
    config = GenerationConfig(
        max_tokens=6, seed=3, logprobs=3, top_k=5, temperature=0.5, repetition_penalty=2.0
    )
    (result,) = generate(network, TOKENIZER, ["hello"], config)
    ids = result.prompt_tokens + result.tokens
    logprobs_TV = network(torch.tensor([ids]))[0, :, :VOCAB].log_softmax(-1)
    logprobs_TV = logprobs_TV[len(result.prompt_tokens) - 1 : -1].detach()
    for place, entry in enumerate(result.logprobs):
        assert entry.token == result.tokens[place]
        assert_close(entry.logprob, float(logprobs_TV[place, entry.token]), rtol=0, atol=1e-5)
        values, top = logprobs_TV[place].topk(3)
        assert [token for token, _ in entry.top] == top.tolist()
        assert_close(torch.tensor([it for _, it in entry.top]), values, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eviction_policy": "sliding_window", "cache_size": 6},
        {"logprobs": 0, "stop": ["q", " "]},
    ],
    ids=str,
)
def test_streamed_pieces_are_the_text(options):
    network = make_network()
    for seed in range(8):
        config = GenerationConfig(max_tokens=30, seed=seed, **options)
        (expected,) = generate(network, TOKENIZER, ["a"], config)
        *pieces, result = exhaust(stream(network, TOKENIZER, "a", config))
        assert "".join(pieces) == expected.text
        assert "" not in pieces
        assert result == expected


def test_a_stop_token_ends_the_text_and_is_no_part_of_it():
    network = make_network()
    config = GenerationConfig(seed=1, max_tokens=12)
    (free,) = generate(network, TOKENIZER, ["ab"], config)
    token = free.tokens[8]
    end = free.tokens.index(token)
    config = dataclasses.replace(config, stop_tokens=[token])
    (result,) = generate(network, TOKENIZER, ["ab"], config)
    assert result.tokens == free.tokens[: end + 1]
    assert result.text == TOKENIZER.decode(free.tokens[:end]).rstrip("\ufffd")
    assert (result.finish_reason, result.stopped_by) == ("stop", token)


def test_a_stop_string_ends_the_text():
    network = make_network()
    (free,) = generate(network, TOKENIZER, ["ab"], GenerationConfig(seed=1, max_tokens=60))
    letters = [it for it in free.text if it.isascii()]
    stop = letters[3]
    config = GenerationConfig(seed=1, max_tokens=60, stop=[stop])
    (result,) = generate(network, TOKENIZER, ["ab"], config)
    assert result.text == free.text[: free.text.index(stop)]
    assert (result.finish_reason, result.stopped_by) == ("stop", stop)
    assert len(result.tokens) < len(free.tokens)


def test_the_end_of_text_ends_unless_it_is_ignored():
    network = make_network()
    config = GenerationConfig(max_tokens=60, temperature=4.0)
    results = generate(network, TOKENIZER, ["q"] * 30, config, seeds=list(range(30)))
    ended = next(result for result in results if result.finish_reason == "stop")
    assert ended.tokens[-1] == ended.stopped_by == TOKENIZER.eos_id
    ignoring = dataclasses.replace(config, ignore_eos=True)
    (longer,) = generate(network, TOKENIZER, ["q"], ignoring, seeds=[ended.seed])
    assert len(longer.tokens) == 60
    assert longer.tokens[: len(ended.tokens)] == ended.tokens


def test_prompts_of_tokens_are_read_as_they_are():
    network = make_network()
    text, ids = generate(
        network, TOKENIZER, ["ab", [TOKENIZER.prefix_id, *TOKENIZER.encode("ab")]], greedy()
    )
    assert ids == text
    with pytest.raises(ValueError, match=r"prompt=\[\]"):
        generate(network, TOKENIZER, [[]])


def test_nothing_is_generated_where_nothing_is_asked_for():
    network = make_network()
    for options in ({}, {"num_beams": 2, "temperature": 1.0}):
        config = dataclasses.replace(greedy(max_tokens=0), **options)
        (result,) = generate(network, TOKENIZER, ["ab"], config)
        assert (result.text, result.tokens, result.finish_reason) == ("", [], "length")
    assert generate(network, TOKENIZER, [], greedy()) == []


def test_rows_of_the_embedding_without_a_token_are_never_drawn():
    network = make_network()
    with torch.no_grad():
        network.embedding.weight[VOCAB:] *= 1e4
    for config in (greedy(), GenerationConfig(num_beams=2, max_tokens=5)):
        (result,) = generate(network, TOKENIZER, ["a"], config)
        assert max(result.tokens) < VOCAB


def test_the_network_is_left_in_its_mode():
    network = make_network().train()
    generate(network, TOKENIZER, ["a"], greedy(max_tokens=1))
    next(stream(network, TOKENIZER, "a", greedy(max_tokens=9)), None)
    assert network.training
    assert next(network.parameters()).requires_grad


def test_a_prompt_that_does_not_fit_is_refused_unless_tokens_may_be_forgotten():
    network = make_network(max_positions=16)
    fits = greedy(max_tokens=14)
    assert len(generate(network, TOKENIZER, ["ab"], fits)[0].tokens) == 14
    with pytest.raises(
        ConfigError, match=r"prompt 1: 4 tokens and max_tokens=14 need 17 places, .*is 16"
    ):
        generate(network, TOKENIZER, ["ab", "abc"], fits)
    with pytest.raises(ConfigError, match=r"prompt 0: .* cache_size is 5"):
        stream(network, TOKENIZER, "ab", greedy(cache_size=5))
    with pytest.raises(ConfigError, match=r"cache_size=17: the model is meant for 16"):
        generate(network, TOKENIZER, ["ab"], greedy(cache_size=17))
    for policy in ("sliding_window", "attention_sinks"):
        config = greedy(max_tokens=40, eviction_policy=policy)
        (result,) = generate(network, TOKENIZER, ["ab" * 20], config)
        assert len(result.tokens) == 40


def test_faults_are_raised_before_anything_is_computed():
    network = make_network()
    with pytest.raises(ConfigError, match="top_p=2"):
        generate(network, TOKENIZER, ["a"], GenerationConfig(top_p=2))
    with pytest.raises(ConfigError, match=r"num_beams=2: .* cannot be streamed"):
        stream(network, TOKENIZER, "a", GenerationConfig(num_beams=2))
    with pytest.raises(ConfigError, match="prompts='a': must be a list"):
        generate(network, TOKENIZER, "a")
    with pytest.raises(ConfigError, match="seeds: 1 for 2 prompts"):
        generate(network, TOKENIZER, ["a", "b"], seeds=[1])


def test_a_model_generates_with_its_tokenizer():
    model = DecoderModel(network=make_network().shape)
    with pytest.raises(ConfigError, match="tokenizer=None"):
        model.generate(["a"])
    model.tokenizer = TOKENIZER
    (expected,) = generate(model.network, TOKENIZER, ["a"], greedy())
    assert model.generate(["a"], greedy()) == [expected]


def test_requests_that_ask_differently_are_served_side_by_side():
    from nemo_like.collections.llm.generation.request import choose_tokens

    configs = [
        GenerationConfig(temperature=0),
        GenerationConfig(seed=1, logprobs=1),
        GenerationConfig(temperature=0, repetition_penalty=9.0),
        GenerationConfig(seed=1, top_k=1),
    ]
    logits_BV = torch.randn(1, VOCAB).repeat(4, 1)
    best, second = logits_BV[0].topk(2).indices.tolist()
    requests = [Request(TOKENIZER, [best], it, seed=it.seed) for it in configs]
    choices = choose_tokens(logits_BV, requests)
    assert [choices[index][0] for index in (0, 2, 3)] == [best, second, best]
    assert [choice[1] is None for choice in choices] == [True, False, True, True]


def test_layout_changes_no_value_and_follows_new_weights():
    network = make_network(tie_embeddings=False)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    expected = generate(network, TOKENIZER, PROMPTS[:2], greedy())
    lay_out_for_decoding(network)
    assert network.layers[0].mlp.gate.weight.stride() == (1, 32)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert [it.tokens for it in generate(network, TOKENIZER, PROMPTS[:2], greedy())] == [
        it.tokens for it in expected
    ]
    hidden_BD = torch.randn(1, 16)
    with torch.no_grad():
        assert_close(project(network, hidden_BD), hidden_BD @ before["output.weight"].T)
        network.output.weight.mul_(2)
        assert_close(project(network, hidden_BD), 2 * hidden_BD @ before["output.weight"].T)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_size": 10, "eviction_policy": "attention_sinks"},
        {"cache_size": 10, "eviction_policy": "sliding_window"},
    ],
    ids=str,
)
def test_a_session_gives_what_reading_everything_anew_gives(options):
    network = make_network()
    config = greedy(max_tokens=5, **options)
    session = Session(network, TOKENIZER, config)
    history = [TOKENIZER.prefix_id, *TOKENIZER.encode("hello")]
    reused = []
    # It grows, is taken back, and is another one altogether.
    for change in ("more", "and", None, "else"):
        pieces = list(session.stream(history))
        reused.append(session.num_reused)
        (expected,) = generate(network, TOKENIZER, [history], config)
        assert "".join(pieces) == expected.text
        if change is None:
            history = [*history[:3], *TOKENIZER.encode("xyz")]
        else:
            history = [*history, *expected.tokens, *TOKENIZER.encode(change)]
    assert reused[0] == 0
    assert reused[1] == 6 + 4
    assert reused[3] == (0 if options else 3)


def test_a_session_goes_on_after_an_answer_that_was_broken_off():
    network = make_network()
    session = Session(network, TOKENIZER, greedy(max_tokens=9))
    history = [TOKENIZER.prefix_id, *TOKENIZER.encode("hello")]
    broken = session.stream(history)
    next(broken)
    broken.close()
    (expected,) = generate(network, TOKENIZER, [history], greedy(max_tokens=9))
    assert "".join(session.stream(history)) == expected.text


def test_a_session_that_is_full_says_so():
    network = make_network()
    session = Session(network, TOKENIZER, greedy(max_tokens=20, cache_size=8))
    history = [TOKENIZER.prefix_id, *TOKENIZER.encode("hello")]
    iterator = session.stream(history)
    *_, result = exhaust(iterator)
    assert len(result.tokens) == 3
    assert result.finish_reason == "length"
    with pytest.raises(ConfigError, match="the conversation has 9 tokens, cache_size is 8"):
        list(session.stream([*history, 1, 2, 3]))
    with pytest.raises(ConfigError, match="num_beams=2"):
        Session(network, TOKENIZER, GenerationConfig(num_beams=2))
    with pytest.raises(ConfigError, match="cache_size=65: the model is meant for 64"):
        Session(network, TOKENIZER, greedy(cache_size=65))
