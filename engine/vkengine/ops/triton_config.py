"""Fixed launch shapes, keyed by the weight's shape: never chosen by a run-time search.

``BK`` and the number of warps decide the order of additions and depend on K alone; ``BN`` (weight
rows per program) only decides how the work is cut and may follow the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Programmatic dependent launch: a kernel's programs start, and ask for their first weights, while
#: the kernel before them drains. Each waits for that kernel before it reads or writes anything
#: else, and lets the next one start only after that wait: whatever is two launches old is complete.
PDL = True

#: Overrides by (N, K), set by the benchmark's sweeps only.
OVERRIDES: dict[tuple[int, int], tuple[int, int, int]] = {}


@dataclass(frozen=True, slots=True)
class GemvConfig:
    bn: int
    bk: int
    warps: int
    ahead: int = 16384  # weights a program asks for at once; many rows need the registers instead


def chunk(k: int, warps: int) -> int:
    """Largest power of two that divides ``k``, at most eight values a thread."""
    bk = 8
    while bk * 2 <= warps * 256 and k % (bk * 2) == 0:
        bk *= 2
    return bk


#: Consecutive values of one head in a chunk, where x is scaled per head.
SLICE = 32


def gemv_config(n: int, k: int, rows: int, head: int = 0) -> GemvConfig:
    """Launch shape of ``[n, k] @ [k, rows]``; ``head`` > 0 when x is scaled per head of it.

    Two warps where many weight rows make enough programs; four where they do not.
    """
    if (n, k) in OVERRIDES:
        return GemvConfig(*OVERRIDES[n, k])
    warps = 2 if n >= 8192 or (head and k % 4096) else 4
    bk = chunk(k, warps)
    while head and k % (bk // min(SLICE, head) * head):
        bk //= 2
    # A small grid is all resident: its weights can wait in registers whatever the rows.
    ahead = 16384 if rows <= 2 or (rows <= 4 and n <= 2048) else 4096
    narrow = rows > 4 or (rows > 2 and bool(head) and bk < 1024)
    return GemvConfig(2 if narrow else 4, bk, warps, ahead)
