"""Products of a few rows on the tensor cores, weights straight from memory into fragments."""

from __future__ import annotations

import triton
import triton.language as tl

from vkengine.ops.triton_common import INTERPRETED as _INTERPRETED
from vkengine.ops.triton_common import hand_over

INTERPRETED = tl.constexpr(_INTERPRETED)


@triton.jit
def weight_fragment(w, S: tl.constexpr):
    """``[8, S, 2, 32]`` (row, slice, half, k) as loaded -> ``[S, 16, 32]`` for the tensor cores.

    A thread has loaded eight consecutive k of one row. The products may take k in any order that
    weights and x share, so k is named anew: what a thread holds is then what the instruction wants
    from it, and nothing moves between threads."""
    w = tl.reshape(tl.permute(w, (1, 2, 0, 3)), (S, 16, 4, 4, 2))
    return tl.reshape(tl.permute(w, (0, 1, 3, 2, 4)), (S, 16, 32))


@triton.jit
def row_fragment(x, S: tl.constexpr):
    """``[8, S, 32]`` (row of x, slice, k) -> ``[S, 32, 8]``, k named as in ``weight_fragment``."""
    return tl.reshape(tl.permute(tl.reshape(x, (8, S, 4, 4, 2)), (1, 3, 2, 4, 0)), (S, 32, 8))


@triton.jit
def mma_dot(
    w_ptr,
    rows,
    row_mask,
    x_ptr,
    norm_ptr,
    eps,
    R: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    NORM: tl.constexpr,
    P: tl.constexpr,
    PP: tl.constexpr,
    HEAD: tl.constexpr,
    TILES: tl.constexpr,
    WAIT: tl.constexpr,
    row_ptr,
    HAS_ROW: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Dot products of 16 weight rows (``rows [8, 2]``: row i and row 8 + i) with ``R`` rows of x:
    fp32 ``[16, 8]``, columns from R on are zero.

    Warp s walks slice s of K, 32 values at a time; the first ``AHEAD`` of these steps are requested
    before the wait."""
    s = tl.arange(0, S)
    kk = tl.arange(0, 32)
    r = tl.arange(0, 8)
    live = r < R
    steps: tl.constexpr = K // (S * 32)
    at = s[:, None] * (steps * 32) + kk[None, :]
    w_tile = w_ptr + rows[:, None, :, None].to(tl.int64) * K + at[None, :, None, :]
    tiles = ()
    for c in tl.static_range(min(AHEAD, steps)):
        tiles = tiles + (
            tl.load(
                w_tile + c * 32,
                mask=row_mask[:, None, :, None],
                other=0.0,
                eviction_policy="evict_first",
            ),
        )
    hand_over(WAIT)
    source = r
    if HAS_ROW:
        source = tl.load(row_ptr + r, mask=live, other=0)
    x_tile = x_ptr + source[:, None, None] * K + at[None, :, :]
    if NORM == 1:
        p = tl.arange(0, PP)
        squares = tl.load(
            norm_ptr + source[:, None] * P + p[None, :],
            mask=live[:, None] & (p < P)[None, :],
            other=0.0,
        )
    acc = tl.zeros([S, 16, 8], tl.float32)
    done = acc
    for c in tl.static_range(steps):
        if c + AHEAD < steps:
            tiles = tiles + (
                tl.load(
                    w_tile + (c + AHEAD) * 32,
                    mask=row_mask[:, None, :, None],
                    other=0.0,
                    eviction_policy="evict_first",
                ),
            )
        x = row_fragment(tl.load(x_tile + c * 32, mask=live[:, None, None], other=0.0), S)
        w = weight_fragment(tiles[c], S)
        if INTERPRETED:
            # Products of bf16 values are exact in fp32; the interpreter has no bf16 arithmetic.
            w = w.to(tl.float32)
            x = x.to(tl.float32)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if NORM == 2:
            if c % (HEAD // 32) == HEAD // 32 - 1:
                # A slice begins with a head: each head's sum is scaled as a whole.
                head = (s * steps + c) * 32 // HEAD
                t = tl.arange(0, TILES)
                sums = (r[None, :] * (K // HEAD) + head[:, None]) * TILES
                total = tl.load(
                    norm_ptr + sums[:, :, None] + t[None, None, :],
                    mask=live[None, :, None],
                    other=0.0,
                )
                factor = tl.rsqrt(tl.sum(total, axis=2) / HEAD + eps)
                done += acc * factor[:, None, :]
                acc = tl.zeros([S, 16, 8], tl.float32)
    if NORM == 2:
        acc = done
    y = tl.sum(acc, axis=0)
    if NORM == 1:
        y = y * tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[None, :]
    return y
