"""Row-streaming matrix-vector products for 1 to 8 rows.

``y[r, n] = sum_k W[n, k] * x[r, k]``, one program per ``BN`` rows of ``W`` with the whole of K in
the program, so every weight is read once from memory for all ``R`` rows. There are two ways to add:

- ``tile_dot``: each thread owns runs of eight consecutive k (one 16-byte load of bf16), adds them
  in order, adds chunk after chunk, and one tree over threads ends the sum.
- ``mma_dot``: tensor cores over 16 weight rows and always eight columns, empty ones included; ``S``
  warps walk a slice of K each, straight from memory, and their sums are added at the end.

Either order is a function of the weight's shape alone, which the table in ``triton_config`` keys.
The number of rows and the rows' neighbours never change a bit.

The stream's norm: the kernel that writes the stream leaves ``h * (1 + gain)`` of the norm that
reads it next, in the weights' type, and sums of squares of ``GROUP`` neighbouring values; here the
products only end with the factor ``rsqrt(mean(h^2) + eps)`` of the row.

Variants (constexpr flags):

- ``NORM`` 1: that factor, from the partial sums ``[R, P]`` in ``norm_ptr``.
- ``NORM`` 2: x is scaled per head of ``HEAD`` values by ``rsqrt(sum(squares) / HEAD + eps)`` with
  the partial sums ``[R, K / HEAD, TILES]`` in ``norm_ptr`` (the gated norm of the DeltaNet).
- ``HAS_ROW``: output row r reads row ``row[r]`` of x (and of the residual source).
- ``RESIDUAL`` 1: ``h[r, n] = source[r, n] + y`` (2: ``= y``) in fp32, ready for the next norm.
- ``SWIGLU``: rows n and N + n of W give ``silu(gate) * up``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vkengine.ops.triton_common import INTERPRETED as _INTERPRETED
from vkengine.ops.triton_common import silu, sum8

INTERPRETED = tl.constexpr(_INTERPRETED)


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
def partial_squares(norm_ptr, row, P: tl.constexpr, PP: tl.constexpr):
    """The partial sums of squares of one row of the stream: ``[PP]``."""
    p = tl.arange(0, PP)
    return tl.load(norm_ptr + row * P + p, mask=p < P, other=0.0)


@triton.jit
def tile_dot(
    w_ptr,
    rows,
    row_mask,
    x_ptr,
    norm_ptr,
    eps,
    R: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    NORM: tl.constexpr,
    P: tl.constexpr,
    PP: tl.constexpr,
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
    for _ in tl.static_range(R):
        accs = accs + (tl.zeros([BN, BK // 8], tl.float32),)
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
    squares = ()
    if NORM == 1:
        for r in tl.static_range(R):
            source = r
            if HAS_ROW:
                source = tl.load(row_ptr + r)
            squares = squares + (partial_squares(norm_ptr, source, P, PP),)
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
        next_accs = ()
        for r in tl.static_range(R):
            source = r
            if HAS_ROW:
                source = tl.load(row_ptr + r)
            x = tl.load(
                x_ptr + source * K + (c // per_group) * group + (c % per_group) * step + k
            ).to(tl.float32)
            next_accs = next_accs + (accs[r] + sum8(w * x[None, :], BN, BK),)
        if NORM == 2 and c % per_group == per_group - 1:
            head = (c // per_group) * (BK // SLICE) + tl.arange(0, BK // 8) * 8 // SLICE
            scaled = ()
            for r in tl.static_range(R):
                total = tl.zeros([BK // 8], tl.float32)
                for t in tl.static_range(TILES):
                    total += tl.load(norm_ptr + (r * (K // HEAD) + head) * TILES + t)
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
    norm_ptr,
    eps,
    R: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    P: tl.constexpr,
    PP: tl.constexpr,
    WAIT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """``silu(gate) * up`` for BN outputs under the stream's norm: weight rows n and N + n side by
    side in one tile, so that both are in flight at once."""
    i = tl.arange(0, 2 * BN)
    n = tile * BN + i // 2
    y = tile_dot(
        w_ptr,
        n + (i % 2) * N,
        n < N,
        x_ptr,
        norm_ptr,
        eps,
        R,
        K,
        2 * BN,
        BK,
        1,
        P,
        PP,
        WAIT=WAIT,
        AHEAD=AHEAD,
    )
    out = ()
    for r in tl.static_range(R):
        gate, up = tl.split(tl.reshape(y[r], (BN, 2)))
        out = out + (silu(gate) * up,)
    return out


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
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
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


@triton.jit
def gemv_kernel(
    w_ptr,
    x_ptr,
    norm_ptr,
    y_ptr,
    source_ptr,
    h_ptr,
    hx_ptr,
    gain_ptr,
    squares_ptr,
    row_ptr,
    N,
    y_stride,
    eps,
    R: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    S: tl.constexpr,
    NORM: tl.constexpr,
    P: tl.constexpr,
    PP: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GROUP: tl.constexpr,
    SWIGLU: tl.constexpr,
    HEAD: tl.constexpr,
    TILES: tl.constexpr,
    SLICE: tl.constexpr,
    HAS_ROW: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """``S`` > 0 chooses ``mma_dot`` with that many slices (BN is 16), 0 ``tile_dot``."""
    pid = tl.program_id(0)
    if S > 0:
        i = tl.arange(0, 8)[:, None]
        half = tl.arange(0, 2)[None, :]
        if SWIGLU:
            pairs = pid * 8 + i + half * N
            inside = (pid * 8 + i + half * 0) < N
        else:
            pairs = pid * 16 + i + half * 8
            inside = pairs < N
        rows = pid * 16 + tl.arange(0, 16)
        mask = rows < N
        y = mma_dot(
            w_ptr, pairs, inside, x_ptr, norm_ptr, eps, R, K, S, NORM, P, PP, HEAD, TILES,
            PDL, row_ptr, HAS_ROW, AHEAD,
        )  # fmt: skip
        r = tl.arange(0, 8)
        live = (r < R)[None, :]
        if SWIGLU:
            gate, up = tl.split(tl.permute(tl.reshape(y, (2, 8, 8)), (1, 2, 0)))
            out = pid * (BN // 2) + tl.arange(0, BN // 2)
            at = y_ptr + r[None, :] * y_stride + out[:, None]
            value = (silu(gate) * up).to(y_ptr.dtype.element_ty)
            tl.store(at, value, mask=live & (out < N)[:, None])
        elif RESIDUAL > 0:
            both = live & mask[:, None]
            at = r[None, :] * N + rows[:, None]
            if RESIDUAL == 1:
                source = r
                if HAS_ROW:
                    source = tl.load(row_ptr + r, mask=r < R, other=0)
                y += tl.load(source_ptr + source[None, :] * N + rows[:, None], mask=both, other=0.0)
            gain = tl.load(gain_ptr + rows, mask=mask, other=0.0).to(tl.float32) + 1.0
            tl.store(h_ptr + at, y, mask=both)
            tl.store(hx_ptr + at, (y * gain[:, None]).to(hx_ptr.dtype.element_ty), mask=both)
            part = pid * (BN // GROUP) + tl.arange(0, BN // GROUP)
            squares = tl.sum(tl.reshape(y * y, (BN // GROUP, GROUP, 8)), axis=1)
            tl.store(
                squares_ptr + r[None, :] * (N // GROUP) + part[:, None],
                squares,
                mask=live & (part < N // GROUP)[:, None],
            )
        else:
            at = y_ptr + r[None, :] * y_stride + rows[:, None]
            tl.store(at, y.to(y_ptr.dtype.element_ty), mask=live & mask[:, None])
    else:
        if SWIGLU:
            i = tl.arange(0, BN)
            n = pid * (BN // 2) + i // 2
            rows = n + (i % 2) * N
            mask = n < N
        else:
            rows = pid * BN + tl.arange(0, BN)
            mask = rows < N
        z = tile_dot(
            w_ptr, rows, mask, x_ptr, norm_ptr, eps, R, K, BN, BK, NORM, P, PP, HEAD, TILES,
            PDL, SLICE, row_ptr, HAS_ROW, AHEAD,
        )  # fmt: skip
        for r in tl.static_range(R):
            if SWIGLU:
                gate, up = tl.split(tl.reshape(z[r], (BN // 2, 2)))
                out = pid * (BN // 2) + tl.arange(0, BN // 2)
                value = (silu(gate) * up).to(y_ptr.dtype.element_ty)
                tl.store(y_ptr + r * y_stride + out, value, mask=out < N)
            elif RESIDUAL > 0:
                v = z[r]
                if RESIDUAL == 1:
                    source = r
                    if HAS_ROW:
                        source = tl.load(row_ptr + r)
                    v += tl.load(source_ptr + source * N + rows, mask=mask, other=0.0)
                gain = tl.load(gain_ptr + rows, mask=mask, other=0.0).to(tl.float32) + 1.0
                tl.store(h_ptr + r * N + rows, v, mask=mask)
                tl.store(hx_ptr + r * N + rows, (v * gain).to(hx_ptr.dtype.element_ty), mask=mask)
                part = pid * (BN // GROUP) + tl.arange(0, BN // GROUP)
                squares = tl.sum(tl.reshape(v * v, (BN // GROUP, GROUP)), axis=1)
                at = squares_ptr + r * (N // GROUP) + part
                tl.store(at, squares, mask=part < N // GROUP)
            else:
                tl.store(y_ptr + r * y_stride + rows, z[r].to(y_ptr.dtype.element_ty), mask=mask)
