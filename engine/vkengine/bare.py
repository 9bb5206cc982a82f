"""A bare loop over transformers' `generate`: no HTTP, no queue, no second thread.

What stock serving is held against, to show that nothing of ours slows it.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from .sampling import SamplingParams
from .stock import StockEngine, run_generate


class _Clock(BaseStreamer):
    """Stamps each token as it leaves `generate`."""

    def __init__(self) -> None:
        self.stamps_s: list[float] = []
        self.token_ids: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.stamps_s.append(time.perf_counter())
        if value.ndim == 1:
            self.token_ids.append(int(value))

    def end(self) -> None: ...


def bare_loop(
    engine: StockEngine, *, prompt_tokens: int, output_tokens: int, repeat: int, seed: int = 0
) -> dict[str, Any]:
    """Greedy decoding of random prompts, decode only: (n - 1) / (t_last - t_first), tokens/s.

    `decode_tok_s` is the median over `repeat` runs; one run before them is not counted.
    """
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True, seed=seed)
    rates: list[float] = []
    spans_s: list[float] = []
    for _ in range(repeat + 1):
        prompt = [rng.randrange(engine.vocab_size) for _ in range(prompt_tokens)]
        clock = _Clock()
        with torch.no_grad():
            run_generate(engine.model, prompt, params, seed, engine.eos_token_ids, clock)
        stamps = clock.stamps_s[1:]  # the first call brings the prompt
        spans_s.append(stamps[-1] - stamps[0])
        rates.append((len(stamps) - 1) / spans_s[-1])
    return {
        "schema_version": 1,
        "decode_tok_s": statistics.median(rates[1:]),
        "decode_tok_s_repeats": rates[1:],
        "tokens": output_tokens,
        "prompt_tokens": prompt_tokens,
        "repeats": repeat,
        "seconds": statistics.median(spans_s[1:]),
        "threads": torch.get_num_threads(),
        "dtype": engine.settings()["dtype"],
        "device": engine.settings()["device"],
        "model": engine.model_name,
        "weights": engine.settings()["weights"],
    }
