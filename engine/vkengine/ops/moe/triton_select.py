"""Top-k of the router's logits."""

from __future__ import annotations

import triton
import triton.language as tl

from vkengine.ops.triton_common import sigmoid

#: Experts per tile: one 16-byte load a thread of a warp.
SPAN = tl.constexpr(128)
LOWEST = tl.constexpr(-0x7FFFFFFF - 1)
#: Distance of two choices that are waited for: a cache line each, or the programs that look at them
#: again and again would all stand before one slice of the cache.
APART = tl.constexpr(32)


@triton.jit
def select_experts(
    logits_ptr,
    ids_ptr,
    choice_ptr,
    weights_ptr,
    shared_ptr,
    R: tl.constexpr,
    LANES: tl.constexpr,
    E: tl.constexpr,
    TOPK: tl.constexpr,
):
    """The TOPK experts with the largest logits of each row, ties to the lowest id, their softmax
    weights over the chosen, and the shared expert's gate.

    ``logits [R, E + 1]`` were written by other programs of the same launch. One warp holds a whole
    row (``LANES`` rows, the real ones again and again), so that a maximum needs no exchange between
    warps. NaN counts as minus infinity: ids stay valid whatever the input."""
    spans: tl.constexpr = (E + SPAN - 1) // SPAN
    lane = tl.arange(0, LANES)
    row = lane % R
    keys = ()
    names = ()
    for i in tl.static_range(spans):
        e = row[:, None] * 0 + i * SPAN + tl.arange(0, SPAN)[None, :]
        logit = tl.load(
            logits_ptr + row[:, None] * (E + 1) + e,
            mask=e < E,
            other=float("-inf"),
            cache_modifier=".cg",
        )
        logit = tl.where(logit == logit, logit, float("-inf"))
        # An integer in the order of the floats; below them all where there is no expert.
        bits = logit.to(tl.int32, bitcast=True)
        ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        keys = keys + (tl.where(e < E, ordered, LOWEST),)
        names = names + (e,)
    gate = tl.load(logits_ptr + row * (E + 1) + E, cache_modifier=".cg")
    ids = ()
    values = ()
    for _ in tl.static_range(TOPK):
        most = keys[0]
        for i in tl.static_range(1, spans):
            most = tl.maximum(most, keys[i])
        best = tl.max(most, axis=1)
        first = tl.where(keys[0] == best[:, None], names[0], 0x7FFFFFFF)
        for i in tl.static_range(1, spans):
            found = tl.where(keys[i] == best[:, None], names[i], 0x7FFFFFFF)
            first = tl.minimum(first, found)
        chosen = tl.min(first, axis=1)
        left = ()
        for i in tl.static_range(spans):
            left = left + (tl.where(names[i] == chosen[:, None], LOWEST, keys[i]),)
        keys = left
        ids = ids + (chosen,)
        bits = tl.where(best < 0, best ^ 0x7FFFFFFF, best)
        values = values + (bits.to(tl.float32, bitcast=True),)
    top = values[0]
    floor = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([LANES], tl.float32)
    raw = ()
    for j in tl.static_range(TOPK):
        weight = tl.where(values[j] == top, 1.0, tl.exp(values[j] - floor))
        total += weight
        raw = raw + (weight,)
    once = lane < R
    # First what others wait for; one more than the id, so that zero is "not yet".
    for j in tl.static_range(TOPK):
        tl.store(choice_ptr + (row * TOPK + j) * APART, ids[j] + 1, mask=once)
    for j in tl.static_range(TOPK):
        tl.store(ids_ptr + row * TOPK + j, ids[j], mask=once)
        tl.store(weights_ptr + row * TOPK + j, raw[j] / total, mask=once)
    tl.store(shared_ptr + row, sigmoid(gate), mask=once)
