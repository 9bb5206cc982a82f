"""Hand-built pages for the report tests: one good run, one of random weights, one hostile."""

from __future__ import annotations

from finalbench.report.view import (
    Board,
    BoardRow,
    Cell,
    ClaimRow,
    Command,
    Comparison,
    DomainRow,
    EqualityRow,
    Fact,
    Failure,
    Headline,
    Interval,
    Marks,
    Measured,
    Page,
    Roll,
    RunCard,
    SpreadRow,
    TelemetrySeries,
    VarianceRow,
    ViolationRow,
)

RUN = "20261130T2200Z-vk-tiny-1a2b3c4d"
REAL = Marks(equality="ties(3)")
STOCK = Marks(equality="not_applicable")
RANDOM = Marks(weights="random", acceptance="synthetic", equality="not_applicable")


def rate(value: float, spread: float = 0.02) -> Measured:
    return Measured(
        value=value,
        interval=Interval(low=value * (1 - spread), high=value * (1 + spread)),
        blocks=(value * 0.99, value, value * 1.01),
    )


def versus(value: float, base: float) -> Comparison:
    return Comparison(
        against="stock",
        against_label="stock",
        against_decode_tok_s=base,
        ratio=rate(value / base, 0.03),
        verdict="FASTER",
    )


def cell(arm: str, axis: str, decode: float, **fields: object) -> Cell:
    base = {
        "run_id": RUN,
        "id": f"{arm}-{axis}-{decode:.0f}",
        "model": "vk-tiny",
        "arm": arm,
        "arm_label": "VKAE" if arm == "vk" else "stock",
        "axis": axis,
        "seq_len": 128,
        "output_len": 128,
        "sampling": "greedy",
        "draft": "mtp k=3" if arm == "vk" else "drafts off",
        "concurrency": 1,
        "requests": 24,
        "decode_tok_s": rate(decode),
        "e2e_tok_s": rate(decode * 0.91),
        "steady_tok_s": Measured(reason="single stream"),
        "ttft_p50_s": Measured(value=0.0212),
        "marks": REAL if arm == "vk" else STOCK,
    }
    if arm == "vk":
        base |= {
            "acceptance_length": 2.11,
            "accepted_per_position": (0.62, 0.33, 0.16),
            "comparison": versus(decode, 76.2),
            "bandwidth_share": 0.31,
            "limit_tok_s": 1630.0,
        }
    return Cell.model_validate(base | fields)


def cells() -> tuple[Cell, ...]:
    off = {"acceptance_length": None, "accepted_per_position": (), "limit_tok_s": None}
    return (
        cell("vk", "base", 492.4),
        cell("stock", "base", 76.2),
        cell("vk", "seq_len", 471.0, seq_len=512, comparison=versus(471.0, 75.1)),
        cell("vk", "seq_len", 402.9, seq_len=2048, comparison=versus(402.9, 70.8)),
        cell("stock", "seq_len", 75.1, seq_len=512),
        cell("stock", "seq_len", 70.8, seq_len=2048),
        cell(
            "vk",
            "sampling",
            418.3,
            sampling="t0.7-p0.9",
            acceptance_length=1.84,
            accepted_per_position=(0.5, 0.24, 0.1),
            marks=Marks(equality="not_applicable"),
        ),
        cell("stock", "sampling", 74.9, sampling="t0.7-p0.9"),
        cell("vk", "draft", 311.2, draft="drafts off", **off),
        cell(
            "vk",
            "draft",
            421.0,
            draft="mtp k=1",
            acceptance_length=1.62,
            accepted_per_position=(0.62,),
            limit_tok_s=1502.0,
        ),
        cell(
            "vk",
            "draft",
            470.4,
            draft="mtp k=2",
            acceptance_length=1.95,
            accepted_per_position=(0.62, 0.33),
            limit_tok_s=1580.0,
        ),
        cell(
            "vk",
            "draft",
            355.8,
            draft="ngram k=3",
            acceptance_length=1.31,
            accepted_per_position=(0.18, 0.09, 0.04),
            limit_tok_s=1210.0,
        ),
        cell(
            "vk",
            "concurrency",
            300.0,
            concurrency=2,
            decode_tok_s=Measured(reason="single stream only"),
            steady_tok_s=rate(760.0),
            e2e_p50_s=Measured(value=0.41),
        ),
        cell(
            "vk",
            "concurrency",
            300.0,
            id="vk-c4",
            concurrency=4,
            decode_tok_s=Measured(reason="single stream only"),
            steady_tok_s=rate(1180.0),
            e2e_p50_s=Measured(value=0.63),
            failed=1,
            violations=("client_bound",),
            comparison=None,
        ),
    )


def headline() -> Headline:
    return Headline(
        model="vk-tiny",
        hardware="AMD EPYC, 2 cores",
        arm_label="VKAE",
        setting="greedy, mtp k=3, 128 + 128 tokens",
        decode_tok_s=rate(492.4),
        comparison=versus(492.4, 76.2).model_copy(
            update={
                "ratio": Measured(
                    value=6.46, interval=Interval(low=6.21, high=6.72), blocks=(6.4, 6.46, 6.52)
                )
            }
        ),
        acceptance_length=2.11,
        bandwidth_share=0.31,
        marks=REAL,
        pairs=((487.5, 75.4), (492.4, 76.2), (497.3, 76.9)),
    )


