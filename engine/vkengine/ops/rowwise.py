"""Row-by-row kernels of the prompt path: norm and SwiGLU, into the weights' type."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkengine.ops.triton_common import silu


def precision_of(dtype: torch.dtype) -> str:
    """How fp32 products may round: exactly for an fp32 model, else with more bits than bf16."""
    return "ieee" if dtype == torch.float32 else "tf32"


@triton.jit
def norm_kernel(h_ptr, gain_ptr, x_ptr, eps, H: tl.constexpr, HP: tl.constexpr):
    """Grid R: ``x = h * rsqrt(mean(h^2) + eps) * gain``."""
    r = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, HP)
    h = tl.load(h_ptr + r * H + k, mask=k < H, other=0.0)
    gain = tl.load(gain_ptr + k, mask=k < H, other=0.0)
    x = h * tl.rsqrt(tl.sum(h * h, axis=0) / H + eps) * gain
    tl.store(x_ptr + r * H + k, x.to(x_ptr.dtype.element_ty), mask=k < H)


@triton.jit
def swiglu_kernel(y_ptr, x_ptr, I: tl.constexpr, BI: tl.constexpr):  # noqa: E741
    """Grid (R, tiles): ``x = silu(y[:, :I]) * y[:, I:]``."""
    r = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BI + tl.arange(0, BI)
    gate = tl.load(y_ptr + r * (2 * I) + i, mask=i < I, other=0.0)
    up = tl.load(y_ptr + r * (2 * I) + I + i, mask=i < I, other=0.0)
    tl.store(x_ptr + r * I + i, (silu(gate) * up).to(x_ptr.dtype.element_ty), mask=i < I)


def norm(h: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """``h [R, H]`` f32, gain ``[H]`` f32 with its 1 -> ``[R, H]`` in ``dtype``."""
    r, hidden = h.shape
    x = torch.empty(r, hidden, device=h.device, dtype=dtype)
    norm_kernel[(r,)](h, gain, x, eps, H=hidden, HP=triton.next_power_of_2(hidden), num_warps=4)
    return x


def swiglu(y: Tensor, dtype: torch.dtype) -> Tensor:
    """``y [R, 2 * I]`` f32 -> ``[R, I]`` in ``dtype``."""
    r, i = y.shape[0], y.shape[1] // 2
    x = torch.empty(r, i, device=y.device, dtype=dtype)
    bi = min(1024, triton.next_power_of_2(i))
    swiglu_kernel[(r, triton.cdiv(i, bi))](y, x, I=i, BI=bi, num_warps=4)
    return x
