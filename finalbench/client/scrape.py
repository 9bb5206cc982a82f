"""`/metrics` before and after: Prometheus text to numbers, and the differences between two."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx2

from finalbench.errors import EnvironmentMissing

PREFIXES = ("vk:", "vllm:", "finalbench:", "sglang:", "llamacpp:", "toy:")
_SAMPLE = re.compile(
    r"^(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?$"
)
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}

Labels = tuple[tuple[str, str], ...]


class CounterReset(EnvironmentMissing):
    """A counter went down between two scrapes: another process answers."""


@dataclass(frozen=True)
class Scrape:
    """Samples of one scrape by (name, sorted labels), and when it was taken (monotonic ns)."""

    at_ns: int
    samples: Mapping[tuple[str, Labels], float]

    def total(self, name: str) -> float | None:
        """Sum over all label sets of a metric, named with or without prefix and `_total`."""
        found = [value for (full, _), value in self.samples.items() if short_name(full) == name]
        return sum(found) if found else None

    def per_position(self, name: str) -> list[float] | None:
        """Values by the `position` label from 0 up, summed over the other labels."""
        rows: dict[int, float] = {}
        for (full, labels), value in self.samples.items():
            place = dict(labels).get("position")
            if short_name(full) == name and place is not None and place.isdigit():
                rows[int(place)] = rows.get(int(place), 0.0) + value
        if not rows:
            return None
        return [rows.get(index, 0.0) for index in range(max(rows) + 1)]

    def counters(self) -> dict[str, float]:
        """Every sample under a flat key, `name` or `name[label=value,...]`, for the record."""
        flat: dict[str, float] = {}
        for (full, labels), value in sorted(self.samples.items()):
            kept = [f"{k}={v}" for k, v in labels if k not in ("model_name", "engine")]
            key = short_name(full) + (f"[{','.join(kept)}]" if kept else "")
            flat[key] = flat.get(key, 0.0) + value
        return flat


def short_name(name: str) -> str:
    """A metric's name without its server's prefix and `_total`."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    return name.removesuffix("_total")


def parse_metrics(text: str, at_ns: int = 0) -> Scrape:
    """Prometheus text format 0.0.4. Lines that are not samples are passed over."""
    samples: dict[tuple[str, Labels], float] = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line.strip())
        if match is None:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        labels = tuple(
            sorted((key, _unescape(raw)) for key, raw in _LABEL.findall(match["labels"] or ""))
        )
        samples[(match["name"], labels)] = value
    return Scrape(at_ns, samples)


def _unescape(text: str) -> str:
    return re.sub(r"\\.", lambda found: _ESCAPES.get(found[0], found[0]), text)


def fetch(http: httpx2.Client, base_url: str) -> Scrape | None:
    """One scrape, or None when the server has no metrics."""
    at_ns = time.monotonic_ns()
    try:
        answer = http.get(f"{base_url}/metrics")
    except httpx2.HTTPError as error:
        raise EnvironmentMissing(f"{base_url}/metrics: {error or type(error).__name__}") from error
    if answer.status_code != 200:
        return None
    return parse_metrics(answer.text, at_ns)


def delta(before: Scrape, after: Scrape, name: str) -> float | None:
    """Growth of a counter between two scrapes. CounterReset when it shrank."""
    start, end = before.total(name), after.total(name)
    if end is None:
        return None
    growth = end - (start or 0.0)
    if growth < 0:
        raise CounterReset(f"{name} fell from {start:g} to {end:g}: the server restarted")
    return growth


@dataclass(frozen=True)
class DraftCounters:
    """Growth of the speculative counters; `acceptance_length` = 1 + accepted / drafts."""

    drafts: float
    draft_tokens: float
    accepted: float
    accepted_per_pos: tuple[float, ...]

    @property
    def acceptance_length(self) -> float | None:
        return 1.0 + self.accepted / self.drafts if self.drafts else None


def draft_counters(before: Scrape, after: Scrape) -> DraftCounters | None:
    """From the window between two scrapes alone, whatever ran before; None when not served."""
    name = "spec_decode_num_"
    drafts = delta(before, after, f"{name}drafts")
    tokens = delta(before, after, f"{name}draft_tokens")
    accepted = delta(before, after, f"{name}accepted_tokens")
    if drafts is None or tokens is None or accepted is None:
        return None
    late = after.per_position(f"{name}accepted_tokens_per_pos") or []
    early = before.per_position(f"{name}accepted_tokens_per_pos") or []
    early += [0.0] * (len(late) - len(early))
    return DraftCounters(
        drafts, tokens, accepted, tuple(b - a for a, b in zip(early, late, strict=False))
    )


def cache_hit_share(before: Scrape, after: Scrape) -> float | None:
    """Prompt tokens found in the prefix cache / looked up; None when nothing was looked up."""
    queries = delta(before, after, "prefix_cache_queries")
    hits = delta(before, after, "prefix_cache_hits")
    return hits / queries if queries and hits is not None else None


def flush_cache(
    http: httpx2.Client,
    base_url: str,
    *,
    path: str = "/reset_prefix_cache",
    timeout_s: float = 30.0,
    pause_s: float = 0.05,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Waits until the server is idle, empties its prefix cache and asks again until it agrees.

    False when the server has no cache to empty. EnvironmentMissing when it stays busy.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        scrape = fetch(http, base_url)
        running = scrape.total("num_requests_running") if scrape is not None else None
        if not running:
            answer = http.post(f"{base_url}{path}")
            if answer.status_code in (404, 405, 501):
                return False
            if answer.status_code < 300:
                return True
        if time.monotonic() > deadline:
            raise EnvironmentMissing(f"{base_url}: the prefix cache could not be emptied, busy")
        sleep(pause_s)
