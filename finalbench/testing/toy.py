"""A toy OpenAI server that speaks the whole contract and can misbehave on request.

python -m finalbench.testing.toy --port N --behaviour NAME[,key=value...] --profile vk|stock
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import socket
import sys
import time
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from finalbench.errors import EnvironmentMissing, FinalbenchError, UsageError
from finalbench.testing.behaviour import Behaviour, parse_behaviour
from finalbench.testing.toy_generate import Generation
from finalbench.testing.toy_model import MAX_LENGTH, decode, encode, prefix_state, unit
from finalbench.testing.toy_protocol import (
    BadField,
    ChatBody,
    CompletionBody,
    check_ids,
    error_response,
    parse_body,
)
from finalbench.testing.toy_state import ToyState
from finalbench.testing.toy_stream import CutStream, EventWriter, StreamReply


class ToyServer:
    """Routes over one `ToyState`."""

    def __init__(self, state: ToyState) -> None:
        self.state = state

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                Route("/v1/models", self.models),
                Route("/v1/settings", self.settings),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
                Route("/reset_prefix_cache", self.flush, methods=["POST"]),
                Route("/toy/stats", self.stats),
                Route("/toy/behaviour", self.behave, methods=["POST"]),
            ]
        )

    async def health(self, request: Request) -> Response:
        ready = time.monotonic() - self.state.started >= self.state.behaviour.start_ms / 1000.0
        return Response(status_code=200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.state.metrics_text())

    async def settings(self, request: Request) -> Response:
        return JSONResponse(self.state.settings())

    async def stats(self, request: Request) -> Response:
        return JSONResponse(self.state.stats())

    async def behave(self, request: Request) -> Response:
        """Changes the behaviour of the running server; requests in flight keep theirs in part."""
        try:
            self.state.behaviour = parse_behaviour((await request.body()).decode())
        except UsageError as error:
            return error_response(400, str(error), "behaviour")
        return Response(status_code=200)

    async def flush(self, request: Request) -> Response:
        if not self.state.behaviour.cache_flushes:
            return error_response(404, "not served")
        if not self.state.flush():
            return error_response(503, "requests are running; try again")
        return Response(status_code=200)

    async def models(self, request: Request) -> Response:
        row = {
            "id": self.state.model,
            "object": "model",
            "created": 0,
            "owned_by": "toy",
            "root": self.state.model,
            "parent": None,
            "max_model_len": MAX_LENGTH,
        }
        return JSONResponse({"object": "list", "data": [row]})

    def _encode(self, text: str) -> list[int]:
        return encode(text, merges=self.state.behaviour.tokenizer == "merges")

    async def tokenize(self, request: Request) -> Response:
        body = await request.json()
        if not isinstance(body.get("prompt"), str):
            return error_response(400, "prompt: must be a string", "prompt")
        ids = self._encode(body["prompt"])
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": MAX_LENGTH})

    async def detokenize(self, request: Request) -> Response:
        body = await request.json()
        try:
            return JSONResponse({"prompt": decode(check_ids(body["tokens"]))})
        except (BadField, KeyError, TypeError) as error:
            return error_response(400, f"tokens: {error}", "tokens")

    async def completions(self, request: Request) -> Response | StreamReply:
        try:
            body = parse_body(
                CompletionBody, await request.body(), drafts_allowed=self.state.drafts_allowed
            )
            prompts = self._prompts(body.prompt)
        except BadField as error:
            return error_response(400, str(error), error.param)
        return await self._serve(request, body, prompts)

    async def chat(self, request: Request) -> Response | StreamReply:
        try:
            body = parse_body(
                ChatBody, await request.body(), drafts_allowed=self.state.drafts_allowed
            )
            text = "".join(f"<{item.role}>{item.content}\n" for item in body.messages)
            prompts = [check_ids(self._encode(text))]
        except BadField as error:
            return error_response(400, str(error), error.param)
        return await self._serve(request, body, prompts)

    def _prompts(self, prompt: str | list[int] | list[str] | list[list[int]]) -> list[list[int]]:
        if isinstance(prompt, str):
            return [check_ids(self._encode(prompt))]
        rows: list[list[int]] = []
        flat: list[int] = []
        for item in prompt:
            if isinstance(item, int):
                flat.append(item)
            else:
                rows.append(check_ids(self._encode(item) if isinstance(item, str) else item))
        return rows or [check_ids(flat)]

    async def _serve(
        self, request: Request, body: CompletionBody | ChatBody, prompts: list[list[int]]
    ) -> Response | StreamReply:
        state, behaviour = self.state, self.state.behaviour
        if body.model not in (None, state.model):
            return error_response(404, f"the model {body.model!r} does not exist", "model")
        if body.stream and len(prompts) > 1:
            return error_response(400, "prompt: one prompt a stream", "prompt")
        state.requests += 1
        number = state.requests
        state.digests += [prefix_state(ids) for ids in prompts]
        if request.client is not None:
            state.clients.add((request.client.host, request.client.port))
        if unit(number, 5) < behaviour.fail_share:
            return error_response(behaviour.fail_status, behaviour.fail_text)
        if body.stream:
            options = body.stream_options
            run = Generation(state, prompts[0], body, number)
            writer = EventWriter(
                run,
                chat=isinstance(body, ChatBody),
                ids=body.return_token_ids,
                usage_asked=options is not None and options.include_usage,
            )
            return StreamReply(run, writer)
        return JSONResponse(await self._whole(body, prompts, number))

    async def _whole(
        self, body: CompletionBody | ChatBody, prompts: list[list[int]], number: int
    ) -> dict[str, Any]:
        state, choices = self.state, []
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        metrics = None
        for index, ids in enumerate(prompts):
            run = Generation(state, ids, body, number)
            scoring = isinstance(body, CompletionBody) and body.prompt_logprobs is not None
            seconds = 0.0 if scoring else state.prefill_seconds(ids, number)
            for _ in run.rounds():
                seconds += 0.0 if scoring else run.step_seconds()
            await asyncio.sleep(seconds)
            run.settle()
            choice: dict[str, Any] = {"index": index, "finish_reason": run.finish_reason}
            if isinstance(body, ChatBody):
                choice["message"] = {"role": "assistant", "content": run.text()}
            else:
                choice |= {"text": run.text(), "logprobs": None}
                if body.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = state.pseudo.score(
                        ids, body.prompt_logprobs, logits=body.prompt_logits
                    )
            if body.return_token_ids and state.behaviour.ids:
                choice |= {"token_ids": run.tokens, "prompt_token_ids": ids}
            choices.append(choice)
            for key, value in run.final_usage().items():
                if isinstance(value, int):
                    usage[key] += value
            metrics = run.metrics()
        kind = "chat.completion" if isinstance(body, ChatBody) else "text_completion"
        answer: dict[str, Any] = {
            "id": f"cmpl-{number}",
            "object": kind,
            "created": int(time.time()),
            "model": state.model,
            "choices": choices,
        }
        if state.behaviour.usage != "absent":
            answer["usage"] = usage
        if metrics is not None:
            answer["metrics"] = metrics
        return answer


class _QuietCut(logging.Filter):
    """Planned cuts are not errors of the server."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, CutStream)


