"""The server, with OpenAI's own client on a free port of this machine."""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
import torch

from nemo_like.collections.llm.decoder import DecoderConfig, DecoderNetwork
from nemo_like.collections.llm.generation import GenerationConfig
from nemo_like.collections.llm.generation.conversation import Conversation
from nemo_like.collections.llm.generation.generate import encode_prompt, generate
from nemo_like.collections.llm.hf_folder import save_hf_folder
from nemo_like.collections.llm.serving import Engine, EngineConfig, ServerConfig
from nemo_like.collections.llm.serving.server import (
    build_app,
    build_server,
    open_port,
    read_api_key,
)
from nemo_like.collections.llm.serving.service import Service
from nemo_like.core.errors import ConfigError
from nemo_like.text.tokenizer import train_bpe

SERVE = Path(__file__).resolve().parents[2] / "examples" / "llm" / "serve.py"
TOKENIZER = train_bpe(["the cat sat on the mat, and then the dog sat, too"] * 3, vocab_size=280)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the cat?"}]
LONG = {"max_tokens": 3000, "temperature": 0, "extra_body": {"ignore_eos": True}}


def make_shape(max_positions=4096):
    return DecoderConfig(
        vocab_size=TOKENIZER.vocab_size,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        intermediate_size=32,
        max_positions=max_positions,
        init_std=0.5,
    )


def make_network():
    torch.manual_seed(0)
    return DecoderNetwork(make_shape())


NETWORK = make_network()


@contextlib.contextmanager
def serving(*, engine=None, api_key=None, **limits):
    """A server in a thread: its service and its address."""
    engine = Engine(NETWORK, TOKENIZER, EngineConfig(cache_size=4096, **(engine or {})))
    service = Service(
        engine,
        Conversation(TOKENIZER, template="chatml"),
        model_name="tiny",
        config=ServerConfig(**limits),
        api_key=api_key,
    )
    opened = open_port("127.0.0.1", 0)
    url = f"http://127.0.0.1:{opened.getsockname()[1]}"
    server = build_server(build_app(service), engine, finish_s=service.config.finish_s)
    service.stop_server = lambda: setattr(server, "should_exit", True)
    with engine:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        thread.start()
        wait_until(lambda: server.started)
        try:
            yield service, url
        finally:
            for handle in engine._rows.occupied:
                handle.cancel()
            server.should_exit = True
            thread.join(20)
    opened.close()


def wait_until(is_so, limit_s=10):
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s, "it never happened"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def served():
    with serving() as found:
        yield found


@pytest.fixture
def client(served):
    with open_client(served[1]) as client:
        yield client


def open_client(url, key="any"):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30)


def continue_alone(prompt, config, seed=None):
    (result,) = generate(
        NETWORK, TOKENIZER, [prompt], config, seeds=None if seed is None else [seed]
    )
    return result


def encode_chat(messages=MESSAGES):
    conversation = Conversation(TOKENIZER, template="chatml")
    conversation.messages = messages
    return conversation.encode(), conversation.end_tokens


