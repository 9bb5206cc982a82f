"""A breach of one rule, and the list of rules there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from finalbench.scenario import Frozen

Severity = Literal["invalid", "warning"]


@dataclass(frozen=True, slots=True)
class Rule:
    """`invalid` takes the row out of every ranking and ratio; a warning stays beside it."""

    id: str
    severity: Severity
    text: str


class Violation(Frozen):
    """`cell_id` is null when the whole run is concerned."""

    rule: str
    severity: Severity
    cell_id: str | None
    block: int | None = None
    message: str
    numbers: dict[str, float | int | str | None] = Field(default_factory=dict)


_ALL: tuple[Rule, ...] = (
    Rule("rate_identity", "invalid", "rate x duration = tokens, for every rate"),
    Rule("out_of_range", "invalid", "every number lies within its metric's sane bounds"),
    Rule("peak_below_mean", "invalid", "the peak rate is never below the mean rate"),
    Rule("time_order", "invalid", "scheduled <= sent <= events in order <= end of stream"),
    Rule("in_flight", "invalid", "no more streams in flight than the cell's concurrency"),
    Rule("request_count", "invalid", "ok + failed + cancelled + incomplete = scheduled"),
    Rule("failures", "invalid", "at most 1 % of scheduled requests fail"),
    Rule("retried", "warning", "no request was made again after it had failed"),
    Rule("credited_fault", "invalid", "a request with status ok ended properly and gave tokens"),
    Rule("token_source_mismatch", "invalid", "token ids, usage and chunks give one count"),
    Rule("token_source_mixed", "invalid", "compared cells count tokens from one source"),
    Rule("engine_count", "invalid", "the engine's own counters agree with what was received"),
    Rule("prompt_length", "invalid", "the server received the prompt length that was asked for"),
    Rule("output_length", "invalid", "with ignore_eos every output has the length asked for"),
    Rule("finish_reason", "invalid", "the finish reason fits the number of tokens"),
    Rule("draft_identity", "invalid", "the draft counters satisfy their identities"),
    Rule("acceptance_unknown", "warning", "a drafting cell has an acceptance length"),
    Rule("acceptance_low", "warning", "drafts are accepted at all: acceptance length above 1.02"),
    Rule("implausible", "invalid", "bytes per step x steps per second <= memory bandwidth"),
    Rule("wrong_server", "invalid", "the server answered with the nonce it was started with"),
    Rule("server_changed", "invalid", "settings before and after the measurement are equal"),
    Rule("settings_unread", "invalid", "the server's effective settings were read back"),
    Rule("settings_differ", "invalid", "dtype, device, threads and weights agree across arms"),
    Rule("class_mismatch", "invalid", "the weights served are of the class the run declares"),
    Rule(
        "correlated_routing",
        "warning",
        "random weights route within 3 % of independent routing, as measured by the server",
    ),
    Rule("kernel_fallback", "warning", "no kernel fallback was in force"),
    Rule("warm_prompt", "invalid", "measured prompts are disjoint from warm-up prompts"),
    Rule(
        "warm_up_unsteady",
        "warning",
        "where warm-up is by rule, it ended with times that vary by at most 10 % over its last "
        "three rounds",
    ),
    Rule("repeated_prompt", "warning", "prompts do not repeat within one cell of a server"),
    Rule("warm_prefix", "invalid", "no prompt of a cold cell was served from a prefix cache"),
    Rule(
        "cache_state",
        "invalid",
        "prompts of a warm or prefix cell found their planned share in the cache, as counted by "
        "the server",
    ),
    Rule("cache_absent", "warning", "the server of a warm or prefix cell has a prefix cache"),
    Rule("cold_start", "warning", "a cell's first request is not over 20 % slower than the rest"),
    Rule("few_blocks", "warning", "at least three blocks of fresh processes"),
    Rule("few_requests", "warning", "at least ten requests in a cell, all blocks together"),
    Rule("missing_block", "warning", "every planned block of the cell was measured"),
    Rule("clock_confounded", "invalid", "GPU clocks of compared arms differ by at most 1 %"),
    Rule("clock_unsteady", "warning", "the GPU clock moved by at most 5 % while an arm was busy"),
    Rule("clock_unobserved", "warning", "the GPU clock was sampled while the arm was busy"),
    Rule("gpu_idle", "warning", "the GPU was busy for at least half of an arm's measured time"),
    Rule("gpu_throttled", "warning", "neither heat nor a power brake held the GPU's clock down"),
    Rule("gpu_shared", "warning", "no second process computed on the GPU"),
    Rule("client_bound", "invalid", "the client can read at least 3 times the cell's chunks"),
    Rule("client_late", "warning", "the client's time stamps are at most 10 ms late under load"),
    Rule("client_unmeasured", "warning", "the ceiling of the client was measured in the same run"),
    Rule("torn_journal", "warning", "journals end with a whole record"),
)

RULES: dict[str, Rule] = {rule.id: rule for rule in _ALL}


def violation(
    rule: str,
    message: str,
    *,
    cell_id: str | None = None,
    block: int | None = None,
    **numbers: float | int | str | None,
) -> Violation:
    """A breach of a known rule; its severity is the rule's."""
    return Violation(
        rule=rule,
        severity=RULES[rule].severity,
        cell_id=cell_id,
        block=block,
        message=message,
        numbers=numbers,
    )
