"""Other tools' result files, read by formula and never by name.

A field is imported only where its formula is exactly one of ours; any other is refused, with the
reason. Files known: vLLM bench serve, SGLang bench_serving, AIPerf, GuideLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from finalbench.errors import UsageError
from finalbench.scenario import Frozen

Tool = Literal["vllm", "sglang", "aiperf", "guidellm"]

CHUNKS = "counts stream chunks as tokens"
PROMPT = "adds prompt tokens"
CLOCK = "its clock runs until every response is closed, not to the last content event"
INTERPOLATED = "an interpolated percentile; ours are nearest-rank with a sample floor"
FIRST_CHUNK = (
    "divides by all tokens but one; equal to ours only where every first chunk holds one token"
)


class ForeignValue(Frozen):
    """One field of the file. `metric` is our id where the formulas agree; seconds and tok/s."""

    field: str
    metric: str | None
    value: float | None
    reason: str | None = None


class Foreign(Frozen):
    """What a file gives, refusals included."""

    tool: Tool
    completed: int | None
    failed: int | None
    values: tuple[ForeignValue, ...]

    def value(self, metric: str) -> float | None:
        return next((v.value for v in self.values if v.metric == metric), None)


@dataclass(frozen=True, slots=True)
class _Rule:
    """`metric` None refuses the field for `reason`; `scale` turns the tool's unit into ours."""

    metric: str | None
    scale: float = 1.0
    reason: str | None = None


def _refuse(reason: str) -> _Rule:
    return _Rule(None, reason=reason)


_MS = 1e-3
_BENCH: dict[str, _Rule] = {
    "mean_ttft_ms": _Rule("ttft_s", _MS),
    "mean_tpot_ms": _refuse(FIRST_CHUNK),
    "output_throughput": _refuse(CLOCK),
    "total_token_throughput": _refuse(PROMPT),
    "max_output_tokens_per_s": _refuse(CHUNKS),
    "median_ttft_ms": _refuse(INTERPOLATED),
    "median_tpot_ms": _refuse(INTERPOLATED),
    "median_itl_ms": _refuse(INTERPOLATED),
    "p99_ttft_ms": _refuse(INTERPOLATED),
    "p99_tpot_ms": _refuse(INTERPOLATED),
    "p99_itl_ms": _refuse(INTERPOLATED),
    "request_goodput": _refuse("per second, not a share of the scheduled requests"),
}
RULES: dict[Tool, dict[str, _Rule]] = {
    "vllm": _BENCH
    | {"mean_itl_ms": _Rule("chunk_gap_s", _MS), "mean_e2el_ms": _Rule("e2e_s", _MS)},
    "sglang": _BENCH
    | {
        "mean_e2e_latency_ms": _Rule("e2e_s", _MS),
        "mean_itl_ms": _refuse(
            "a gap between chunks, or between tokens where the acceptance length is known"
        ),
        "total_throughput": _refuse(PROMPT),
        "accept_length": _refuse("an average since the server's start, earlier traffic included"),
    },
    "aiperf": {
        "time_to_first_token": _Rule("ttft_s"),
        "inter_token_latency": _Rule("tpot_s"),
        "request_latency": _Rule("e2e_s"),
        "output_token_throughput": _refuse(CLOCK),
        "output_token_throughput_per_user": _refuse("the inverse of a mean, not a rate over time"),
        "time_to_second_token": _refuse("no metric of ours"),
        "total_token_throughput": _refuse(PROMPT),
    },
    "guidellm": {
        "time_to_first_token_ms": _Rule("ttft_s", _MS),
        "time_per_output_token_ms": _refuse("divides the whole latency, first token included"),
        "inter_token_latency_ms": _refuse(FIRST_CHUNK),
        "output_tokens_per_second": _refuse(
            "a distribution over time whose events may be chunks, not one ratio"
        ),
        "tokens_per_second": _refuse(PROMPT),
        "request_latency": _refuse("runs to the end of the response, not the last content event"),
    },
}
_UNITS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "us": 1e-6, "ns": 1e-9}


def read_foreign(path: Path) -> Foreign:
    """Read one result file. UsageError when it is none of the known tools'."""
    text = path.read_text(encoding="utf-8")
    document = _document(text, path)
    for tool, known, read in _READERS:
        if known(document):
            return read(tool, document)
    raise UsageError(
        f"{path} is no result file of a known tool",
        hint="known are vLLM bench serve, SGLang bench_serving, AIPerf and GuideLLM",
    )


