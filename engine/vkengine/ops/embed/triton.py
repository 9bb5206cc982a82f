"""Start of a round (embedding, cursors) and input of the MTP module."""

from __future__ import annotations

import triton
import triton.language as tl

from vkengine.ops.triton_common import hand_over


@triton.jit
def embed_kernel(
    tokens_ptr,
    embed_ptr,
    gain_ptr,
    h_ptr,
    hx_ptr,
    squares_ptr,
    pos_ptr,
    next_pos_ptr,
    turn_ptr,
    token_stride,
    V,
    M: tl.constexpr,
    H: tl.constexpr,
    HP: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr = 0,
):
    """Grid R. ``h[r] = embed[token]``, with what the first norm needs; the first row of a sequence
    moves its cursor forward."""
    hand_over(PDL)
    r = tl.program_id(0)
    b = r // M
    token = tl.load(tokens_ptr + b * token_stride + r % M).to(tl.int64)
    token = tl.minimum(tl.maximum(token, 0), V - 1)
    k = tl.arange(0, HP)
    x = tl.load(embed_ptr + token * H + k, mask=k < H, other=0.0).to(tl.float32)
    tl.store(h_ptr + r * H + k, x, mask=k < H)
    gain = tl.load(gain_ptr + k, mask=k < H, other=0.0).to(tl.float32) + 1.0
    tl.store(hx_ptr + r * H + k, (x * gain).to(hx_ptr.dtype.element_ty), mask=k < H)
    part = tl.arange(0, HP // GROUP)
    squares = tl.sum(tl.reshape(x * x, (HP // GROUP, GROUP)), axis=1)
    tl.store(squares_ptr + r * (H // GROUP) + part, squares, mask=part < H // GROUP)
    if r % M == 0:
        tl.store(pos_ptr + b, tl.load(next_pos_ptr + b))
    if r == 0:
        tl.store(turn_ptr, tl.load(turn_ptr) + 1)


@triton.jit
def mtp_input_kernel(
    tokens_ptr,
    embed_ptr,
    h_ptr,
    row_ptr,
    final_ptr,
    norm_embedding_ptr,
    norm_hidden_ptr,
    x_ptr,
    token_stride,
    V,
    eps,
    M: tl.constexpr,
    H: tl.constexpr,
    HP: tl.constexpr,
    HAS_ROW: tl.constexpr,
    PDL: tl.constexpr = 0,
):
    """Grid rows. ``x[r] = concat(norm_e(embed[token]), norm_h(final_norm(h[source])))``.

    Gains are stored without their 1. ``final`` is the norm that ends the stream ``h`` (the
    target's, or the MTP layer's own when its output is chained)."""
    hand_over(PDL)
    r = tl.program_id(0)
    b = r // M
    token = tl.load(tokens_ptr + b * token_stride + r % M).to(tl.int64)
    token = tl.minimum(tl.maximum(token, 0), V - 1)
    source = r
    if HAS_ROW:
        source = tl.load(row_ptr + r)
    k = tl.arange(0, HP)
    mask = k < H
    e = tl.load(embed_ptr + token * H + k, mask=mask, other=0.0).to(tl.float32)
    e = e * tl.rsqrt(tl.sum(e * e, axis=0) / H + eps)
    e = e * (tl.load(norm_embedding_ptr + k, mask=mask, other=0.0).to(tl.float32) + 1.0)
    h = tl.load(h_ptr + source.to(tl.int64) * H + k, mask=mask, other=0.0)
    h = h * tl.rsqrt(tl.sum(h * h, axis=0) / H + eps)
    h = h * (tl.load(final_ptr + k, mask=mask, other=0.0).to(tl.float32) + 1.0)
    h = h * tl.rsqrt(tl.sum(h * h, axis=0) / H + eps)
    h = h * (tl.load(norm_hidden_ptr + k, mask=mask, other=0.0).to(tl.float32) + 1.0)
    tl.store(x_ptr + r * (2 * H) + k, e.to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(x_ptr + r * (2 * H) + H + k, h.to(x_ptr.dtype.element_ty), mask=mask)