def test_the_model_is_named(client):
    assert [it.id for it in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "nemo-like"
    with pytest.raises(openai.NotFoundError, match="'tiniest': is not served here, 'tiny' is; did"):
        client.models.retrieve("tiniest")


def test_a_completion_is_what_generation_gives(client):
    given = client.completions.create(
        model="tiny", prompt="the cat", max_tokens=9, temperature=0, top_p=0.9
    )
    alone = continue_alone("the cat", GenerationConfig(max_tokens=9, temperature=0))
    (choice,) = given.choices
    assert (choice.text, choice.finish_reason) == (alone.text, alone.finish_reason)
    assert given.object == "text_completion"
    assert given.usage.prompt_tokens == len(alone.prompt_tokens)
    assert given.usage.completion_tokens == len(alone.tokens)
    assert given.usage.total_tokens == len(alone.prompt_tokens) + len(alone.tokens)


def test_several_prompts_and_choices_count_seeds_up(client):
    tokens = TOKENIZER.encode("a dog")
    given = client.completions.create(
        model="tiny",
        prompt=["the cat", "then"],
        n=2,
        seed=7,
        max_tokens=12,
        temperature=0.8,
        top_p=0.9,
        stop=["e", "zz"],
        extra_body={"top_k": 30, "repetition_penalty": 1.1, "priority": 2},
    )
    config = GenerationConfig(
        max_tokens=12,
        temperature=0.8,
        top_p=0.9,
        top_k=30,
        repetition_penalty=1.1,
        stop=["e", "zz"],
    )
    prompts = ["the cat", "the cat", "then", "then"]
    alone = [continue_alone(it, config, 7 + number) for number, it in enumerate(prompts)]
    assert [it.index for it in given.choices] == [0, 1, 2, 3]
    assert [it.text for it in given.choices] == [it.text for it in alone]
    assert [it.finish_reason for it in given.choices] == [it.finish_reason for it in alone]
    read = len(encode_prompt(TOKENIZER, "the cat")) + len(encode_prompt(TOKENIZER, "then"))
    assert given.usage.prompt_tokens == read
    given = client.completions.create(model="tiny", prompt=tokens, temperature=0)
    alone = continue_alone(tokens, GenerationConfig(max_tokens=16, temperature=0))
    assert given.choices[0].text == alone.text


def test_a_stream_is_the_completion_in_pieces(client):
    options = {"model": "tiny", "prompt": "the cat", "max_tokens": 30, "seed": 3, "n": 2}
    whole = client.completions.create(**options)
    chunks = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert len(chunks) > 10
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []
    assert len({it.id for it in chunks}) == 1
    for choice in whole.choices:
        mine = [it.choices[0] for it in chunks[:-1] if it.choices[0].index == choice.index]
        assert "".join(it.text for it in mine) == choice.text
        assert [it.finish_reason for it in mine if it.finish_reason] == [choice.finish_reason]


def test_a_chat_is_written_by_the_template_and_ends_where_it_says(client):
    given = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=20, seed=1
    )
    tokens, ends = encode_chat()
    alone = continue_alone(tokens, GenerationConfig(max_tokens=20, stop_tokens=ends), 1)
    (choice,) = given.choices
    assert choice.message.content == alone.text.lstrip()
    assert choice.message.role == "assistant"
    assert given.object == "chat.completion"
    assert given.usage.prompt_tokens == len(tokens)


