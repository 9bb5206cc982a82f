"""The right server, with the right settings, from the first request to the last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from finalbench.plan import unequal_settings
from finalbench.record import Run, ServerRecord
from finalbench.validity.violation import Violation, violation

# What may differ between two readings of one server: a measurement, not a setting.
VOLATILE = frozenset({"host_launch_us", "routing"})
# What must be equal in every arm, or the ratio measures something else than the engine.
SHARED = (
    "model",
    "model_digest",
    "weights",
    "dtype",
    "device",
    "device_name",
    "threads",
    "sampler_defaults",
)


def check_servers(run: Run, servers: Sequence[ServerRecord]) -> Iterator[Violation]:
    """Faults of a server concern every cell it served; unequal arms concern the whole run."""
    cells_of: dict[str, list[str]] = {}
    for cell in run.plan.cells:
        cells_of.setdefault(cell.server_key, []).append(cell.id)
    measuring = [s for s in servers if s.purpose == "measure"]
    for server in measuring:
        for fault in _server(run, server):
            for cell_id in cells_of.get(server.server_key, []):
                yield fault.model_copy(update={"cell_id": cell_id})
    yield from _shared(measuring)
    for text in unequal_settings(run.plan):
        yield violation("settings_differ", text)


def _server(run: Run, server: ServerRecord) -> Iterator[Violation]:
    if server.settings is None:
        yield violation(
            "settings_unread",
            f"server {server.server_id}: no settings were read back",
            block=server.block,
        )
        return
    nonce = server.settings.get("nonce")
    if nonce != server.nonce:
        yield violation(
            "wrong_server",
            f"server {server.server_id} was started with nonce {server.nonce}, "
            f"the one that answered has {nonce}",
            block=server.block,
        )
    weights = str(server.settings.get("weights", "real"))
    if weights.startswith("random") != (run.classes.weights == "random"):
        yield violation(
            "class_mismatch",
            f"server {server.server_id} has {weights} weights, the run declares "
            f"{run.classes.weights}",
            block=server.block,
        )
    fallbacks = server.settings.get("kernel_fallbacks") or []
    if fallbacks:
        yield violation(
            "kernel_fallback",
            f"server {server.server_id} runs without: {', '.join(map(str, fallbacks))}",
            block=server.block,
        )
    yield from _unchanged(server)
    yield from _prefix_hits(server)


def _unchanged(server: ServerRecord) -> Iterator[Violation]:
    before, after = server.settings or {}, server.settings_after
    if after is None:
        yield violation(
            "settings_unread",
            f"server {server.server_id}: settings were not read after the measurement",
            block=server.block,
        )
        return
    for name in sorted(before.keys() | after.keys()):
        if name not in VOLATILE and before.get(name) != after.get(name):
            yield violation(
                "server_changed",
                f"server {server.server_id}: {name} was {before.get(name)!r}, "
                f"became {after.get(name)!r}",
                block=server.block,
            )


def _prefix_hits(server: ServerRecord) -> Iterator[Violation]:
    """Where hits were not counted cell by cell, warm-ups count too."""
    if any(w.prefix_hits is not None for w in server.windows):
        return
    before, after = server.counters_before or {}, server.counters_after or {}
    for name, late in sorted(after.items()):
        if "prefix_cache_hits" in name and late - before.get(name, 0.0) > 0:
            hits = late - before.get(name, 0.0)
            yield violation(
                "warm_prefix",
                f"server {server.server_id}: {name} rose by {hits:g}",
                block=server.block,
                hits=hits,
            )


def _shared(servers: Sequence[ServerRecord]) -> Iterator[Violation]:
    for name in SHARED:
        found: dict[str, str] = {}
        for server in servers:
            if server.settings is not None and name in server.settings:
                if name == "weights" and server.settings[name] == "random":
                    continue  # a foreign server's own draw; its class is checked for itself
                found.setdefault(repr(server.settings[name]), server.server_id)
        if len(found) > 1:
            text = "; ".join(f"{value} in {where}" for value, where in found.items())
            yield violation("settings_differ", f"{name} differs between servers: {text}")
