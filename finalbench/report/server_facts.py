"""What the page says of each server: how it was started and set, and how it differs from ours."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import PurePath

from finalbench.arms import ARMS, ENGINES, Engine
from finalbench.record import RunRecords, ServerRecord
from finalbench.report import view

_SETTINGS = (
    ("dtype", "dtype"),
    ("quantization", "quantization"),
    ("device", "device"),
    ("device_name", "device name"),
    ("threads", "threads"),
    ("graph_mode", "graph mode"),
    ("weights", "weights"),
    ("weights_from", "weights from"),
    ("model_digest", "model digest"),
    ("kv_cache_dtype", "KV cache dtype"),
    ("prefix_caching", "prefix cache"),
    ("host_launch_us", "host launch, µs"),
    ("kernel_fallbacks", "kernel fallbacks"),
    ("read_from", "settings read from"),
)


def server_facts(records: RunRecords) -> Iterator[view.Fact]:
    """The first server of each arm, then what is known of its kind where it is not ours."""
    for server in _first_servers(records):
        yield from _server(server)
        engine = _engine(server.arm)
        if engine is not None and engine.name != "vk":
            yield from _dialect(f"Server {server.arm}", engine)


def exploratory(records: RunRecords) -> str | None:
    """Why a comparison with another project's server shows speed and nothing else, or None."""
    peers = [a for a in records.run.scenario.arms if a in ARMS and ARMS[a].peer]
    if not peers or records.run.classes.weights != "random":
        return None
    titles = ", ".join(dict.fromkeys(ENGINES[ARMS[a].engine].title for a in peers))
    return (
        f"Exploratory: {titles} holds random weights of its own, not those of the other servers, "
        "so outputs and routing differ and only speed at this shape is compared."
    )


def command_line(words: tuple[str, ...]) -> str:
    """A command line without the folder of the program it starts."""
    if not words:
        return ""
    return shlex.join([PurePath(words[0]).name, *words[1:]])


def _engine(arm: str) -> Engine | None:
    return ENGINES[ARMS[arm].engine] if arm in ARMS else None


def _server(server: ServerRecord) -> Iterator[view.Fact]:
    group = f"Server {server.arm}"
    yield view.Fact(group=group, name="command", value=command_line(server.command) or "not ours")
    settings = server.settings or {}
    for key, name in _SETTINGS:
        value = settings.get(key)
        if value not in (None, [], ""):
            shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            yield view.Fact(group=group, name=name, value=shown[:160])
    for key, name in (("versions", "versions"), ("variables", "variables")):
        told = settings.get(key)
        if isinstance(told, dict) and any(told.values()):
            text = ", ".join(f"{k} {v}" for k, v in sorted(told.items()) if v)
            yield view.Fact(group=group, name=name, value=text)
    if server.image_digest:
        yield view.Fact(group=group, name="image", value=server.image_digest)
    if server.start_seconds is not None:
        yield view.Fact(group=group, name="start", value=f"{server.start_seconds:.1f} s")
    if server.gpu_proof is None and server.gpu_proof_reason:
        yield view.Fact(group=group, name="GPU proof", value=server.gpu_proof_reason)


def _dialect(group: str, engine: Engine) -> Iterator[view.Fact]:
    for name, values in (
        ("set by request", engine.per_request),
        ("set at the start", engine.restart),
        ("tokens counted by", (engine.tokens,)),
    ):
        yield view.Fact(group=group, name=name, value=", ".join(values))
    for difference in engine.differs:
        yield view.Fact(group=group, name="differs", value=difference)


def _first_servers(records: RunRecords) -> list[ServerRecord]:
    found: dict[str, ServerRecord] = {}
    for server in records.servers:
        if server.purpose == "measure" and server.settings is not None:
            found.setdefault(server.arm, server)
    return list(found.values())
