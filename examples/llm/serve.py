"""Serves a model over HTTP, in OpenAI's protocol.

    python examples/llm/serve.py path/to/hf_folder
    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"model": "hf_folder", "messages": [{"role": "user", "content": "Hello!"}], "stream": true}'

The model is a checkpoint folder, a run folder (its newest checkpoint), or a Hugging Face folder. Requests come and go
at every token. Only programs on this machine are served, unless --host says otherwise; then set a key, in the
environment variable NEMO_LIKE_API_KEY or in a file.
"""

import argparse
import ipaddress
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_like.collections.llm.generation.config import EVICTION_POLICIES
from nemo_like.collections.llm.generation.options import parse_spelled, read_stop_tokens
from nemo_like.collections.llm.serving.config import EngineConfig, ServerConfig
from nemo_like.core.errors import ConfigError
from nemo_like.core.script import run_script


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    engine, limits = EngineConfig(), ServerConfig()
    add = parser.add_argument
    add("model", type=Path, help="folder of the model")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    add("--name", help="what clients call the model; default: the name of its folder")
    add("--template", help="of chats: plain, chatml, or a Jinja file; default: the tokenizer's own")
    add("--api-key-file", type=Path, help="file whose first line clients must show as their key")
    add("--device", help="cpu, cuda, ...; default: a GPU if there is one")
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add("--max-batch", type=int, default=engine.max_batch, help="requests computed at once")
    add("--cache-size", type=int, help="tokens of prompt and text together; default: at most 2048")
    add(
        "--eviction-policy",
        choices=EVICTION_POLICIES,
        default=engine.eviction_policy,
        help="when a request needs more (default: %(default)s)",
    )
    add("--num-sinks", type=int, default=engine.num_sinks, help="tokens attention_sinks keeps")
    add(
        "--prefill-tokens",
        type=int,
        default=engine.prefill_tokens,
        help="tokens of new prompts that running requests wait for (default: %(default)s)",
    )
    add("--max-waiting", type=int, default=engine.max_waiting, help="more requests are refused")
    add("--ageing-s", type=float, default=engine.ageing_s, help="wait that is worth a priority")
    group = parser.add_argument_group("limits")
    add = group.add_argument
    add("--max-tokens", type=int, help="of a request; default: as many as there is room for")
    add("--max-choices", type=int, default=limits.max_choices, help="texts of a request")
    add("--max-body-bytes", type=int, default=limits.max_body_bytes, help="of a request")
    add(
        "--max-time-s", type=float, default=limits.max_time_s, help="of a request, waiting included"
    )
    add("--finish-s", type=float, default=limits.finish_s, help="for running ones at the end")
    return parse_spelled(parser, argv)


def warn_if_open(host: str, api_key: str | None) -> None:
    """Says so when everybody may use the server."""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback and api_key is None:
        sys.stderr.write(f"[no API key: whoever reaches {host} may use the model]\n")


def run(arguments: argparse.Namespace) -> None:
    """Checks, loads, and serves until Ctrl-C."""
    from nemo_like.collections.llm.serving.server import open_port, read_api_key, serve

    given = vars(arguments)
    engine_config = EngineConfig(**{it: given[it] for it in EngineConfig.__dataclass_fields__})
    limits = ServerConfig(**{it: given[it] for it in ServerConfig.__dataclass_fields__})
    faults = [*engine_config.check(), *limits.check()]
    if faults:
        raise ConfigError(faults)
    api_key = read_api_key(arguments.api_key_file)
    opened = open_port(arguments.host, arguments.port)
    warn_if_open(arguments.host, api_key)

    import torch

    from nemo_like.collections.llm.decoder import DecoderModel
    from nemo_like.collections.llm.generation.conversation import Conversation
    from nemo_like.collections.llm.generation.layout import lay_out_for_decoding
    from nemo_like.collections.llm.serving import Engine
    from nemo_like.collections.llm.serving.service import Service

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = DecoderModel.load(arguments.model).to(device)
    assert model.tokenizer is not None, "load() brings it"
    lay_out_for_decoding(model.network)
    conversation = Conversation(model.tokenizer, template=arguments.template)
    service = Service(
        Engine(model.network, model.tokenizer, engine_config),
        conversation,
        model_name=arguments.name or arguments.model.resolve().name,
        config=limits,
        stop_tokens=read_stop_tokens(arguments.model),
        api_key=api_key,
    )
    sys.stderr.write(
        f"[{service.model_name}, template: {conversation.template_name}, "
        f"{engine_config.max_batch} requests of {service.engine.cache.cache_size} tokens at once]\n"
    )
    serve(service, opened)


def main() -> None:
    """The command."""
    run_script(lambda argv: run(parse_arguments(argv)))


if __name__ == "__main__":
    main()
