"""Bare loops without HTTP: over transformers' `generate`, and over our engine's `step`.

What serving is held against, to show that the server slows neither arm.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.streamers import BaseStreamer

from .sampling import SamplingParams
from .stock import StockEngine, run_generate

if TYPE_CHECKING:
    from .engine import Engine


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
            run_generate(engine, prompt, params, seed, clock)
        stamps = clock.stamps_s[1:]  # the first call brings the prompt
        spans_s.append(stamps[-1] - stamps[0])
        rates.append((len(stamps) - 1) / spans_s[-1])
    return _document(engine, rates[1:], spans_s[1:], prompt_tokens, output_tokens)


def bare_turns(
    engine: StockEngine,
    prompts: Iterable[str],
    write: Callable[[dict[str, Any]], None],
    *,
    output_tokens: int,
) -> None:
    """Times one prompt at a time, as each comes: a JSON list of token ids a line.

    So that a loop can take turns with a server, minute by minute, on the same prompts. One document
    says that the model is loaded, then one for each prompt: `tokens` after the first over `seconds`
    from the first to the last, and the ids. Raises ValueError for a line that is no such list.
    """
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True, seed=0)
    settings = engine.settings()
    told = ("model", "profile", "weights", "dtype", "device")
    write({"schema_version": 1, "ready": True, **{name: settings[name] for name in told}})
    for line in prompts:
        if not line.strip():
            continue
        clock = _Clock()
        with torch.no_grad():
            run_generate(engine, _prompt(line, engine.vocab_size), params, 0, clock)
        stamps = clock.stamps_s[1:]  # the first call brings the prompt
        write(
            {
                "schema_version": 1,
                "tokens": len(stamps) - 1,
                "seconds": stamps[-1] - stamps[0],
                "token_ids": clock.token_ids,
                "threads": torch.get_num_threads(),
            }
        )


def _prompt(line: str, vocab_size: int) -> list[int]:
    try:
        ids = json.loads(line)
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not ids:
        raise ValueError("each line of standard input must be a JSON list of token ids")
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise ValueError(f"{token_id!r} is no token id of this model")
    return ids


def engine_loop(
    engine: Engine, *, prompt_tokens: int, output_tokens: int, repeat: int, seed: int = 0
) -> dict[str, Any]:
    """The same for an engine of ours, with its default draft: (n - n_first) / (t_last - t_first).

    Several tokens may come in one step, so the first step's are left out, as the first token is.
    """
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True, seed=seed)
    rates: list[float] = []
    spans_s: list[float] = []
    for turn in range(repeat + 1):
        prompt = [rng.randrange(engine.vocab_size) for _ in range(prompt_tokens)]
        engine.add(f"bench-{turn}", prompt, params)
        stamps: list[tuple[float, int]] = []
        while engine.has_work():
            count = sum(len(output.token_ids) for output in engine.step())
            if count:
                stamps.append((time.perf_counter(), count))
        spans_s.append(stamps[-1][0] - stamps[0][0])
        rates.append(sum(count for _, count in stamps[1:]) / spans_s[-1])
    return _document(engine, rates[1:], spans_s[1:], prompt_tokens, output_tokens)


def _document(
    engine: Engine | StockEngine,
    rates: list[float],
    spans_s: list[float],
    prompt_tokens: int,
    output_tokens: int,
) -> dict[str, Any]:
    settings = engine.settings()
    return {
        "schema_version": 1,
        "decode_tok_s": statistics.median(rates),
        "decode_tok_s_repeats": rates,
        "tokens": output_tokens,
        "prompt_tokens": prompt_tokens,
        "repeats": len(rates),
        "seconds": statistics.median(spans_s),
        "threads": torch.get_num_threads(),
        **{name: settings[name] for name in ("model", "profile", "weights", "dtype", "device")},
    }
