"""One sweep over prompt, temperature, acceptance and depth on one GPU: tok/s as JSON.

    python tests/gpu/sweep.py MODEL OUTPUT.json

Captured rounds timed with events, random weights of the true shape, keys before the start are
noise; acceptance is synthetic. Each point runs twice from its start; both rates are kept.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton
from vkengine.bench import Subject
from vkengine.config import KNOWN_SHAPES

CONTEXTS = (128, 1024, 8192, 32768)
TEMPERATURES = (0.0, 0.7)
ACCEPTANCES = (0.6, 0.8, 0.95)
DEPTHS = (0, 1, 2, 3, 4, 5)
ROUNDS = 64


def point(subject: Subject, one: Any, context: int, acceptance: float | None, t: float) -> Any:
    rates, micros, drawn = [], [], []
    for _ in range(2):
        subject.start(context, acceptance, t)
        for _ in range(3):
            one.replay()
        torch.cuda.synchronize()
        before = int(subject.lanes.next_pos[0])
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(ROUNDS):
            one.replay()
        end.record()
        torch.cuda.synchronize()
        spent = start.elapsed_time(end) * 1e3
        tokens = int(subject.lanes.next_pos[0]) - before
        rates.append(tokens / spent * 1e6)
        micros.append(spent / ROUNDS)
        drawn.append(tokens / ROUNDS)
    return {"k": one.k, "context": context, "temperature": t, "acceptance": acceptance,
            "round_us": micros, "tokens_per_round": drawn, "tok_s": rates}  # fmt: skip


def main() -> None:
    model, out = sys.argv[1], Path(sys.argv[2])
    began = time.monotonic()
    subject = Subject(KNOWN_SHAPES[model], max(CONTEXTS) + 1024)
    points = []
    for k in DEPTHS:
        one = subject.round(k)
        one.capture()
        for context in CONTEXTS:
            for t in TEMPERATURES:
                for acceptance in ACCEPTANCES if k else (None,):
                    points.append(point(subject, one, context, acceptance, t))
        document = {
            "schema_version": 1,
            "model": model,
            "weights": "random:0",
            "device": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "rounds": ROUNDS,
            "points": points,
        }
        out.write_text(json.dumps(document, indent=1) + "\n")
        last = points[-1]
        print(k, last["context"], last["acceptance"], last["tok_s"],
              f"{time.monotonic() - began:.0f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
