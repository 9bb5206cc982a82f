"""Hand-built runs for the tests of everything that reads records: no server, no clock."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from finalbench.plan import Cell, make_plan
from finalbench.provenance import HardwareFacts, Provenance
from finalbench.record import (
    Classes,
    ClientCeiling,
    RequestRecord,
    Roll,
    Run,
    RunRecords,
    RunWriter,
    ScorePosition,
    ScoreRecord,
    ServerRecord,
    Spec,
    Usage,
)
from finalbench.scenario import Scenario

MS = 1_000_000
VOCAB = 4096
STEP_MS = {"vk": 5.0, "stock": 20.0}

SCENARIO: dict[str, Any] = {
    "name": "unit",
    "title": "a scenario for tests",
    "model": {
        "name": "toy",
        "source": "bundled",
        "family": "qwen3_5_moe",
        "kind": "moe",
        "dtype": "float32",
        "context": 4096,
        "mtp": "present",
        "facts": {
            "params_total": 9_000_000,
            "params_per_token": 4_000_000,
            "params_per_draft": 1_000_000,
            "layers": 8,
            "kv_elements_per_token": 1_000,
            "state_bytes_per_sequence": 400_000,
        },
    },
    "hardware": {"device": "cpu", "memory_gb": 4},
    "arms": ("vk", "stock"),
    "baseline": "stock",
    "samplings": {
        "greedy": {"name": "greedy"},
        "t07": {"name": "t07", "temperature": 0.7, "top_p": 0.9},
    },
    "drafts": {"none": {}, "mtp3": {"method": "mtp", "k": 3}},
    "axes": {
        "seq_len": (128, 512),
        "output_len": (32,),
        "sampling": ("greedy", "t07"),
        "draft": ("none", "mtp3"),
    },
    "base": {"seq_len": 512, "output_len": 32, "sampling": "greedy", "draft": "mtp3"},
    "workload": {"requests": 4},
    "measure": {"blocks": 4},
}


def scenario(**updates: Any) -> Scenario:
    return Scenario.model_validate({**SCENARIO, **updates})


def provenance(**hardware: Any) -> Provenance:
    facts = {
        "cpu": "Test CPU",
        "cores": 2,
        "memory_bytes": 8_000_000_000,
        "cache_bytes": 1_000_000,
        "gpus": (),
        "memory_bandwidth_bytes_s": None,
        "memory_bandwidth_source": "not stated",
        "governor": None,
    }
    return Provenance(
        finalbench_version="0.1.0",
        git_commit="0" * 40,
        git_dirty=False,
        python="3.11",
        os="Linux",
        host="abcdef",
        packages={"vkengine": "0.1.0"},
        hardware=HardwareFacts.model_validate({**facts, **hardware}),
        environment={},
        loadavg_1m=0.1,
    )


def a_run(spec: Scenario | None = None, **updates: Any) -> Run:
    chosen = spec or scenario()
    fields: dict[str, Any] = {
        "run_id": "20261130T220000Z-unit-1a2b3c4d",
        "status": "complete",
        "scenario": chosen,
        "plan": make_plan(chosen),
        "provenance": provenance(),
        "rolls": (
            Roll(
                index=0,
                started_utc="2026-11-30T22:00:00Z",
                ended_utc="2026-11-30T22:05:00Z",
                status="complete",
                command=("finalbench", "run"),
            ),
        ),
        "failures": (),
        "bare_loop": None,
        "classes": Classes(weights="real", acceptance="measured"),
        "client_ceilings": tuple(
            ClientCeiling(
                streams=streams,
                tokens_per_chunk=1,
                chunks_per_s=20_000.0,
                added_p50_ms=0.2,
                added_p99_ms=0.8,
            )
            for streams in (1, 2, 4)
        ),
    }
    return Run(**{**fields, **updates})


def output_tokens(prompt_digest: str, seed: int, count: int) -> tuple[int, ...]:
    draw = random.Random(f"{prompt_digest}-{seed}")
    return tuple(draw.randrange(VOCAB) for _ in range(count))


def prompt_digest(seq_len: int, index: int, *, warmup: bool = False, cache: str = "cold") -> str:
    state = "" if cache == "cold" else f"-{cache}"
    return hashlib.sha256(f"{seq_len}-{warmup}-{index}{state}".encode()).hexdigest()


def chunk_sizes(cell: Cell) -> list[int]:
    """One token from the prompt, then a round per chunk: 1 token, or 1 + accepted with drafts."""
    if cell.draft.method == "none":
        return [1] * cell.output_len
    pattern, sizes = [4, 2, 1, 3], [1]
    while sum(sizes) < cell.output_len:
        sizes.append(min(pattern[len(sizes) % 4], cell.output_len - sum(sizes)))
    return sizes


def spec_of(cell: Cell, sizes: Sequence[int]) -> Spec | None:
    if cell.draft.method == "none":
        return Spec(drafts=0, draft_tokens=0, accepted_tokens=0)
    rounds = sizes[1:]
    k = int(cell.draft.k)
    return Spec(
        drafts=len(rounds),
        draft_tokens=k * len(rounds),
        accepted_tokens=sum(n - 1 for n in rounds),
        accepted_per_pos=tuple(sum(n - 1 > i for n in rounds) for i in range(k)),
    )


def a_request(
    cell: Cell,
    *,
    block: int = 0,
    index: int = 0,
    start_ns: int = 1_000 * MS,
    ttft_ms: float = 50.0,
    step_ms: float = 20.0,
    sizes: Sequence[int] | None = None,
    warmup: bool = False,
    server_id: str | None = None,
    **updates: Any,
) -> RequestRecord:
    """One good request: a chunk every `step_ms`, the first after `ttft_ms`."""
    parts = list(chunk_sizes(cell) if sizes is None else sizes)
    digest = prompt_digest(cell.seq_len, index, warmup=warmup, cache=cell.cache)
    seed = int(digest[:8], 16)
    first = start_ns + round(ttft_ms * MS)
    chunks = tuple((first + round(i * step_ms * MS), n) for i, n in enumerate(parts))
    total = sum(parts)
    fields: dict[str, Any] = {
        "request_id": f"{cell.id}-b{block}-r0-{'w' if warmup else 'q'}{index}",
        "cell_id": cell.id,
        "block": block,
        "roll": 0,
        "server_id": server_id or f"{cell.server_key}-b{block}-r0-1",
        "arm": cell.arm,
        "warmup": warmup,
        "prompt_index": index,
        "prompt_digest": digest,
        "prompt_tokens": cell.seq_len,
        "prompt_token_ids": None,
        "domain": ("chat", "code")[index % 2],
        "seed": seed,
        "scheduled_ns": start_ns,
        "sent_ns": start_ns,
        "connect_ns": None,
        "chunks": chunks,
        "done_ns": chunks[-1][0] + MS if chunks else start_ns + MS,
        "token_ids": output_tokens(digest, seed, total),
        "first_chunk_tokens": parts[0] if parts else 0,
        "text": None,
        "usage": Usage(prompt=cell.seq_len, completion=total),
        "token_source": "ids",
        "finish_reason": "length",
        "stop_reason": None,
        "done_seen": True,
        "http_status": 200,
        "spec": spec_of(cell, parts),
        "status": "ok",
        "error": None,
    }
    return RequestRecord(**{**fields, **updates})


def a_score(request: RequestRecord, *, stock: str = "stock-b0") -> ScoreRecord:
    """Every token is stock's argmax, by a wide margin."""
    positions = tuple(
        ScorePosition(
            token=token,
            logit=9.0,
            logprob=-0.1,
            rank=1,
            top=((token, 9.0), ((token + 1) % VOCAB, 5.0)),
        )
        for token in request.token_ids
    )
    return ScoreRecord(
        request_id=request.request_id,
        cell_id=request.cell_id,
        block=request.block,
        arm=request.arm,
        scorer_arm="stock",
        scorer_server_id=stock,
        unit="logit",
        positions=positions,
    )


