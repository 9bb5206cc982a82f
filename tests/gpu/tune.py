# ruff: noqa: B023
"""Sweeps of launch shapes on one GPU: microseconds and TB/s per kernel variant, as JSON lines."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Any

import torch
from vkengine import bench
from vkengine.config import KNOWN_SHAPES
from vkengine.ops import triton_config
from vkengine.ops.gdn import triton as gdn_ops
from vkengine.ops.moe import triton as moe_ops
from vkengine.ops.triton_launch import PrefetchPlan, Stream, gemv
from vkengine.rows import Workspace

OFF = PrefetchPlan(0.0, 0.0, 0.0, 0.0, 0.0)
START = time.monotonic()


def say(**row: Any) -> None:
    row["t"] = round(time.monotonic() - START, 1)
    print(json.dumps(row), flush=True)


def graph_us(body: Any, repeat: int = 20) -> float:
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return bench.timed(graph.replay, repeat)


def gemv_sweep(name: str, weights: list[torch.Tensor], rows: tuple[int, ...], **how: Any) -> None:
    n, k = weights[0].shape
    count = max(1, -(-2 * 10**9 // (n * k * 2)))
    chosen = [weights[i % len(weights)] for i in range(count)]
    for r in rows:
        x = torch.randn(r, k, device="cuda").bfloat16()
        gain = torch.zeros(k, device="cuda").bfloat16()
        out = torch.empty(r, n, device="cuda")
        stream = Stream(
            torch.zeros(r, n, device="cuda"), torch.zeros(r, n, device="cuda").bfloat16()
        )
        for warps in (2, 4, 8):
            for bn in (2, 4, 8, 16):
                if bn * k // (warps * 32) > 512 or bn * r > 32:
                    continue
                triton_config.OVERRIDES[n, k] = (bn, triton_config.chunk(k, warps), warps)
                try:

                    def body() -> None:
                        for w in chosen:
                            if how.get("stream"):
                                gemv(w, x, None, stream=stream)
                            else:
                                gemv(w, x, out, eps=1e-6, gain=gain)

                    us = graph_us(body, 5) / count
                    say(
                        op=name, n=n, k=k, r=r, bn=bn, warps=warps, us=us, tb_s=n * k * 2 / us / 1e6
                    )
                except Exception as error:  # a variant that does not fit is a result too
                    say(op=name, r=r, bn=bn, warps=warps, error=str(error)[:80])
        triton_config.OVERRIDES.clear()


def moe_sweep(subject: bench.Subject, rows: tuple[int, ...]) -> None:
    ws = Workspace(torch.device("cuda"))
    layers = [layer.ffn for layer in subject.weights.layers]
    c = subject.weights.config
    for r in rows:
        h = torch.randn(r, c.hidden_size, device="cuda")
        stream = Stream(h, h.bfloat16())
        for name, values in (
            ("GATE_UP_BN", (2, 4, 8)),
            ("DOWN_BN", (2, 4, 8)),
            ("ROUTER_BN", (2, 4, 8)),
        ):
            before = getattr(moe_ops, name)
            for value in values:
                setattr(moe_ops, name, value)
                for share in (0.0, 1.0) if name == "GATE_UP_BN" else (0.0,):

                    def body() -> None:
                        for _ in range(4):
                            for w in layers:
                                stream.h.copy_(h)
                                moe_ops.run(stream, w, ws, pf=None, down_share=share)

                    us = graph_us(body) / (4 * len(layers))
                    say(op="moe", r=r, knob=name, value=value, down_share=share, us=us)
            setattr(moe_ops, name, before)


def plans(subject: bench.Subject, k: int, rounds: int) -> None:
    base = PrefetchPlan()
    variants = {
        "off": OFF,
        "base": base,
        "out only": replace(OFF, out=17.0),
        "out+router": replace(OFF, out=17.0, router=5.5),
        "out+down": replace(OFF, out=17.0, down=1.0),
        "out+mixer4": replace(OFF, out=17.0, mixer=4.0),
        "out+mixer16": replace(OFF, out=17.0, mixer=16.0),
        "base down .5": replace(base, down=0.5),
        "base mixer 16": replace(base, mixer=16.0),
    }
    for name, plan in variants.items():
        row = bench.measure_round(
            subject,
            k,
            plan,
            context=1024,
            acceptance=0.8 if k else None,
            rounds=rounds,
            profile=False,
        )
        say(op="plan", k=k, plan=name, step_us=row["step_us"], tok_s=row["tok_s"])


def small(layers: int) -> bench.Subject:
    config = KNOWN_SHAPES["qwen35-35b-a3b"]
    config = replace(config, num_layers=layers, layer_types=config.layer_types[:layers])
    subject = bench.Subject(config, 2032)
    say(event="built", layers=layers, gib=torch.cuda.memory_allocated() / 2**30)
    return subject


def show(subject: bench.Subject, k: int, plan: PrefetchPlan, name: str, **how: Any) -> None:
    row = bench.measure_round(
        subject, k, plan, context=1024, acceptance=0.8 if k else None, rounds=60, **how
    )
    layers = subject.weights.config.num_layers
    print(bench.render({"model": name, "layers": layers, "device": "gpu", "rounds": [row]}))


def step(
    subject: bench.Subject, plan: PrefetchPlan, name: str, depths: tuple[int, ...] = (0, 3)
) -> None:
    found = {}
    for k in depths:
        try:
            row = bench.measure_round(
                subject,
                k,
                plan,
                context=1024,
                acceptance=0.8 if k else None,
                rounds=60,
                profile=False,
            )
            found[f"k{k}"] = round(row["step_us"], 1)
        except Exception as error:  # a variant that does not fit is a result too
            found[f"k{k}"] = str(error)[:60]
    say(op="step", name=name, **found)


def main() -> None:
    torch.cuda.init()
    subject = small(8)
    for k in (0, 3):
        show(subject, k, OFF, "base")
    if "profile" in sys.argv:
        return
    for bv, warps in ((32, 4), (8, 1), (16, 1)):
        gdn_ops.BV, gdn_ops.WARPS = bv, warps
        step(subject, OFF, f"gdn {bv} {warps}")
    gdn_ops.BV, gdn_ops.WARPS = 16, 2
    for bn, warps in ((4, 4), (8, 2), (8, 4)):
        for shape in ((12352, 2048), (9216, 2048)):
            triton_config.OVERRIDES[shape] = (bn, triton_config.chunk(shape[1], warps), warps)
        step(subject, OFF, f"in_proj bn={bn} warps={warps}")
    triton_config.OVERRIDES.clear()
    for knob, values in (("DOWN_BN", (2,)), ("GATE_UP_BN", (2, 8)), ("ROUTER_BN", (2,))):
        before = getattr(moe_ops, knob)
        for value in values:
            setattr(moe_ops, knob, value)
            step(subject, OFF, f"{knob}={value}")
        setattr(moe_ops, knob, before)


if __name__ == "__main__":
    main()
