"""Request parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

METHODS = ("none", "mtp", "ngram", "oracle")


@dataclass(frozen=True, slots=True)
class Draft:
    """How to draft. `acceptance`: synthetic chance, given that the previous was accepted."""

    method: str = "none"
    k: int | str = 0
    head_rows: int | None = None
    acceptance: float | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"draft.method: {self.method!r} is none of {', '.join(METHODS)}")
        if self.k != "auto" and not (isinstance(self.k, int) and 0 <= self.k <= 8):
            raise ValueError("draft.k: must be 0 to 8 or 'auto'")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling. `top_k` 0 is off; `seed` None is drawn by the engine."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    choice: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    draft: Draft | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError("max_tokens: must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError("min_tokens: must be 0 to max_tokens")
        if self.temperature < 0:
            raise ValueError("temperature: must not be negative")
        if not 0 < self.top_p <= 1:
            raise ValueError("top_p: must be above 0, up to 1")
