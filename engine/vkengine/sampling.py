"""Request parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

METHODS = ("none", "mtp", "ngram", "oracle")
MAX_K = 8
MAX_LOGPROBS = 100
_SEED_LIMIT = 1 << 64


@dataclass(frozen=True, slots=True)
class Draft:
    """How to draft.

    ``k``: drafts per round, 0 to 8, or "auto" (an online estimate chooses; tokens never depend on
    it). ``head_rows``: the drafter scores only that many vocabulary ids, the lowest ones (a BPE
    numbers frequent pieces first); None for all. ``acceptance``: synthetic chance that a draft
    counts as accepted, given that the previous one did; None to compare truly.
    """

    method: str = "none"
    k: int | str = 0
    head_rows: int | None = None
    acceptance: float | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"draft.method: {self.method!r} is none of {', '.join(METHODS)}")
        whole = isinstance(self.k, int) and not isinstance(self.k, bool)
        if self.k != "auto" and not (whole and 0 <= int(self.k) <= MAX_K):
            raise ValueError(f"draft.k: must be 0 to {MAX_K} or 'auto'")
        if self.head_rows is not None and self.head_rows < 1:
            raise ValueError("draft.head_rows: must be at least 1")
        if self.acceptance is not None and not 0.0 <= self.acceptance <= 1.0:
            raise ValueError("draft.acceptance: must be 0 to 1")

    @property
    def active(self) -> bool:
        return self.method != "none" and self.k != 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling. ``top_k`` 0 is off; ``seed`` None is drawn by the engine.

    Raises ValueError whose message starts with the field's name.
    """

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
        for name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}: must be finite")
        if self.temperature < 0:
            raise ValueError("temperature: must not be negative")
        if self.top_k < 0:
            raise ValueError("top_k: must not be negative (0 is off)")
        if not 0 < self.top_p <= 1:
            raise ValueError("top_p: must be above 0, up to 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError("min_p: must be 0 to 1")
        if self.repetition_penalty <= 0:
            raise ValueError("repetition_penalty: must be above 0")
        if self.seed is not None and not -_SEED_LIMIT // 2 <= self.seed < _SEED_LIMIT:
            raise ValueError("seed: must fit 64 bits")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise ValueError(f"{name}: must be 0 to {MAX_LOGPROBS}")
        for token, bias in (self.logit_bias or {}).items():
            if math.isnan(bias) or bias == math.inf:
                raise ValueError(f"logit_bias: bias of id {token} must be finite or -inf")