def board() -> Board:
    def row(position: int, tied: bool, arm: str, setting: str, decode: float) -> BoardRow:
        vk = arm != "stock"
        return BoardRow(
            position=position,
            tied=tied,
            run_id=RUN,
            model="vk-tiny",
            arm=arm,
            arm_label=arm,
            setting=setting,
            decode_tok_s=rate(decode),
            blocks=3,
            comparison=versus(decode, 76.2) if vk else None,
            acceptance_length=2.11 if vk else None,
            bandwidth_share=0.31 if vk else 0.05,
            marks=REAL if vk else STOCK,
        )

    return Board(
        title="vk-tiny on AMD EPYC, 2 cores, float32",
        compares="model, hardware, precision, scenario version and classes",
        rows=(
            row(1, True, "VKAE", "greedy, mtp k=3", 492.4),
            row(1, True, "VKAE", "greedy, mtp k=2", 470.4),
            row(3, False, "VKAE", "greedy, drafts off", 311.2),
            row(4, False, "stock", "greedy, drafts off", 76.2),
        ),
        resolution=0.048,
    )


def run_card(run_id: str = RUN) -> RunCard:
    facts = (
        ("Machine", "CPU", "AMD EPYC 7763"),
        ("Machine", "Cores", "2"),
        ("Machine", "Memory", "24.0 GiB"),
        ("Machine", "GPU", "none"),
        ("Code", "finalbench", "0.1.0"),
        ("Code", "commit", "0f3c1d2e9a77, clean"),
        ("Code", "Python", "3.11.7"),
        ("Packages", "torch", "2.13.0"),
        ("Packages", "transformers", "5.24.0"),
        ("Settings", "dtype", "float32"),
        ("Settings", "threads", "2"),
    )
    return RunCard(
        id=run_id,
        status="complete",
        scenario="vk-tiny",
        scenario_hash="1a2b3c4d",
        models=("vk-tiny",),
        hardware="AMD EPYC, 2 cores",
        blocks=3,
        requests=336,
        facts=tuple(Fact(group=g, name=n, value=v) for g, n, v in facts),
        rolls=(
            Roll(
                started_utc="2026-11-30T22:00:00Z",
                ended_utc="2026-11-30T22:04:10Z",
                status="complete",
                command="finalbench run --model vk-tiny",
            ),
        ),
        commands=(
            Command(
                label="Run the same plan again",
                text="git checkout 0f3c1d2e9a77\n"
                "python -m venv .venv && . .venv/bin/activate\n"
                "pip install -c constraints.txt -e '.[hub]' -e ./engine\n"
                "finalbench run --model vk-tiny",
            ),
            Command(
                label="Check the numbers from the raw records",
                text=f"finalbench verify results/{run_id}",
            ),
        ),
        bare_loop="stock over HTTP reaches 97.8 % of a bare generate loop",
        root_hash="9c1e77aa02b4",
    )


def spread() -> tuple[SpreadRow, ...]:
    def row(arm: str, source: str, low: str, slow: float, high: str, fast: float) -> SpreadRow:
        return SpreadRow(
            run_id=RUN,
            model="vk-tiny",
            arm=arm,
            source=source,
            low_label=low,
            low_tok_s=slow,
            high_label=high,
            high_tok_s=fast,
            marks=REAL,
        )

    return (
        row("VKAE", "draft", "drafts off", 311.2, "mtp k=3", 492.4),
        row("VKAE", "prompt length", "2048", 402.9, "128", 492.4),
        row("VKAE", "sampling", "t0.7-p0.9", 418.3, "greedy", 492.4),
        row("VKAE", "process restart", "block 1", 487.5, "block 3", 497.3),
        row("stock", "prompt length", "2048", 70.8, "128", 76.2),
        row("stock", "sampling", "t0.7-p0.9", 74.9, "greedy", 76.2),
        row("stock", "process restart", "block 1", 75.4, "block 3", 76.9),
    )


