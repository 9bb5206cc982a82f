"""The models of a run on disk. Raw events only; every rate is derived elsewhere.

Times named `_ns` are readings of one monotonic clock of the harness process, in nanoseconds, and
are comparable only within one roll; `connect_ns` alone is a length of time. The writer and the
reader are in `record.journal`.
"""

from __future__ import annotations

from typing import Any, Literal

from finalbench.plan import Block, Cell, Plan
from finalbench.provenance import Provenance
from finalbench.scenario import Frozen, Scenario

__all__ = [
    "SCHEMA_VERSION",
    "BareBlock",
    "BareLoop",
    "BareTurn",
    "Block",
    "Cell",
    "Classes",
    "ClientCeiling",
    "CounterWindow",
    "Failure",
    "Plan",
    "PromptRecord",
    "RequestRecord",
    "Roll",
    "Run",
    "RunStatus",
    "ScorePosition",
    "ScoreRecord",
    "ServerRecord",
    "Spec",
    "TelemetryRecord",
    "Usage",
]

SCHEMA_VERSION = 1

RunStatus = Literal["running", "complete", "partial", "cancelled", "failed"]
RequestStatus = Literal["ok", "failed", "cancelled", "incomplete"]


class Usage(Frozen):
    """Token counts as the server reports them."""

    prompt: int
    completion: int


class Spec(Frozen):
    """Speculative counters of one request; `drafts` counts verify rounds."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_pos: tuple[int, ...] = ()


class PromptRecord(Frozen):
    """One prompt of exact length, the same for every arm; requests name it by its digest."""

    schema_version: Literal[1] = SCHEMA_VERSION
    seq_len: int
    index: int
    warmup: bool
    domain: str | None
    digest: str
    token_ids: tuple[int, ...]
    cache: str = "cold"  # the state of the cells it is for


class RequestRecord(Frozen):
    """One request: what was sent and every event that came back."""

    schema_version: Literal[1] = SCHEMA_VERSION
    request_id: str
    cell_id: str
    block: int
    roll: int
    server_id: str
    arm: str
    warmup: bool
    prompt_index: int
    prompt_digest: str
    prompt_tokens: int  # length asked for, tokens
    prompt_token_ids: tuple[int, ...] | None
    domain: str | None
    seed: int | None
    scheduled_ns: int
    sent_ns: int
    connect_ns: int | None  # how long opening a connection took; null where one was ready
    chunks: tuple[tuple[int, int], ...]  # (time of the socket read, tokens in the chunk)
    done_ns: int | None  # end of the stream
    token_ids: tuple[int, ...]
    first_chunk_tokens: int
    text: str | None
    usage: Usage | None
    token_source: Literal["ids", "usage"] | None
    finish_reason: str | None
    stop_reason: int | str | None
    done_seen: bool
    http_status: int | None
    spec: Spec | None
    status: RequestStatus
    error: str | None


class ScorePosition(Frozen):
    """The scorer's view of one engine token; `logit`s are raw logits, or null where not served."""

    token: int
    logit: float | None
    logprob: float
    rank: int  # 1 is the scorer's argmax
    top: tuple[tuple[int, float], ...]  # (token id, logit or, without logits, log-probability)


class ScoreRecord(Frozen):
    """Teacher-forced judgement of one request's output by the scoring arm."""

    schema_version: Literal[1] = SCHEMA_VERSION
    request_id: str
    cell_id: str
    block: int
    arm: str  # the arm whose output is judged
    scorer_arm: str
    scorer_server_id: str
    unit: Literal["logit", "logprob"]
    positions: tuple[ScorePosition, ...]


class CounterWindow(Frozen):
    """Growth of a server's counters in `/metrics` over one cell's measured requests.

    `spec`, `generation_tokens`: of servers that count drafts per process and not per request.
    `prefix_queries`, `prefix_hits`: prompt tokens looked up and found in its prefix cache. Null
    where the server has no such counter.
    """

    cell_id: str
    generation_tokens: int | None = None
    spec: Spec | None = None
    prefix_queries: int | None = None
    prefix_hits: int | None = None


