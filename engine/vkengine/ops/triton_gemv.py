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

from vkengine.ops.triton_common import hand_over, silu, sum8
from vkengine.ops.triton_mma import mma_dot


@triton.jit
def sum_each(parts, R: tl.constexpr, AXIS: tl.constexpr):
    """The sums of R tensors of one shape over ``AXIS``: a tuple of R, four per exchange through
    shared memory."""
    out = ()
    for g in tl.static_range((R + 3) // 4):
        if R - 4 * g == 1:
            out = out + (tl.sum(parts[4 * g], axis=AXIS),)
        elif R - 4 * g == 2:
            a, b = tl.split(tl.sum(tl.join(parts[4 * g], parts[4 * g + 1]), axis=AXIS))
            out = out + (a, b)
        elif R - 4 * g == 3:
            low = tl.join(parts[4 * g], parts[4 * g + 1])
            high = tl.join(parts[4 * g + 2], parts[4 * g + 2])
            even, odd = tl.split(tl.sum(tl.join(low, high), axis=AXIS))
            a, b = tl.split(even)
            c, _ = tl.split(odd)
            out = out + (a, b, c)
        else:
            low = tl.join(parts[4 * g], parts[4 * g + 1])
            high = tl.join(parts[4 * g + 2], parts[4 * g + 3])
            even, odd = tl.split(tl.sum(tl.join(low, high), axis=AXIS))
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
    WAIT: tl.constexpr = 0,
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
    hand_over(WAIT)
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
    out = sum_each(accs, R, 1)
    if NORM == 1:
        means = sum_each(squares, R, 0)
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
