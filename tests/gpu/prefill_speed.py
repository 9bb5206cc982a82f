"""Milliseconds to put a prompt into a slot, and the kernels that take them.

`python tests/gpu/prefill_speed.py [MODEL ...]`: first four layers, then the full depth.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile
from vkengine.checkpoint import random_model
from vkengine.config import KNOWN_SHAPES
from vkengine.gpu_prefill import Prefill
from vkengine.rows import Workspace
from vkengine.state import State, cache_length

MAX_LEN = 8300
CUDA = torch.device("cuda")


def measure(model: str, layers: int | None) -> None:
    config = KNOWN_SHAPES[model]
    if layers is not None:
        config = replace(config, num_layers=layers, layer_types=config.layer_types[:layers])
    began = time.monotonic()
    with torch.inference_mode():
        w = random_model(config, 0, CUDA, torch.bfloat16, cache_length(MAX_LEN))
        state = State(config, 1, MAX_LEN, CUDA, torch.bfloat16, True)
    prefill = Prefill(w, state, Workspace(CUDA))
    prefill.warm()
    torch.cuda.synchronize()
    print(f"\n{model}, {config.num_layers} layers: ready in {time.monotonic() - began:.1f} s")
    for n in (128, 1024, 8192):
        generator = torch.Generator().manual_seed(n)
        tokens = torch.randint(0, 30000, (n + 1,), generator=generator).to(CUDA, torch.int32)
        times, hosts = [], []
        for _ in range(4):
            state.reset(0)
            torch.cuda.synchronize()
            start = time.perf_counter()
            prefill.prompt(0, tokens, 0, n)
            hosts.append(time.perf_counter() - start)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        finite = state.is_finite(0)
        text = ", ".join(f"{1e3 * t:.1f}" for t in times)
        print(f"{n} tokens: {text} ms (host {1e3 * min(hosts):.1f} ms), finite: {finite}")
        if n > 128:
            state.reset(0)
            with profile(activities=[ProfilerActivity.CUDA]) as found:
                prefill.prompt(0, tokens, 0, n)
                torch.cuda.synchronize()
            print(found.key_averages().table(sort_by="cuda_time_total", row_limit=14))
    print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or ["qwen35-35b-a3b", "qwen36-27b"]:
        for depth in (4, None):
            measure(name, depth)
            torch.cuda.empty_cache()
