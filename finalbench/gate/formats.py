"""A gate's result as JSON, JUnit XML, Markdown and a GitHub step summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from finalbench.gate.rows import GateCell, GateResult
from finalbench.stats import Verdict


def to_json(result: GateResult) -> dict[str, Any]:
    return result.model_dump(mode="json")


def to_junit(result: GateResult) -> str:
    """One test case per gated cell. A regression is a failure; what cannot tell is an error."""
    suite = ElementTree.Element("testsuite", name="finalbench gate")
    failures, errors = 0, 0
    for cell in result.cells:
        case = ElementTree.SubElement(suite, "testcase", classname=cell.arm, name=cell.label)
        if cell.verdict is Verdict.SLOWER:
            failures += 1
            _note(case, "failure", "regression", _line(cell))
        elif cell.verdict is Verdict.INCONCLUSIVE:
            errors += 1
            _note(case, "error", "inconclusive", _line(cell))
        else:
            ElementTree.SubElement(case, "system-out").text = _line(cell)
    if result.exit_code and not failures and not (errors and result.outcome == "inconclusive"):
        case = ElementTree.SubElement(suite, "testcase", classname="gate", name=result.outcome)
        kind = "failure" if result.outcome in ("regression", "divergent") else "error"
        failures += kind == "failure"
        errors += kind == "error"
        _note(case, kind, result.outcome, "; ".join(result.reasons))
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(failures))
    suite.set("errors", str(errors))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def to_markdown(result: GateResult) -> str:
    """A heading with the outcome, the reasons, and one table of all cells."""
    lines = [
        f"## finalbench gate: {result.outcome}",
        "",
        f"Baseline `{result.baseline_run}`, candidate `{result.candidate_run}`, "
        f"margin {result.margin:.1%}.",
        "",
        *(f"- {_escape(reason)}" for reason in result.reasons),
    ]
    cautions = [w for c in result.cells for w in c.caution.split(", ") if w]
    if cautions:
        lines += ["", f"Rows here are: {', '.join(dict.fromkeys(cautions))}."]
    rows = [("gated", c) for c in result.cells]
    rows += [("anchor", c) for c in result.anchor]
    rows += [("exploratory", c) for c in result.exploratory]
    if rows:
        lines += [
            "",
            "| | Arm | Setting | Baseline | Candidate | Change | 95 % interval | Detectable "
            "| Verdict | Classes |",
            "|---|---|---|---:|---:|---:|---|---:|---|---|",
        ]
    lines += [_row(kind, cell) for kind, cell in rows]
    if result.changes:
        lines += ["", "Changed between the runs:", ""]
        lines += [
            f"- {c.factor}: {_escape(c.name)}: {_escape(c.baseline)} -> {_escape(c.candidate)}"
            for c in result.changes
        ]
    if result.confounded:
        lines += ["", "**confounded**: more than one kind of thing changed, so the cause is open."]
    return "\n".join(lines) + "\n"


def write_step_summary(result: GateResult, path: Path) -> None:
    """Append to the file that GitHub shows on the job's page."""
    with path.open("a", encoding="utf-8") as file:
        file.write(to_markdown(result))


def _row(kind: str, cell: GateCell) -> str:
    interval = (
        "none"
        if cell.interval is None
        else f"{cell.interval[0] - 1:+.1%} to {cell.interval[1] - 1:+.1%}"
    )
    values = [
        kind,
        cell.arm,
        cell.label,
        _number(cell.baseline),
        _number(cell.candidate),
        "none" if cell.ratio is None else f"{cell.ratio - 1:+.1%}",
        interval,
        "none" if cell.detectable is None else f"{cell.detectable:.1%}",
        str(cell.verdict),
        cell.caution or "verified",
    ]
    return "| " + " | ".join(_escape(v) for v in values) + " |"


def _line(cell: GateCell) -> str:
    change = "" if cell.ratio is None else f", {cell.ratio - 1:+.1%}"
    why = f": {cell.reason}" if cell.reason else ""
    values = f"{_number(cell.baseline)} -> {_number(cell.candidate)} tok/s"
    caution = f" ({cell.caution})" if cell.caution else ""
    return f"{cell.verdict}: {values}{change}{caution}{why}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _note(case: ElementTree.Element, tag: str, kind: str, text: str) -> None:
    ElementTree.SubElement(case, tag, type=kind, message=text)
