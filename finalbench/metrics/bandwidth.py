"""The physics bound: bytes a step must read x steps per second may not exceed the memory bandwidth.

Bytes come from the scenario's model facts, never from a server, and are a lower bound: routed
experts are counted for one row only, though several rows of a verify step may read more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finalbench.plan import Cell
from finalbench.provenance import HardwareFacts
from finalbench.record import ServerRecord
from finalbench.scenario import DTYPE_BYTES, Frozen, ModelSpec

# Last-level cache in bytes by data sheet; the first name that occurs in the device's name decides.
# What fits in there need not be read from memory at each step.
GPU_CACHES = (
    ("B200", 126_000_000),
    ("B300", 126_000_000),
    ("H200", 50_000_000),
    ("H100", 50_000_000),
    ("A100", 40_000_000),
    ("L40", 96_000_000),
    ("L4", 48_000_000),
    ("A10", 6_000_000),
    ("RTX 5090", 96_000_000),
    ("RTX 4090", 72_000_000),
)


class Memory(Frozen):
    """Bandwidth of one device and where the figure comes from, or null with a reason."""

    bytes_per_s: float | None
    cache_bytes: int | None = None
    source: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Bound:
    """`share` of the bandwidth used at least, and the rate at which it would be all of it."""

    share: float | None
    limit_tok_s: float | None
    bytes_per_step: int | None
    reason: str | None


def memory_of(hardware: HardwareFacts, servers: Sequence[ServerRecord]) -> Memory:
    """The bandwidth on record for this machine, and the cache of the device that served."""
    if hardware.memory_bandwidth_bytes_s is None:
        return Memory(bytes_per_s=None, reason=hardware.memory_bandwidth_source)
    return Memory(
        bytes_per_s=hardware.memory_bandwidth_bytes_s,
        cache_bytes=_cache_bytes(hardware, servers),
        source=hardware.memory_bandwidth_source,
    )


def _cache_bytes(hardware: HardwareFacts, servers: Sequence[ServerRecord]) -> int | None:
    settings = [s.settings for s in servers if s.settings is not None]
    if not any(str(found.get("device", "")).startswith("cuda") for found in settings):
        return hardware.cache_bytes
    names = {str(found.get("device_name", "")) for found in settings}
    found = [size for part, size in GPU_CACHES if any(part in name for name in names)]
    return found[0] if found else None


def bytes_per_step(model: ModelSpec, cell: Cell) -> int:
    """Least bytes that one step of `cell.concurrency` sequences reads."""
    facts = model.facts
    weights = model.bytes_per_token
    draft = cell.draft
    if draft.method in ("mtp", "oracle") and isinstance(draft.k, int) and draft.head_rows is None:
        weights += draft.k * model.bytes_per_draft
    context = cell.seq_len + cell.output_len // 2
    per_sequence = int(
        facts.kv_elements_per_token * DTYPE_BYTES[model.dtype] * context
        + facts.state_bytes_per_sequence
    )
    return weights + cell.concurrency * per_sequence


def bandwidth_bound(
    model: ModelSpec, cell: Cell, tok_s: float | None, length: float | None, memory: Memory
) -> Bound:
    """Judge `tok_s`, all streams together; `length` is the acceptance length, 1 without drafts."""
    need = bytes_per_step(model, cell)
    if memory.bytes_per_s is None:
        return Bound(None, None, need, memory.reason)
    if memory.cache_bytes is not None and need <= memory.cache_bytes:
        return Bound(None, None, need, "one step's bytes fit in the device's cache")
    if cell.draft.method != "none" and length is None:
        return Bound(None, None, need, "acceptance length is unknown")
    per_step = cell.concurrency * (1.0 if length is None else length)
    limit = memory.bytes_per_s / need * per_step
    if tok_s is None:
        return Bound(None, limit, need, "no rate")
    return Bound(tok_s / limit, limit, need, None)