def test_a_chat_streams_its_role_its_text_and_its_end(client):
    parts = [{"role": "developer", "content": "Be brief."}]
    parts += [
        {
            "role": "user",
            "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "cat?"}],
        }
    ]
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=20, seed=1)
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=parts, max_tokens=20, seed=1, stream=True
        )
    )
    deltas = [it.choices[0].delta for it in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(it.content or "" for it in deltas) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all("usage" not in it.model_fields_set for it in chunks)


def test_a_chat_without_a_limit_goes_on_as_long_as_there_is_room(served):
    service, url = served
    tokens, _ = encode_chat()
    with open_client(url) as client:
        stream = client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        wait_until(lambda: service.engine._rows.occupied)
        (handle,) = service.engine._rows.occupied
        assert handle.request.config.max_tokens == 4096 - len(tokens) + 1
        stream.close()
    wait_until(lambda: not service.engine._rows.occupied)


def test_log_probabilities_stand_beside_their_tokens(client):
    config = GenerationConfig(max_tokens=8, temperature=0, logprobs=2, ignore_eos=True)
    options = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    options["extra_body"] = {"ignore_eos": True}
    alone = continue_alone("the cat", config)
    given = client.completions.create(**options, prompt="the cat", logprobs=2).choices[0]
    names = [TOKENIZER.decode([it], skip_special_tokens=False) for it in alone.tokens]
    assert given.logprobs.tokens == names
    values = [it.logprob for it in alone.logprobs]
    assert given.logprobs.token_logprobs == pytest.approx(values, abs=1e-4)
    assert given.logprobs.text_offset[0] == 0
    assert given.logprobs.text_offset == sorted(given.logprobs.text_offset)
    best = given.logprobs.top_logprobs[0]
    assert best[names[0]] == pytest.approx(values[0], abs=1e-4)
    chunks = list(client.completions.create(**options, prompt="the cat", logprobs=2, stream=True))
    streamed = [it.choices[0].logprobs for it in chunks if it.choices[0].logprobs]
    assert [token for it in streamed for token in it.tokens] == names
    offsets = [offset for it in streamed for offset in it.text_offset]
    assert offsets == given.logprobs.text_offset

    tokens, _ = encode_chat()
    alone = continue_alone(tokens, config)
    chat = client.chat.completions.create(
        **options, messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs.content
    assert [it.logprob for it in content] == pytest.approx(
        [it.logprob for it in alone.logprobs], abs=1e-4
    )
    assert [len(it.top_logprobs) for it in content] == [2] * 8
    for entry in content:
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token


def test_many_clients_at_once_get_what_each_gets_alone(served):
    found = {}

    def ask(number):
        with open_client(served[1]) as client:
            found[number] = client.completions.create(
                model="tiny", prompt="the dog " * number, max_tokens=5 + 3 * number, seed=number
            )

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for number in range(12):
        config = GenerationConfig(max_tokens=5 + 3 * number)
        alone = continue_alone("the dog " * number, config, number)
        assert found[number].choices[0].text == alone.text


def post(url, path="completions", *, headers=None, content=None, **body):
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1, **body}
    if path == "chat/completions":
        body.pop("prompt")
    kinds = {"Content-Type": "application/json", **(headers or {})}
    content = json.dumps(body) if content is None else content
    return httpx.post(f"{url}/v1/{path}", content=content, headers=kinds, timeout=20)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (
            {"temprature": 1},
            "temprature",
            "is no field of this request; did you mean 'temperature'",
        ),
        ({"temperature": "hot"}, "temperature", "temperature='hot': must be a number"),
        ({"temperature": -1}, "temperature", "temperature=-1.0: must be at least 0"),
        ({"temperature": 0, "top_p": 7}, "top_p", "top_p=7.0: must be above 0"),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens=1.5: must be a whole number"),
        ({"max_tokens": True}, "max_tokens", "max_tokens=True: must be a whole number"),
        ({"max_tokens": 5000}, "messages or prompt", "max_tokens=5000 need 5001 places"),
        ({"model": None}, "model", "model: is missing"),
        ({"prompt": None}, "prompt", "prompt=None: must be a text, a list of texts, or token ids"),
        ({"prompt": [[]]}, "prompt", r"prompt: \[\] is neither a text nor token ids"),
        ({"prompt": [9999]}, "prompt", "token 9999 is none of the model's"),
        ({"prompt": "\ud800"}, "prompt", "is no text: half a character at place 0"),
        ({"n": 0}, "n", "n=0: must be at least 1"),
        ({"n": 9, "prompt": ["a", "b"]}, "n", "n=9: 18 texts in one request, at most 16"),
        ({"best_of": 3}, "best_of", "best_of=3: is not supported beyond n=1"),
        ({"stop": [""]}, "stop", "stop: holds an empty string"),
        ({"stop": 3}, "stop", "stop=3: must be a text or a list of texts"),
        ({"stop": ["a"] * 17}, "stop", "stop: has 17 texts, at most 16"),
        ({"logprobs": 21}, "logprobs", "logprobs=21: at most 20"),
        ({"echo": True}, "echo", "echo=True: is not supported here; leave it out"),
        ({"presence_penalty": 1}, "presence_penalty", "use repetition_penalty"),
        ({"stream_options": {}}, "stream_options", "has no effect without stream=true"),
        (
            {"stream": True, "stream_options": 3},
            "stream_options",
            "must be a JSON object, this is 3",
        ),
        ({"priority": 11}, "priority", "priority=11: must lie between -10 and 10"),
        ({"seed": -1}, "seed", "seed=-1: must be at least 0"),
    ],
)
def test_a_completion_with_a_fault_is_refused_by_the_name_of_the_field(
    served, body, param, message
):
    check_refusal(post(served[1], **body), param, message)


