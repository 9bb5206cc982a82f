"""Counter-based Gumbel noise: a pure function of (seed, choice, position, vocabulary id).

Two stages, both plain 32-bit integer arithmetic that every device computes alike:

1. Row key: the first two words of Philox-4x32-10 with key ``(seed low, seed high)`` and counter
   ``(position, choice, 0, 0)``.
2. Per vocabulary id: ``w = mix(mix(id ^ key0) ^ key1)`` with the 32-bit finaliser :func:`mix`.

``u = ((w >> 9) + 0.5) * 2**-23`` is exact in fp32 and never 0 or 1; the noise is
``-log(-log(u))``. Test vectors are in ``tests/engine/test_sampling_noise.py``.
"""

from __future__ import annotations

from torch import Tensor

_WORD = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
#: Multipliers and shifts of the finaliser ("lowbias32", found by C. Wellons' hash prospector).
MIX_SHIFTS = (16, 15, 16)
MIX_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Four 32-bit words of Philox-4x32 with ten rounds."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0 = _PHILOX_MULTIPLIERS[0] * c0
        p1 = _PHILOX_MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32) ^ c3 ^ k1, p0 & _WORD
        k0 = (k0 + _PHILOX_WEYL[0]) & _WORD
        k1 = (k1 + _PHILOX_WEYL[1]) & _WORD
    return (c0, c1, c2, c3)


def row_key(seed: int, choice: int, position: int) -> tuple[int, int]:
    """The two unsigned 32-bit key words of one row of noise."""
    words = philox4x32((position & _WORD, choice & _WORD, 0, 0), (seed & _WORD, seed >> 32 & _WORD))
    return (words[0], words[1])


def signed(word: int) -> int:
    """An unsigned 32-bit word as the int32 of the same bits."""
    return word - (1 << 32) if word & 0x80000000 else word


def mix(x: Tensor) -> Tensor:
    """32-bit finaliser on int32, in place: twice xor-shift right and multiply, then xor-shift."""
    for i, shift in enumerate(MIX_SHIFTS):
        x ^= (x >> shift) & ((1 << (32 - shift)) - 1)
        if i < 2:
            x *= signed(MIX_MULTIPLIERS[i])
    return x


def word_bits(key: tuple[int, int], ids: Tensor) -> Tensor:
    """The 32-bit word of each id (i32 in, i32 of the same bits out)."""
    x = mix(ids ^ signed(key[0]))
    x ^= signed(key[1])
    return mix(x)


def gumbel(key: tuple[int, int], ids: Tensor) -> Tensor:
    """Standard Gumbel noise [N] fp32 for vocabulary ids [N] i32 under one row key."""
    u = ((word_bits(key, ids) >> 9) & 0x7FFFFF).float()
    u += 0.5
    u *= 2.0**-23
    return u.log_().neg_().log_().neg_()