def a_server(cell: Cell, block: int, order_index: int, **updates: Any) -> ServerRecord:
    settings = {
        "schema_version": 1,
        "model": cell.model,
        "model_digest": "f" * 64,
        "weights": "real",
        "dtype": "float32",
        "device": "cpu",
        "device_name": "Test CPU",
        "threads": 2,
        "nonce": f"nonce-{cell.arm}-{block}",
        "kernel_fallbacks": [],
        "sampler_defaults": {"temperature": 1.0, "top_k": 0},
        "host_launch_us": 1.5,
    }
    fields: dict[str, Any] = {
        "server_id": f"{cell.server_key}-b{block}-r0-1",
        "server_key": cell.server_key,
        "arm": cell.arm,
        "block": block,
        "roll": 0,
        "order_index": order_index,
        "purpose": "measure",
        "runtime": "process",
        "command": ("vk", "serve"),
        "nonce": f"nonce-{cell.arm}-{block}",
        "pid": 1,
        "base_url": "http://127.0.0.1:1",
        "settings": settings,
        "settings_after": settings | {"host_launch_us": 1.7},
        "start_seconds": 3.0,
        "gpu_proof": None,
        "gpu_proof_reason": "the server runs on cpu",
        "exit_code": 0,
        "log": None,
        "counters_before": {},
        "counters_after": {},
        "error": None,
    }
    return ServerRecord(**{**fields, **updates})


