"""The committed run of llama.cpp: our counts and rates against the server's own timings."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from llamacpp_timings import pairs

from finalbench.aggregate import analyse
from finalbench.record import RunRecords, load_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def records() -> RunRecords:
    found = sorted((ROOT / "results" / "reference").glob("*-smollm2-135m-*"))
    assert found, "the committed run of llama.cpp is missing"
    return load_run(found[-1])


def test_every_request_is_in_the_log_with_our_counts(records: RunRecords) -> None:
    found = pairs(records)
    assert len(found) == len(records.requests) > 50
    for request, timing in found:
        assert request.status == "ok" and request.usage is not None
        assert timing.tokens == request.usage.completion == sum(n for _, n in request.chunks)
        assert timing.prompt_tokens == request.usage.prompt == request.prompt_tokens


def test_rates_agree_with_the_servers_own(records: RunRecords) -> None:
    """Its clock stops before our socket read; over tens of tokens the two differ by little."""
    ratios = []
    for request, timing in pairs(records):
        if request.warmup:
            continue
        ours_ms = (request.chunks[-1][0] - request.chunks[0][0]) / 1e6
        ratios.append(ours_ms / timing.decode_ms)
    assert median(ratios) == pytest.approx(1.0, abs=0.01)
    assert max(abs(ratio - 1) for ratio in ratios) < 0.1


def test_cells_follow_from_the_servers_timings(records: RunRecords) -> None:
    """The reported decode rate is the one that follows from llama.cpp's numbers, within 2 %."""
    told: dict[str, list[tuple[int, float]]] = {}
    for request, timing in pairs(records):
        if not request.warmup:
            told.setdefault(request.cell_id, []).append((timing.tokens - 1, timing.decode_ms))
    analysis = analyse(records.path)
    assert {row.cell.id for row in analysis.rows} == set(told)
    for row in analysis.rows:
        theirs = sum(n for n, _ in told[row.cell.id]) / sum(ms for _, ms in told[row.cell.id]) * 1e3
        assert row.cell.decode_tok_s == pytest.approx(theirs, rel=0.02)
        assert row.valid and row.cell.token_source == "usage"


def test_the_record_says_what_was_served(records: RunRecords) -> None:
    for server in records.servers:
        settings = server.settings or {}
        assert settings["quantization"] == "Q4_1" and settings["nonce"] == server.nonce
        before, after = server.counters_before or {}, server.counters_after or {}
        own = [r for r in records.requests if r.server_id == server.server_id]
        grown = after["generation_tokens"] - before["generation_tokens"]
        assert grown == sum(r.usage.completion for r in own if r.usage)
        assert after["prefix_cache_hits"] == 0