def _document(text: str, path: Path) -> dict[str, Any]:
    """The JSON object of a file, or the last line of a JSON Lines file."""
    for candidate in (text, text.strip().rpartition("\n")[2]):
        try:
            found = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    raise UsageError(f"{path} holds no JSON object")


def _flat(tool: Tool, document: dict[str, Any]) -> Foreign:
    """vLLM and SGLang: one number a field."""
    values = [*_apply(tool, document)]
    values += _decode_rate(document)
    return Foreign(
        tool=tool,
        completed=_count(document.get("completed")),
        failed=_count(document.get("failed")),
        values=tuple(values),
    )


def _apply(tool: Tool, fields: dict[str, Any]) -> Iterator[ForeignValue]:
    for name, rule in RULES[tool].items():
        if name in fields:
            yield _value(name, rule, fields[name])


def _value(field: str, rule: _Rule, raw: object, scale: float | None = None) -> ForeignValue:
    if rule.metric is None:
        return ForeignValue(field=field, metric=None, value=None, reason=rule.reason)
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not raw > 0:
        return ForeignValue(
            field=field, metric=None, value=None, reason=f"{raw!r} is no measurement"
        )
    factor = rule.scale if scale is None else scale
    return ForeignValue(field=field, metric=rule.metric, value=raw * factor)


def _decode_rate(document: dict[str, Any]) -> Iterator[ForeignValue]:
    """From the per-request arrays of a detailed file, where every chunk holds one token."""
    gaps, lengths = document.get("itls"), document.get("output_lens")
    if not isinstance(gaps, list) or not isinstance(lengths, list):
        return
    field = "itls, output_lens"
    if document.get("max_concurrency") != 1:
        reason = "a decode rate is defined for one stream only"
    elif any(len(g) + 1 != n for g, n in zip(gaps, lengths, strict=True) if n):
        reason = "chunks hold several tokens, and those of the first are not stored"
    else:
        seconds = sum(sum(g) for g in gaps)
        tokens = sum(len(g) for g in gaps)
        if seconds > 0:
            yield ForeignValue(field=field, metric="decode_tok_s", value=tokens / seconds)
            return
        reason = "no gap between tokens"
    yield ForeignValue(field=field, metric=None, value=None, reason=reason)


def _aiperf(tool: Tool, document: dict[str, Any]) -> Foreign:
    """A block of statistics a metric, each with its unit."""
    values: list[ForeignValue] = []
    for name, rule in RULES[tool].items():
        block = document.get(name)
        if not isinstance(block, dict):
            continue
        unit = str(block.get("unit"))
        if rule.metric is not None and unit not in _UNITS:
            reason = f"unit {unit!r} is not a known time"
            values.append(ForeignValue(field=name, metric=None, value=None, reason=reason))
        else:
            values.append(_value(name, rule, block.get("avg"), _UNITS.get(unit)))
    return Foreign(
        tool=tool,
        completed=_count((document.get("request_count") or {}).get("avg")),
        failed=_count((document.get("error_request_count") or {}).get("avg")),
        values=tuple(values),
    )


def _guidellm(tool: Tool, document: dict[str, Any]) -> Foreign:
    """The first benchmark of a report; statistics of its successful requests."""
    benchmarks = document["benchmarks"]
    if len(benchmarks) != 1:
        raise UsageError(f"the report holds {len(benchmarks)} benchmarks; export one at a time")
    found = benchmarks[0].get("metrics", {})
    means = {
        name: found[name].get("successful", {}).get("mean")
        for name in RULES[tool]
        if isinstance(found.get(name), dict)
    }
    totals = found.get("request_totals") or {}
    return Foreign(
        tool=tool,
        completed=_count(totals.get("successful")),
        failed=_count(totals.get("errored")),
        values=tuple(_apply(tool, means)),
    )


def _count(raw: object) -> int | None:
    return int(raw) if isinstance(raw, int | float) and not isinstance(raw, bool) else None


_Known = Callable[[dict[str, Any]], bool]
_Read = Callable[[Tool, dict[str, Any]], Foreign]
_READERS: tuple[tuple[Tool, _Known, _Read], ...] = (
    ("guidellm", lambda d: isinstance(d.get("benchmarks"), list), _guidellm),
    ("aiperf", lambda d: isinstance(d.get("time_to_first_token"), dict), _aiperf),
    ("sglang", lambda d: "mean_e2e_latency_ms" in d, _flat),
    ("vllm", lambda d: "output_throughput" in d and "mean_ttft_ms" in d, _flat),
)