class ServerRecord(Frozen):
    """One server process, written when it ends."""

    schema_version: Literal[1] = SCHEMA_VERSION
    server_id: str
    server_key: str
    arm: str
    block: int
    roll: int
    order_index: int
    purpose: Literal["measure", "score"]
    runtime: Literal["process", "container", "endpoint"]
    command: tuple[str, ...]
    image_digest: str | None = None
    nonce: str
    pid: int | None
    base_url: str
    settings: dict[str, Any] | None  # read back from /v1/settings, before the first request
    settings_after: dict[str, Any] | None  # and after the last one
    start_seconds: float | None
    gpu_proof: dict[str, Any] | None
    gpu_proof_reason: str | None
    exit_code: int | None
    log: str | None  # path inside the run folder
    counters_before: dict[str, float] | None
    counters_after: dict[str, float] | None
    windows: tuple[CounterWindow, ...] = ()
    error: str | None


class TelemetryRecord(Frozen):
    """One reading of the machine, wall clock in UTC and monotonic time.

    `gpu_reason` says why no GPU was read at this time, where a reading of the host is alone.
    """

    utc: str
    t_ns: int
    values: dict[str, float | None]
    gpu_reason: str | None = None


class Roll(Frozen):
    """One attempt at the run, finished or not."""

    index: int
    started_utc: str
    ended_utc: str | None
    status: RunStatus
    command: tuple[str, ...]
    failed: int = 0  # failures met in this attempt, resolved later or not


class Failure(Frozen):
    """A cell (a whole server, when `cell_id` is null) that has no full result in a block.

    Once a later roll completes the cell its failure is dropped; the roll keeps the count.
    """

    cell_id: str | None
    block: int | None
    roll: int
    reason: str


class BareTurn(Frozen):
    """One prompt through the baseline's own loop and over HTTP, the one right behind the other.

    Tokens are those after the first, over the seconds from the first to the last.
    """

    prompt_index: int
    first: Literal["bare", "http"]
    bare_tokens: int
    bare_seconds: float
    http_tokens: int
    http_seconds: float
    same_tokens: bool  # both gave the same ids


class BareBlock(Frozen):
    """The turns of one block, taken with the server that had just been measured."""

    block: int
    server_id: str
    turns: tuple[BareTurn, ...]
    reason: str | None = None  # why there are fewer turns than wanted


class BareLoop(Frozen):
    """The baseline's generate loop without HTTP, timed in the same run.

    Where a second process of the baseline has room, it takes turns with the server in every block
    (`blocks`); else it was timed once, behind a block (`after_block`).
    """

    decode_tok_s: float | None
    tokens: int | None
    seconds: float | None
    prompt_tokens: int | None
    output_tokens: int | None
    reason: str | None  # why a value is null
    raw: dict[str, Any] | None
    after_block: int | None = None  # the block it was timed right behind: what it compares with
    blocks: tuple[BareBlock, ...] = ()


class ClientCeiling(Frozen):
    """What the client itself took on this machine, against a toy server, in the same run.

    `streams` are those of the cells it stands for; `added_p99_ms` is the lateness of the client's
    time stamps at half that rate. Values are null with a reason when nothing was measured.
    """

    streams: int
    tokens_per_chunk: int
    chunks_per_s: float | None
    added_p50_ms: float | None
    added_p99_ms: float | None
    reason: str | None = None
    waited_share: float | None = None  # of that time, spent waiting for a core
    scheduling: Literal["real-time", "shared"] | None = None


class Classes(Frozen):
    """What every row of this run carries into every export."""

    weights: Literal["real", "random"]
    acceptance: Literal["measured", "synthetic"]


class Run(Frozen):
    """run.json: identity, plan, circumstances and every attempt."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run_id: str
    status: RunStatus
    scenario: Scenario
    plan: Plan
    provenance: Provenance
    rolls: tuple[Roll, ...]
    failures: tuple[Failure, ...]
    bare_loop: BareLoop | None
    client_ceilings: tuple[ClientCeiling, ...] = ()  # one for each concurrency of the plan
    classes: Classes
