"""How a claim changes its state: only through sealed runs, each from a host of its own.

self-reported -> replicated   an equivalent bundle from a host that did not make the claim
replicated    -> verified     a second one from a third host, at least one of both signed
any           -> contested    a bundle from another host whose interval lies outside the margin
any           -> stale        a digest that the claim names has changed
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from finalbench.aggregate import Analysis, analyse
from finalbench.bundle import verify
from finalbench.claims.ledger import Claim, Evidence, Figure, Move, Source, State
from finalbench.errors import BundleBroken, Inconclusive, UsageError
from finalbench.record import Run, load_run
from finalbench.scenario import Frozen
from finalbench.stats import Verdict, decide

MARGIN = 0.05


class Bundle(Frozen):
    """A sealed run that holds, with what a claim is compared with."""

    run: Run
    analysis: Analysis
    root: str
    key: str | None
    digests: dict[str, str]


def open_bundle(run_dir: Path) -> Bundle:
    """Verify the seal and every number first. Errors: `BundleBroken` naming file and field."""
    checked = verify(run_dir)
    checked.require()
    records = load_run(run_dir)
    if records.run.status != "complete":
        raise BundleBroken(f"{run_dir}: the run is {records.run.status}, not complete")
    digests = {"scenario": records.run.plan.scenario_hash}
    digests["engine"] = str(records.run.provenance.packages.get("vkengine", "unknown"))
    if records.run.provenance.git_commit:
        digests["commit"] = records.run.provenance.git_commit
    served = [s.settings or {} for s in records.servers]
    found = {str(settings["model_digest"]) for settings in served if settings.get("model_digest")}
    if len(found) == 1:
        digests["model"] = found.pop()
    return Bundle(
        run=records.run,
        analysis=analyse(run_dir),
        root=checked.root or "",
        key=checked.signed_by,
        digests=digests,
    )


def claim_of(bundle: Bundle, *, claim_id: str, who: str, title: str, on: date) -> Claim:
    """A new claim of our own from a sealed run: its headline, conditions, digests and host."""
    head = bundle.analysis.headline
    if head.ratio is None or head.ratio_interval is None:
        reason = head.reasons.get("ratio") or head.reasons.get("ratio_interval") or "unknown"
        raise UsageError(f"{bundle.run.run_id} has no ratio with an interval to claim: {reason}")
    scenario = bundle.run.scenario
    base, workload = scenario.base, scenario.workload
    low, high = head.ratio_interval
    return Claim(
        id=claim_id,
        model=bundle.analysis.model,
        scenario=scenario.name,
        figure=Figure(
            ratio=round(head.ratio, 3),
            engine_tok_s=head.decode_tok_s and round(head.decode_tok_s, 2),
            baseline_tok_s=head.against_decode_tok_s and round(head.against_decode_tok_s, 2),
        ),
        scope=head.setting or "base setting",
        hardware=bundle.analysis.hardware,
        protocol={
            "baseline": head.against,
            "baseline_version": bundle.run.provenance.packages.get("transformers"),
            "engine_version": bundle.run.provenance.packages.get("vkengine"),
            "precision": scenario.model.dtype,
            "sampling": base.sampling,
            "draft": base.draft,
            "seq_len": base.seq_len,
            "output_len": base.output_len,
            "prompts": f"{workload.text_class}, seed {workload.seed}",
            "repeats": len(bundle.run.plan.blocks),
            "interval": f"{low:.3g} to {high:.3g}",
            "token_source": "ids",
            "output_equality": head.equality,
        },
        source=Source(who=who, title=title, published=on),
        digests=bundle.digests,
        evidence=(_evidence(bundle, "origin", who, on, Verdict.EQUIVALENT),),
    )


def replicate(claim: Claim, bundle: Bundle, *, by: str, on: date, margin: float = MARGIN) -> Claim:
    """Hold a bundle against a claim; an equivalent one may lift it by one state.

    Errors: `BundleBroken` when it does not measure the same thing or comes from the same host,
    `Inconclusive` when its interval cannot tell, `UsageError` when it contradicts (`contest` it).
    """
    verdict = _judged(claim, bundle, by, margin)
    if verdict is Verdict.INCONCLUSIVE:
        raise Inconclusive(
            f"{bundle.run.run_id} cannot tell whether {claim.id} holds within {100 * margin:g} %",
            hint="run more blocks: finalbench run --blocks N",
        )
    if verdict is not Verdict.EQUIVALENT:
        raise UsageError(
            f"{bundle.run.run_id} is {verdict.value} than claimed, not equivalent",
            hint=f"finalbench claim contest {claim.id} RUN",
        )
    found = _evidence(bundle, "replication", by, on, verdict)
    evidence = (*claim.evidence, found)
    replications = [e for e in evidence if e.kind == "replication"]
    hosts = {e.host for e in replications}
    after: State = "replicated"
    if len(hosts) >= 2 and any(e.key for e in replications) and claim.status != "contested":
        after = "verified"
    if claim.status in ("contested", "stale", "verified"):
        after = claim.status  # one agreeing run settles no dispute and revives no outdated claim
    moved = claim.model_copy(update={"evidence": evidence})
    return _move(moved, after, on, f"equivalent bundle {bundle.root[:12]} by {by}")


def contest(claim: Claim, bundle: Bundle, *, by: str, on: date, margin: float = MARGIN) -> Claim:
    """Hold a contradicting bundle against a claim. Errors as in `replicate`."""
    verdict = _judged(claim, bundle, by, margin)
    if verdict is Verdict.INCONCLUSIVE:
        raise Inconclusive(f"{bundle.run.run_id} cannot tell whether {claim.id} is wrong")
    if verdict is Verdict.EQUIVALENT:
        raise UsageError(f"{bundle.run.run_id} agrees with {claim.id} within {100 * margin:g} %")
    moved = claim.model_copy(
        update={"evidence": (*claim.evidence, _evidence(bundle, "contest", by, on, verdict))}
    )
    return _move(moved, "contested", on, f"{verdict.value} in bundle {bundle.root[:12]} by {by}")


def check(claim: Claim, current: Mapping[str, str], *, on: date) -> tuple[Claim, list[str]]:
    """Compare the digests a claim names with today's; any difference makes it stale."""
    changed = [
        f"{name} was {before[:12]}, is {current[name][:12]}"
        for name, before in sorted(claim.digests.items())
        if name in current and current[name] != before
    ]
    if not changed or claim.status == "stale":
        return claim, changed
    return _move(claim, "stale", on, "; ".join(changed)), changed


