"""The physics bound: bytes a step must read x steps per second may not exceed the memory bandwidth.

Bytes come from the scenario's model facts, never from a server, and are a lower bound: routed
experts are counted for one row only, though several rows of a verify step may read more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finalbench.plan import Cell
from finalbench.provenance import Hardware
from finalbench.record import ServerRecord
from finalbench.scenario import DTYPE_BYTES, Frozen, ModelSpec

# Vendor data sheets: memory bandwidth in bytes per second, last-level cache in bytes. The first
# name that occurs in the device's name decides, so longer names come first.
DEVICES: tuple[tuple[str, float, int], ...] = (
    ("GB200", 8.0e12, 126_000_000),
    ("B200", 8.0e12, 126_000_000),
    ("GH200", 4.9e12, 60_000_000),
    ("H200 NVL", 4.8e12, 50_000_000),
    ("H200", 4.8e12, 50_000_000),
    ("H100 NVL", 3.9e12, 50_000_000),
    ("H100 PCIe", 2.0e12, 50_000_000),
    ("H100", 3.35e12, 50_000_000),
    ("A100-SXM4-80GB", 2.039e12, 40_000_000),
    ("A100 80GB", 1.935e12, 40_000_000),
    ("A100", 1.555e12, 40_000_000),
    ("A10G", 0.6e12, 6_000_000),
    ("L40S", 0.864e12, 96_000_000),
    ("L4", 0.3e12, 48_000_000),
    ("RTX 4090", 1.008e12, 72_000_000),
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


def memory_of(hardware: Hardware, servers: Sequence[ServerRecord]) -> Memory:
    """A declared bandwidth, else the data sheet of the device the servers name."""
    if hardware.memory_bandwidth_bytes_s is not None:
        return Memory(
            bytes_per_s=hardware.memory_bandwidth_bytes_s,
            cache_bytes=hardware.cache_bytes,
            source=hardware.memory_bandwidth_source or "declared",
        )
    devices = {str((s.settings or {}).get("device", "unknown")) for s in servers}
    if not devices or devices == {"unknown"}:
        return Memory(bytes_per_s=None, reason="no server named its device")
    if any(d.startswith("cpu") for d in devices):
        return Memory(bytes_per_s=None, reason="memory bandwidth of a CPU must be declared")
    names = {str((s.settings or {}).get("device_name", "")) for s in servers}
    if len(names) != 1:
        return Memory(bytes_per_s=None, reason=f"several devices: {', '.join(sorted(names))}")
    name = names.pop()
    for part, bandwidth, cache in DEVICES:
        if part.lower() in name.lower():
            return Memory(bytes_per_s=bandwidth, cache_bytes=cache, source=f"data sheet of {part}")
    return Memory(bytes_per_s=None, reason=f"no data sheet for device {name!r}")


def bytes_per_step(model: ModelSpec, cell: Cell) -> int:
    """Least bytes that one step of `cell.concurrency` sequences reads."""
    facts = model.facts
    weights = model.bytes_per_token
    draft = cell.draft
    if draft.method in ("mtp", "oracle") and isinstance(draft.k, int) and draft.head_rows is None:
        weights += draft.k * model.bytes_per_draft
    context = cell.seq_len + cell.output_len // 2
    per_sequence = (
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