def check_refusal(response, param, message):
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param
    with pytest.raises(ValueError, match=message):
        raise ValueError(error["message"])


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "messages", "messages=None: must be a list of messages"),
        ({"mesages": []}, "mesages", "is no field of this request; did you mean 'messages'"),
        ({"messages": ["a"]}, "messages[0]", r"messages\[0\]: must be a JSON object"),
        (
            {"messages": [{"role": "usr"}]},
            "messages[0].role",
            "='usr': must be one of .*mean 'user'",
        ),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content", "must be a text, or parts"),
        ({"messages": [{**USER, "colour": 1}]}, "messages[0].colour", "is no field of a message"),
        ({"messages": [{**USER, "tool_calls": [1]}]}, "messages[0].tool_calls", "is not supported"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "must be a text, or parts of text",
        ),
        (
            {"messages": [{"role": "user", "content": "<|endoftext|>"}]},
            "messages",
            "holds the name of the special token",
        ),
        ({"messages": [USER], "top_logprobs": 2}, "top_logprobs", "without logprobs=true"),
        ({"messages": [USER], "tools": [{}]}, "tools", "is not supported here"),
        (
            {"messages": [USER], "response_format": {"type": "json_object"}},
            "response_format",
            "is not supported here",
        ),
        (
            {"messages": [USER], "max_tokens": 3, "max_completion_tokens": 4},
            "max_tokens",
            "max_tokens=3: max_completion_tokens=4, too",
        ),
    ],
)
def test_a_chat_with_a_fault_is_refused_by_the_name_of_the_field(served, body, param, message):
    check_refusal(post(served[1], "chat/completions", **body), param, message)


def test_what_clients_send_along_without_meaning_anything_is_taken(served):
    idle = {
        "user": "me",
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "tools": None,
        "response_format": {"type": "text"},
        "seed": None,
        "store": False,
    }
    assistant = {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None}
    messages = [{**USER, "name": "me"}, assistant, USER]
    response = post(served[1], "chat/completions", messages=messages, **idle)
    assert response.status_code == 200


def test_other_models_paths_and_methods_are_refused_in_the_same_shape(served):
    url = served[1]
    response = post(url, model="tinny")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    response = httpx.get(f"{url}/v1/completion")
    assert response.status_code == 404
    assert "/v1/completion: is not served here; /health" in response.json()["error"]["message"]
    response = httpx.get(f"{url}/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_bodies_that_are_no_json_or_of_another_type_are_refused(served):
    url = served[1]
    for content, message in (
        ("{", "the body is no JSON"),
        ("[" * 100_000, "the body is no JSON"),
        (b"\xff", "the body is no JSON"),
        ("[1]", "the body: must be a JSON object, this is [1]"),
    ):
        response = post(url, content=content)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]
    response = post(url, headers={"Content-Type": "text/plain"})
    assert response.status_code == 415
    assert "'text/plain': must be application/json" in response.json()["error"]["message"]


def test_a_body_that_is_too_large_is_not_read():
    with serving(max_body_bytes=200) as (_, url):
        assert post(url).status_code == 200
        response = post(url, prompt="x" * 200)
        assert response.status_code == 413
        assert "too large: at most 200 bytes" in response.json()["error"]["message"]
        chunks = (b"x" * 50 for _ in range(100))  # its length is not announced
        response = post(url, content=chunks)
        assert response.status_code == 413


