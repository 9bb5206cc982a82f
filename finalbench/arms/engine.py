"""What the harness must know of a kind of server: its command line, its words, its answers. Data.

Nothing here talks to a server: `runtime` starts it and reads the pages, these functions read what
came back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Settings = dict[str, str | int | None]
Pages = Mapping[str, Any]  # path -> its JSON answer; a page that is not served is absent


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens. `name` is the served model's name where we choose it."""

    host: str
    port: int
    name: str


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine's dialect.

    `serve`: executable, settings, address -> command. `effective`: pages, log, settings asked for
    -> what the server says it runs with; a value that it does not tell is left out. `body`: the
    body of a request in this server's words.
    `variable` names the command in the environment, and `variable` + `_ARGS` what is added to it.
    `counters`: speculative counters come with each request, or only for a window in `/metrics`.
    """

    name: str
    title: str
    variable: str
    commands: tuple[str, ...]
    hint: str
    serve: Callable[[Sequence[str], Settings, Address], list[str]]
    pages: tuple[str, ...]
    effective: Callable[[Pages, str, Settings], dict[str, Any]]
    body: Callable[[dict[str, Any]], dict[str, Any]]
    counters: Literal["request", "window"]
    tokens: str  # how tokens are counted
    synthetic_drafts: bool = False  # it can draft with a synthetic acceptance
    tokenize_field: str = "prompt"
    counter_names: Mapping[str, str] = field(default_factory=dict)  # its name -> vLLM's
    environment: Mapping[str, str] | None = None
    environment_prefix: str | None = None  # variables of its own, recorded with its settings
    # Its prefix cache is switched by an option at the start, or is its own affair (none, or on).
    prefix_cache: Literal["restart", "own"] = "own"
    flush: str = "/reset_prefix_cache"  # empties it, where that is served
    per_request: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()


def nonce_of(name: str) -> str:
    """The nonce in a served model's name, empty without one."""
    base, mark, nonce = name.rpartition(NAME_MARK)
    return nonce if mark and base else ""


NAME_MARK = "--run-"  # a foreign server proves that it is ours by the name it serves under


def model_argument(settings: Mapping[str, Any]) -> str:
    """A checkpoint's folder or file when one is given, else the model's name."""
    return str(settings.get("path") or settings["model"])


def without_draft(body: dict[str, Any]) -> dict[str, Any]:
    """The body for a server whose drafts are set when it starts."""
    return {key: value for key, value in body.items() if key != "draft"}


def draft_default(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The draft a server was started with, in the form of `/v1/settings`."""
    chance = settings.get("draft_acceptance")
    return {
        "method": settings.get("draft_method") or "none",
        "k": settings.get("draft_k") or 0,
        "head_rows": None,
        "acceptance": None if chance is None else float(str(chance)),
    }