def _judged(claim: Claim, bundle: Bundle, by: str, margin: float) -> Verdict:
    head = bundle.analysis.headline
    for refusal in _refusals(claim, bundle, by):
        raise BundleBroken(f"{bundle.run.run_id} cannot judge {claim.id}: {refusal}")
    ratio = claim.figure.ratio
    if ratio is None or head.ratio_interval is None:
        raise BundleBroken(f"{bundle.run.run_id} has no interval to judge {claim.id} by")
    low, high = (math.log(bound / ratio) for bound in head.ratio_interval)
    return decide(low, high, margin=margin)[0]


def _refusals(claim: Claim, bundle: Bundle, by: str) -> list[str]:
    """Why a bundle says nothing about a claim, by name."""
    analysis, head = bundle.analysis, bundle.analysis.headline
    found = []
    if claim.figure.ratio is None:
        found.append("a rank or rate without a ratio is judged by its own event only")
    if claim.scenario is not None and claim.scenario != analysis.scenario:
        found.append(f"scenario is {analysis.scenario}, the claim's is {claim.scenario}")
    if claim.scenario is None:
        found.append("no scenario measures what it claims")
    if claim.hardware and not _same_hardware(claim.hardware, analysis.hardware):
        found.append(f"hardware is {analysis.hardware}, the claim's is {claim.hardware}")
    baseline = claim.protocol.get("baseline")
    if baseline is not None and head.against is not None and str(baseline) != head.against:
        found.append(f"baseline is {head.against}, the claim's is {baseline}")
    if head.weights != "real" or head.acceptance != "measured":
        found.append(f"{head.weights} weights and {head.acceptance} acceptance prove nothing")
    if not (head.equality == "identical" or head.equality.startswith("ties(")):
        found.append(f"equality is {head.equality}, so its speed is of other outputs")
    host = bundle.run.provenance.host
    if claim.origin is not None and claim.origin.host == host:
        found.append("it comes from the host that made the claim")
    if by.casefold() == claim.source.who.casefold():
        found.append(f"{by} made the claim")
    if host in {e.host for e in claim.evidence if e.kind != "origin"}:
        found.append("a bundle from this host already stands in the ledger")
    return found


def _same_hardware(claimed: str, measured: str) -> bool:
    """Every word of the claimed device, counts aside, occurs in the measured one."""
    words = claimed.lower().replace(",", " ").split()
    ignored = {"one", "1", "x", "1x", "gpu", "nvidia", "a"}
    return all(word in measured.lower() for word in words if word not in ignored)


def _evidence(bundle: Bundle, kind: str, by: str, on: date, verdict: Verdict) -> Evidence:
    head = bundle.analysis.headline
    return Evidence.model_validate(
        {
            "kind": kind,
            "run_id": bundle.run.run_id,
            "root": bundle.root,
            "host": bundle.run.provenance.host,
            "key": bundle.key,
            "by": by,
            "on": on,
            "ratio": head.ratio,
            "ratio_interval": head.ratio_interval,
            "verdict": verdict.value,
        }
    )


def _move(claim: Claim, after: State, on: date, reason: str) -> Claim:
    if after == claim.status:
        return claim
    move = Move(on=on, before=claim.status, after=after, reason=reason)
    return claim.model_copy(update={"status": after, "history": (*claim.history, move)})