def make_records(
    run: Run | None = None,
    *,
    step_ms: dict[str, float] | None = None,
    noise: float = 0.005,
    seed: int = 0,
    factor: Callable[[str, int, int], float] | None = None,
) -> RunRecords:
    """A whole run without fault. `factor(arm, block, slot)` multiplies a server's step time."""
    chosen = run or a_run()
    steps = STEP_MS if step_ms is None else step_ms
    draw = random.Random(seed)
    plan = chosen.plan
    requests: list[RequestRecord] = []
    servers: list[ServerRecord] = []
    for block in plan.blocks:
        now = 1_000 * MS * (1 + 1_000 * block.index)
        for slot, key in enumerate(block.order):
            cells = [plan.cell(cell_id) for cell_id in block.cells[key]]
            arm = cells[0].arm
            speed = draw.gauss(1.0, noise) * (factor(arm, block.index, slot) if factor else 1.0)
            servers.append(a_server(cells[0], block.index, slot))
            for cell in cells:
                for index in range(cell.requests):
                    one = a_request(
                        cell,
                        block=block.index,
                        index=index,
                        start_ns=now,
                        step_ms=steps[arm] * speed * (1 + 0.01 * index),
                    )
                    requests.append(one)
                    now = (one.done_ns or now) + MS
    scores = tuple(a_score(r) for r in requests if plan.cell(r.cell_id).sampling.greedy)
    return RunRecords(
        path=Path("run"),
        run=chosen,
        prompts=(),
        requests=tuple(requests),
        scores=scores,
        servers=tuple(servers),
        telemetry=(),
    )


def edit(
    records: RunRecords,
    where: Callable[[RequestRecord], bool],
    **updates: Any,
) -> RunRecords:
    """The same run with the chosen requests changed."""
    changed = tuple(r.model_copy(update=updates) if where(r) else r for r in records.requests)
    return replace(records, requests=changed)


def write_run(path: Path, records: RunRecords) -> Path:
    """The run as a folder, in the form the runner leaves behind."""
    writer = RunWriter(path)
    writer.write_run(records.run)
    _each(writer.append_request, records.requests)
    _each(writer.append_score, records.scores)
    _each(writer.append_server, records.servers)
    writer.close()
    return path


def cell_of(records: RunRecords, arm: str, draft: str = "mtp3", **fields: Any) -> Cell:
    """The plan's cell of this arm with the base's coordinates but for `fields`."""
    wanted = {"seq_len": 512, "output_len": 32, "concurrency": 1, **fields}
    sampling = wanted.pop("sampling", "greedy")
    for cell in records.run.plan.cells:
        if (
            cell.arm == arm
            and cell.sampling.name == sampling
            and (arm == "stock" or cell.draft.label == draft)
            and all(getattr(cell, name) == value for name, value in wanted.items())
        ):
            return cell
    raise LookupError(f"no cell {arm} {draft} {fields}")


def _each(write: Callable[[Any], None], found: Iterable[Any]) -> None:
    for record in found:
        write(record)
