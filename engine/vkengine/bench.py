"""Where a decode round's time goes on a GPU: step time, kernels, bytes, bandwidth.

In-process, on random weights of the true shape, one stream, captured graphs timed with CUDA
events over many replays. `bench_decode` returns one JSON-ready document; `render` prints it.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from .checkpoint import random_model
from .config import KNOWN_SHAPES, ModelConfig
from .costs import RoundCosts, round_costs
from .graph import Round
from .lanes import Lanes
from .models.layout import ModelWeights
from .rows import Workspace
from .state import State


@dataclass(slots=True)
class Launch:
    """One kernel launch of a round: what it is and how many weight and state bytes it needs."""

    label: str
    n_bytes: int


@contextmanager
def recorded() -> Generator[list[Launch]]:
    """Collects the Triton launches made inside, in order."""
    found: list[Launch] = []
    original = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        bound = dict(zip(self.arg_names, args, strict=False)) | kwargs
        found.append(Launch(*describe(self.__name__, bound)))
        return original(self, *args, grid=grid, warmup=warmup, **kwargs)

    JITFunction.run = run  # type: ignore[method-assign]
    try:
        yield found
    finally:
        JITFunction.run = original  # type: ignore[method-assign]


def describe(kernel: str, a: dict[str, Any]) -> tuple[str, int]:
    """Label and minimal bytes of one launch (nominal experts: one read per (row, rank) pair)."""
    item = 2
    if kernel == "gemv_kernel":
        n = a["N"] * (2 if a["SWIGLU"] else 1)
        return f"gemv {n}x{a['K']} R{a['R']}", n * a["K"] * item
    if kernel == "route_kernel":
        n_bytes = (a["E"] + 1 + 2 * a["I"]) * a["K"] * item
        return f"route+shared R{a['R']}", n_bytes
    if kernel == "gate_up_kernel":
        return f"gate_up {a['n_pairs']} pairs", a["n_pairs"] * 2 * a["I"] * a["K"] * item
    if kernel == "down_kernel":
        n_bytes = (a["R"] * a["TOPK"] + 1) * a["I"] * a["H"] * item
        return f"down R{a['R']}", n_bytes
    if kernel == "gdn_kernel":
        return f"gdn M{a['M']}", 8 * a["HV"] * a["DK"] * a["DV"]
    return f"{kernel.removesuffix('_kernel')} M{a.get('M', 1)}", 0


def timed(replay: Callable[[], None], repeat: int) -> float:
    """Microseconds per call: ``repeat`` calls between two events, once, after three warm-ups."""
    for _ in range(3):
        replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeat):
        replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / repeat


def kernel_times(replay: Callable[[], None], launches: list[Launch]) -> list[dict[str, Any]]:
    """Per-label microseconds of one replay, from the profiler's trace. Launches overlap: ``us`` is
    how long a kernel ran, ``adds_us`` how much later the round ended because of it."""
    from torch.profiler import ProfilerActivity, profile

    replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: float(e["ts"]))
    n = len(launches)
    if len(kernels) < 3 * n:
        return [{"label": f"trace holds {len(kernels)} kernels, expected {3 * n}"}]
    rows: dict[str, dict[str, Any]] = {}
    last = kernels[-n:]
    for i, (event, launch) in enumerate(zip(last, launches, strict=True)):
        row = rows.setdefault(
            launch.label, {"label": launch.label, "count": 0, "us": 0.0, "adds_us": 0.0, "bytes": 0}
        )
        row["count"] += 1
        row["us"] += float(event["dur"])
        if i:
            # From the end of the kernel before to the end of this one: what it adds to the round.
            before = last[i - 1]
            row["adds_us"] += float(event["ts"]) + float(event["dur"])
            row["adds_us"] -= float(before["ts"]) + float(before["dur"])
        row["bytes"] += launch.n_bytes
    for row in rows.values():
        row["tb_s"] = row["bytes"] / row["adds_us"] / 1e6 if row["adds_us"] > 0 else None
        row["us_each"] = row["us"] / row["count"]
        row["adds_each"] = row["adds_us"] / row["count"]
    return sorted(rows.values(), key=lambda row: -row["adds_us"])


class Subject:
    """Weights, state and lanes for one stream in mid-generation."""

    def __init__(self, config: ModelConfig, max_len: int, seed: int = 0, batch: int = 1) -> None:
        device = torch.device("cuda")
        self.weights: ModelWeights = random_model(
            config, seed, device, torch.bfloat16, max_len + 64
        )
        self.state = State(config, batch, max_len, device, torch.bfloat16, True)
        self.lanes = Lanes.make(batch, batch, device)
        self.ws = Workspace(device)
        generator = torch.Generator(device=device).manual_seed(seed + 1)
        for part in (self.state.k, self.state.v, self.state.mtp_k, self.state.mtp_v):
            part.normal_(generator=generator)

    def start(self, context: int, acceptance: float | None, temperature: float = 0.0) -> None:
        """Every lane as if ``context`` tokens had been prefilled (their keys are noise)."""
        for lane in range(self.lanes.slot.shape[0]):
            self.state.reset(lane)
            self.state.folded[lane] = context
            self.lanes.join(
                lane,
                lane,
                17 + lane,
                context,
                acceptance=acceptance,
                temperature=temperature,
                seed=9,
            )

    def round(self, k: int, head_rows: int | None = 32768) -> Round:
        return Round(self.weights, self.state, self.lanes, self.ws, k, head_rows)


def measure_round(
    subject: Subject,
    k: int,
    *,
    context: int,
    acceptance: float | None,
    rounds: int,
    repeats: int = 3,
    profile: bool = True,
) -> dict[str, Any]:
    """Step time and tokens per second at depth k from ``context`` tokens on."""
    one = subject.round(k)
    subject.start(context, acceptance)
    with recorded() as launches:
        one.run()
    torch.cuda.synchronize()
    one.capture()
    micros, tokens = [], []
    for _ in range(repeats):
        subject.start(context, acceptance)
        one.replay()
        torch.cuda.synchronize()
        before = int(subject.lanes.next_pos[0])
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(rounds):
            one.replay()
        end.record()
        torch.cuda.synchronize()
        micros.append(start.elapsed_time(end) * 1e3)
        tokens.append(int(subject.lanes.next_pos[0]) - before)
    step = statistics.median(m / rounds for m in micros)
    rates = [t / m * 1e6 for t, m in zip(tokens, micros, strict=True)]
    return {
        "k": k,
        "context": context,
        "acceptance": acceptance,
        "step_us": step,
        "tokens_per_round": sum(tokens) / (rounds * repeats),
        "tok_s": statistics.mean(rates),
        "tok_s_each": rates,
        "kernels": len(launches),
        "weight_bytes": sum(launch.n_bytes for launch in launches),
        "tb_s": sum(launch.n_bytes for launch in launches) / step / 1e6,
        "profile": kernel_times(one.replay, launches) if profile else [],
    }


def bench_decode(
    model: str,
    *,
    depths: tuple[int, ...] = (0, 1, 2, 3),
    layers: int | None = None,
    experts_per_token: int | None = None,
    context: int = 1024,
    rounds: int = 150,
    acceptance: float = 0.8,
) -> dict[str, Any]:
    """The document `vk bench --kernels` prints. Fewer ``experts_per_token`` than the shape has tell
    the bytes of experts from the fixed cost of their kernels."""
    config = KNOWN_SHAPES[model]
    if experts_per_token is not None:
        config = replace(config, experts_per_token=experts_per_token)
    if layers is not None:
        config = replace(config, num_layers=layers, layer_types=config.layer_types[:layers])
    subject = Subject(config, 2032)
    rows = [
        measure_round(
            subject,
            k,
            context=context,
            acceptance=acceptance if k else None,
            rounds=rounds,
        )
        for k in depths
    ]
    costs = round_costs({row["k"]: row["step_us"] for row in rows})
    return {
        "schema_version": 1,
        "model": model,
        "layers": config.num_layers,
        "experts_per_token": config.experts_per_token,
        "costs": None if costs is None else asdict(costs),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__},
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "rounds": rows,
    }


def render(document: dict[str, Any]) -> str:
    """The document as a table for a terminal."""
    experts = document["experts_per_token"]
    title = f"{document['model']} x{document['layers']} layers on {document['device']}"
    lines = [title + (f", {experts} experts a token" if experts else "")]
    if document["costs"] is not None:
        lines.append(str(RoundCosts(**document["costs"])))
    for row in document["rounds"]:
        lines.append(
            f"k={row['k']}: {row['step_us']:.0f} us a round, {row['tokens_per_round']:.3f} tokens, "
            f"{row['tok_s']:.0f} tok/s, {row['kernels']} kernels, {row['tb_s']:.2f} TB/s"
        )
        for part in row["profile"]:
            if "us" not in part:
                lines.append(f"  {part['label']}")
                continue
            rate = "" if part["tb_s"] is None else f"{part['tb_s']:5.2f} TB/s"
            lines.append(
                f"  {part['label']:<28} x{part['count']:<4} adds {part['adds_each']:7.2f} us "
                f"(runs {part['us_each']:7.2f})  {rate}  total {part['adds_us']:8.1f}"
            )
    return "\n".join(lines)
