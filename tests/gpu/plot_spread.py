"""Draws the sweep of sweep.py beside a model of its bytes and launches, and lists what misses it.

    python tests/gpu/plot_spread.py docs/spread.json docs/spread.svg

The model (Qwen3.5-35B-A3B, bf16, draft head of 32,768 rows): a round reads its weights, state and
keys once at 4.3 TB/s, the copy rate of one H200, and each kernel costs 1.5 us.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

#: Bytes of a round at 2,048 tokens of context, by depth; independent routing.
ROUND_BYTES = (6.06e9, 8.28e9, 10.44e9, 12.53e9, 14.57e9, 16.56e9)
KV_BYTES_PER_TOKEN = 10240 * 2
#: One attention layer of the draft module against ten of the model.
DRAFT_KV_BYTES_PER_TOKEN = KV_BYTES_PER_TOKEN / 10
KERNELS, KERNELS_PER_DRAFT, LAUNCH_S = 253, 11, 1.5e-6
BYTES_PER_S = 4.3e12


def round_s(k: int, context: int) -> float:
    more = (context - 2048) * (KV_BYTES_PER_TOKEN + k * DRAFT_KV_BYTES_PER_TOKEN)
    return (ROUND_BYTES[k] + more) / BYTES_PER_S + (KERNELS + k * KERNELS_PER_DRAFT) * LAUNCH_S


def tokens(k: int, acceptance: float | None) -> float:
    a = acceptance or 0.0
    return (1 - a ** (k + 1)) / (1 - a)


def predicted(point: dict[str, Any]) -> float:
    k = point["k"]
    return tokens(k, point["acceptance"]) / round_s(k, point["context"])


def measured(point: dict[str, Any]) -> float:
    """Of the round's time and the expected number of tokens: a short run's luck in acceptance
    says nothing about kernels."""
    return tokens(point["k"], point["acceptance"]) / statistics.mean(point["round_us"]) * 1e6


def draw(points: list[dict[str, Any]], path: Path) -> None:
    contexts = sorted({p["context"] for p in points})
    chances = sorted({p["acceptance"] for p in points if p["acceptance"] is not None})
    figure, axes = plt.subplots(1, len(contexts), figsize=(13, 3.8), sharey=True)
    for axis, context in zip(axes, contexts, strict=True):
        for color, chance in zip(("C0", "C1", "C2"), chances, strict=True):
            for t, marker in ((0.0, "o"), (0.7, "x")):
                own = [
                    p for p in points
                    if p["context"] == context and p["temperature"] == t
                    and p["acceptance"] in (None, chance)
                ]  # fmt: skip
                ks = [p["k"] for p in own]
                label = f"acceptance {chance}, {'greedy' if t == 0 else f'T={t}'}"
                axis.plot(ks, [measured(p) for p in own], marker, color=color, label=label, ms=5)
                if t == 0:
                    axis.plot(ks, [predicted(p) for p in own], "-", color=color, lw=1, alpha=0.6)
        axis.set_title(f"{context:,} tokens before", fontsize=10)
        axis.set_xlabel("drafts a round, k")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("tok/s, one stream")
    axes[0].set_ylim(0)
    handles, labels = axes[0].get_legend_handles_labels()
    handles.append(plt.Line2D([], [], color="grey", lw=1))
    labels.append("model: bytes / 4.3 TB/s + 1.5 us a kernel")
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    document = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    points = document["points"]
    draw(points, Path(sys.argv[2]))
    for point in points:
        share = measured(point) / predicted(point)
        if abs(share - 1) > 0.15:
            print(
                f"k={point['k']} context={point['context']} T={point['temperature']} "
                f"acceptance={point['acceptance']}: {measured(point):.0f} tok/s, "
                f"{share:.0%} of {predicted(point):.0f}"
            )


if __name__ == "__main__":
    main()
