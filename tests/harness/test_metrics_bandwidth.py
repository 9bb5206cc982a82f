"""The physics bound: bytes by the scenario's facts, share of the limit, nulls with reasons."""

from __future__ import annotations

from typing import Any

import pytest
from run_records import a_run, a_server, cell_of, make_records, provenance, scenario

from finalbench.metrics import Memory, bandwidth_bound, bytes_per_step, compute, memory_of
from finalbench.plan import Cell
from finalbench.scenario import DraftSetting

RECORDS = make_records()
MODEL = RECORDS.run.scenario.model
PLAIN = cell_of(RECORDS, "vk", "none")
DRAFTING = cell_of(RECORDS, "vk", "mtp3")
FAST = Memory(bytes_per_s=100e9, source="declared")


def test_bytes_of_a_step_by_hand() -> None:
    # 4e6 weights x 4 B + (1,000 x 4 B x (512 + 16) + 400,000 B) of one sequence
    sequence = 1_000 * 4 * (512 + 16) + 400_000
    assert bytes_per_step(MODEL, PLAIN) == 16_000_000 + sequence
    # Three draft passes of 1e6 weights more.
    assert bytes_per_step(MODEL, DRAFTING) == 28_000_000 + sequence
    two = PLAIN.model_copy(update={"concurrency": 2})
    assert bytes_per_step(MODEL, two) == 16_000_000 + 2 * sequence


@pytest.mark.parametrize(
    "draft",
    [
        DraftSetting(method="ngram", k=3),
        DraftSetting(method="mtp", k="auto"),
        DraftSetting(method="mtp", k=3, head_rows=1_000),
    ],
)
def test_draft_bytes_that_are_not_known_are_not_counted(draft: DraftSetting) -> None:
    cell = PLAIN.model_copy(update={"draft": draft})
    assert bytes_per_step(MODEL, cell) == bytes_per_step(MODEL, PLAIN)


def test_t22_share_and_limit_by_hand() -> None:
    need = bytes_per_step(MODEL, PLAIN)
    bound = bandwidth_bound(MODEL, PLAIN, 1_000.0, None, FAST)
    assert bound.share == pytest.approx(1_000 * need / 100e9, rel=1e-12)
    assert bound.limit_tok_s == pytest.approx(100e9 / need, rel=1e-12)
    assert bound.reason is None
    drafting = bandwidth_bound(MODEL, DRAFTING, 1_000.0, 2.5, FAST)
    assert drafting.limit_tok_s == pytest.approx(
        2.5 * 100e9 / bytes_per_step(MODEL, DRAFTING), rel=1e-12
    )
    many = PLAIN.model_copy(update={"concurrency": 4})
    assert bandwidth_bound(MODEL, many, 1.0, None, FAST).limit_tok_s == pytest.approx(
        4 * 100e9 / bytes_per_step(MODEL, many), rel=1e-12
    )


def test_nulls_have_reasons() -> None:
    def reason(cell: Cell, tok_s: float | None, length: float | None, memory: Memory) -> Any:
        bound = bandwidth_bound(MODEL, cell, tok_s, length, memory)
        assert bound.share is None
        return bound.reason

    assert reason(PLAIN, 1.0, None, Memory(bytes_per_s=None, reason="why")) == "why"
    assert reason(DRAFTING, 1.0, None, FAST) == "acceptance length is unknown"
    assert reason(PLAIN, None, None, FAST) == "no rate"
    need = bytes_per_step(MODEL, PLAIN)
    for cache, known in ((need, False), (need - 1, True)):
        memory = Memory(bytes_per_s=100e9, cache_bytes=cache)
        bound = bandwidth_bound(MODEL, PLAIN, 1.0, None, memory)
        assert (bound.share is not None) is known
        if not known:
            assert bound.reason == "one step's bytes fit in the device's cache"


def test_memory_of_a_cpu_is_null_unless_declared() -> None:
    server = a_server(PLAIN, 0, 0)
    plain = memory_of(provenance().hardware, [server])
    assert plain.bytes_per_s is None
    assert plain.reason == "not stated"
    told = provenance(memory_bandwidth_bytes_s=40e9, memory_bandwidth_source="declared").hardware
    found = memory_of(told, [server])
    assert (found.bytes_per_s, found.source, found.cache_bytes) == (40e9, "declared", 1_000_000)


def test_a_gpu_has_its_own_cache() -> None:
    hardware = provenance(
        memory_bandwidth_bytes_s=4.8e12, memory_bandwidth_source="data sheet of H200"
    ).hardware
    server = a_server(PLAIN, 0, 0)
    assert server.settings is not None
    for name, cache in (("NVIDIA H200", 50_000_000), ("Unheard of", None)):
        settings = server.settings | {"device": "cuda:0", "device_name": name}
        found = memory_of(hardware, [server.model_copy(update={"settings": settings})])
        assert found.cache_bytes == cache
    assert memory_of(hardware, []).cache_bytes == 1_000_000
    mute = server.model_copy(update={"settings": None})
    assert memory_of(hardware, [mute]).cache_bytes == 1_000_000


@pytest.mark.parametrize(
    ("name", "megabytes"),
    [
        ("NVIDIA B200", 126),
        ("NVIDIA B300", 126),
        ("NVIDIA H100 80GB HBM3", 50),
        ("NVIDIA A100-SXM4-80GB", 40),
        ("NVIDIA L40S", 96),
        ("NVIDIA L4", 48),
        ("NVIDIA A10G", 6),
        ("NVIDIA GeForce RTX 5090", 96),
        ("NVIDIA GeForce RTX 4090", 72),
    ],
)
def test_caches_of_known_devices(name: str, megabytes: int) -> None:
    told = provenance(memory_bandwidth_bytes_s=1e12, memory_bandwidth_source="data sheet")
    server = a_server(PLAIN, 0, 0)
    settings = {**(server.settings or {}), "device": "cuda", "device_name": name}
    found = memory_of(told.hardware, [server.model_copy(update={"settings": settings})])
    assert found.cache_bytes == megabytes * 1_000_000


def test_each_row_prints_its_share() -> None:
    run = a_run(
        scenario(),
        provenance=provenance(memory_bandwidth_bytes_s=100e9, memory_bandwidth_source="declared"),
    )
    table = compute(make_records(run))
    for row in table.cells:
        assert row.bandwidth_share is not None
        assert row.limit_tok_s is not None
        assert row.bandwidth_share == pytest.approx((row.decode_tok_s or 0) / row.limit_tok_s)
