"""The engine: whatever comes and goes, each request gets what it would get alone."""

import random
import threading
import time

import pytest
import torch

from nemo_like.collections.llm.decoder import DecoderConfig, DecoderNetwork
from nemo_like.collections.llm.generation import GenerationConfig
from nemo_like.collections.llm.generation.generate import generate
from nemo_like.collections.llm.serving import Engine, EngineConfig, ServerConfig
from nemo_like.collections.llm.serving.errors import (
    EngineStoppedError,
    QueueFullError,
    RequestCancelledError,
    RequestFailedError,
    RequestTimeoutError,
    RequestTooLongError,
)
from nemo_like.core.errors import ConfigError
from nemo_like.text.tokenizer import train_bpe

VOCAB = 257  # every byte, and the end of text
TOKENIZER = train_bpe(["ab"], vocab_size=VOCAB)


def make_network(**options):
    torch.manual_seed(0)
    shape = DecoderConfig(
        vocab_size=VOCAB + 7,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        intermediate_size=32,
        max_positions=96,
        init_std=0.5,
        **options,
    )
    return DecoderNetwork(shape)


class Clock:
    """Seconds that a test decides about."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def make_engine(network=None, *, clock=None, **options):
    config = EngineConfig(**{"max_batch": 3, "prefill_tokens": 8, **options})
    clocks = {} if clock is None else {"clock": clock}
    return Engine(network or make_network(), TOKENIZER, config, **clocks)


def run(engine):
    while engine.step():
        pass


def greedy(max_tokens=6, **options):
    return GenerationConfig(temperature=0, ignore_eos=True, max_tokens=max_tokens, **options)


def assert_alone(network, handle):
    """A result is what the request alone gives, log-probabilities up to rounding."""
    request, result = handle.request, handle.result(0)
    seeds = None if request.seed is None else [request.seed]
    (alone,) = generate(network, TOKENIZER, [request.prompt], request.config, seeds=seeds)
    assert (result.tokens, result.text) == (alone.tokens, alone.text)
    assert (result.finish_reason, result.stopped_by) == (alone.finish_reason, alone.stopped_by)
    for one, other in zip(result.logprobs or [], alone.logprobs or [], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [it for it, _ in one.top] == [it for it, _ in other.top]


def draw_request(number, draw):
    """A prompt of 1 to 40 tokens and a configuration of some kind."""
    prompt = [TOKENIZER.prefix_id, *(draw.randrange(256) for _ in range(draw.randrange(40)))]
    kinds = [
        {"temperature": 0},
        {"seed": number},
        {"seed": number, "top_p": 0.8, "repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 0, "logprobs": 3, "stop": ["a", "\n"]},
        {"seed": number, "temperature": 2.0, "top_k": 20},
    ]
    return prompt, GenerationConfig(max_tokens=draw.randrange(1, 30), **kinds[number % len(kinds)])


@pytest.mark.parametrize("window", [None, 7])
def test_each_request_gets_what_it_gets_alone_whatever_comes_and_goes(window):
    network, draw = make_network(sliding_window=window), random.Random(1)
    engine = make_engine(network)
    handles, cancelled = [], []
    for number in range(40):
        prompt, config = draw_request(number, draw)
        handles.append(engine.submit(prompt, config, priority=draw.randrange(-2, 3)))
        for _ in range(draw.randrange(4)):
            engine.step()
        if number % 7 == 3:
            running = [it for it in handles if it.state == "running" and it.request.tokens]
            waiting = [it for it in handles if it.state == "waiting"]
            victim = draw.choice((waiting if number % 2 else running) or running or waiting)
            victim.cancel()
            cancelled.append(victim)
    run(engine)
    assert any(it.request.tokens for it in cancelled)
    for handle in handles:
        if handle in cancelled:
            with pytest.raises(RequestCancelledError, match="cancelled after"):
                handle.result(0)
        else:
            assert_alone(network, handle)
    statistics = engine.summarize()
    assert statistics.cancelled == len(cancelled)
    assert statistics.finished == 40 - len(cancelled)
    assert statistics.generated_tokens == sum(len(it.request.tokens) for it in handles)
    assert engine.cache.lengths == [0, 0, 0]


def test_an_engine_that_forgets_equals_generation_that_forgets():
    network, draw = make_network(), random.Random(2)
    policy = {"cache_size": 12, "eviction_policy": "attention_sinks", "num_sinks": 2}
    engine = make_engine(network, **policy)
    handles = []
    for _ in range(8):
        prompt = [TOKENIZER.prefix_id, *(draw.randrange(256) for _ in range(draw.randrange(30)))]
        handles.append(engine.submit(prompt, greedy(draw.randrange(5, 25))))
        engine.step()
        engine.step()
    run(engine)
    for handle in handles:
        config = greedy(handle.request.config.max_tokens, **policy)
        (alone,) = generate(network, TOKENIZER, [handle.request.prompt], config)
        assert handle.result(0).tokens == alone.tokens


def test_requests_are_admitted_and_retired_at_every_token():
    engine = make_engine(max_batch=2)
    short, long = engine.submit("a", greedy(2)), engine.submit("b", greedy(6))
    late = engine.submit("c", greedy(2))
    engine.step()
    assert [it.state for it in (short, long, late)] == ["running", "running", "waiting"]
    engine.step()  # the short one ends in this step, and the late one begins in it
    assert [it.state for it in (short, long, late)] == ["finished", "running", "running"]
    assert len(late.request.tokens) == 1
    late.cancel()
    last = engine.submit("d", greedy(1))
    engine.step()  # the cancelled one has left before the step computes
    assert [it.state for it in (late, last)] == ["failed", "finished"]
    assert len(late.request.tokens) == 1


def test_a_long_prompt_is_read_in_parts_while_others_go_on():
    network = make_network()
    engine = make_engine(network, prefill_tokens=8)
    running = engine.submit("a", greedy(12))
    engine.step()
    long = engine.submit("x" * 39, greedy(3))  # 40 tokens: five steps
    for count in range(1, 5):
        engine.step()
        assert len(running.request.tokens) == 1 + count
        assert engine.cache.lengths[1] == 8 * count
        assert not long.request.tokens
    engine.step()
    assert len(long.request.tokens) == 1
    run(engine)
    assert_alone(network, long)
    assert_alone(network, running)


def test_short_prompts_are_read_in_one_step_up_to_the_limit():
    engine = make_engine(prefill_tokens=8, max_batch=8)
    handles = [engine.submit("ab", greedy(4)) for _ in range(4)]  # 3 tokens each
    engine.step()
    assert [len(it.request.tokens) for it in handles] == [1, 1, 0, 0]


def test_the_beginning_that_a_running_request_shares_is_copied():
    network = make_network()
    engine = make_engine(network, prefill_tokens=64)
    shared = "the same beginning, word for word"
    handles = [engine.submit(f"{shared} {end}", greedy(9)) for end in ("one", "two", "one")]
    other = engine.submit("another beginning" * 2, greedy(3))
    run(engine)
    # The second computes "two" alone, the third its last token.
    alone = sum(map(len, (handles[0].request.prompt, other.request.prompt)))
    assert engine.summarize().prompt_tokens == alone + 3 + 1
    for handle in (*handles, other):
        assert_alone(network, handle)


def test_a_higher_priority_goes_first_and_equal_ones_in_order():
    clock = Clock()
    engine = make_engine(max_batch=1, prefill_tokens=2, clock=clock)
    names = {}
    for name, priority in (("low", -1), ("first", 0), ("second", 0), ("high", 3)):
        names[name] = engine.submit("a", greedy(1), priority=priority)
    order = []
    while engine.step() or len(order) < 4:
        order += [it for it in names if names[it].is_over and it not in order]
        clock.now_s += 0.01
    assert order == ["high", "first", "second", "low"]


def test_no_request_starves_however_many_of_higher_priority_come():
    clock = Clock()
    engine = make_engine(max_batch=1, prefill_tokens=2, clock=clock, ageing_s=5.0)
    low = engine.submit("a", greedy(1), priority=0)
    passed = 0
    while not low.is_over:
        engine.submit("b", greedy(1), priority=2)  # one a second, as many as are served
        engine.step()
        passed += 1
        clock.now_s += 1.0
    # What comes 2 * 5 s later, or after that, waits behind it.
    assert passed == 11


def test_a_full_queue_refuses_and_says_when_to_come_again():
    clock = Clock()
    engine = make_engine(max_batch=1, prefill_tokens=2, max_waiting=2, clock=clock)
    waiting = [engine.submit("a", greedy(1)) for _ in range(2)]
    with pytest.raises(QueueFullError, match=r"2 requests wait, .*try again in 1 s") as caught:
        engine.submit("b", greedy(1))
    assert caught.value.retry_after_s == 1
    assert engine.summarize().refused == 1
    while engine.step():
        clock.now_s += 7.0
    assert all(it.state == "finished" for it in waiting)
    for _ in range(2):
        engine.submit("a", greedy(1))
    with pytest.raises(QueueFullError) as caught:
        engine.submit("b", greedy(1))
    assert caught.value.retry_after_s == 7  # since the one before


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("a", {"num_beams": 2}, "num_beams=2: the engine has no beam search"),
        ("a", {"cache_size": 8}, "cache_size=8: the engine's own configuration decides"),
        ("a", {"top_p": 2.0}, "top_p=2.0: must be above 0 and at most 1"),
        ([3, 999], {}, "token 999 is none of the model's, which are 0 to 263"),
        ([-1], {}, "token -1 is none of the model's"),
        ([], {}, "prompt: holds no token"),
    ],
)
def test_a_request_with_a_fault_is_refused_at_the_door(prompt, options, message):
    engine = make_engine()
    with pytest.raises(ConfigError, match=message):
        engine.submit(prompt, GenerationConfig(**options))
    with pytest.raises(ConfigError, match="priority=11: must lie between -10 and 10"):
        engine.submit("a", greedy(), priority=11)


def test_a_request_that_is_too_long_is_refused_and_one_that_just_fits_is_not():
    network = make_network()
    engine = make_engine(network, cache_size=16)
    fitting = engine.submit([5] * 10, greedy(7))
    with pytest.raises(RequestTooLongError, match="10 tokens and max_tokens=8 need 17 places"):
        engine.submit([5] * 10, greedy(8))
    run(engine)
    assert_alone(network, fitting)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch=0: must be at least 1"),
        ({"prefill_tokens": 0}, "prefill_tokens=0: must be at least 1"),
        ({"ageing_s": 0.0}, "ageing_s=0.0: must be a finite number above 0"),
        ({"eviction_policy": "lru"}, "eviction_policy='lru': must be one of error"),
        ({"cache_size": 97}, "cache_size=97: the model is meant for 96"),
    ],
)
def test_an_engine_with_a_fault_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make_engine(**options)


def test_limits_of_a_server_with_faults_are_all_named():
    config = ServerConfig(max_tokens=0, max_choices=0, max_body_bytes=0, max_time_s=0, finish_s=-1)
    assert [it.partition("=")[0] for it in config.check()] == [
        "max_tokens",
        "max_choices",
        "max_body_bytes",
        "max_time_s",
        "finish_s",
    ]


def test_a_request_that_takes_too_long_ends_waiting_or_running():
    clock = Clock()
    engine = make_engine(max_batch=1, clock=clock)
    running = engine.submit("a", greedy(50), max_time_s=3.0)
    waiting = engine.submit("b", greedy(50), max_time_s=2.0)
    last = engine.submit("c", greedy(2))
    while engine.step():
        clock.now_s += 1.0
    with pytest.raises(RequestTimeoutError, match="not done after 3 s: 3 tokens so far"):
        running.result(0)
    with pytest.raises(RequestTimeoutError, match="not done after 2 s: 0 tokens so far"):
        waiting.result(0)
    assert last.result(0).finish_reason == "length"
    assert engine.summarize().failed == 2


def test_a_request_for_no_tokens_is_answered():
    engine = make_engine(max_batch=1)
    empty, after = engine.submit("a", greedy(0)), engine.submit("a", greedy(1))
    run(engine)
    assert empty.result(0).tokens == []
    assert len(after.result(0).tokens) == 1


def test_an_exception_in_one_request_leaves_the_others_alone():
    network = make_network()
    engine = make_engine(network)

    def refuse():
        raise OSError("nobody listens")

    handles = [engine.submit("abc", greedy(8)), engine.submit("d", greedy(8), listener=refuse)]
    handles += [engine.submit("efg", greedy(8)), engine.submit("h", greedy(8))]
    run(engine)
    with pytest.raises(RequestFailedError, match="OSError: nobody listens"):
        handles.pop(1).result(0)
    for handle in handles:
        assert_alone(network, handle)


def test_numbers_that_are_not_finite_end_one_request_and_do_not_reach_the_next():
    network = make_network(tie_embeddings=False)
    with torch.no_grad():
        network.embedding.weight[7] = torch.nan
    engine = make_engine(network, max_batch=2, prefill_tokens=64)
    sound = engine.submit([5] * 3, greedy(20))
    broken = engine.submit([5, 6, 7, 8, 9], greedy(5))
    after = engine.submit([5, 6], greedy(20))  # in the row of the broken one, beside a longer one
    run(engine)
    with pytest.raises(RequestFailedError, match="the network's output is not finite"):
        broken.result(0)
    assert_alone(network, sound)
    assert_alone(network, after)


def test_a_device_that_fails_once_ends_who_was_computed_and_serves_the_next():
    network = make_network()
    engine = make_engine(network)
    first = engine.submit("a", greedy(5))
    engine.step()
    layer, found = network.layers[1], network.layers[1].forward

    def fail(*_):
        layer.forward = found
        raise RuntimeError("out of memory")

    layer.forward = fail
    second = engine.submit("b", greedy(5))
    run(engine)
    with pytest.raises(RequestFailedError, match="RuntimeError: out of memory"):
        first.result(0)
    assert_alone(network, second)


def test_threads_submit_iterate_and_get_what_they_get_alone():
    network = make_network()
    failures = []

    def use(number):
        prompt, config = draw_request(number, random.Random(number))
        handle = engine.submit(prompt, config)
        pieces = list(handle)
        if "".join(pieces) != handle.result(10).text or "" in pieces:
            failures.append(number)
        handles.append(handle)

    handles = []
    with make_engine(network) as engine:
        threads = [threading.Thread(target=use, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        statistics = engine.summarize()
    assert not failures
    assert len(handles) == statistics.finished == 12
    for handle in handles:
        assert_alone(network, handle)


def test_waiting_for_a_result_has_a_limit_and_the_request_goes_on():
    engine = make_engine()
    handle = engine.submit("a", greedy(2))
    with pytest.raises(TimeoutError, match=r"no result after 0.01 s: the request is waiting, 0"):
        handle.result(0.01)
    run(engine)
    assert len(handle.result(0).tokens) == 2


def test_iterating_a_request_that_fails_gives_its_text_and_then_the_error():
    engine = make_engine()
    handle = engine.submit("a", greedy(40))
    for _ in range(10):
        engine.step()
    handle.cancel()
    engine.step()
    pieces = []
    with pytest.raises(RequestCancelledError, match="cancelled after 10 tokens"):
        pieces.extend(handle)
    assert "".join(pieces) == handle.text != ""


def test_closing_lets_running_requests_end_and_turns_the_others_away():
    engine = make_engine(max_batch=1)
    engine.network.train()
    engine.start()
    running, waiting = engine.submit("a", greedy(60)), engine.submit("b", greedy(5))
    next(iter(running))
    engine.close(finish_s=30)
    assert len(running.result(0).tokens) == 60
    with pytest.raises(EngineStoppedError, match="the engine is being stopped: 0 tokens so far"):
        waiting.result(0)
    with pytest.raises(EngineStoppedError, match="the engine is being stopped"):
        engine.submit("c", greedy(1))
    with pytest.raises(RuntimeError, match="has its thread already, or is closed"):
        engine.start()
    engine.close()


def test_closing_ends_what_takes_longer_than_it_may():
    clock = Clock()
    engine = make_engine(clock=clock)
    handle = engine.submit("a", greedy(60))
    engine.step()
    engine.drain(2.0)
    while engine.step():
        clock.now_s += 1.0
    with pytest.raises(EngineStoppedError, match="is being stopped: 3 tokens so far"):
        handle.result(0)
    engine.close()


def test_the_network_is_put_back_into_its_mode():
    network = make_network().train()
    with make_engine(network):
        assert not network.training
    assert network.training


def test_an_engine_that_breaks_down_fails_everybody_instead_of_hanging():
    def stop():
        if broken:
            broken.clear()
            raise ArithmeticError("no clock")
        return time.monotonic()

    broken = []
    engine = make_engine(clock=stop, max_batch=1)
    handles = [engine.submit("a", greedy(5)) for _ in range(2)]
    broken.append(True)
    engine.start()
    for handle in handles:
        with pytest.raises(EngineStoppedError, match=r"broke down \(ArithmeticError: no clock"):
            handle.result(5)
    assert not engine.is_sound
    engine.close()


def test_figures_count_waits_and_speed():
    clock = Clock()
    engine = make_engine(max_batch=1, clock=clock)
    for _ in range(2):
        engine.submit("a", greedy(5))
    assert engine.summarize().waiting == 2
    engine.step()
    assert (engine.summarize().waiting, engine.summarize().running) == (1, 1)
    clock.now_s = 0.5
    while engine.step():
        clock.now_s += 0.5
    statistics = engine.summarize()
    # The last token of the first and the first of the second come in one step, at 2 s.
    assert statistics.time_to_first_token_s.p50 == 0
    assert statistics.time_to_first_token_s.p95 == pytest.approx(2.0)
    assert statistics.time_per_token_s.p95 == pytest.approx(0.5)
    assert statistics.tokens_per_s == pytest.approx(9 / 4)
    assert statistics.to_json()["time_per_token_s"]["count"] == 2
