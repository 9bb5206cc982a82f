"""The `.eval_results` entry of a run, for a pull request to the model's own repository."""

from __future__ import annotations

from finalbench.aggregate import Analysis
from finalbench.report import phrases, view


def eval_results(analysis: Analysis, repo_id: str, *, on: str) -> tuple[str | None, str | None]:
    """(YAML, None), or (None, why not): a random, synthetic or divergent row is never proposed."""
    head = analysis.headline
    if head.weights != "real" or head.acceptance != "measured":
        return None, f"{head.weights} weights, {head.acceptance} acceptance"
    if not (head.equality == "identical" or head.equality.startswith("ties(")):
        return None, f"equality is {head.equality}"
    if head.decode_tok_s is None or head.ratio is None:
        return None, "the run has no headline rate and ratio"
    import yaml
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    marks = view.Marks(weights=head.weights, acceptance=head.acceptance, equality=head.equality)
    entry = EvalResultEntry(
        dataset_id=repo_id,
        task_id=analysis.scenario,
        value=round(head.decode_tok_s, 2),
        date=on or None,
        source_url=f"https://huggingface.co/datasets/{repo_id}",
        source_name=f"finalbench run {analysis.run_id}",
        notes=phrases.join_words(
            (
                f"decode tok/s, one stream, {head.setting}",
                f"{phrases.times(head.ratio)} {head.against}",
                f"on {analysis.hardware}",
                *phrases.mark_words(marks),
            )
        ),
    )
    return yaml.safe_dump(
        eval_result_entries_to_yaml([entry]), sort_keys=False, allow_unicode=True, width=1000
    ), None