def test_limits_of_tokens_hold():
    with serving(max_tokens=5) as (_, url):
        response = post(url, max_tokens=6)
        assert "max_tokens=6: at most 5" in response.json()["error"]["message"]
        with open_client(url) as client:
            given = client.chat.completions.create(
                model="tiny", messages=MESSAGES, extra_body={"ignore_eos": True}
            )
    assert given.usage.completion_tokens == 5


def test_a_body_that_dawdles_and_an_answer_that_takes_too_long_end():
    with serving(max_time_s=0.3) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as slow:
            head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            slow.sendall(f"{head}Content-Length: 50\r\n\r\n{{".encode())
            assert b" 408 " in slow.recv(1000)
        with open_client(url) as client:
            options = {"model": "tiny", "prompt": "a", **LONG}
            with pytest.raises(openai.InternalServerError, match=r"not done after 0.3 s") as caught:
                client.completions.create(**options)
            assert caught.value.status_code == 504
            with pytest.raises(openai.APIError, match=r"not done after 0.3 s"):
                list(client.completions.create(**options, stream=True))


def test_a_full_queue_is_429_with_the_time_to_come_again():
    config = GenerationConfig(temperature=0, max_tokens=4000, ignore_eos=True)
    with serving(engine={"max_batch": 1, "max_waiting": 1}) as (service, url):
        running = service.engine.submit("a", config)
        next(iter(running))
        waiting = service.engine.submit("a", config)
        response = post(url)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        with (
            open_client(url) as client,
            pytest.raises(openai.RateLimitError, match="1 requests wait"),
        ):
            client.completions.create(model="tiny", prompt="a", n=2)
        running.cancel()
        waiting.cancel()
        wait_until(lambda: service.engine.summarize().running == 0)
        assert post(url).status_code == 200
        assert service.engine.summarize().refused == 2


def test_a_client_that_leaves_frees_its_row():
    with serving(engine={"max_batch": 1}) as (service, url):
        with open_client(url) as client:
            stream = client.completions.create(model="tiny", prompt="a", **LONG, stream=True)
            next(stream)
            stream.close()
        wait_until(lambda: service.engine.summarize().cancelled == 1)
        body = {"model": "tiny", "prompt": "a", "max_tokens": 3000, "ignore_eos": True}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json=body, timeout=0.3)
        wait_until(lambda: service.engine.summarize().cancelled == 2)
        assert service.engine.summarize().finished == 0
        assert service.engine.summarize().running == 0


def test_without_the_key_only_health_is_told():
    with serving(api_key="open sesame") as (_, url):
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        assert httpx.get(f"{url}/statistics").status_code == 401
        for key in ("wrong", "\u00fc".encode().decode("latin1")):
            response = post(url, headers={"Authorization": f"Bearer {key}".encode("latin1")})
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
        with (
            open_client(url, "wrong") as client,
            pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"),
        ):
            client.models.list()
        with open_client(url, "open sesame") as client:
            assert len(client.models.list().data) == 1


def test_figures_and_health_are_served(served):
    _, url = served
    post(url)
    figures = httpx.get(f"{url}/statistics").json()
    assert figures["finished"] >= 1
    assert figures["time_to_first_token_s"]["p50"] > 0


@pytest.mark.parametrize(("finish_s", "is_whole"), [(20.0, True), (0.0, False)])
def test_a_server_that_is_stopped_lets_running_requests_end_if_they_can(finish_s, is_whole):
    with serving(finish_s=finish_s) as (service, url), open_client(url) as client:
        options = {**LONG, "max_tokens": 400}
        stream = client.completions.create(model="tiny", prompt="a", **options, stream=True)
        chunks = [next(stream)]
        service.stop_server()
        if is_whole:
            chunks += list(stream)
            assert chunks[-1].choices[0].finish_reason == "length"
        else:
            with pytest.raises(openai.APIError, match="the engine is being stopped"):
                list(stream)
        wait_until(lambda: not service.engine.is_sound)


