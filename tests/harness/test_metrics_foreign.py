"""One recorded stream through other tools' formulas: what agrees is imported, the rest refused."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from run_records import a_request, a_run, cell_of, make_records

from finalbench.errors import UsageError
from finalbench.metrics import METRICS, Memory, compute_cell
from finalbench.metrics.foreign import RULES, Foreign, ForeignValue, read_foreign

RUN = a_run()
CELL = cell_of(make_records(RUN), "vk", "none")
STREAMS = [
    a_request(CELL, index=i, ttft_ms=40.0 + 10 * i, step_ms=18.0 + i, start_ns=(1 + i) * 10**10)
    for i in range(4)
]
OURS = compute_cell(
    CELL,
    STREAMS,
    servers={},
    model=RUN.scenario.model,
    memory=Memory(bytes_per_s=None, reason="unknown"),
)


def ttfts() -> list[float]:
    return [(r.chunks[0][0] - r.sent_ns) / 1e9 for r in STREAMS]


def gaps() -> list[list[float]]:
    return [
        [(b[0] - a[0]) / 1e9 for a, b in zip(r.chunks, r.chunks[1:], strict=False)] for r in STREAMS
    ]


def latencies() -> list[float]:
    return [(r.chunks[-1][0] - r.sent_ns) / 1e9 for r in STREAMS]


def bench(**more: Any) -> dict[str, Any]:
    """What the vLLM and SGLang clients print for these streams, by their own formulas."""
    all_gaps = [g for one in gaps() for g in one]
    per_token = [(e - t) / 31 for e, t in zip(latencies(), ttfts(), strict=True)]
    return {
        "completed": 4,
        "failed": 0,
        "max_concurrency": 1,
        "output_throughput": 4 * 32 / 40.0,
        "total_token_throughput": 4 * 544 / 40.0,
        "max_output_tokens_per_s": 55.0,
        "mean_ttft_ms": 1e3 * statistics.mean(ttfts()),
        "p99_ttft_ms": 70.0,
        "mean_tpot_ms": 1e3 * statistics.mean(per_token),
        "mean_itl_ms": 1e3 * statistics.mean(all_gaps),
        **more,
    }


def read(tmp_path: Path, document: Any, *, lines: bool = False) -> Foreign:
    path = tmp_path / "result.json"
    text = json.dumps(document)
    path.write_text(f"{{}}\n{text}\n" if lines else text)
    return read_foreign(path)


def refused(found: Foreign) -> dict[str, str | None]:
    return {v.field: v.reason for v in found.values if v.metric is None}


def test_f07_l09_vllm_agrees_where_the_formula_does(tmp_path: Path) -> None:
    document = bench(
        mean_e2el_ms=1e3 * statistics.mean(latencies()), itls=gaps(), output_lens=[32] * 4
    )
    found = read(tmp_path, document)
    assert (found.tool, found.completed, found.failed) == ("vllm", 4, 0)
    assert found.value("ttft_s") == pytest.approx(OURS.latencies["ttft_s"].mean, rel=1e-9)
    assert found.value("chunk_gap_s") == pytest.approx(OURS.latencies["chunk_gap_s"].mean, rel=1e-9)
    assert found.value("e2e_s") == pytest.approx(OURS.latencies["e2e_s"].mean, rel=1e-9)
    assert found.value("decode_tok_s") == pytest.approx(OURS.decode_tok_s, rel=1e-9)
    assert refused(found)["total_token_throughput"] == "adds prompt tokens"
    assert refused(found)["max_output_tokens_per_s"] == "counts stream chunks as tokens"
    assert "last content event" in (refused(found)["output_throughput"] or "")
    assert found.value("e2e_tok_s") is None
    assert found.value("tpot_s") is None


def test_decode_rate_needs_one_stream_and_one_token_a_chunk(tmp_path: Path) -> None:
    drafted = read(tmp_path, bench(itls=[g[::2] for g in gaps()], output_lens=[32] * 4))
    assert drafted.value("decode_tok_s") is None
    assert "several tokens" in (refused(drafted)["itls, output_lens"] or "")
    many = read(tmp_path, bench(itls=gaps(), output_lens=[32] * 4, max_concurrency=8))
    assert "one stream only" in (refused(many)["itls, output_lens"] or "")
    empty = read(tmp_path, bench(itls=[[]], output_lens=[1]))
    assert refused(empty)["itls, output_lens"] == "no gap between tokens"
    failed = read(tmp_path, bench(itls=[*gaps(), []], output_lens=[32] * 4 + [0]))
    assert failed.value("decode_tok_s") == pytest.approx(OURS.decode_tok_s, rel=1e-9)


def test_short_and_partial_arrays(tmp_path: Path) -> None:
    short = read(tmp_path, bench(itls=[[0.1, 0.1]], output_lens=[3]))
    assert short.value("decode_tok_s") == pytest.approx(10.0, rel=1e-9)
    half = read(tmp_path, bench(itls=[[0.1, 0.1]]))
    assert "itls, output_lens" not in refused(half)
    other = read(tmp_path, bench(output_lens=[3]))
    assert "itls, output_lens" not in refused(other)


def test_sglang_lines_and_ambiguous_fields(tmp_path: Path) -> None:
    document = bench(mean_e2e_latency_ms=1e3 * statistics.mean(latencies()), accept_length=2.4)
    found = read(tmp_path, document, lines=True)
    assert found.tool == "sglang"
    assert found.value("e2e_s") == pytest.approx(OURS.latencies["e2e_s"].mean, rel=1e-9)
    assert found.value("chunk_gap_s") is None
    assert "since the server's start" in (refused(found)["accept_length"] or "")


def test_aiperf_itl_is_our_tpot(tmp_path: Path) -> None:
    per_token = [(e - t) / 31 for e, t in zip(latencies(), ttfts(), strict=True)]
    document = {
        "time_to_first_token": {"unit": "ms", "avg": 1e3 * statistics.mean(ttfts())},
        "inter_token_latency": {"unit": "ms", "avg": 1e3 * statistics.mean(per_token)},
        "request_latency": {"unit": "s", "avg": statistics.mean(latencies())},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 3.2},
        "request_count": {"unit": "requests", "avg": 4.0},
    }
    found = read(tmp_path, document)
    assert (found.tool, found.completed, found.failed) == ("aiperf", 4, None)
    assert found.value("ttft_s") == pytest.approx(OURS.latencies["ttft_s"].mean, rel=1e-9)
    assert found.value("tpot_s") == pytest.approx(OURS.latencies["tpot_s"].mean, rel=1e-9)
    assert found.value("e2e_s") == pytest.approx(OURS.latencies["e2e_s"].mean, rel=1e-9)
    assert "output_token_throughput" in refused(found)
    document["request_latency"]["unit"] = "fortnights"
    assert refused(read(tmp_path, document))["request_latency"] == (
        "unit 'fortnights' is not a known time"
    )


def test_l09_guidellm_tpot_is_not_ours(tmp_path: Path) -> None:
    def block(mean: float) -> dict[str, Any]:
        return {"successful": {"mean": mean}, "errored": {"mean": 0.0}}

    one = {
        "metrics": {
            "time_to_first_token_ms": block(1e3 * statistics.mean(ttfts())),
            "time_per_output_token_ms": block(20.0),
            "request_latency": block(0.7),
            "request_totals": {"successful": 4, "errored": 1},
        }
    }
    found = read(tmp_path, {"benchmarks": [one]})
    assert (found.tool, found.completed, found.failed) == ("guidellm", 4, 1)
    assert found.value("ttft_s") == pytest.approx(OURS.latencies["ttft_s"].mean, rel=1e-9)
    assert "first token included" in (refused(found)["time_per_output_token_ms"] or "")
    assert found.value("tpot_s") is None
    with pytest.raises(UsageError, match="holds 2 benchmarks"):
        read(tmp_path, {"benchmarks": [one, one]})


@pytest.mark.parametrize("value", [0, -1.0, None, True, "12"])
def test_impossible_values_are_not_imported(tmp_path: Path, value: object) -> None:
    found = read(tmp_path, bench(mean_ttft_ms=value))
    assert found.value("ttft_s") is None
    assert refused(found)["mean_ttft_ms"] == f"{value!r} is no measurement"


def test_unknown_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no result file of a known tool"):
        read(tmp_path, {"tokens_per_second": 601})
    (tmp_path / "x.json").write_text("tok/s: 601")
    with pytest.raises(UsageError, match="holds no JSON object"):
        read_foreign(tmp_path / "x.json")


def test_every_mapping_names_a_metric_of_the_registry() -> None:
    for rules in RULES.values():
        for name, rule in rules.items():
            assert (rule.metric in METRICS) != (rule.reason is not None), name


@pytest.mark.parametrize(
    ("unit", "seconds"), [("ms", 2e-3), ("s", 2.0), ("sec", 2.0), ("us", 2e-6), ("ns", 2e-9)]
)
def test_units_are_read_and_not_assumed(tmp_path: Path, unit: str, seconds: float) -> None:
    found = read(tmp_path, {"time_to_first_token": {"unit": unit, "avg": 2}})
    assert found.value("ttft_s") == pytest.approx(seconds, rel=1e-12)


def test_a_value_is_found_by_its_metric() -> None:
    found = Foreign(
        tool="vllm",
        completed=None,
        failed=None,
        values=(
            ForeignValue(field="a", metric="ttft_s", value=1.0),
            ForeignValue(field="b", metric="e2e_s", value=2.0),
        ),
    )
    assert (found.value("ttft_s"), found.value("e2e_s"), found.value("tpot_s")) == (1.0, 2.0, None)


@pytest.mark.parametrize("known", ["output_throughput", "mean_ttft_ms"])
def test_one_known_field_does_not_make_a_tools_file(tmp_path: Path, known: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({known: 40.0}))
    with pytest.raises(UsageError, match="no result file of a known tool"):
        read_foreign(path)
