"""What an engine says about a request, shared by every engine and the server. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field


class EngineFull(Exception):
    """No slot or no memory for one more sequence now; the caller may try again later."""


@dataclass(slots=True)
class TokenLogprobs:
    """One position: the token, its natural-log probability and the `top` ones, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    rank: int = 0  # of the token itself, 1 is the most likely; 0 is unknown
    logsumexp: float = 0.0  # logprob + logsumexp is the raw logit


@dataclass(slots=True)
class RequestStats:
    """A finished request in numbers. Drafts are verify rounds, before truncation at the end."""

    prompt_tokens: int
    completion_tokens: int
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    seed: int = 0


@dataclass(slots=True)
class Output:
    """What one step added to one request."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: int | str | None = None
    error: str | None = None
    stats: RequestStats | None = None  # with the finish reason; so far, if asked for
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # on the first output
