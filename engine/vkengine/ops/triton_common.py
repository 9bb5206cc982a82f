"""Device functions shared by the Triton kernels.

Two rules hold in every kernel of this package. Values are widened to fp32 right after each load
(the interpreter computes garbage on bf16), and the order of additions depends on the weight's
shape alone, never on how many rows a launch carries.

``prefetch_l2`` asks the memory system to bring part of the *next* kernel's weights into L2 while
this kernel is short of bandwidth (start, tail, latency-bound phases). It changes no value.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

#: True when kernels run under the interpreter (CPU tensors); decided before ``import triton``.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

#: Bytes one thread's bulk prefetch covers.
PREFETCH_UNIT = 1024


@triton.jit
def prefetch_l2(base, first_byte, n_bytes, THREADS: tl.constexpr, UNITS: tl.constexpr):
    """Prefetch ``THREADS * UNITS`` KiB from ``base + first_byte`` (clamped to ``n_bytes``)."""
    lane = tl.arange(0, THREADS)
    for i in tl.static_range(UNITS):
        off = first_byte + (i * THREADS + lane).to(tl.int64) * 1024
        off = tl.minimum(off, n_bytes - 1024)
        addr = base.to(tl.int64) + off
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], 1024; mov.u32 $0, 0;",
            "=r,l",
            [addr],
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
def philox_word(seed_lo, seed_hi, c0, c1):
    """First 32-bit word of Philox-4x32-10 with key (lo, hi) and counter (c0, c1, 0, 0)."""
    k0 = seed_lo.to(tl.uint32)
    k1 = seed_hi.to(tl.uint32)
    x0 = c0.to(tl.uint32)
    x1 = c1.to(tl.uint32)
    x2 = tl.zeros_like(x0)
    x3 = tl.zeros_like(x0)
    for _ in tl.static_range(10):
        a = x0.to(tl.uint64) * 0xD2511F53
        b = x2.to(tl.uint64) * 0xCD9E8D57
        y0 = (b >> 32).to(tl.uint32) ^ x1 ^ k0
        y2 = (a >> 32).to(tl.uint32) ^ x3 ^ k1
        x1 = b.to(tl.uint32)
        x3 = a.to(tl.uint32)
        x0 = y0
        x2 = y2
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return x0


@triton.jit
def gumbel(word):
    """Standard Gumbel noise from a 32-bit word: -log(-log(u)), u = (word >> 8 + 0.5) / 2**24."""
    u = ((word >> 8).to(tl.float32) + 0.5) * (1.0 / 16777216.0)
    return -tl.log(-tl.log(u))
