"""Counters: parsed, differenced, never trusted across a restart."""

from __future__ import annotations

import pytest

from finalbench.client.scrape import (
    CounterReset,
    cache_hit_share,
    delta,
    draft_counters,
    parse_metrics,
)

TEXT = """\
# HELP vllm:generation_tokens_total tokens
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{model_name="a",engine="0"} 100.0
vllm:generation_tokens_total{model_name="a",engine="1"} 50.5 1700000000000
vk:num_requests_running 2
odd_name{path="C:\\\\x \\"y\\"\\n",le="+Inf"} 3e2
broken{ 1
not a sample
nan_value NaN
"""


def spec(drafts: int, tokens: int, accepted: int, per_pos: list[int], engine: str = "0") -> str:
    name, label = "vllm:spec_decode_num_", f'engine="{engine}"'
    rows = [
        f"{name}drafts_total{{{label}}} {drafts}",
        f"{name}draft_tokens_total{{{label}}} {tokens}",
        f"{name}accepted_tokens_total{{{label}}} {accepted}",
    ]
    rows += [
        f'{name}accepted_tokens_per_pos_total{{{label},position="{i}"}} {n}'
        for i, n in enumerate(per_pos)
    ]
    return "\n".join(rows) + "\n"


def test_samples_labels_and_escapes() -> None:
    scrape = parse_metrics(TEXT, at_ns=7)
    assert scrape.at_ns == 7
    assert scrape.total("generation_tokens") == 150.5
    assert scrape.total("num_requests_running") == 2.0
    assert scrape.total("missing") is None
    assert scrape.samples[("odd_name", (("le", "+Inf"), ("path", 'C:\\x "y"\n')))] == 300.0
    assert not [name for name, _ in scrape.samples if name.startswith(("broken", "not"))]


def test_flat_counters_keep_only_labels_that_matter() -> None:
    scrape = parse_metrics(spec(3, 9, 5, [3, 1, 1]) + spec(1, 3, 0, [0, 0, 0], engine="1"))
    flat = scrape.counters()
    assert flat["spec_decode_num_drafts"] == 4.0
    assert flat["spec_decode_num_accepted_tokens_per_pos[position=0]"] == 3.0


def test_acceptance_comes_from_the_window_alone() -> None:
    """S04: the second workload's length does not depend on the first; all ranks are added."""
    start = parse_metrics(spec(0, 0, 0, [0, 0, 0]) + spec(0, 0, 0, [0, 0, 0], engine="1"))
    first = parse_metrics(spec(10, 30, 30, [10, 10, 10]) + spec(10, 30, 30, [10] * 3, engine="1"))
    second = parse_metrics(spec(20, 60, 30, [10, 10, 10]) + spec(20, 60, 40, [20, 10, 10], "1"))
    one, two = draft_counters(start, first), draft_counters(first, second)
    assert one is not None and two is not None
    assert one.acceptance_length == 4.0
    assert two.acceptance_length == 1.5
    assert two.accepted_per_pos == (10.0, 0.0, 0.0)


def test_no_drafts_no_length() -> None:
    """S05: unknown is None, never 1.0."""
    zero = parse_metrics(spec(0, 0, 0, [0]))
    found = draft_counters(zero, zero)
    assert found is not None and found.acceptance_length is None
    assert draft_counters(parse_metrics(TEXT), parse_metrics(TEXT)) is None


def test_a_restart_is_an_error_not_a_negative_number() -> None:
    before, after = parse_metrics("vk:x_total 10\n"), parse_metrics("vk:x_total 4\n")
    with pytest.raises(CounterReset, match="x fell from 10 to 4"):
        delta(before, after, "x")
    assert delta(parse_metrics(""), after, "x") == 4.0
    assert delta(before, parse_metrics(""), "x") is None


def test_cache_share_without_lookups_is_unknown() -> None:
    zero = parse_metrics("vk:prefix_cache_queries_total 0\nvk:prefix_cache_hits_total 0\n")
    some = parse_metrics("vk:prefix_cache_queries_total 80\nvk:prefix_cache_hits_total 20\n")
    assert cache_hit_share(zero, zero) is None
    assert cache_hit_share(zero, some) == 0.25
