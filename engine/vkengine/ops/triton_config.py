"""Fixed launch shapes, keyed by the weight's shape: never chosen by a run-time search.

``BK`` and the number of warps decide the order of additions and depend on K alone; ``BN`` (weight
rows per program) only decides how the work is cut and may follow the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Programmatic dependent launch: a kernel's programs start, and ask for their first weights, while
#: the kernel before them drains. Each waits for that kernel before it reads or writes anything
#: else, and lets the next one start only after that wait: whatever is two launches old is complete.
PDL = True
#: Let the next kernel start before that wait where it reads nothing but weights before its own.
EARLY = True

#: Overrides by (N, K), set by the benchmark's sweeps only.
OVERRIDES: dict[tuple[int, int], GemvConfig] = {}
#: Tensor cores for products whose weights are at least this many rows.
MMA_ROWS = 16


def hand_over_mode(device: torch.device, early: bool = False) -> int:
    """What ``hand_over`` does in a kernel; ``early`` when the next kernel is a product, the router,
    or one that reads nothing before its wait."""
    if not PDL or device.type == "cpu":
        return 0
    return 2 if early and EARLY else 1


#: Bytes of the weights read after the experts that are brought to the second-level cache while the
#: router makes its choice and memory is idle: of the head, and of a layer's first product.
HEAD_BYTES = 16 << 20
NEXT_BYTES = 8 << 20


def ahead_bytes(weight: Tensor | None, programs: int, on: int) -> int:
    """Bytes that each of ``programs`` asks for, in whole 64-byte pieces."""
    if weight is None or not on:
        return 0
    total = weight.numel() * weight.element_size()
    wanted = HEAD_BYTES if total > 1 << 28 else NEXT_BYTES
    return min(wanted, total) // programs // 64 * 64


@dataclass(frozen=True, slots=True)
class GemvConfig:
    bn: int  # weight rows per program
    bk: int  # values of K per chunk
    warps: int
    ahead: int  # weights (steps of 32 with tensor cores) a program asks for at once
    slices: int = 0  # slices of K, one to a warp; 0 without tensor cores


def chunk(k: int, warps: int) -> int:
    """Largest power of two that divides ``k``, at most eight values a thread."""
    bk = 8
    while bk * 2 <= warps * 256 and k % (bk * 2) == 0:
        bk *= 2
    return bk


#: Consecutive values of one head in a chunk, where x is scaled per head.
SLICE = 32
#: Steps of 32 values that a warp asks for ahead: eight registers each.
STEPS_AHEAD = 16
MOST_STEPS = 64


def tensor_cores(w: Tensor) -> bool:
    """bf16 on a GPU; under the interpreter fp32 too, so that its tests reach that code."""
    return w.element_size() == 2 or w.device.type == "cpu"


def gemv_config(n: int, k: int, rows: int, head: int = 0, mma: bool = True) -> GemvConfig:
    """Launch shape of ``[n, k] @ [k, rows]``; ``head`` > 0 when x is scaled per head of it, ``mma``
    when tensor cores can take it."""
    if (n, k) in OVERRIDES:
        return OVERRIDES[n, k]
    fits = k % 32 == 0 and k % max(head, 32) == 0 and (not head or head % 32 == 0)
    if mma and fits and n >= MMA_ROWS:
        return mma_config(n, k, head)
    warps = 2 if n >= 8192 or (head and k % 4096) else 4
    bk = chunk(k, warps)
    while head and k % (bk // min(SLICE, head) * head):
        bk //= 2
    return GemvConfig(4, bk, warps, 16384 if rows <= 2 else 4096)


def mma_config(n: int, k: int, head: int) -> GemvConfig:
    """Two warps a program, more where there are few programs or K is long (the steps of a slice are
    unrolled, and the compiler needs minutes for hundreds); a slice begins with a head."""
    slices = 8 if n <= 4096 else 2
    while slices < 8 and k // (slices * 32) > (MOST_STEPS // 2 if head else MOST_STEPS):
        slices *= 2
    while k % (slices * max(head, 32)):
        slices //= 2
    return GemvConfig(16, 32, slices, STEPS_AHEAD, slices)
