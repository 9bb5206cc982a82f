# ruff: noqa: E501
"""The engine in process on a GPU: tokens per second between the first and the last output."""

from __future__ import annotations

import sys
import time

import torch
from vkengine.engine import load_engine
from vkengine.sampling import Draft, SamplingParams


def main(model: str, depths: list[int], equality: bool) -> None:
    start = time.monotonic()
    engine = load_engine(
        model,
        profile="vkae",
        weights="random:0",
        device="cuda",
        dtype="auto",
        threads=None,
        max_model_len=2048,
        max_sequences=8,
        default_draft=Draft("mtp", 3),
    )
    ready = time.monotonic() - start
    gib = torch.cuda.max_memory_allocated() / 2**30
    print(
        f"{model}: ready in {ready:.1f} s, {gib:.1f} GiB, {engine.settings()['host_launch_us']} us launch, {engine.load_s}"
    )
    prompt = torch.randint(0, 30000, (1024,), generator=torch.Generator().manual_seed(1)).tolist()
    texts: dict[str, list[int]] = {}
    cases: list[tuple[int, float | None, float, bool]] = [(k, 0.8, 0.0, True) for k in depths]
    cases += [(0, None, 0.0, False), (0, None, 0.0, True)]
    if equality:
        cases += [(3, None, 0.0, True), (3, None, 0.7, True), (0, None, 0.7, True)]
    for k, acceptance, temperature, pairs in cases:
        rates = []
        engine.pairs = pairs  # two rounds a graph, where there are no drafts
        for turn in range(3):
            draft = Draft("mtp", k, None, acceptance) if k else Draft()
            params = SamplingParams(
                max_tokens=512, temperature=temperature, ignore_eos=True, seed=7, draft=draft
            )
            engine.add("r", prompt, params)
            began = time.perf_counter()
            first = last = None
            count = first_count = 0
            tokens: list[int] = []
            stats = None
            while engine.has_work():
                for output in engine.step():
                    now = time.perf_counter()
                    if first is None:
                        first, first_count = now, len(output.token_ids)
                    last = now
                    count += len(output.token_ids)
                    tokens += output.token_ids
                    stats = output.stats or stats
                    if output.error:
                        raise RuntimeError(output.error)
            assert first is not None and last is not None and stats is not None
            rates.append((count - first_count) / (last - first))
            if turn == 2:
                length = 1 + stats.accepted_tokens / max(1, stats.drafts)
                print(
                    f"k={k} acceptance={acceptance} T={temperature} pairs={pairs}: "
                    f"{', '.join(f'{r:.1f}' for r in rates)} tok/s, "
                    f"{length:.3f} tokens a round, first token {(first - began) * 1e3:.0f} ms"
                )
            if acceptance is None or k == 0:
                same = texts.setdefault(f"T={temperature}", tokens)
                if same != tokens:
                    print(
                        "TOKENS DIFFER",
                        k,
                        temperature,
                        next(
                            i for i, (a, b) in enumerate(zip(same, tokens, strict=False)) if a != b
                        ),
                    )
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], [int(x) for x in sys.argv[2].split(",")], "equality" in sys.argv[3:])