def make_app(behaviour: Behaviour, *, profile: str = "vk", model: str = "toy") -> ASGIApp:
    """The ASGI app of a fresh server."""
    return ToyServer(ToyState(behaviour, profile, model)).app()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. EnvironmentMissing when the port is taken."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise EnvironmentMissing(f"cannot listen on {host}:{port}: {error.strerror}") from error
    sock.listen(2048)
    return sock


def main(argv: list[str] | None = None) -> int:
    """Serves until interrupted. Writes one JSON line with the port to stdout first."""
    parser = argparse.ArgumentParser(prog="finalbench.testing.toy", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--behaviour", default="ok")
    parser.add_argument("--profile", default="vk", help="vk, vkae, vkue, stock")
    parser.add_argument("--model", default="toy")
    options = parser.parse_args(argv)
    try:
        app = make_app(
            parse_behaviour(options.behaviour), profile=options.profile, model=options.model
        )
        sock = bind(options.host, options.port)
    except FinalbenchError as error:
        sys.stderr.write(f"toy: {error}\n")
        return error.exit_code
    logging.getLogger("uvicorn.error").addFilter(_QuietCut())
    sys.stdout.write(json.dumps({"port": sock.getsockname()[1], "pid": os.getpid()}) + "\n")
    sys.stdout.flush()
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_keep_alive=600, lifespan="off"
    )
    uvicorn.Server(config).run(sockets=[sock])
    return 0


if __name__ == "__main__":
    sys.exit(main())
