"""A live server behind one face, whichever runtime brought it up."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from finalbench.arms import NAME_MARK, Engine, Settings, engine_of, serve_command
from finalbench.errors import EnvironmentMissing
from finalbench.runtime.process import ServerProcess, choose_port, last_lines
from finalbench.runtime.readback import ReadBack
from finalbench.runtime.ready import Reader, ServerFailed, check_settings, read_settings, wait_ready

HOST = "127.0.0.1"
COMMAND_VARIABLE = "FINALBENCH_VK"  # what runs `vk`, when it is not on the path
PORT_TRIES = 3
PORT_TAKEN = re.compile(r"address already in use|port \d+ is (already )?in use|EADDRINUSE", re.I)


class Running(Protocol):
    """What a process and a container have in common."""

    @property
    def pid(self) -> int | None: ...
    def death(self) -> str | None: ...
    def stop(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class LiveServer:
    """A server that answered, with the settings it says it runs with."""

    base_url: str
    runtime: Literal["process", "container", "endpoint"]
    command: tuple[str, ...]
    nonce: str
    settings: dict[str, Any]
    start_seconds: float | None
    process: Running | None
    log: Path | None
    image_digest: str | None = None
    gpu_proof: dict[str, Any] | None = None  # from inside a container
    reread: Reader = read_settings

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    @property
    def model_id(self) -> str:
        return str(self.settings["model_ids"][0])

    def died(self) -> str | None:
        """In words, why it no longer runs; None while it does."""
        return self.process.death() if self.process else None

    def stop(self) -> int | None:
        """End it; None for a server that is not ours to end."""
        return self.process.stop() if self.process else None


@dataclass(frozen=True, slots=True)
class Wanted:
    """Who asks for a container, and where its log goes."""

    arm: str
    run_id: str
    log: Path
    timeout_s: float


class ServerStartFailed(ServerFailed):
    """A server that never became ready; `exit_code_of_server` is null when it did not exit."""

    def __init__(
        self,
        message: str,
        *,
        command: tuple[str, ...],
        code: int | None,
        log: Path,
        runtime: Literal["process", "container"] = "process",
    ) -> None:
        super().__init__(message)
        self.runtime = runtime
        self.last_line = (last_lines(log, 1) or [message])[-1].removeprefix("error: ")
        self.command = command
        self.exit_code_of_server = code


def executable_of(engine: Engine, environment: Mapping[str, str]) -> list[str]:
    """What runs a server: its variable, else beside this Python, else on the path.

    Errors: `EnvironmentMissing` with what to install.
    """
    if given := environment.get(engine.variable):
        return shlex.split(given)
    if not engine.commands:
        raise EnvironmentMissing(f"the arm {engine.name} starts no server", hint=engine.hint)
    command, *words = engine.commands
    beside = Path(sys.executable).parent / command
    if beside.exists():
        return [str(beside), *words]
    found = shutil.which(command, path=environment.get("PATH"))
    if found is None:
        whose = "the engine's" if engine.name == "vk" else f"{engine.title}'s"
        raise EnvironmentMissing(f"{whose} command `{command}` is not installed", hint=engine.hint)
    return [found, *words]


def vk_executable(environment: Mapping[str, str]) -> list[str]:
    """What runs `vk`."""
    return executable_of(engine_of({}), environment)


def start_server(
    settings: Settings,
    *,
    log: Path,
    timeout_s: float,
    environment: Mapping[str, str],
) -> LiveServer:
    """Start a child, wait until it is ready, prove that it is ours.

    Errors: `ServerStartFailed`; `EnvironmentMissing` when it cannot be started at all.
    """
    engine = engine_of(settings)
    executable = executable_of(engine, environment)
    added = shlex.split(environment.get(f"{engine.variable}_ARGS", "")) if engine.variable else []
    for attempt in range(PORT_TRIES):
        port, nonce = choose_port(HOST), secrets.token_hex(8)
        name = served_name(settings, nonce)
        command = serve_command(executable, settings, host=HOST, port=port, name=name)
        try:
            return _start_on((*command, *added), settings, port, nonce, log, timeout_s, environment)
        except ServerStartFailed as error:
            taken = PORT_TAKEN.search("\n".join(last_lines(log, 20)))
            if not taken or attempt == PORT_TRIES - 1:
                raise
            log.replace(log.with_suffix(f".port{attempt}.log"))
            last_error = error
    raise last_error


def _start_on(
    command: tuple[str, ...],
    settings: Settings,
    port: int,
    nonce: str,
    log: Path,
    timeout_s: float,
    environment: Mapping[str, str],
) -> LiveServer:
    base_url = f"http://{HOST}:{port}"
    begun = time.monotonic()
    chosen = server_environment(environment, settings, nonce)
    read = ReadBack(settings, log, chosen)
    process = ServerProcess.start(command, log, chosen)
    try:
        read_back = wait_ready(base_url, timeout_s=timeout_s, dead=process.death, read=read)
        check_settings(read_back, settings, nonce=nonce)
        if (reason := process.death()) is not None:
            raise ServerFailed(reason)
    except ServerFailed as error:
        died_with = process.exit_code()
        process.stop()
        raise ServerStartFailed(str(error), command=command, code=died_with, log=log) from error
    except BaseException:
        process.stop()
        raise
    return LiveServer(
        base_url=base_url,
        runtime="process",
        command=command,
        nonce=nonce,
        settings=read_back,
        start_seconds=round(time.monotonic() - begun, 3),
        process=process,
        log=log,
        reread=read,
    )


def attach_endpoint(base_url: str, settings: Settings, *, timeout_s: float) -> LiveServer:
    """Use a server that somebody else runs; it is checked, and never stopped.

    Errors: `EnvironmentMissing` when it does not answer or runs otherwise than asked.
    """
    read = ReadBack(settings, None)
    try:
        read_back = wait_ready(base_url, timeout_s=timeout_s, dead=lambda: None, read=read)
        check_settings(read_back, settings | {"threads": None}, nonce=None)
    except ServerFailed as error:
        raise EnvironmentMissing(f"endpoint {base_url}: {error}") from error
    return LiveServer(
        base_url=base_url,
        runtime="endpoint",
        command=(),
        nonce=str(read_back.get("nonce") or ""),
        settings=read_back,
        start_seconds=None,
        process=None,
        log=None,
        reread=read,
    )


def served_name(settings: Settings, nonce: str) -> str:
    """What a foreign server calls the model: with our nonce, so that it proves to be ours."""
    return f"{settings['model']}{NAME_MARK}{nonce}"


def server_environment(
    environment: Mapping[str, str], settings: Settings, nonce: str
) -> dict[str, str]:
    """The child's environment: ours, its nonce, and the same thread settings for every arm."""
    chosen = dict(environment) | {"VK_NONCE": nonce, "PYTHONUNBUFFERED": "1"}
    chosen.setdefault("HF_HUB_OFFLINE", "1")
    for name, value in (engine_of(settings).environment or {}).items():
        chosen.setdefault(name, value)
    if settings["threads"] is not None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            chosen[name] = str(settings["threads"])
    return chosen


def with_settings(server: LiveServer, settings: dict[str, Any]) -> LiveServer:
    """The same server with freshly read settings."""
    return dataclasses.replace(server, settings=settings)


def our_environment() -> dict[str, str]:
    """A copy of the process environment: the only place of the runtime that reads it."""
    return dict(os.environ)
