"""G12 end to end: a whole run with the cache axis against the toy server, with a cache and without.

Requests are few and short; what is checked is what the counters say, not how fast it is.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_runner import options, small

from finalbench.aggregate import analyse
from finalbench.bundle import derive
from finalbench.record import RunRecords, load_run
from finalbench.runner import Silent, execute
from finalbench.validity import RULES

pytestmark = pytest.mark.slow

LENGTH = 64
STATES = ("cold", "warm", "prefix-50")
AXES = (
    f"axes.seq_len=[{LENGTH}]",
    f"axes.cache=[{','.join(STATES)}]",
    f"base={{seq_len: {LENGTH}, output_len: 8, sampling: greedy, draft: mtp3}}",
    "workload.warmup_rounds=null",
    "workload.warmup_requests=1",
    "workload.requests=3",
)
ABOUT = {
    r for r in RULES if r.startswith(("cache_", "warm_p", "repeated", "prompt", "engine", "req"))
}
CACHE = "prefix_cache,step_ms=1,prefill_ms=0,prefill_us_per_token=0"


def states_run(tmp_path: Path, behaviours: str, *overrides: str) -> RunRecords:
    outcome = execute(small(*AXES, *overrides), options(tmp_path, behaviours), Silent())
    return load_run(outcome.path)


def breaches(records: RunRecords) -> set[tuple[str, str, str]]:
    """(rule, arm, cache state) of what is about prompts and caches, not about times."""
    cells = {c.id: c for c in records.run.plan.cells}
    return {
        (v.rule, cells[v.cell_id].arm, cells[v.cell_id].cache)
        for v in derive(records).violations
        if v.cell_id is not None and v.rule in ABOUT
    }


def test_each_state_is_met_counted_and_shown(tmp_path: Path) -> None:
    records = states_run(tmp_path, f"vk:{CACHE};stock:{CACHE}")
    assert records.run.status == "complete"
    assert breaches(records) == set()
    rows = derive(records).metrics.cells
    # Drafts on and off, and the stock cell, for each state.
    assert {(r.arm, r.cache) for r in rows} == {(a, s) for a in ("vk", "stock") for s in STATES}
    shares = {s: {r.cache_hit_share for r in rows if r.cache == s} for s in STATES}
    # The prompt's last block is found too: the toy needs none of it computed.
    assert shares == {"cold": {0.0}, "warm": {1.0}, "prefix-50": {0.5}}
    labels = {row.label for row in analyse(records.path).rows}
    assert {label.partition("drafts ")[2].partition(", ")[2] for label in labels} == {
        "",
        "warm prompts, 100% from the cache",
        "prefix-50 prompts, 50% from the cache",
    }
    digests = {s: {p.digest for p in records.prompts if p.cache == s} for s in STATES}
    assert not digests["cold"] & digests["warm"] and not digests["cold"] & digests["prefix-50"]
    # A warm cell's prompts were sent once before; nobody else's were.
    cells = {c.id: c.cache for c in records.run.plan.cells}
    measured = {(r.server_id, r.cell_id, r.prompt_digest) for r in records.requests if not r.warmup}
    again = {(r.server_id, r.cell_id, r.prompt_digest) for r in records.requests if r.warmup}
    assert {cells[cell_id] for _, cell_id, _ in measured & again} == {"warm"}
    assert {k for k in measured if cells[k[1]] == "warm"} <= again
    assert len({r.request_id for r in records.requests}) == len(records.requests)


def test_a_server_without_a_cache_is_labelled_so(tmp_path: Path) -> None:
    records = states_run(tmp_path, "vk:ok,step_ms=1;stock:ok,step_ms=1")
    assert breaches(records) == {
        ("cache_absent", arm, state) for arm in ("vk", "stock") for state in STATES[1:]
    }
    rows = derive(records).metrics.cells
    assert {r.cache_hit_share for r in rows} == {None}
    assert {r.cache_label for r in rows} == {
        "",
        "warm prompts, no cache",
        "prefix-50 prompts, no cache",
    }
    # Both arms computed every prompt in full, so their ratio stands, under that label.
    warm = [r for r in analyse(records.path).rows if r.cell.cache == "warm" and r.cell.arm == "vk"]
    assert warm and all(r.valid and r.comparison is not None for r in warm)


def test_a_cache_that_keeps_nothing_is_not_called_warm(tmp_path: Path) -> None:
    """A toy that forgets: its counters show lookups without hits."""
    records = states_run(tmp_path, f"vk:{CACHE},cache_forgets=true;stock:{CACHE}")
    assert breaches(records) == {("cache_state", "vk", state) for state in STATES[1:]}


@pytest.mark.parametrize("flushes", [True, False])
def test_a_cold_cell_on_a_server_with_a_cache_needs_it_emptied(
    tmp_path: Path, flushes: bool
) -> None:
    """Drafts on and off get the same prompts: without a flush the second cell meets the first's."""
    cold = f"vk:{CACHE},cache_flushes={str(flushes).lower()};stock:{CACHE}"
    records = states_run(tmp_path, cold, "axes.cache=[cold]")
    named = breaches(records)
    assert named == (set() if flushes else {("warm_prefix", "vk", "cold")})
