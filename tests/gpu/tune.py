"""Variants of a round on one GPU: microseconds per round of a few layers, as JSON lines."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from triton.runtime.jit import JITFunction
from vkengine import bench
from vkengine.config import KNOWN_SHAPES
from vkengine.ops import triton_config
from vkengine.ops.moe import triton as moe_ops

START = time.monotonic()
SHARED_MEMORY_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT


def say(**row: Any) -> None:
    row["t"] = round(time.monotonic() - START, 1)
    print(json.dumps(row), flush=True)


def small(model: str, layers: int) -> bench.Subject:
    config = KNOWN_SHAPES[model]
    config = replace(config, num_layers=layers, layer_types=config.layer_types[:layers])
    subject = bench.Subject(config, 2032)
    say(event="built", model=model, layers=layers, gib=torch.cuda.memory_allocated() / 2**30)
    return subject


def show(subject: bench.Subject, k: int, name: str) -> None:
    row = bench.measure_round(
        subject, k, context=1024, acceptance=0.8 if k else None, rounds=60, profile=True
    )
    layers = subject.weights.config.num_layers
    print(bench.render({"model": name, "layers": layers, "device": "gpu", "rounds": [row]}))


def step(subject: bench.Subject, name: str, depths: tuple[int, ...] = (0, 3)) -> None:
    found = {}
    for k in depths:
        try:
            row = bench.measure_round(
                subject, k, context=1024, acceptance=0.8 if k else None, rounds=200, profile=False
            )
            found[f"k{k}"] = round(row["step_us"], 1)
        except Exception as error:  # a variant that does not fit is a result too
            found[f"k{k}"] = str(error)[:60]
    say(op="step", name=name, **found)


@contextmanager
def setting(module: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    yield
    for name, value in before.items():
        setattr(module, name, value)


def carve_out(percent: int) -> None:
    """Ask for one split of L1 and shared memory in every kernel that has been compiled."""
    driver = ctypes.CDLL("libcuda.so.1")
    found = set()
    for fn in {id(f): f for f in ALL}.values():
        for cache in fn.device_caches.values():
            for kernel in cache[0].values():
                handle = ctypes.c_void_p(kernel.function)
                found.add(driver.cuFuncSetAttribute(handle, SHARED_MEMORY_CARVEOUT, percent))
    say(event="carve-out", percent=percent, codes=sorted(found))


ALL: list[JITFunction] = []


def remember() -> None:
    original = JITFunction.run

    def run(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        ALL.append(self)
        return original(self, *args, **kwargs)

    JITFunction.run = run  # type: ignore[method-assign]


SHAPES = {
    "in": (12352, 2048),
    "qkv": (9216, 2048),
    "out": (2048, 4096),
    "head": (248320, 2048),
    "draft head": (32768, 2048),
}


def variants(subject: bench.Subject) -> None:
    step(subject, "base")
    for mib in (0, 4, 12, 16):
        with setting(triton_config, NEXT_BYTES=mib << 20):
            step(subject, f"next ahead {mib} MiB")
    for module, values in (
        (moe_ops, {"SHARED_BN": 2}),
        (moe_ops, {"SHARED_BN": 2, "ROUTER_BN": 1}),
        (moe_ops, {"GATE_UP_BN": 2, "GATE_UP_WARPS": 2}),
    ):
        with setting(module, **values):
            step(subject, str(values))
    step(subject, "base again")


def main() -> None:
    torch.cuda.init()
    remember()
    model = sys.argv[2] if len(sys.argv) > 2 else "qwen35-35b-a3b"
    subject = small(model, 8)
    for k in (0, 3) if "show" in sys.argv[1] else ():
        show(subject, k, "base")
    if "all" in sys.argv[1]:
        variants(subject)
    if "carve" in sys.argv[1]:
        for percent in (50, 100):
            carve_out(percent)
            step(subject, f"carve-out {percent}")


if __name__ == "__main__":
    main()
