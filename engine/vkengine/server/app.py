"""The Starlette application: routes, limits, the key, and the engine's life."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from .driver import Driver
from .errors import ApiError
from .metrics import Metrics

if TYPE_CHECKING:
    from starlette.requests import Request

    from vkengine.engine import Engine
    from vkengine.tokenizer import Tokenizer

log = logging.getLogger("vkengine")
_OPEN_PATHS = frozenset({"/health", "/ping", "/version"})


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may ask of the server."""

    max_waiting: int = 512  # requests in front of the engine
    body_bytes: int = 16 << 20
    body_s: float = 60.0  # for the body to arrive
    request_s: float = 3600.0  # from arrival to the last token


@dataclass(slots=True)
class Service:
    """Everything the routes share; `app.state.service`."""

    engine: Engine
    tokenizer: Tokenizer | None
    driver: Driver
    metrics: Metrics
    limits: Limits
    settings: dict[str, Any]
    started_s: int


def create_app(
    engine: Engine,
    tokenizer: Tokenizer | None,
    *,
    limits: Limits | None = None,
    settings: dict[str, Any] | None = None,
    api_key: str | None = None,
    started_s: int = 0,
) -> Starlette:
    """`tokenizer` None serves token ids only. `settings` are added to the engine's own."""
    from . import completions, info

    limits = limits or Limits()
    driver = Driver(engine, max_waiting=limits.max_waiting)
    metrics = Metrics(engine.model_name)
    service = Service(engine, tokenizer, driver, metrics, limits, settings or {}, started_s)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        driver.start(asyncio.get_running_loop())
        try:
            yield
        finally:
            await asyncio.to_thread(driver.close)

    routes = [
        Route("/v1/models", info.models),
        Route("/v1/models/{name:path}", info.model),
        Route("/v1/settings", info.settings),
        Route("/health", info.health),
        Route("/ping", info.health),
        Route("/version", info.version),
        Route("/load", info.load),
        Route("/metrics", info.metrics),
        Route("/openapi.json", info.openapi),
        Route("/tokenize", info.tokenize, methods=["POST"]),
        Route("/detokenize", info.detokenize, methods=["POST"]),
        Route("/v1/completions", completions.complete, methods=["POST"]),
        Route("/v1/chat/completions", completions.chat, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            Exception: _bug,
        },
    )
    app.state.service = service
    if api_key is not None:
        app.add_middleware(_KeyCheck, api_key=api_key)
    return app


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {404: f"no such route: {request.url.path}", 405: "wrong method for this route"}
    answer = ApiError(error.status_code, message.get(error.status_code, error.detail)).response()
    answer.headers.update(error.headers or {})
    return answer


async def _bug(_: Request, error: Exception) -> Response:
    log.error("unexpected error", exc_info=error)
    return ApiError(500, "internal error").response()


class _KeyCheck:
    """Asks for `Authorization: Bearer KEY` on every route that is not open."""

    def __init__(self, app: Callable[..., Awaitable[None]], *, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self._expected):
                error = ApiError(401, "missing or wrong API key")
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def read_body(request: Request, limits: Limits) -> bytes:
    """Raises ApiError(413) past the size limit, 408 when the body does not arrive in time."""
    too_large = ApiError(413, f"the body is larger than {limits.body_bytes} bytes")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limits.body_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                size += len(part)
                if size > limits.body_bytes:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {limits.body_s:g} s") from None
    return b"".join(parts)
