"""Which rows one round carries, and the scratch memory it uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class Rows:
    """R = B*M rows, the M rows of one sequence consecutive; row (b, j) is at pos0[b] + j.

    ``host`` mirrors (slot, pos0) as Python ints on a CPU and is None in a captured graph. Rows
    that are not ``valid`` compute garbage that nothing reads; padded sequences use the null slot.
    """

    slot: Tensor  # [B] i32
    pos0: Tensor  # [B] i32, absolute position of the sequence's first row
    m: int
    valid: Tensor  # [R] bool
    host: list[tuple[int, int]] | None = None

    @staticmethod
    def on_host(pairs: list[tuple[int, int]], m: int) -> Rows:
        """Rows for (slot, pos0) pairs on a CPU, all valid."""
        both = torch.tensor(pairs, dtype=torch.int32).t()
        valid = torch.ones(len(pairs) * m, dtype=torch.bool)
        return Rows(both[0], both[1], m, valid, pairs)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(slot, pos0) of each sequence as ints; costs a device sync unless on a CPU."""
        if self.host is None:
            return list(zip(self.slot.tolist(), self.pos0.tolist(), strict=True))
        return self.host


@dataclass(slots=True)
class Workspace:
    """Named scratch buffers, allocated on first use and kept for ever (graphs replay on them)."""

    device: torch.device
    buffers: dict[tuple[object, ...], Tensor] = field(default_factory=dict)
    views: dict[tuple[int, ...], Any] = field(default_factory=dict)  # views of buffers, by op

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """The buffer of that name, shape and dtype; zeros when new, else its last content."""
        key = (name, shape, dtype)
        found = self.buffers.get(key)
        if found is None:
            found = torch.zeros(shape, dtype=dtype, device=self.device)
            self.buffers[key] = found
        return found

    def poison(self) -> None:
        """Overwrite every buffer (NaN, or -1 for integers): a test's way to find stale reads."""
        for buffer in self.buffers.values():
            buffer.fill_(float("nan") if buffer.is_floating_point() else -1)
