"""llama.cpp's own account of each request, from its log, beside what a run recorded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from finalbench.record import RequestRecord, RunRecords

# prompt eval first; the decode line has the same words behind other ones.
_EVAL = re.compile(r"\|\s+(prompt eval|eval) time =\s+([0-9.]+) ms /\s+([0-9]+) tokens")


@dataclass(frozen=True, slots=True)
class Timing:
    """One request by the server: token counts, and milliseconds from first to last token."""

    prompt_tokens: int
    tokens: int
    decode_ms: float


def read_timings(log: Path) -> list[Timing]:
    """In the order in which requests ended."""
    found: list[Timing] = []
    prompt: int | None = None
    for kind, milliseconds, count in _EVAL.findall(log.read_text(encoding="utf-8")):
        if kind == "prompt eval":
            prompt = int(count)
        elif prompt is not None:
            found.append(Timing(prompt, int(count), float(milliseconds)))
            prompt = None
    return found


def pairs(records: RunRecords) -> list[tuple[RequestRecord, Timing]]:
    """Each request of the run, warm-ups too, with the server's own timing."""
    found: list[tuple[RequestRecord, Timing]] = []
    for server in records.servers:
        own = [r for r in records.requests if r.server_id == server.server_id]
        own.sort(key=lambda r: r.sent_ns)
        told = read_timings(records.path / str(server.log))
        if len(told) != len(own):
            raise ValueError(f"{server.server_id}: {len(own)} requests, the log has {len(told)}")
        found += zip(own, told, strict=True)
    return found
