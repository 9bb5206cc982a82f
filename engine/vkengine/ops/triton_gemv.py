"""Row-streaming matrix-vector products for 1 to 9 rows.

``y[r, n] = sum_k W[n, k] * x[r, k]``, one program per ``BN`` rows of ``W`` with the whole of K in
the program, so every weight is read once from memory for all ``R`` rows. Each thread owns runs of
eight consecutive k (one 16-byte load of bf16), adds them in order, adds chunk after chunk, and one
tree over threads ends the sum: the order is a function of ``(K, BK, num_warps)``, which the table
below keys by K alone. ``BN`` and ``R`` never change a bit.

Variants of the prologue and epilogue (constexpr flags):

- ``NORM`` 1: x is RMS-normalised on the fly: ``x * rsqrt(mean(x^2) + eps) * (1 + gain)``.
- ``NORM`` 2: x is scaled per head of ``HEAD`` values by ``rsqrt(sum(squares) / HEAD + eps)`` with
  the partial sums ``[R, K / HEAD, TILES]`` in ``gain_ptr`` (the gated norm of the DeltaNet).
- ``HAS_ROW``: output row r reads row ``row[r]`` of x (and of the residual source).
- ``RESIDUAL`` 1: ``h[r, n] = source[r, n] + y`` (2: ``= y``) in fp32 and ``hx[r, n] = h`` in the
  weight's type.
- ``SWIGLU``: rows n and N + n of W give ``silu(gate) * up``.
- ``PF``: prefetch of the next kernel's weights into L2 (see ``triton_common``).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vkengine.ops.triton_common import prefetch_tail, silu, sum8


@triton.jit
def sum_rows(accs, R: tl.constexpr):
    """R tensors ``[BN, L]`` -> a tuple of R ``[BN]``, four per exchange through shared memory."""
    out = ()
    for g in tl.static_range((R + 3) // 4):
        if R - 4 * g == 1:
            out = out + (tl.sum(accs[4 * g], axis=1),)
        elif R - 4 * g == 2:
            a, b = tl.split(tl.sum(tl.join(accs[4 * g], accs[4 * g + 1]), axis=1))
            out = out + (a, b)
        elif R - 4 * g == 3:
            low = tl.join(accs[4 * g], accs[4 * g + 1])
            high = tl.join(accs[4 * g + 2], accs[4 * g + 2])
            even, odd = tl.split(tl.sum(tl.join(low, high), axis=1))
            a, b = tl.split(even)
            c, _ = tl.split(odd)
            out = out + (a, b, c)
        else:
            low = tl.join(accs[4 * g], accs[4 * g + 1])
            high = tl.join(accs[4 * g + 2], accs[4 * g + 3])
            even, odd = tl.split(tl.sum(tl.join(low, high), axis=1))
            a, b = tl.split(even)
            c, d = tl.split(odd)
            out = out + (a, b, c, d)
    return out


@triton.jit
def sum_vectors(vectors, R: tl.constexpr):
    """R tensors ``[L]`` -> a tuple of R scalars, in the same grouping."""
    out = ()
    for g in tl.static_range((R + 3) // 4):
        if R - 4 * g == 1:
            out = out + (tl.sum(vectors[4 * g], axis=0),)
        elif R - 4 * g == 2:
            a, b = tl.split(tl.sum(tl.join(vectors[4 * g], vectors[4 * g + 1]), axis=0))
            out = out + (a, b)
        elif R - 4 * g == 3:
            low = tl.join(vectors[4 * g], vectors[4 * g + 1])
            high = tl.join(vectors[4 * g + 2], vectors[4 * g + 2])
            even, odd = tl.split(tl.sum(tl.join(low, high), axis=0))
            a, b = tl.split(even)
            c, _ = tl.split(odd)
            out = out + (a, b, c)
        else:
            low = tl.join(vectors[4 * g], vectors[4 * g + 1])
            high = tl.join(vectors[4 * g + 2], vectors[4 * g + 3])
            even, odd = tl.split(tl.sum(tl.join(low, high), axis=0))
            a, b = tl.split(even)
            c, d = tl.split(odd)
            out = out + (a, b, c, d)
    return out


@triton.jit
def tile_dot(
    w_ptr,
    rows,
    row_mask,
    x_ptr,
    gain_ptr,
    eps,
    R: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    NORM: tl.constexpr,
    HEAD: tl.constexpr = 8,
    TILES: tl.constexpr = 1,
    WAIT: tl.constexpr = False,
    SLICE: tl.constexpr = 8,
    row_ptr=None,
    HAS_ROW: tl.constexpr = False,
    AHEAD: tl.constexpr = 16384,
):
    """Dot products of ``BN`` weight rows with ``R`` rows of x: a tuple of R fp32 ``[BN]``.

    The first ``AHEAD`` weights are requested together, and with ``WAIT`` before the launch
    dependency is awaited.
    """
    lane = tl.arange(0, BK)
    if NORM == 2:
        # A chunk takes SLICE values of each of BK / SLICE heads: a thread stays with one head.
        k = (lane // SLICE) * HEAD + lane % SLICE
        per_group: tl.constexpr = HEAD // SLICE
        group: tl.constexpr = (BK // SLICE) * HEAD
    else:
        k = lane
        per_group: tl.constexpr = K // BK
        group: tl.constexpr = 0
    w_rows = w_ptr + rows[:, None].to(tl.int64) * K + k[None, :]
    step: tl.constexpr = SLICE if NORM == 2 else BK
    accs = ()
    squares = ()
    for _ in tl.static_range(R):
        accs = accs + (tl.zeros([BN, BK // 8], tl.float32),)
        squares = squares + (tl.zeros([BK // 8], tl.float32),)
    done = accs
    # The first chunks are requested together, before anything that depends on another launch.
    ahead: tl.constexpr = min(K // BK, max(1, AHEAD // (BN * BK)))
    early = ()
    for c in tl.static_range(ahead):
        early = early + (
            tl.load(
                w_rows + (c // per_group) * group + (c % per_group) * step,
                mask=row_mask[:, None],
                other=0.0,
                eviction_policy="evict_first",
            ),
        )
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    for c in tl.static_range(K // BK):
        if c < ahead:
            w = early[c].to(tl.float32)
        else:
            w = tl.load(
                w_rows + (c // per_group) * group + (c % per_group) * step,
                mask=row_mask[:, None],
                other=0.0,
                eviction_policy="evict_first",
            ).to(tl.float32)
        if NORM == 1:
            gain = tl.load(gain_ptr + c * BK + k).to(tl.float32) + 1.0
        next_accs = ()
        next_squares = ()
        for r in tl.static_range(R):
            source = r
            if HAS_ROW:
                source = tl.load(row_ptr + r)
            x = tl.load(
                x_ptr + source * K + (c // per_group) * group + (c % per_group) * step + k
            ).to(tl.float32)
            if NORM == 1:
                next_squares = next_squares + (
                    squares[r] + tl.sum(tl.reshape(x * x, (BK // 8, 8)), axis=1),
                )
                x = x * gain
            next_accs = next_accs + (accs[r] + sum8(w * x[None, :], BN, BK),)
        if NORM == 1:
            squares = next_squares
        if NORM == 2 and c % per_group == per_group - 1:
            head = (c // per_group) * (BK // SLICE) + tl.arange(0, BK // 8) * 8 // SLICE
            scaled = ()
            for r in tl.static_range(R):
                total = tl.zeros([BK // 8], tl.float32)
                for t in tl.static_range(TILES):
                    total += tl.load(gain_ptr + (r * (K // HEAD) + head) * TILES + t)
                part = next_accs[r] * tl.rsqrt(total / HEAD + eps)[None, :]
                if c >= per_group:
                    part = part + done[r]
                scaled = scaled + (part,)
            done = scaled
            accs = ()
            for _ in tl.static_range(R):
                accs = accs + (tl.zeros([BN, BK // 8], tl.float32),)
        else:
            accs = next_accs
    if NORM == 2:
        accs = done
    out = sum_rows(accs, R)
    if NORM == 1:
        means = sum_vectors(squares, R)
        scaled = ()
        for r in tl.static_range(R):
            scaled = scaled + (out[r] * tl.rsqrt(means[r] / K + eps),)
        out = scaled
    return out


@triton.jit
def swiglu_dot(
    w_ptr,
    tile,
    N,
    x_ptr,
    gain_ptr,
    eps,
    R: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    NORM: tl.constexpr,
    WAIT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """``silu(gate) * up`` for BN outputs: weight rows n and N + n side by side in one tile, so that
    both are in flight at once."""
    i = tl.arange(0, 2 * BN)
    n = tile * BN + i // 2
    y = tile_dot(
        w_ptr,
        n + (i % 2) * N,
        n < N,
        x_ptr,
        gain_ptr,
        eps,
        R,
        K,
        2 * BN,
        BK,
        NORM,
        8,
        1,
        WAIT,
        AHEAD=AHEAD,
    )
    out = ()
    for r in tl.static_range(R):
        gate, up = tl.split(tl.reshape(y[r], (BN, 2)))
        out = out + (silu(gate) * up,)
    return out


@triton.jit
def gemv_kernel(
    w_ptr,
    x_ptr,
    gain_ptr,
    y_ptr,
    source_ptr,
    h_ptr,
    hx_ptr,
    row_ptr,
    pf_ptr,
    pf_bytes,
    pf_from,
    N,
    y_stride,
    eps,
    R: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    HEAD: tl.constexpr,
    TILES: tl.constexpr,
    SLICE: tl.constexpr,
    HAS_ROW: tl.constexpr,
    AHEAD: tl.constexpr,
    PF: tl.constexpr,
    PDL: tl.constexpr,
    THREADS: tl.constexpr,
):
    pid = tl.program_id(0)
    if PF:
        prefetch_tail(pid, pf_ptr, pf_bytes, pf_from, THREADS)
    if SWIGLU:
        out = pid * BN + tl.arange(0, BN)
        mask = out < N
        y = swiglu_dot(w_ptr, pid, N, x_ptr, gain_ptr, eps, R, K, BN, BK, NORM, PDL, AHEAD)
        for r in tl.static_range(R):
            tl.store(y_ptr + r * y_stride + out, y[r].to(y_ptr.dtype.element_ty), mask=mask)
    else:
        rows = pid * BN + tl.arange(0, BN)
        row_mask = rows < N
        z = tile_dot(
            w_ptr,
            rows,
            row_mask,
            x_ptr,
            gain_ptr,
            eps,
            R,
            K,
            BN,
            BK,
            NORM,
            HEAD,
            TILES,
            PDL,
            SLICE,
            row_ptr,
            HAS_ROW,
            AHEAD,
        )
        for r in tl.static_range(R):
            if RESIDUAL > 0:
                v = z[r]
                if RESIDUAL == 1:
                    source = r
                    if HAS_ROW:
                        source = tl.load(row_ptr + r)
                    v += tl.load(source_ptr + source * N + rows, mask=row_mask, other=0.0)
                tl.store(h_ptr + r * N + rows, v, mask=row_mask)
                tl.store(hx_ptr + r * N + rows, v.to(hx_ptr.dtype.element_ty), mask=row_mask)
            else:
                tl.store(
                    y_ptr + r * y_stride + rows, z[r].to(y_ptr.dtype.element_ty), mask=row_mask
                )
