"""How a container ended, in words."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

_SHELL_SIGNAL = 128
_WORDS = {
    125: "exit code 125: the container engine failed",
    126: "exit code 126: its command cannot be executed",
    127: "exit code 127: its command is not in the image",
}


def describe_container_exit(state: Mapping[str, Any], memory: str | None) -> str:
    """`out of memory (limit 512m)`, `killed by SIGKILL`, `exit code 3`, from the engine's state."""
    code = int(state.get("ExitCode", 0))
    limit = f"limit {memory}" if memory else "no limit set: the machine's memory ran out"
    if state.get("OOMKilled"):
        return f"out of memory ({limit})"
    if state.get("Error"):
        return f"{_plain(code)}: {state['Error']}"
    if code == _SHELL_SIGNAL + signal.SIGKILL and memory:
        # Podman does not tell a kill by the kernel from one by hand.
        return f"killed by SIGKILL, perhaps out of memory ({limit})"
    return _plain(code)


def _plain(code: int) -> str:
    if code in _WORDS:
        return _WORDS[code]
    if code > _SHELL_SIGNAL:
        try:
            return f"killed by {signal.Signals(code - _SHELL_SIGNAL).name}"
        except ValueError:
            pass
    return f"exit code {code}"
