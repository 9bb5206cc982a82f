"""Binds the port, runs uvicorn, and turns signals into an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
import socket
import time
from collections.abc import Callable, Generator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from .app import Limits, create_app
from .connection import Connection

if TYPE_CHECKING:
    from vkengine.engine import Engine
    from vkengine.tokenizer import Tokenizer

INTERRUPTED = 130


class PortInUse(OSError):
    """Somebody else listens there."""


def bind(host: str, port: int) -> socket.socket:
    """Takes the port before anything slow is loaded. Raises PortInUse."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise PortInUse(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return sock


def serve(
    load: Callable[[], tuple[Engine, Tokenizer | None, dict[str, Any]]],
    sock: socket.socket,
    *,
    limits: Limits,
    api_key: str | None,
    announce: Callable[[str], None],
    shutdown_s: int = 10,
) -> int:
    """Loads, serves until a signal, and returns the exit code: 0 (SIGTERM) or 130 (SIGINT).

    `load` gives the engine, its tokenizer and what the server adds to its settings.
    """
    started_s = int(time.time())
    with contextlib.closing(sock), _signals() as stop:
        engine, tokenizer, settings = load()
        if stop.received is not None:
            engine.close()
            return stop.exit_code
        if engine.settings().get("device") == "cpu":
            settings = {"device_name": cpu_name(), **settings}
        app = create_app(
            engine,
            tokenizer,
            limits=limits,
            settings={**settings, **process_settings()},
            api_key=api_key,
            started_s=started_s,
        )
        host, port = sock.getsockname()[:2]
        try:
            sock.listen(1024)
        except OSError as error:
            raise PortInUse(f"cannot listen on {host}:{port}: {error.strerror}") from error
        config = uvicorn.Config(
            app,
            http=Connection,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=shutdown_s,
            timeout_keep_alive=75,
            backlog=1024,
        )
        server = _Server(config)
        stop.server = server
        announce(f"vk: serving {engine.model_name} ({engine.profile}) on http://{host}:{port}")
        load_s = getattr(engine, "load_s", None)
        if load_s:
            parts = ", ".join(f"{name} {spent:.1f} s" for name, spent in load_s.items())
            announce(f"vk: loading took {parts}")
        state_bytes = engine.settings().get("state_bytes_per_sequence")
        if state_bytes:
            announce(
                f"vk: {engine.max_sequences} sequences of {engine.max_model_len} tokens at once, "
                f"{state_bytes / 2**20:.1f} MiB of state each, drafts included"
            )
        try:
            run_loop(server, sock)
        finally:
            app.state.service.driver.close(wait_s=5)
        return stop.exit_code


def run_loop(server: uvicorn.Server, sock: socket.socket) -> None:
    """On uvloop where it is installed: a chunk then costs about half."""
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.serve(sockets=[sock]))


def process_settings() -> dict[str, Any]:
    """What this process alone knows: its nonce and its packages."""
    return {
        "nonce": os.environ.get("VK_NONCE"),
        "pid": os.getpid(),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("vkengine", "torch", "transformers", "triton")},
        },
    }


def cpu_name() -> str:
    """What the kernel calls this processor."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


class _Server(uvicorn.Server):
    """Leaves the signals to `_signals`: uvicorn would raise them again after the shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class _Stop:
    """The first signal asks for an orderly end, the second one for an end."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.server: _Server | None = None

    @property
    def exit_code(self) -> int:
        return INTERRUPTED if self.received == signal.SIGINT else 0

    def on_signal(self, number: int, _: FrameType | None) -> None:
        again = self.received is not None
        self.received = self.received or number
        if self.server is None:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(0)
        self.server.should_exit = True
        self.server.force_exit = again


@contextlib.contextmanager
def _signals() -> Generator[_Stop]:
    # Set even where the parent ignores SIGINT, as shells do for background jobs.
    stop = _Stop()
    before = {n: signal.signal(n, stop.on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
