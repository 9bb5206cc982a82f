"""What the toy server does wrong, as one frozen set of knobs.

`NAME[,key=value...]` picks a preset and overrides knobs: `ok,step_ms=1`, `cut_stream,cut_after=5`.
Presets are only short names for knobs; every knob can be set under `ok`.
"""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from finalbench.errors import UsageError


class Behaviour(BaseModel):
    """Knobs of the toy server. Times in milliseconds; counts are tokens unless the name says more.

    A count of -1 means "never". `pattern` overrides `tokens_per_chunk` with a repeated list of
    chunk sizes, written `1:4:2`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Speed
    step_ms: float | None = None  # None: by profile, vk 2 ms, stock 10 ms
    draft_ms: float = 0.2  # added to a step for each draft token
    prefill_ms: float = 1.0
    prefill_us_per_token: float = 0.0
    jitter: float = 0.0  # uniform share of a step's time, seeded by the request number
    tokens_per_chunk: int = 1
    pattern: str = ""
    slots: int = 4096  # requests served at once; others wait
    sync: bool = False  # all streams step on one common tick
    slow_first_ms: float = 0.0  # added on the first sight of each power-of-two prompt length
    warm_decay_ms: float = 0.0  # added to request r as warm_decay_ms * 0.5**r
    drift_per_request: float = 0.0  # step time grows by this share with each request
    drift_per_s: float = 0.0  # ... and with each second the server is up
    slot_bias: float = 0.0  # slower by this share on even starts counted in slot_file
    slot_file: str = ""
    done_delay_ms: float = 0.0  # between the last content and the usage event
    start_ms: float = 0.0  # /health answers 503 for this long

    # Usage and counting
    usage: Literal["normal", "absent", "always", "cumulative", "incremental", "wrong"] = "normal"
    usage_wrong_share: float = 0.0  # share of requests whose usage is one short
    reasoning_usage: bool = False  # completion_tokens_details.reasoning_tokens in usage
    prompt_tokens_extra: int = 0  # added to usage.prompt_tokens ...
    inflate_from: int = 1  # ... from this request on (1 = the first)
    ids: bool = True  # honour return_token_ids
    counter_factor: float = 1.0  # generation_tokens_total in /metrics times this

    # Shape of the stream
    reasoning: Literal["none", "reasoning_content", "reasoning"] = "none"
    reasoning_tokens: int = -1  # -1: all tokens, when reasoning is on
    role_chunk: bool = False
    empty_chunks: int = 0
    keepalive: bool = False
    multibyte: bool = False  # output is characters of 2 to 4 bytes, one byte a token
    newlines: bool = False  # output is newlines only
    split_bytes: int = 0  # body cut into pieces of this many bytes
    crlf: bool = False
    stamp: bool = False  # each chunk carries `t_ns`, monotonic time at which it was written

    # Endings
    error_after: int = -1
    error_style: Literal["data", "event"] = "data"
    cut_after: int = -1
    stall_after: int = -1  # stops sending, keeps the connection open
    no_done: bool = False
    no_finish: bool = False
    empty_body: bool = False
    eos_after: int = -1
    pad_after_eos: bool = False
    context_limit: int = -1  # finish_reason length after this many tokens
    finish_reason: str = ""  # forced
    fail_share: float = 0.0  # of requests, answered with fail_status
    fail_status: int = 500
    fail_text: str = "planned failure"
    die_after: int = -1  # requests served before the process ends in the middle of the next
    die_code: int = 9

    # Identity, settings, cache
    weights: str = "real"  # what the server says it holds
    ignore: str = ""  # fields accepted and not acted on: `temperature+draft+max_tokens`
    nonce: str = ""  # answered instead of VK_NONCE
    model_name: str = ""
    default_top_k: int = 0
    tokenizer: Literal["merges", "bytes"] = "merges"
    cache: bool = False
    cache_speedup: float = 20.0
    cache_forgets: bool = False  # looks prompts up and keeps none
    cache_flushes: bool = True  # serves /reset_prefix_cache
    flush_busy: int = 0

    # Tokens and drafts
    accept: float = 0.7  # chance that a draft is accepted, given the previous one was
    counters: Literal["true", "fake", "absent"] = "true"
    wrong_token: int = -1  # output position of a token that is not the argmax
    wrong_from_request: int = 1
    draft_diverges: int = -1  # as wrong_token, only when drafts are on
    tie_every: int = 0  # one position in so many has two logits 0.0005 apart
    flip_ties: bool = False

    def chunk_sizes(self) -> list[int]:
        """Tokens in each chunk, repeated to the end of the stream."""
        if not self.pattern:
            return [self.tokens_per_chunk]
        return [int(part) for part in self.pattern.split(":")]

    def ignores(self, field: str) -> bool:
        return field in self.ignore.split("+")


PRESETS: dict[str, dict[str, Any]] = {
    "ok": {},
    "fast": {"step_ms": 0.0, "prefill_ms": 0.0},
    "chunks": {"tokens_per_chunk": 4},
    "usage_absent": {"usage": "absent", "ids": False},
    "usage_cumulative": {"usage": "cumulative", "ids": False},
    "usage_incremental": {"usage": "incremental", "ids": False},
    "usage_wrong": {"usage": "wrong"},
    "usage_mismatch": {"usage_wrong_share": 0.01},
    "counter_mismatch": {"counter_factor": 1.75},
    "prompt_inflated": {"prompt_tokens_extra": 3, "inflate_from": 2},
    "no_ids": {"ids": False},
    "reasoning": {"reasoning": "reasoning_content"},
    "reasoning_alt": {"reasoning": "reasoning"},
    "reasoning_then_content": {"reasoning": "reasoning_content", "reasoning_tokens": 4},
    "role_only": {"role_chunk": True},
    "empty_chunks": {"role_chunk": True, "empty_chunks": 2, "keepalive": True},
    "split_utf8": {"multibyte": True, "split_bytes": 7},
    "newlines": {"newlines": True},
    "error_event": {"error_after": 5},
    "error_named_event": {"error_after": 5, "error_style": "event"},
    "cut_stream": {"cut_after": 5},
    "stall": {"stall_after": 5},
    "no_done": {"no_done": True},
    "empty_body": {"empty_body": True},
    "early_eos": {"eos_after": 5},
    "padded": {"eos_after": 5, "pad_after_eos": True},
    "context_limit": {"context_limit": 3},
    "abort": {"finish_reason": "abort"},
    "late_done": {"done_delay_ms": 200.0},
    "ignored_temperature": {"ignore": "temperature"},
    "ignored_draft": {"ignore": "draft"},
    "ignored_max_tokens": {"ignore": "max_tokens"},
    "other_defaults": {"default_top_k": 20},
    "prefix_cache": {"cache": True, "prefill_us_per_token": 50.0},
    "busy_flush": {"cache": True, "flush_busy": 2},
    "slow_first_shape": {"slow_first_ms": 50.0},
    "warming": {"warm_decay_ms": 40.0},
    "drift": {"drift_per_request": 0.01},
    "slot_bias": {"slot_bias": 0.2},
    "wrong_nonce": {"nonce": "0" * 16},
    "wrong_model": {"model_name": "another-model"},
    "fake_counters": {"counters": "fake"},
    "no_counters": {"counters": "absent"},
    "rejects_all": {"accept": 0.0},
    "wrong_token": {"wrong_token": 7},
    "draft_diverges": {"draft_diverges": 7},
    "ties": {"tie_every": 10, "flip_ties": True},
    "drops": {"fail_share": 0.09},
    "dies": {"die_after": 3},
}


def parse_behaviour(text: str) -> Behaviour:
    """`NAME[,key=value...]` to knobs. UsageError names what is unknown and the nearest name."""
    name, *pairs = [part.strip() for part in text.split(",") if part.strip()] or ["ok"]
    if name not in PRESETS:
        raise UsageError(f"unknown behaviour {name!r}{_nearest(name, PRESETS)}")
    knobs = dict(PRESETS[name])
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator:
            raise UsageError(f"behaviour {text!r}: {pair!r} is not key=value")
        if key not in Behaviour.model_fields:
            raise UsageError(f"unknown knob {key!r}{_nearest(key, Behaviour.model_fields)}")
        knobs[key] = value
    try:
        return Behaviour.model_validate(knobs)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"behaviour {text!r}: {first['loc'][0]}: {first['msg']}") from error


def _nearest(name: str, known: Any) -> str:
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; nearest is {found[0]!r}" if found else ""
