"""Counters and histograms in Prometheus' text form, under vLLM's names with our prefix."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .driver import Driver
    from .generation import Choice

# fmt: off
_SHORT_S = (.0005, .001, .0025, .005, .01, .025, .05, .075, .1, .25, .5, 1, 2.5, 5, 10)
_LONG_S = (.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
# fmt: on
SPECULATIVE = (
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
)
_MANY = 256  # steps sorted at once
_GAUGES = frozenset({"kv_cache_usage_perc"})


class Histogram:
    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.total_s = 0.0

    def observe(self, value_s: float, weight: int = 1) -> None:
        self.counts[bisect_left(self.bounds_s, value_s)] += weight
        self.total_s += value_s * weight

    def lines(self, name: str, labels: str) -> Iterator[str]:
        running = 0
        for bound, count in zip((*self.bounds_s, "+Inf"), self.counts, strict=True):
            running += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {running}'
        yield f"{name}_sum{{{labels}}} {self.total_s}"
        yield f"{name}_count{{{labels}}} {running}"


class Metrics:
    """Fed by the event loop alone; the engine's own counters are read when scraped."""

    def __init__(self, model_name: str) -> None:
        self._labels = f'model_name="{_escaped(model_name)}",engine="0"'
        self.prompt_tokens = 0
        self.finished: Counter[str] = Counter()
        self.aborted = 0
        self.first_token = Histogram(_LONG_S)
        self.between_tokens = Histogram(_SHORT_S)
        self.whole_request = Histogram(_LONG_S)
        self.in_queue = Histogram(_SHORT_S)
        #: (seconds, tokens) of what came after a first chunk, still to be sorted into buckets.
        self._steps: list[tuple[float, int]] = []
        self._tokens = 0

    def on_tokens(self, choice: Choice, count: int, now_s: float) -> None:
        if choice.last_s is None:
            self._tokens += count
            self._on_first(choice, now_s)
        else:
            self.on_step(now_s - choice.last_s, count)
        choice.last_s = now_s

    def on_step(self, seconds: float, count: int) -> None:
        """Called for each chunk, so it only notes."""
        self._steps.append((seconds, count))
        if len(self._steps) >= _MANY:
            self._sort()

    def _on_first(self, choice: Choice, now_s: float) -> None:
        job = choice.job
        self.prompt_tokens += len(choice.prompt)
        self.first_token.observe(now_s - job.queued_s)
        if job.admitted_s is not None:
            self.in_queue.observe(job.admitted_s - job.queued_s)

    def on_finish(self, choice: Choice, reason: str, now_s: float) -> None:
        self.finished[reason] += 1
        self.whole_request.observe(now_s - choice.job.queued_s)

    def on_abort(self, _choice: Choice) -> None:
        self.aborted += 1

    @property
    def generation_tokens(self) -> int:
        self._sort()
        return self._tokens

    def _sort(self) -> None:
        steps, self._steps = self._steps, []
        for seconds, count in steps:
            self._tokens += count
            self.between_tokens.observe(seconds / count, count)

    def render(self, driver: Driver) -> str:
        self._sort()
        counters = driver.engine.counters()
        lines = [*self._own(driver), *self._engine(counters)]
        return "\n".join(lines) + "\n"

    def _own(self, driver: Driver) -> Iterator[str]:
        yield from self._one("counter", "vk:prompt_tokens_total", self.prompt_tokens)
        yield from self._one("counter", "vk:generation_tokens_total", self.generation_tokens)
        yield "# TYPE vk:request_success_total counter"
        for reason in ("stop", "length"):
            labels = f'{self._labels},finished_reason="{reason}"'
            yield f"vk:request_success_total{{{labels}}} {self.finished[reason]}"
        yield from self._one("counter", "vk:request_aborted_total", self.aborted)
        yield from self._one("counter", "vk:request_rejected_total", driver.rejected)
        yield from self._one("gauge", "vk:num_requests_running", driver.running)
        yield from self._one("gauge", "vk:num_requests_waiting", driver.waiting)
        yield from self._one("gauge", "vk:process_cpu_seconds", time.process_time())
        for name, histogram in (
            ("vk:time_to_first_token_seconds", self.first_token),
            ("vk:inter_token_latency_seconds", self.between_tokens),
            ("vk:e2e_request_latency_seconds", self.whole_request),
            ("vk:request_queue_time_seconds", self.in_queue),
        ):
            yield f"# TYPE {name} histogram"
            yield from histogram.lines(name, self._labels)

    def _engine(self, counters: Mapping[str, float | list[float]]) -> Iterator[str]:
        for name in SPECULATIVE:
            value = counters.get(name, [] if name.endswith("_per_pos") else 0)
            full = f"vllm:{name}_total"
            if not isinstance(value, list):
                yield from self._one("counter", full, value)
                continue
            yield f"# TYPE {full} counter"
            for position, count in enumerate(value):
                yield f'{full}{{{self._labels},position="{position}"}} {count}'
        defaults = {
            "kv_cache_usage_perc": 0.0,
            "prefix_cache_queries": 0.0,
            "prefix_cache_hits": 0.0,
        }
        for name, value in {**defaults, **counters}.items():
            if name in SPECULATIVE or isinstance(value, list):
                continue
            if name in _GAUGES:
                yield from self._one("gauge", f"vk:{name}", value)
            else:
                yield from self._one("counter", f"vk:{name}_total", value)

    def _one(self, kind: str, name: str, value: float) -> Iterator[str]:
        yield f"# TYPE {name} {kind}"
        yield f"{name}{{{self._labels}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
