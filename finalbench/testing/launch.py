"""Starts toy servers as processes of their own and always ends them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from finalbench.errors import EnvironmentMissing


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
