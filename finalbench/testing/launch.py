"""Starts toy servers, in processes or threads of their own, and always ends them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from finalbench.errors import EnvironmentMissing
from finalbench.testing.behaviour import Behaviour, parse_behaviour
from finalbench.testing.toy import bind, make_app


@dataclass(frozen=True)
class ToyProcess:
    """A running toy server."""

    base_url: str
    port: int
    process: subprocess.Popen[str]

    def end(self, timeout_s: float = 5.0) -> int:
        """Terminates the process, kills it when it does not follow; returns the exit code."""
        self.process.terminate()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def start_toy(
    behaviour: str = "ok",
    *,
    profile: str = "vk",
    model: str = "toy",
    port: int = 0,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
) -> ToyProcess:
    """A toy server that already listens. EnvironmentMissing with its message when it cannot."""
    command = [sys.executable, "-m", "finalbench.testing.toy", "--port", str(port)]
    command += ["--behaviour", behaviour, "--profile", profile, "--model", model]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    assert process.stdout is not None and process.stderr is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    line = process.stdout.readline() if ready else ""
    if not line:
        process.kill()
        message = process.stderr.read().strip().splitlines()
        process.wait()
        process.stdout.close()
        process.stderr.close()
        raise EnvironmentMissing(f"toy server: {message[-1] if message else 'did not start'}")
    found = json.loads(line)["port"]
    return ToyProcess(f"http://127.0.0.1:{found}", found, process)


@contextmanager
def toy(
    behaviour: str = "ok",
    *,
    profile: str = "vk",
    model: str = "toy",
    env: Mapping[str, str] | None = None,
) -> Generator[ToyProcess]:
    """`start_toy` for the length of a with block."""
    server = start_toy(behaviour, profile=profile, model=model, env=env)
    try:
        yield server
    finally:
        server.end()
        for stream in (server.process.stdout, server.process.stderr):
            if stream is not None:
                stream.close()


class ToyThread:
    """A toy server in a thread of this process: quick to start, and each `use` is a fresh server.

    For tests of what is said, not of how fast. Use as a context manager.
    """

    def __init__(self) -> None:
        self._sock = bind("127.0.0.1", 0)
        self.port = self._sock.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._inner: ASGIApp = make_app(Behaviour())
        config = uvicorn.Config(
            self._app,
            log_level="critical",
            access_log=False,
            lifespan="off",
            interface="asgi3",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._sock]}, daemon=True
        )

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._inner(scope, receive, send)

    def use(self, behaviour: str = "ok", *, profile: str = "vk", model: str = "toy") -> str:
        """Forgets everything and behaves anew; returns the base URL."""
        self._inner = make_app(parse_behaviour(behaviour), profile=profile, model=model)
        return self.base_url

    def __enter__(self) -> ToyThread:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._sock.close()