def test_health_says_when_the_engine_is_gone():
    with serving() as (service, url):
        service.engine.drain(0)
        response = httpx.get(f"{url}/health")
        assert (response.status_code, response.json()) == (503, {"status": "stopped"})
        response = post(url)
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "server_error"


def test_limits_with_faults_are_refused():
    engine = Engine(NETWORK, TOKENIZER, EngineConfig(cache_size=8))
    with pytest.raises(ConfigError, match="max_choices=0: must be at least 1"):
        Service(
            engine,
            Conversation(TOKENIZER, template="plain"),
            model_name="tiny",
            config=ServerConfig(max_choices=0),
        )
    engine.close()


def test_a_key_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("NEMO_LIKE_API_KEY", raising=False)
    assert read_api_key(None) is None
    monkeypatch.setenv("NEMO_LIKE_API_KEY", " from outside ")
    assert read_api_key(None) == "from outside"
    file = tmp_path / "key"
    file.write_text("from a file\nmore\n")
    assert read_api_key(file) == "from a file"
    file.write_text("\n")
    with pytest.raises(ConfigError, match=f"api_key_file={file}: holds no key"):
        read_api_key(file)
    with pytest.raises(ConfigError, match="none: cannot be read"):
        read_api_key(tmp_path / "none")
    monkeypatch.setenv("NEMO_LIKE_API_KEY", "")
    with pytest.raises(ConfigError, match="NEMO_LIKE_API_KEY: holds no key"):
        read_api_key(None)


def test_a_port_that_is_taken_and_a_host_that_is_none_are_refused():
    with open_port("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port={port}: Address already in use"):
            open_port("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"host=no\.such\.host\.invalid"):
        open_port("no.such.host.invalid", 0)
    with pytest.raises(ConfigError, match="port=70000: must lie between 0 and 65535"):
        open_port("127.0.0.1", 70000)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-bach", "3"], "'max_bach' is no argument; did you mean 'max_batch'"),
        (["--max-batch", "0"], "max_batch=0: must be at least 1"),
        (["max_choices=0"], "max_choices=0: must be at least 1"),
        (["--port", "70000"], "port=70000: must lie between"),
        (["--api-key-file", "/no/such"], "api_key_file=/no/such: cannot be read"),
    ],
)
def test_a_command_with_a_fault_is_refused_before_the_model_is_loaded(
    argv, message, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["serve", "/no/such/model", *argv])
    spec = importlib.util.spec_from_file_location("serve_script", SERVE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_a_signal_comes(tmp_path, number):
    folder = save_hf_folder(
        tmp_path / "small",
        make_shape(256),
        DecoderNetwork(make_shape(256)).state_dict(),
        tokenizer_files=TOKENIZER.to_bytes(),
        eos_token_id=TOKENIZER.eos_id,
    )
    process = subprocess.Popen(
        [sys.executable, str(SERVE), str(folder), "--port", "0", "--template", "plain"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NEMO_LIKE_API_KEY": "k"},
    )
    with process:
        said = []
        for line in process.stderr:
            said.append(line)
            if "serving on " in line:
                break
        url = said[-1].partition("serving on ")[2].partition("/v1")[0]
        with open_client(url, "k") as client:
            chat = client.chat.completions.create(model="small", messages=MESSAGES, max_tokens=5)
            assert chat.usage.completion_tokens <= 5
            stream = client.completions.create(
                model="small",
                prompt="a",
                max_tokens=200,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            next(stream)
            process.send_signal(number)
            assert list(stream)[-1].choices[0].finish_reason == "length"
        rest = process.stderr.read()
        assert process.wait(20) == 0
    assert "ending; running requests have 30 s" in rest
    assert "[small, template: plain, 8 requests of 256 tokens at once]" in "".join(said)
