"""What a run ran on and how to run it again, as the page shows it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from finalbench.aggregate import Analysis
from finalbench.aggregate.rows import BareBlockRow
from finalbench.bundle import MANIFEST_FILE, read_manifest
from finalbench.record import Roll, RunRecords
from finalbench.report import phrases, view
from finalbench.report.server_facts import command_line, exploratory, server_facts

MAX_SENSORS = 6
MAX_POINTS = 240
_UNITS = (
    ("_mhz", "MHz", 1.0),
    ("_w", "W", 1.0),
    ("_watts", "W", 1.0),
    ("_c", "°C", 1.0),
    ("_celsius", "°C", 1.0),
    ("_bytes", "GB", 1e-9),
    ("_share", "share", 1.0),
    ("_percent", "%", 1.0),
    ("_pct", "%", 1.0),
)


def run_card(records: RunRecords, analysis: Analysis) -> view.RunCard:
    run = records.run
    timed = sum(not request.warmup for request in records.requests)
    return view.RunCard(
        id=run.run_id,
        status=run.status,
        scenario=run.scenario.name,
        scenario_hash=run.plan.scenario_hash[:12],
        models=(analysis.model,),
        hardware=analysis.hardware,
        blocks=len(run.plan.blocks),
        requests=timed,
        facts=tuple(_facts(records, analysis)),
        rolls=tuple(_roll(roll) for roll in run.rolls),
        commands=_commands(records),
        notes=tuple(_notes(records)),
        bare_loop=_bare_loop(analysis),
        root_hash=root_hash(records.path),
    )


def root_hash(run_dir: Path) -> str | None:
    """The seal's root hash, when the run is sealed. Errors: `BundleBroken` when it is damaged."""
    return read_manifest(run_dir).root if (run_dir / MANIFEST_FILE).is_file() else None


