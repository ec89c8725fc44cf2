"""The service behind HTTP: FastAPI and uvicorn."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from nemo_like.core.errors import ConfigError
from nemo_like.core.extras import require

from .api_error import ApiError
from .engine import Engine
from .service import Service
from .transport import ClientGoneError

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "NEMO_LIKE_API_KEY"
_MORE_S = 5.0
"""Seconds in which the last bytes leave after the engine has ended everything."""


def read_api_key(file: Path | None) -> str | None:
    """The key that clients must show: the first line of a file, else ``NEMO_LIKE_API_KEY``, else none.

    Raises:
        ConfigError: The file cannot be read, or there is no key where one is announced.
    """
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"api_key_file={file}: cannot be read: {error}"]) from error
        name, key = f"api_key_file={file}", lines[0].strip() if lines else ""
    else:
        name, given = API_KEY_VARIABLE, os.environ.get(API_KEY_VARIABLE)
        if given is None:
            return None
        key = given.strip()
    if not key:
        raise ConfigError([f"{name}: holds no key"])
    return key


def open_port(host: str, port: int) -> socket.socket:
    """Takes a port before anything slow begins; 0 takes a free one.

    Raises:
        ConfigError: It is taken, or the host is none of this machine's.
    """
    if not 0 <= port < 2**16:
        raise ConfigError([f"port={port}: must lie between 0 and 65535"])
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        opened = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError([f"host={host}: {error.strerror}"]) from error
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
    except OSError as error:
        opened.close()
        raise ConfigError([f"host={host} port={port}: {error.strerror}"]) from error
    return opened


def build_app(service: Service) -> Any:
    """The application, of FastAPI, with OpenAI's paths and ``/health`` and ``/statistics``."""
    fastapi, responses = require("fastapi"), require("fastapi.responses")
    route = require("starlette.routing").Route

    async def list_models(_: Any) -> Any:
        return {"object": "list", "data": [service.describe_model()]}

    async def show_model(request: Any) -> Any:
        return service.describe_model(request.path_params["name"])

    async def show_statistics(_: Any) -> Any:
        return service.engine.summarize().to_json()

    async def show_health(_: Any) -> Any:
        is_sound = service.engine.is_sound
        body = {"status": "ok" if is_sound else "stopped"}
        return responses.JSONResponse(body, 200 if is_sound else 503)

    def write_error(error: ApiError) -> Any:
        return responses.JSONResponse(error.to_json(), error.status, headers=error.headers)

    def guard(answer: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        async def handle(request: Any) -> Any:
            try:
                service.authorize(request.headers.get("authorization"))
                given = await answer(request)
            except ClientGoneError:
                return responses.Response(status_code=499)  # which nobody reads
            except Exception as error:
                told = ApiError.of(error)
                if told.status == 500:
                    logger.exception("%s failed", request.url.path)
                return write_error(told)
            return responses.JSONResponse(given) if isinstance(given, dict) else given

        return handle

    async def refuse_path(request: Any, error: Any) -> Any:
        paths = ", ".join(it.path.replace(":path", "") for it in routes)
        what = f"{request.method} {request.url.path}: is not served here; {paths} are"
        return write_error(ApiError(error.status_code, what, headers=error.headers))

    routes = [
        route("/health", show_health),
        route("/statistics", guard(show_statistics)),
        route("/v1/models", guard(list_models)),
        route("/v1/models/{name:path}", guard(show_model)),
        route("/v1/completions", guard(service.complete), methods=["POST"]),
        route("/v1/chat/completions", guard(service.chat), methods=["POST"]),
    ]
    return fastapi.FastAPI(
        routes=routes,
        exception_handlers={404: refuse_path, 405: refuse_path},
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )


def build_server(app: Any, engine: Engine, *, finish_s: float) -> Any:
    """A server of uvicorn that, when it is stopped, gives running requests ``finish_s`` seconds."""
    uvicorn = require("uvicorn")

    class DrainingServer(uvicorn.Server):  # type: ignore[misc, name-defined]
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            for each in sockets or []:
                host, port = each.getsockname()[:2]
                host = f"[{host}]" if ":" in host else host
                logger.info("serving on http://%s:%d/v1; Ctrl-C ends", host, port)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            logger.info("ending; running requests have %g s, Ctrl-C ends them now", finish_s)
            engine.drain(finish_s)
            await super().shutdown(sockets)

    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=finish_s + _MORE_S,
    )
    return DrainingServer(config)


def serve(service: Service, opened: socket.socket) -> None:
    """Serves until a signal comes.

    Args:
        service: With its engine, which is started and closed here.
        opened: From :func:`open_port`.
    """
    engine = service.engine
    server = build_server(build_app(service), engine, finish_s=service.config.finish_s)
    # The server takes signals itself and afterwards raises them again, for whoever had them before: nobody.
    found = {it: signal.signal(it, lambda *_: None) for it in (signal.SIGINT, signal.SIGTERM)}
    try:
        with engine:
            server.run(sockets=[opened])
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)
        opened.close()
