"""Compile every kernel of a round for a GPU that is not there, and report what ptxas says.

Run by itself (not under the interpreter): `python tests/ops/compile_round.py MODEL K ARCH`.
Launches are caught, their arguments turned into a signature as the launcher would, and compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
META = torch.device("meta")
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg")


class Catcher:
    """Compiles each distinct launch once."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.seen: dict[str, dict[str, Any]] = {}

    def run(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {k: kwargs.pop(k) for k in OPTIONS if k in kwargs}
        bound = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        signature, constants, attrs = {}, {}, {}
        for i, parameter in enumerate(kernel.params):
            value = bound[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = TYPES[value.dtype]
                if value.storage_offset() * value.element_size() % 16 == 0:
                    attrs[(i,)] = [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            elif value == 1:
                signature[parameter.name], constants[parameter.name] = "constexpr", 1
            else:
                signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
                if value % 16 == 0:
                    attrs[(i,)] = [["tt.divisibility", 16]]
        key = f"{kernel.__name__} {sorted(constants.items())} {signature} {options}"
        if key in self.seen:
            self.seen[key]["launches"] += 1
            return
        source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attrs)
        target = GPUTarget("cuda", self.arch, 32)
        compiled = triton.compile(source, target=target, options=options)
        self.seen[key] = {
            "kernel": kernel.__name__,
            "grid": [int(g) for g in grid],
            "constants": {k: v for k, v in constants.items() if k.isupper()},
            "launches": 1,
            "shared": compiled.metadata.shared,
            "wide_loads": len(re.findall(r"ld\.global[^\n]*\.v4", compiled.asm["ptx"])),
            **resources(compiled.asm["cubin"]),
        }


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes (spills) from the compiled binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    path = Path("/tmp") / f"vk-kernel-{hash(cubin)}.cubin"
    path.write_bytes(cubin)
    text = subprocess.run(
        [str(tool), "-res-usage", str(path)], capture_output=True, text=True, check=True
    ).stdout
    path.unlink()
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}
    return {"registers": found.get("REG", -1), "stack": found.get("STACK", -1)}


def on_meta(model: str, kinds: tuple[str, ...], batch: int = 1) -> tuple[Any, Any]:
    """Weights and state of a few layers of true width, without memory."""
    from vkengine.checkpoint import Builder, rotary_tables
    from vkengine.config import KNOWN_SHAPES
    from vkengine.state import State

    config = replace(KNOWN_SHAPES[model], num_layers=len(kinds), layer_types=kinds)

    def source(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, device=META, dtype=torch.bfloat16)

    cos, sin = rotary_tables(config, 4096, META)
    weights = Builder(config, source, META, torch.bfloat16, cos, sin).model("model.", True)
    return weights, State(config, batch, 2048, META, torch.bfloat16, True)


@contextmanager
def caught(arch: int) -> Iterator[Catcher]:
    """Launches inside are compiled, not run."""
    catcher = Catcher(arch)
    original = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        catcher.run(self, *args, grid=grid, warmup=warmup, **kwargs)

    JITFunction.run = run  # type: ignore[method-assign]
    try:
        yield catcher
    finally:
        JITFunction.run = original  # type: ignore[method-assign]


def compile_round(model: str, k: int, arch: int, batch: int = 1) -> list[dict[str, Any]]:
    from vkengine.graph import Round
    from vkengine.lanes import Lanes
    from vkengine.rows import Workspace

    weights, state = on_meta(model, ("gdn", "attention", "gdn"), batch)
    with caught(arch) as catcher:
        Round(weights, state, Lanes.make(batch, batch, META), Workspace(META), k).run()
    return list(catcher.seen.values())


if __name__ == "__main__":
    found = compile_round(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps(found))  # noqa: T201