def telemetry(records: RunRecords) -> list[view.TelemetrySeries]:
    """The sensors that gave at least two readings, thinned to a drawable number of points."""
    readings = records.telemetry
    names = dict.fromkeys(name for reading in readings for name in reading.values)
    chosen = sorted(names, key=_sensor_order)
    found = []
    for name in chosen:
        known = [(r.t_ns, value) for r in readings if (value := r.values.get(name)) is not None]
        if len(known) < 2 or len(found) == MAX_SENSORS:
            continue
        step = -(-len(known) // MAX_POINTS)
        start = readings[0].t_ns
        unit, scale = next(((u, s) for tail, u, s in _UNITS if name.endswith(tail)), ("", 1.0))
        found.append(
            view.TelemetrySeries(
                run_id=records.run.run_id,
                name=_sensor_name(name),
                unit=unit or "as read",
                t_s=tuple((t - start) * 1e-9 for t, _ in known[::step]),
                values=tuple(value * scale for _, value in known[::step]),
            )
        )
    return found


def _sensor_order(name: str) -> tuple[int, str]:
    wanted = ("sm_clock", "clock", "power", "temp", "load", "mem")
    rank = next((i for i, part in enumerate(wanted) if part in name), len(wanted))
    return rank, name


def _sensor_name(name: str) -> str:
    tail = next((tail for tail, _, _ in _UNITS if name.endswith(tail)), "")
    words = name.removesuffix(tail).replace("_", " ").replace(".", " ")
    fixed = {"gpu": "GPU", "cpu": "CPU", "sm": "SM"}
    text = " ".join(fixed.get(part, part) for part in words.split())
    return text[:1].upper() + text[1:]


def _facts(records: RunRecords, analysis: Analysis) -> Iterator[view.Fact]:
    run = records.run
    made = run.provenance
    machine = made.hardware
    for name, value in (
        ("CPU", machine.cpu),
        ("cores", str(machine.cores)),
        ("memory", f"{machine.memory_bytes / 2**30:.1f} GiB"),
        ("governor", machine.governor or "not readable"),
        ("memory bandwidth", _bandwidth(records)),
        ("load before", phrases.significant(made.loadavg_1m, 3)),
        ("OS", made.os),
        ("host digest", made.host[:12]),
    ):
        yield view.Fact(group="Machine", name=name, value=value)
    for gpu in machine.gpus:
        memory = f", {gpu.memory_bytes / 2**30:.0f} GiB" if gpu.memory_bytes else ""
        driver = f", driver {gpu.driver}" if gpu.driver else ""
        yield view.Fact(group="Machine", name="GPU", value=f"{gpu.name}{memory}{driver}")
    clean = {True: "with uncommitted changes", False: "clean", None: "state unknown"}
    commit = f"{made.git_commit[:12]}, {clean[made.git_dirty]}" if made.git_commit else "unknown"
    yield view.Fact(group="Code", name="finalbench", value=made.finalbench_version)
    yield view.Fact(group="Code", name="commit", value=commit)
    yield view.Fact(group="Code", name="Python", value=made.python)
    for name, version in sorted(made.packages.items()):
        yield view.Fact(group="Packages", name=name, value=version)
    for name, value in sorted(made.environment.items()):
        yield view.Fact(group="Environment", name=name, value=value)
    yield from _workload(records, analysis)
    yield from server_facts(records)


def _workload(records: RunRecords, analysis: Analysis) -> Iterator[view.Fact]:
    scenario = records.run.scenario
    work, measure = scenario.workload, scenario.measure
    for name, value in (
        ("prompts", f"{work.text_class}, {', '.join(work.domains) or 'all domains'}"),
        ("requests per cell and block", str(work.requests)),
        ("warm-up requests", str(work.warmup_requests)),
        ("blocks", f"{measure.blocks}, order {measure.order}"),
        ("seed", str(work.seed)),
        ("A/A", _aa(analysis)),
        ("client ceiling", _ceiling(records)),
    ):
        yield view.Fact(group="Workload", name=name, value=value)
    for name, sampling in scenario.samplings.items():
        fields = ", ".join(f"{key} {value:g}" for key, value in sampling.fields().items())
        yield view.Fact(group="Workload", name=f"sampling {name}", value=fields)


def _aa(analysis: Analysis) -> str:
    if not analysis.aa:
        return f"not measured: {analysis.aa_reason}" if analysis.aa_reason else "not measured"
    apart = [row for row in analysis.aa if row.comparison.verdict in ("FASTER", "SLOWER")]
    return f"{len(analysis.aa)} cells against a copy, {len(apart)} of them told apart"


def _ceiling(records: RunRecords) -> str:
    known = [c for c in records.run.client_ceilings if c.chunks_per_s is not None]
    if not known:
        return "not measured"
    return "; ".join(
        f"{ceiling.chunks_per_s:,.0f} chunks/s over {ceiling.streams} stream"
        f"{'s' if ceiling.streams > 1 else ''}"
        for ceiling in known
    )


def _bandwidth(records: RunRecords) -> str:
    machine = records.run.provenance.hardware
    if machine.memory_bandwidth_bytes_s is None:
        return machine.memory_bandwidth_source or "not known"
    return f"{machine.memory_bandwidth_bytes_s / 1e9:.0f} GB/s, {machine.memory_bandwidth_source}"


def _bare_loop(analysis: Analysis) -> str | None:
    bare = analysis.bare_loop
    if bare.share is None:
        return f"cost of HTTP not known: {bare.reason}" if bare.reason else None
    http, loop = phrases.tok_s(bare.http_decode_tok_s), phrases.tok_s(bare.bare_decode_tok_s)
    reach = phrases.share(bare.share)
    whole = f"stock over HTTP reaches {reach} of a bare generate loop"
    if not bare.blocks:
        return f"{whole} ({http} of {loop} tok/s)"
    details = [f"{http} of {loop} tok/s"]
    if bare.low is not None and bare.high is not None:
        details.append(f"95 % interval {phrases.share(bare.low)} to {phrases.share(bare.high)}")
    told = ", ".join(_bare_block(block) for block in bare.blocks)
    details.append(f"in turns on the same prompts, by block: {told}")
    if not bare.same_tokens:
        details.append("some turns gave other tokens")
    return f"{whole} ({'; '.join(details)})"


def _bare_block(block: BareBlockRow) -> str:
    if block.share is None:
        return f"none ({block.reason})"
    if block.low is None or block.high is None:
        return phrases.share(block.share)
    return f"{phrases.share(block.share)} [{100 * block.low:.1f}, {100 * block.high:.1f}]"


def _roll(roll: Roll) -> view.Roll:
    return view.Roll(
        started_utc=roll.started_utc,
        ended_utc=roll.ended_utc,
        status=roll.status,
        command=command_line(roll.command),
    )


def _commands(records: RunRecords) -> tuple[view.Command, ...]:
    run = records.run
    commit = run.provenance.git_commit
    again = command_line(run.rolls[0].command) if run.rolls else ""
    steps = [f"git checkout {commit}"] if commit else []
    steps += [
        "python -m venv .venv && . .venv/bin/activate",
        "pip install -c constraints.txt -e . -e ./engine",
        again,
    ]
    return (
        view.Command(label="Run the same plan again", text="\n".join(filter(None, steps))),
        view.Command(
            label="Recompute these numbers from the raw records",
            text=f"finalbench verify {shlex.quote(_results_dir(run.rolls))}/{run.run_id}",
        ),
    )


def _results_dir(rolls: Sequence[Roll]) -> str:
    """The folder for runs as typed, or its default."""
    words = rolls[0].command if rolls else ()
    for word, after in pairwise((*words, "")):
        if word == "--results-dir":
            return after
        if word.startswith("--results-dir="):
            return word.partition("=")[2]
    return "results"


def _notes(records: RunRecords) -> Iterator[str]:
    run = records.run
    if (why := exploratory(records)) is not None:
        yield why
    if run.status != "complete":
        yield f"This run is {run.status}: some of its plan was not measured."
    if run.provenance.git_dirty:
        yield "The code had uncommitted changes, so the commit alone does not give it back."
    if records.torn:
        torn = ", ".join(records.torn)
        yield f"A journal was cut while writing and lost its last record: {torn}."
    if len(run.rolls) > 1:
        yield f"It took {len(run.rolls)} attempts; all are listed."
