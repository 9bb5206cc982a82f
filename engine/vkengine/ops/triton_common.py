"""Device functions shared by the Triton kernels.

Two rules hold in every kernel of this package. Values are widened to fp32 right after each load
(the interpreter computes garbage on bf16), and the order of additions depends on the weight's
shape alone, never on how many rows a launch carries.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: True when kernels run under the interpreter (CPU tensors); decided before ``import triton``.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


@triton.jit
def hand_over(PDL: tl.constexpr):
    """Wait for the launch before this one, and let the next one start.

    ``PDL`` 1: in that order, so that whatever is two launches old is complete for every kernel.
    2: the other way round, where the next kernel reads nothing but weights before its own wait: its
    programs then ask for them as early as there is room. 0: neither.
    """
    if PDL == 2:
        gdc_launch_dependents()
    if PDL > 0:
        gdc_wait()
    if PDL == 1:
        gdc_launch_dependents()


@triton.jit
def ask_for(ptr, part, BYTES: tl.constexpr):
    """Have ``BYTES`` from byte ``part * BYTES`` of ``ptr`` brought to the second-level cache, in
    four requests of one thread; nothing waits for them."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .u32 t; .reg .u64 a;
        mov.u32 t, %tid.x;
        setp.eq.u32 p, t, 0;
        cvt.u64.u32 a, $2;
        add.u64 a, a, $1;
        @p cp.async.bulk.prefetch.L2.global [$1], $2;
        @p cp.async.bulk.prefetch.L2.global [a], $2;
        mad.wide.u32 a, $2, 2, $1;
        @p cp.async.bulk.prefetch.L2.global [a], $2;
        mad.wide.u32 a, $2, 3, $1;
        @p cp.async.bulk.prefetch.L2.global [a], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [ptr.to(tl.uint64, bitcast=True) + part.to(tl.uint64) * BYTES, part * 0 + BYTES // 4],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def sum8(p, BN: tl.constexpr, BK: tl.constexpr):
    """[BN, BK] -> [BN, BK / 8]: the eight values of one 16-byte load, added in their thread."""
    return tl.sum(tl.reshape(p, (BN, BK // 8, 8)), axis=2)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    # log1p(exp(x)) is x itself above 20 in fp32, as in torch.
    e = tl.exp(tl.minimum(x, 20.0))
    # log1p by the correction of Kahan: exact where 1 + e rounds.
    u = 1.0 + e
    small = tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.where(x > 20.0, x, tl.where(u == 1.0, e, small))


@triton.jit
def row_key(seed_ptr, b, position, salt):
    """Key words (uint32 scalars) of one row of noise: the first two words of Philox-4x32-10 with
    key (seed low, seed high) and counter (position, choice, 0, 0). ``seed_ptr [B, 3]`` i32 holds
    (seed low, seed high, choice); ``salt`` is xored into the choice. The same numbers as
    ``ops/sample/noise.py``."""
    k0 = tl.load(seed_ptr + 3 * b).to(tl.uint32)
    k1 = tl.load(seed_ptr + 3 * b + 1).to(tl.uint32)
    x1 = (tl.load(seed_ptr + 3 * b + 2) ^ salt).to(tl.uint32)
    x0 = position.to(tl.uint32)
    x2 = x0 ^ x0
    x3 = x2
    for _ in tl.static_range(10):
        p0 = x0.to(tl.uint64) * 0xD2511F53
        p1 = x2.to(tl.uint64) * 0xCD9E8D57
        y0 = (p1 >> 32).to(tl.uint32) ^ x1 ^ k0
        x2 = (p0 >> 32).to(tl.uint32) ^ x3 ^ k1
        x1 = p1.to(tl.uint32)
        x3 = p0.to(tl.uint32)
        x0 = y0
        k0 = k0 + tl.full([], 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full([], 0xBB67AE85, tl.uint32)
    return x0, x1


@triton.jit
def mix(x):
    """32-bit finaliser (lowbias32) on uint32."""
    x = x ^ (x >> 16)
    x = x * tl.full([], 0x7FEB352D, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def uniform(key0, key1, ids):
    """``((w >> 9) + 0.5) * 2**-23`` of the word of each id under a row key."""
    word = mix(mix(ids.to(tl.uint32) ^ key0) ^ key1)
    return ((word >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
