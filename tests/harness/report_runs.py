"""Run folders with made-up but lawful records, for tests that start from files."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from pathlib import Path

from finalbench.plan import Cell, Plan, make_plan
from finalbench.provenance import HardwareFacts, Provenance
from finalbench.record import (
    BareLoop,
    Classes,
    Failure,
    RequestRecord,
    Roll,
    Run,
    RunWriter,
    ScorePosition,
    ScoreRecord,
    ServerRecord,
    Spec,
    TelemetryRecord,
    Usage,
)
from finalbench.scenario import Scenario, load_scenario, parse_override

CHANCE = {"mtp": 0.62, "ngram": 0.3, "oracle": 0.8}


def provenance(host: str = "5f0c") -> Provenance:
    return Provenance(
        finalbench_version="0.1.0",
        git_commit="0f3c1d2e9a77b5c4d3e2f1a0b9c8d7e6f5a4b3c2",
        git_dirty=False,
        python="3.11.7",
        os="Linux 6.18",
        host=host * 8,
        packages={"torch": "2.13.0", "transformers": "5.24.0"},
        hardware=HardwareFacts(
            cpu="Test CPU",
            cores=2,
            memory_bytes=24 * 2**30,
            cache_bytes=32 * 2**20,
            gpus=(),
            memory_bandwidth_bytes_s=None,
            memory_bandwidth_source="not stated",
            governor=None,
        ),
        environment={"OMP_NUM_THREADS": "2"},
        loadavg_1m=0.12,
    )


def scenario(*overrides: str, name: str = "vk-tiny") -> Scenario:
    return load_scenario(name, [parse_override(text) for text in overrides])


def make_run(
    root: Path,
    made_from: Scenario | None = None,
    *,
    run_id: str = "20261130T220000Z-vk-tiny-1a2b3c4d",
    speed: float = 1.0,
    host: str = "5f0c",
    failures: tuple[Failure, ...] = (),
    extra_settings: Mapping[str, object] | None = None,
    bandwidth: float | None = None,
    sensors: Mapping[str, float] | None = None,
) -> Path:
    """Write a complete run; `speed` scales the engine's arm. Same arguments, same bytes.

    `bandwidth` of the memory in bytes/s; `sensors` are more readings of each second.
    """
    described = made_from or scenario()
    plan = make_plan(described)
    asked = described.serving.weights
    weights = "real" if asked == "auto" else asked
    path = root / run_id
    writer = RunWriter(path)
    clock = 1_000_000_000
    for block in plan.blocks:
        for slot, key in enumerate(block.order):
            own = [plan.cell(cell_id) for cell_id in block.cells[key]]
            server = f"b{block.index}-{key}"
            writer.append_server(
                _server(server, key, own[0], block.index, slot, weights, extra_settings)
            )
            for cell in own:
                for index in range(cell.requests):
                    record = _request(cell, block.index, server, index, clock, speed)
                    clock = (record.done_ns or clock) + 1_000_000
                    writer.append_request(record)
                    if cell.arm != described.baseline and cell.sampling.greedy:
                        writer.append_score(_score(record, server, str(described.baseline)))
    for second in range(30):
        values = {"cpu_load_share": 0.5 + 0.01 * (second % 5), **(sensors or {})}
        stamp = f"2026-11-30T22:00:{second:02d}Z"
        writer.append_telemetry(
            TelemetryRecord(utc=stamp, t_ns=second * 1_000_000_000, values=values)
        )
    run = _run(run_id, described, plan, host, failures)
    if bandwidth is not None:
        made_on = run.provenance
        hardware = made_on.hardware.model_copy(
            update={"memory_bandwidth_bytes_s": bandwidth, "memory_bandwidth_source": "stated"}
        )
        made_on = made_on.model_copy(update={"hardware": hardware})
        run = run.model_copy(update={"provenance": made_on})
    writer.write_run(run)
    writer.close()
    return path


def _run(
    run_id: str, described: Scenario, plan: Plan, host: str, failures: tuple[Failure, ...]
) -> Run:
    random_weights = described.serving.weights.startswith("random")
    synthetic = any(draft.acceptance is not None for draft in described.drafts.values())
    return Run(
        run_id=run_id,
        status="partial" if failures else "complete",
        scenario=described,
        plan=plan,
        provenance=provenance(host),
        rolls=(
            Roll(
                index=0,
                started_utc="2026-11-30T22:00:00Z",
                ended_utc="2026-11-30T22:04:00Z",
                status="complete",
                command=("finalbench", "run", "--model", described.model.name),
            ),
        ),
        failures=failures,
        bare_loop=BareLoop(
            decode_tok_s=78.0,
            tokens=64,
            seconds=0.82,
            prompt_tokens=128,
            output_tokens=64,
            reason=None,
            raw=None,
        ),
        classes=Classes(
            weights="random" if random_weights else "real",
            acceptance="synthetic" if synthetic else "measured",
        ),
    )


def _server(
    server: str,
    key: str,
    cell: Cell,
    block: int,
    slot: int,
    weights: str,
    extra: Mapping[str, object] | None,
) -> ServerRecord:
    settings = {
        "schema_version": 1,
        "profile": "stock" if cell.arm.startswith("stock") else "vkae",
        "model": cell.model,
        "weights": weights,
        "model_digest": "ab" * 32,
        "dtype": "float32",
        "device": "cpu",
        "device_name": "Test CPU",
        "threads": 2,
        "graph_mode": "none",
        "kernel_fallbacks": [],
        "nonce": f"nonce-{server}",
        **(extra or {}),
    }
    return ServerRecord(
        server_id=server,
        server_key=key,
        arm=cell.arm,
        block=block,
        roll=0,
        order_index=slot,
        purpose="measure",
        runtime="process",
        command=("/opt/venv/bin/vk", "serve", cell.model, "--port", "41234"),
        nonce=f"nonce-{server}",
        pid=4242,
        base_url="http://127.0.0.1:41234",
        settings=settings,
        settings_after=settings,
        start_seconds=3.2,
        gpu_proof=None,
        gpu_proof_reason="the scenario runs on a CPU",
        exit_code=0,
        log=f"logs/{server}.log",
        counters_before=None,
        counters_after=None,
        error=None,
    )


def _tokens(cell: Cell, index: int) -> tuple[int, ...]:
    """Equal for cells of one pair key, so drafts on, drafts off and stock agree."""
    source = random.Random(f"{cell.pair_key}/{index}")
    return tuple(source.randrange(8, 4000) for _ in range(cell.output_len))


def _request(
    cell: Cell, block: int, server: str, index: int, clock: int, speed: float
) -> RequestRecord:
    noise = random.Random(f"{cell.id}/{block}/{index}")
    drift = 1 + 0.01 * random.Random(f"{cell.arm}/{block}").uniform(-1, 1)
    slow = 1 + cell.seq_len / 9000
    method, k = cell.draft.method, cell.draft.k if isinstance(cell.draft.k, int) else 3
    step_ms = 13.0 * slow if cell.arm.startswith("stock") else (3.1 + 0.45 * k) * slow / speed
    tokens = _tokens(cell, index)
    sent = clock
    now = sent + int(2e6 + cell.seq_len * 4e4)
    chunks = [(now, 1)]
    left, drafts, accepted = len(tokens) - 1, 0, 0
    by_position = [0] * k
    while left > 0:
        hit = 0
        chance = (cell.draft.acceptance or CHANCE.get(method, 0.0)) - 0.1 * (
            not cell.sampling.greedy
        )
        while hit < k and noise.random() < chance:
            by_position[hit] += 1
            hit += 1
        drafts, accepted = drafts + 1, accepted + hit
        now += int(step_ms * 1e6 * drift * noise.uniform(0.98, 1.02))
        taken = min(hit + 1, left)
        chunks.append((now, taken))
        left -= taken
    spec = Spec(
        drafts=drafts,
        draft_tokens=drafts * k,
        accepted_tokens=accepted,
        accepted_per_pos=tuple(by_position),
    )
    prompt = hashlib.sha256(f"{cell.seq_len}/{index}".encode()).hexdigest()
    return RequestRecord(
        request_id=f"{cell.id}-{block}-{index}",
        cell_id=cell.id,
        block=block,
        roll=0,
        server_id=server,
        arm=cell.arm,
        warmup=False,
        prompt_index=index,
        prompt_digest=prompt,
        prompt_tokens=cell.seq_len,
        prompt_token_ids=None,
        domain=("chat", "code", "maths")[index % 3],
        seed=index,
        scheduled_ns=sent,
        sent_ns=sent,
        connect_ns=None,
        chunks=tuple(chunks),
        done_ns=now + 100_000,
        token_ids=tokens,
        first_chunk_tokens=1,
        text=None,
        usage=Usage(prompt=cell.seq_len, completion=len(tokens)),
        token_source="ids",
        finish_reason="length",
        stop_reason=None,
        done_seen=True,
        http_status=200,
        spec=spec if method != "none" else None,
        status="ok",
        error=None,
    )


def _score(record: RequestRecord, server: str, scorer: str) -> ScoreRecord:
    return ScoreRecord(
        request_id=record.request_id,
        cell_id=record.cell_id,
        block=record.block,
        arm=record.arm,
        scorer_arm=scorer,
        scorer_server_id=server,
        unit="logit",
        positions=tuple(
            ScorePosition(
                token=token, logit=12.0, logprob=-0.1, rank=1, top=((token, 12.0), (7, 9.0))
            )
            for token in record.token_ids
        ),
    )
