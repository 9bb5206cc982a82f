"""Keyed-noise argmax over the logits of the rows of a round.

The logits come from ``gemv_kernel`` (final norm in its prologue). Score of vocabulary id v at
absolute position p: the logit at temperature 0, else ``logit / T + Gumbel(seed, choice, v, p)``.
Up to four banned ids are left out before the position ``until`` (minimum lengths).
The noise depends on the id and the position, never on the row, the depth k or the head's size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vkengine.ops.triton_common import hand_over, row_key, uniform


@triton.jit
def sample_kernel(
    logits_ptr,
    ids_ptr,
    row_ptr,
    temperature_ptr,
    seed_ptr,
    pos_ptr,
    banned_ptr,
    until_ptr,
    value_ptr,
    index_ptr,
    counter_ptr,
    out_ptr,
    V,
    add,
    out_stride,
    M: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_ROW: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    PP: tl.constexpr,
    PDL: tl.constexpr = 0,
):
    """Grid (PARTS, rows). Row r is row r % M of sequence r // M; with ``HAS_ROW`` (M = 1) its
    logits are those of row ``row_ptr[r]``. Writes ``out[r // M * out_stride + r % M]``."""
    hand_over(PDL)
    part = tl.program_id(0)
    r = tl.program_id(1)
    b = r // M
    source = r
    if HAS_ROW:
        source = tl.load(row_ptr + r)
    v = part * CHUNK + tl.arange(0, CHUNK)
    mask = v < V
    logit = tl.load(logits_ptr + source.to(tl.int64) * V + v, mask=mask, other=float("-inf"))
    logit = tl.where(logit == logit, logit, float("-inf"))
    ids = v
    if HAS_IDS:
        ids = tl.load(ids_ptr + v, mask=mask, other=0).to(tl.int32)
    position = tl.load(pos_ptr + b) + add + r % M
    if position < tl.load(until_ptr + b):
        for i in tl.static_range(4):
            logit = tl.where(ids == tl.load(banned_ptr + 4 * b + i), float("-inf"), logit)
    temperature = tl.load(temperature_ptr + b)
    if temperature > 0.0:
        key0, key1 = row_key(seed_ptr, b, position, 0)
        noise = -tl.log(-tl.log(uniform(key0, key1, ids)))
        logit = tl.where(mask, logit / temperature + noise, float("-inf"))
    best = tl.max(logit, axis=0)
    # Ids ascend with v, so the lowest index among equals is the lowest id.
    index = tl.min(tl.where(logit == best, v, 0x7FFFFFFF), axis=0)
    tl.store(value_ptr + r * PARTS + part, best)
    tl.store(index_ptr + r * PARTS + part, index)
    tl.debug_barrier()
    done = tl.atomic_add(counter_ptr + r, 1, sem="acq_rel")
    if done == PARTS - 1:
        tl.store(counter_ptr + r, 0)
        p = tl.arange(0, PP)
        values = tl.load(
            value_ptr + r * PARTS + p, mask=p < PARTS, other=float("-inf"), cache_modifier=".cg"
        )
        indices = tl.load(
            index_ptr + r * PARTS + p, mask=p < PARTS, other=0x7FFFFFFF, cache_modifier=".cg"
        )
        top = tl.max(values, axis=0)
        winner = tl.min(tl.where(values == top, indices, 0x7FFFFFFF), axis=0)
        winner = tl.minimum(winner, V - 1)
        if HAS_IDS:
            winner = tl.load(ids_ptr + winner).to(tl.int32)
        # A row of NaN has no token: -1 tells the host, and the embedding clamps it.
        winner = tl.where(top == float("-inf"), -1, winner)
        tl.store(out_ptr + b * out_stride + r % M, winner)
