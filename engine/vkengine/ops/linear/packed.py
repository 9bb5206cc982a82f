"""fp32 matrices in oneDNN's own layout, with a proof at load that rows do not affect each other.

``F.linear`` picks another algorithm for another number of rows and so other bits. oneDNN's
packed product walks K in one order for every row count on the machines seen so far; that is an
observation, not a promise, so each matrix shape is probed once per process. A shape that fails
falls back to zero-padded groups of eight rows through ``F.linear`` (constant shape, constant
algorithm), and the fallback is reported by :func:`fallbacks`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 8
PROBED_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 18, 24, 27, 32, 36, 45, 54, 63, 64, 72)

_verdict: dict[tuple[int, int, int], bool] = {}


@dataclass(slots=True)
class PackedMatrix:
    """One ``[N, K]`` fp32 matrix. ``data`` is opaque to all but :meth:`apply`."""

    data: Tensor
    shape: tuple[int, int]
    invariant: bool

    def apply(self, x: Tensor) -> Tensor:
        """``x [R, K] f32, contiguous -> [R, N] f32``, each row's bits its own."""
        if self.invariant:
            return torch.ops.mkldnn._linear_pointwise.default(x, self.data, None, "none", [], "")
        return _grouped(x, self.data)


def _grouped(x: Tensor, w: Tensor) -> Tensor:
    rows = x.shape[0]
    padded = -(-rows // GROUP) * GROUP
    if padded != rows:
        x = F.pad(x, (0, 0, 0, padded - rows))
    parts = [F.linear(x[i : i + GROUP], w) for i in range(0, padded, GROUP)]
    return torch.cat(parts)[:rows]


def _rows_are_independent(data: Tensor, n: int, k: int) -> bool:
    """True when every row's bits are the same at every row count and row index probed."""
    generator = torch.Generator().manual_seed(n * 1_000_003 + k)
    x = torch.randn(max(PROBED_ROWS), k, generator=generator)
    op = torch.ops.mkldnn._linear_pointwise.default
    full = op(x, data, None, "none", [], "")
    for rows in PROBED_ROWS:
        for start in {0, x.shape[0] - rows}:
            part = op(x[start : start + rows].contiguous(), data, None, "none", [], "")
            if not torch.equal(part, full[start : start + rows]):
                return False
    return True


def pack(w: Tensor) -> PackedMatrix:
    """Pack ``w [N, K]`` (any float dtype, CPU) as fp32. Warns when the shape must fall back."""
    plain = w.float().contiguous()
    shape = (plain.shape[0], plain.shape[1])
    if not torch.backends.mkldnn.is_available():
        return PackedMatrix(plain, shape, invariant=False)
    data = torch.ops.mkldnn._reorder_linear_weight.default(plain)
    key = (*shape, torch.get_num_threads())
    if key not in _verdict:
        _verdict[key] = _rows_are_independent(data, *shape)
        if not _verdict[key]:
            warnings.warn(
                f"matrix {shape[0]}x{shape[1]}: packed product depends on the row count here; "
                "using padded groups of eight rows, which is slower",
                RuntimeWarning,
                stacklevel=2,
            )
    if not _verdict[key]:
        return PackedMatrix(plain, shape, invariant=False)
    return PackedMatrix(data, shape, invariant=True)


def fallbacks() -> list[str]:
    """Matrix shapes that failed the probe in this process, as ``NxK``."""
    return sorted(f"linear {n}x{k}" for (n, k, _), good in _verdict.items() if not good)
