"""Compare, count and commit a round on the device, and set the cursors of the draft stage."""

from __future__ import annotations

import triton
import triton.language as tl

from vkengine.ops.triton_common import hand_over, row_key


@triton.jit
def accept_kernel(
    tokens_ptr,
    y_ptr,
    limit_ptr,
    cap_ptr,
    acceptance_ptr,
    seed_ptr,
    slot_ptr,
    pos_ptr,
    next_pos_ptr,
    folded_ptr,
    row_ptr,
    chain_pos_ptr,
    record_ptr,
    turn_ptr,
    host_ptr,
    record_stride,
    turn_stride,
    last_pos,
    B,
    token_stride,
    M: tl.constexpr,
    MP: tl.constexpr,
    TURNS: tl.constexpr,
    SALT: tl.constexpr,
    PDL: tl.constexpr = 0,
):
    """Grid B. ``tokens [B, M]``: last committed token, then the drafts; ``y [B, M]``: the
    target's tokens. ``acceptance < 0`` compares; otherwise draft j is accepted with that chance,
    a function of (seed, position), and nothing else changes. Writes the committed
    tokens to the record (-1 beyond them) and their count to its last column, both again to the
    host's record of this turn (``MP`` is the width of a record), the next position,
    ``folded``, the row the first draft is drawn from, and the positions ``chain_pos [M, B]`` of
    the draft stage."""
    hand_over(PDL)
    b = tl.program_id(0)
    j = tl.arange(0, MP)
    pos = tl.load(pos_ptr + b)
    y = tl.load(y_ptr + b * M + j, mask=j < M, other=-1)
    draft = tl.load(tokens_ptr + b * token_stride + j + 1, mask=j < M - 1, other=-2)
    chance = tl.load(acceptance_ptr + b)
    agree = (draft == y).to(tl.int32)
    if chance >= 0.0:
        word, _ = row_key(seed_ptr, b, pos + 1 + j, SALT)
        agree = ((word >> 8).to(tl.float32) * (1.0 / 16777216.0) < chance).to(tl.int32)
    live = (j < M - 1) & (j < tl.load(limit_ptr + b))
    # The number of leading agreements is the index of the first disagreement.
    n = tl.min(tl.where(live & (agree > 0), MP, j), axis=0)
    committed = tl.where(j < n, draft, tl.where(j == n, y, -1))
    last = tl.sum(tl.where(j == n, y, 0), axis=0)
    tl.debug_barrier()
    tl.store(record_ptr + b * record_stride + j, committed, mask=j < M)
    tl.store(record_ptr + b * record_stride + record_stride - 1, n + 1)
    host = host_ptr + (tl.load(turn_ptr) & (TURNS - 1)) * turn_stride + b * record_stride
    tl.store(host + j, tl.where(j == MP - 1, n + 1, committed), mask=(j < M) | (j == MP - 1))
    tl.store(tokens_ptr + b * token_stride, last)
    tl.store(limit_ptr + b, tl.minimum(tl.load(cap_ptr + b), M - 1))
    # Idle lanes on the null slot stop at the end of the cache; live ones end before it.
    tl.store(next_pos_ptr + b, tl.minimum(pos + n + 1, last_pos))
    tl.store(folded_ptr + tl.load(slot_ptr + b), pos)
    tl.store(row_ptr + b, b * M + n)
    tl.store(chain_pos_ptr + j * B + b, pos + n + j, mask=j < M)
