"""The words and number formats every output shares, so that no format can say less than another."""

from __future__ import annotations

import math
from collections.abc import Iterable

from finalbench.report.view import Comparison, Headline, Interval, Marks, Measured

MISSING = "–"
VERDICT_WORDS = {
    "FASTER": "faster",
    "SLOWER": "slower",
    "EQUIVALENT": "equivalent",
    "INCONCLUSIVE": "inconclusive",
}
STATUS_WORDS = {
    "self-reported": "self-reported, unverified",
    "replicated": "replicated, unverified",
    "verified": "verified",
    "contested": "contested, unverified",
    "stale": "stale, unverified",
}


def significant(value: float | None, digits: int = 4) -> str:
    """A number with `digits` significant digits and no exponent: 0.02515, 79.31, 1204."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}"


def tok_s(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def times(value: float | None) -> str:
    """A ratio: 5.21×."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:.3f}×" if value < 2 else f"{value:.2f}×"


def share(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{100 * value:.1f} %"


def milliseconds(value_s: float | None) -> str:
    if value_s is None or not math.isfinite(value_s):
        return MISSING
    return f"{1000 * value_s:.1f}" if value_s < 1 else f"{1000 * value_s:.0f}"


def between(interval: Interval | None, form: str = "tok_s") -> str:
    """An interval in square brackets, or nothing."""
    if interval is None:
        return ""
    show = {"tok_s": tok_s, "times": times}[form]
    return f"[{show(interval.low).removesuffix('×')}, {show(interval.high).removesuffix('×')}]"


def shape_name(model: str, marks: Marks) -> str:
    """Random weights are named by shape, never as the model."""
    if marks.weights == "random" and not model.endswith(" shape"):
        return f"{model} shape"
    return model


def mark_words(marks: Marks) -> tuple[str, ...]:
    """All four classes in words, for a page or a card."""
    return (
        f"{marks.weights} weights",
        f"{marks.acceptance} acceptance",
        equality_words(marks.equality),
        STATUS_WORDS[marks.status],
    )


def caution(marks: Marks) -> str:
    """What must stand in every number's own cell: the words that lower its claim."""
    words = []
    if marks.weights == "random":
        words.append("random weights")
    if marks.acceptance == "synthetic":
        words.append("synthetic acceptance")
    if marks.equality.startswith("divergent"):
        words.append("divergent")
    if marks.status != "verified":
        words.append("unverified")
    return ", ".join(words)


def equality_words(equality: str) -> str:
    words = {
        "identical": "identical tokens",
        "divergent": "divergent tokens",
        "not_applicable": "equality not applicable",
        "not_judged": "equality not judged",
    }
    if equality.startswith("ties"):
        count = equality.removeprefix("ties").strip("()")
        return f"identical but for {count} ties" if count else "identical but for ties"
    return words.get(equality, equality)


def verdict_words(comparison: Comparison | None) -> str:
    return VERDICT_WORDS[comparison.verdict] if comparison else MISSING


def why(measured: Measured) -> str:
    """The reason for a null, or nothing."""
    return "" if measured.value is not None else (measured.reason or "not measured")


def headline_sentence(headline: Headline) -> str:
    """The one sentence a stranger takes away; the ratio never stands without its baseline."""
    name = shape_name(headline.model, headline.marks)
    versus = headline.comparison
    if headline.decode_tok_s.value is None:
        return f"No rate for {headline.arm_label} on {name}: {why(headline.decode_tok_s)}."
    rate = f"{tok_s(headline.decode_tok_s.value)} tok/s"
    if versus is None or versus.ratio.value is None:
        missing = why(versus.ratio) if versus else "no baseline in this run"
        return (
            f"{headline.arm_label} decodes {name} at {rate} on {headline.hardware}; "
            f"no ratio: {missing}."
        )
    base = versus.against_label
    against = f"{rate} against {tok_s(versus.against_decode_tok_s)}"
    ratio = times(versus.ratio.value)
    if versus.verdict == "INCONCLUSIVE":
        return (
            f"{headline.arm_label} against {base} on {name} is inconclusive: {ratio}, "
            f"{against}, on {headline.hardware}."
        )
    if versus.verdict == "EQUIVALENT":
        return (
            f"{headline.arm_label} decodes {name} as fast as {base}: {ratio}, "
            f"{against}, on {headline.hardware}."
        )
    return (
        f"{headline.arm_label} decodes {name} {ratio} as fast as {base}: {against}, "
        f"one stream, on {headline.hardware}."
    )


def interval_sentence(headline: Headline) -> str:
    versus = headline.comparison
    if versus is None or versus.ratio.value is None:
        return ""
    count = len(versus.ratio.blocks) or len(headline.pairs)
    paired = f"{count} paired blocks of fresh server processes" if count else "paired blocks"
    interval = versus.ratio.interval
    if interval is None:
        return f"No interval: {versus.ratio.reason or 'too few blocks'} ({paired})."
    level = f"{100 * interval.level:g} %"
    return f"{level} interval {between(interval, 'times')} over {paired}; the mean, not the best."


def join_words(words: Iterable[str]) -> str:
    return " · ".join(word for word in words if word)


def setting_name(sampling: str, draft: str) -> str:
    return f"{sampling}, {draft}"


def draft_name(method: str, k: int | str | None, acceptance: float | None = None) -> str:
    """`drafts off`, `mtp k=3`, `mtp k=auto, synthetic 0.8`."""
    if method == "none":
        return "drafts off"
    name = f"{method} k={k}"
    return f"{name}, synthetic {acceptance:g}" if acceptance is not None else name
