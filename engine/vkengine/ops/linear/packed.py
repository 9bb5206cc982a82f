"""Packed matrices for a CPU, with a proof at load that rows do not affect each other.

``F.linear`` picks another algorithm for another number of rows and so other bits. Two packed
products walk K in one order for every row count on the machines seen so far, both in fp32:

* ``half``: FBGEMM's, which keeps the matrix as fp16 and widens it in registers. Taken only when
  every element survives the round trip, as those of a bf16 checkpoint do after a scaling by a
  power of two: no value changes, and half as many bytes are read.
* ``full``: oneDNN's, for any fp32 matrix.

That rows are independent is an observation, not a promise, so each form and shape is probed once
per process. A shape that fails falls back to zero-padded groups of eight rows through ``F.linear``
(constant shape, constant algorithm), and :func:`fallbacks` reports it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 8
PROBED_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 18, 24, 27, 32, 36, 45, 54, 63, 64, 72)
_HALF_MAX = 65504.0

#: (form, N, K, threads) -> rows are independent.
_verdict: dict[tuple[str, int, int, int], bool] = {}


def _full(x: Tensor, data: Any) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, data, None, "none", [], "")


# The bound operator itself: OpOverload.__call__ inspects every argument in Python when one is a
# packed-weight object, which costs more than a small product.
_half: Callable[[Tensor, Any], Tensor] = torch.ops.quantized.linear_dynamic_fp16.default._op


def _grouped(x: Tensor, data: Any) -> Tensor:
    rows = x.shape[0]
    padded = -(-rows // GROUP) * GROUP
    if padded != rows:
        x = F.pad(x, (0, 0, 0, padded - rows))
    parts = [F.linear(x[i : i + GROUP], data) for i in range(0, padded, GROUP)]
    return torch.cat(parts)[:rows]


_FORMS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "half": _half,
    "full": _full,
    "grouped": _grouped,
}


@dataclass(slots=True)
class PackedMatrix:
    """One ``[N, K]`` matrix; ``apply`` takes ``x [R, K] f32 contiguous`` to ``[R, N] f32``.

    ``scale`` is a power of two that the stored elements carry; ``apply`` removes it.
    """

    form: str
    data: Any
    shape: tuple[int, int]
    scale: float = 1.0
    run: Callable[[Tensor, Any], Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.run = _FORMS[self.form]

    def apply(self, x: Tensor) -> Tensor:
        if self.scale != 1.0:
            x = x * (1.0 / self.scale)
        return self.run(x, self.data)


def _rows_are_independent(form: str, data: Any, n: int, k: int) -> bool:
    """True when every row's bits are the same at every row count and row index probed."""
    generator = torch.Generator().manual_seed(n * 1_000_003 + k)
    x = torch.randn(max(PROBED_ROWS), k, generator=generator)
    run = _FORMS[form]
    full = run(x, data)
    for rows in PROBED_ROWS:
        for start in {0, x.shape[0] - rows}:
            part = run(x[start : start + rows].contiguous(), data)
            if not torch.equal(part, full[start : start + rows]):
                return False
    return True


def _probed(form: str, data: Any, n: int, k: int) -> bool:
    key = (form, n, k, torch.get_num_threads())
    if key not in _verdict:
        _verdict[key] = _rows_are_independent(form, data, n, k)
        if not _verdict[key]:
            warnings.warn(
                f"matrix {n}x{k}: the packed product ({form}) depends on the row count here; "
                "using a slower one",
                RuntimeWarning,
                stacklevel=3,
            )
    return _verdict[key]


def _halved(w: Tensor) -> tuple[Tensor, float] | None:
    """``w`` times a power of two when fp16 holds it exactly, and that power; else None."""
    top = float(w.abs().max())
    if not math.isfinite(top):
        return None
    for scale in (1.0, 2.0 ** math.floor(math.log2(_HALF_MAX / top)) if top > 0 else 1.0):
        scaled = w * scale
        if torch.equal(scaled.half().float(), scaled):
            return scaled, scale
    return None


def pack(w: Tensor) -> PackedMatrix:
    """Pack ``w [N, K]`` (any float dtype, CPU). Warns when the shape must fall back."""
    plain = w.float().contiguous()
    n, k = plain.shape
    if "fbgemm" in torch.backends.quantized.supported_engines:
        halved = _halved(plain)
        if halved is not None:
            data = torch.ops.quantized.linear_prepack_fp16(halved[0], None)
            if _probed("half", data, n, k):
                return PackedMatrix("half", data, (n, k), halved[1])
    if torch.backends.mkldnn.is_available():
        data = torch.ops.mkldnn._reorder_linear_weight.default(plain)
        if _probed("full", data, n, k):
            return PackedMatrix("full", data, (n, k))
    return PackedMatrix("grouped", plain, (n, k))


def fallbacks() -> list[str]:
    """Packed products that failed the probe in this process, as ``form NxK``."""
    return sorted(f"{form} {n}x{k}" for (form, n, k, _), good in _verdict.items() if not good)
