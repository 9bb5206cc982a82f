"""Every metric once: id, formula, unit, better direction, version; labels come from here.

A change of a formula is a new version; numbers of different versions are never compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower", "neither"]
Scale = Literal["rate", "time", "ratio", "count"]


@dataclass(frozen=True, slots=True)
class Metric:
    """`formula` is the text shown to readers; `bounds` are what any sane value lies within."""

    id: str
    label: str
    formula: str
    unit: str
    better: Better
    version: int
    scale: Scale
    bounds: tuple[float, float]

    @property
    def column(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label

    @property
    def higher_is_better(self) -> bool:
        return self.better == "higher"


# A rate below one token in 1,000 s or above 1e8 tokens/s, and a time below 1 ns or above a day,
# is a fault of units and not a measurement.
_RATE = (1e-3, 1e8)
_TIME = (1e-9, 86_400.0)


def _rate(id_: str, label: str, formula: str) -> Metric:
    return Metric(id_, label, formula, "tok/s", "higher", 1, "rate", _RATE)


def _time(id_: str, label: str, formula: str) -> Metric:
    return Metric(id_, label, formula, "s", "lower", 1, "time", _TIME)


_ALL = (
    _rate(
        "decode_tok_s",
        "Decode rate",
        "single-stream requests: sum of (tokens - tokens of the first chunk) / "
        "sum of (last content event - first content event)",
    ),
    _rate(
        "e2e_tok_s",
        "End-to-end rate",
        "generated tokens of valid requests / (last content event - first scheduled send), "
        "blocks added",
    ),
    _rate(
        "steady_tok_s",
        "Steady rate",
        "tokens whose event lies inside the steady window / its length; the window opens when "
        "the last of the first `concurrency` streams gives its first token and closes with the "
        "first stream that ends without a successor",
    ),
    _rate(
        "peak_tok_s",
        "Peak rate",
        "most tokens in any of the equal buckets of at least 1 s between the first and the last "
        "content event / the bucket's length; a chunk weighs its tokens",
    ),
    _time("ttft_s", "Time to first token", "first content event - send"),
    _time(
        "ttft_scheduled_s",
        "Time to first token from schedule",
        "first content event - scheduled send",
    ),
    _time(
        "tpot_s",
        "Time per output token",
        "per request (last content event - first content event) / "
        "(tokens - tokens of the first chunk), each request weighing the same",
    ),
    _time(
        "tpot_token_weighted_s",
        "Time per output token, token-weighted",
        "sum of (last - first content event) / sum of (tokens - tokens of the first chunk)",
    ),
    _time("chunk_gap_s", "Gap between chunks", "time between consecutive content events"),
    _time(
        "token_gap_s",
        "Gap between tokens",
        "gap before a content event / its tokens, each token weighing the same",
    ),
    _time("e2e_s", "Latency", "last content event - send"),
    _time("e2e_scheduled_s", "Latency from schedule", "last content event - scheduled send"),
    _time(
        "connect_s", "Connection time", "opening a connection, before the send, if none is ready"
    ),
    Metric(
        "acceptance_length",
        "Acceptance length",
        "1 + accepted draft tokens / verify rounds, counted before truncation at the end",
        "tokens/round",
        "higher",
        1,
        "ratio",
        (1.0, 9.0),
    ),
    Metric(
        "acceptance_rate",
        "Acceptance rate",
        "accepted draft tokens / proposed draft tokens",
        "",
        "higher",
        1,
        "ratio",
        (0.0, 1.0),
    ),
    Metric(
        "cache_hit_share",
        "Prompt tokens from a prefix cache",
        "growth of the server's counter of prompt tokens found in its prefix cache / prompt tokens "
        "sent, over the measured requests",
        "",
        "neither",
        1,
        "ratio",
        (0.0, 1.0),
    ),
    Metric(
        "goodput_share",
        "Goodput",
        "requests that meet every declared limit / scheduled requests",
        "",
        "higher",
        1,
        "ratio",
        (0.0, 1.0),
    ),
    Metric(
        "bandwidth_share",
        "Share of the bandwidth limit",
        "least bytes per step x steps per second / memory bandwidth",
        "",
        "neither",
        1,
        "ratio",
        (0.0, 1.0),
    ),
    _rate(
        "limit_tok_s",
        "Bandwidth limit",
        "memory bandwidth / least bytes per step x acceptance length",
    ),
)

METRICS: dict[str, Metric] = {metric.id: metric for metric in _ALL}


def metric(metric_id: str) -> Metric:
    """The metric of this id; KeyError names the ids there are."""
    if metric_id not in METRICS:
        raise KeyError(f"unknown metric {metric_id!r}; metrics are {', '.join(METRICS)}")
    return METRICS[metric_id]


def within_bounds(metric_id: str, value: float) -> bool:
    """False for what cannot be a measurement: nan, a negative time, a rate in the wrong unit."""
    low, high = metric(metric_id).bounds
    return low <= value <= high
