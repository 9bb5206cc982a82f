"""When is a server warm: a rule over times of warm-up rounds; it ends a warm-up and judges one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WarmRule:
    """Steady when the last `window` rounds' times vary by at most `spread` of their median.

    A round is `concurrency` requests. `spread` is (largest - smallest) / median, both of time to
    first token and of time per token; a width below `noise_ms`, or `token_noise_ms` a token, is
    steady whatever its share.
    """

    window: int = 3
    spread: float = 0.1
    noise_ms: float = 2.0
    token_noise_ms: float = 0.5
    max_rounds: int = 12


def unsteady(
    first_token_ms: Sequence[float], per_token_ms: Sequence[float], rule: WarmRule
) -> str | None:
    """Why the last rounds are not steady, or None when they are."""
    if len(first_token_ms) < rule.window:
        return f"{len(first_token_ms)} of the {rule.window} rounds that are compared"
    for name, times, noise in (
        ("first token", first_token_ms, rule.noise_ms),
        ("time per token", per_token_ms, rule.token_noise_ms),
    ):
        last = times[-rule.window :]
        width, middle = max(last) - min(last), statistics.median(last)
        if width > noise and width > rule.spread * middle:
            return (
                f"{name} still varies from {min(last):.2f} to {max(last):.2f} ms over "
                f"{rule.window} rounds"
            )
    return None