def page() -> Page:
    times = tuple(float(i) for i in range(60))
    return Page(
        headlines=(headline(),),
        boards=(board(),),
        cells=cells(),
        equality=(
            EqualityRow(
                run_id=RUN,
                model="vk-tiny",
                comparison="VKAE drafts on = drafts off",
                setting="greedy",
                result="identical",
                prompts=96,
                positions=12288,
            ),
            EqualityRow(
                run_id=RUN,
                model="vk-tiny",
                comparison="VKAE = stock",
                setting="greedy",
                result="ties(3)",
                prompts=24,
                positions=3072,
                ties=3,
                tie_bound=1e-3,
                self_rate=0.0,
            ),
            EqualityRow(
                run_id=RUN,
                model="vk-tiny",
                comparison="VKAE = stock",
                setting="t0.7-p0.9",
                result="not_applicable",
                prompts=24,
                positions=0,
                note="sampled",
            ),
        ),
        spread=spread(),
        variance=tuple(
            VarianceRow(
                run_id=RUN,
                model="vk-tiny",
                arm="VKAE",
                source=source,
                share=share,
                interval=Interval(low=share * 0.6, high=min(1.0, share * 1.5)),
                levels=levels,
                marks=REAL,
            )
            for source, share, levels in (
                ("prompt", 0.71, 24),
                ("fresh process", 0.12, 3),
                ("order in the block", 0.02, 2),
                ("within a run", 0.15, 72),
            )
        ),
        domains=tuple(
            DomainRow(
                run_id=RUN,
                model="vk-tiny",
                arm="VKAE",
                domain=name,
                requests=12,
                decode_tok_s=Measured(value=value),
                against="stock",
                ratio=Measured(value=value / 76.2),
                acceptance_length=length,
                marks=REAL,
            )
            for name, value, length in (
                ("code", 561.0, 2.44),
                ("chat", 470.2, 2.01),
                ("maths", 448.9, 1.92),
            )
        ),
        failures=(Failure(run_id=RUN, cell="vk-c4", block=2, reason="server died: exit code -9"),),
        violations=(
            ViolationRow(
                run_id=RUN,
                cell="vk-c4",
                rule="client_bound",
                severity="invalid",
                message="the client was the bottleneck",
                numbers="stall 41 ms, bound 5 ms",
            ),
        ),
        runs=(run_card(),),
        telemetry=(
            TelemetrySeries(
                run_id=RUN,
                name="CPU load",
                unit="cores",
                t_s=times,
                values=tuple(1.5 + 0.4 * (i % 7) / 7 for i in range(60)),
            ),
        ),
        claims=(
            ClaimRow(
                id="qwen35-35b-a3b",
                who="VIDRAFT",
                model="Qwen3.5-35B-A3B",
                claimed="23.4×, 25.7 to 601 tok/s",
                hardware="one B200",
                status="self-reported",
                measured=None,
                unknown="baseline settings, prompts, repeats, token equality",
                source="published statement",
            ),
        ),
    )


def random_page() -> Page:
    """A run of random weights and synthetic acceptance: never to be read as a model's speed."""
    mine = cell(
        "vk", "base", 601.0, model="qwen35-35b-a3b", marks=RANDOM, draft="mtp k=3, synthetic 0.8"
    )
    lead = headline().model_copy(update={"model": "qwen35-35b-a3b", "marks": RANDOM})
    return Page(
        headlines=(lead,),
        boards=(
            Board(
                title="qwen35-35b-a3b shape, random weights",
                compares="everything",
                rows=(
                    board()
                    .rows[0]
                    .model_copy(
                        update={"model": "qwen35-35b-a3b", "marks": RANDOM, "position": None}
                    ),
                ),
            ),
        ),
        cells=(
            mine,
            cell("vk", "seq_len", 555.0, model="qwen35-35b-a3b", seq_len=512, marks=RANDOM),
        ),
        spread=(spread()[0].model_copy(update={"model": "qwen35-35b-a3b", "marks": RANDOM}),),
        runs=(run_card(),),
    )


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>|`x`\n# [x](javascript:y)"


def hostile_page() -> Page:
    """Every free-text field holds markup."""
    lead = headline().model_copy(
        update={"model": HOSTILE, "arm_label": HOSTILE, "hardware": HOSTILE}
    )
    card = run_card().model_copy(
        update={
            "id": HOSTILE,
            "scenario": HOSTILE,
            "hardware": HOSTILE,
            "bare_loop": HOSTILE,
            "facts": (Fact(group=HOSTILE, name=HOSTILE, value=HOSTILE),),
            "rolls": (
                Roll(started_utc=HOSTILE, ended_utc=HOSTILE, status=HOSTILE, command=HOSTILE),
            ),
            "commands": (Command(label=HOSTILE, text=HOSTILE + "\n```\nrm -rf /\n"),),
            "notes": (HOSTILE,),
        }
    )
    named = {
        "model": HOSTILE,
        "arm_label": HOSTILE,
        "id": HOSTILE,
        "sampling": HOSTILE,
        "draft": HOSTILE,
    }
    return page().model_copy(
        update={
            "headlines": (lead,),
            "boards": (board().model_copy(update={"title": HOSTILE, "note": HOSTILE}),),
            "cells": tuple(c.model_copy(update=named) for c in cells()),
            "failures": (Failure(run_id=HOSTILE, cell=HOSTILE, block=1, reason=HOSTILE),),
            "violations": (
                ViolationRow(
                    run_id=HOSTILE,
                    cell=HOSTILE,
                    rule=HOSTILE,
                    severity="invalid",
                    message=HOSTILE,
                    numbers=HOSTILE,
                ),
            ),
            "runs": (card,),
            "spread": tuple(
                r.model_copy(update={"model": HOSTILE, "arm": HOSTILE, "source": HOSTILE})
                for r in spread()
            ),
        }
    )
