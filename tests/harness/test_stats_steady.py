"""The rule that ends a warm-up."""

from __future__ import annotations

from finalbench.stats.steady import WarmRule, unsteady


def test_the_rule_as_documented() -> None:
    rule = WarmRule()
    assert (rule.window, rule.spread, rule.max_rounds) == (3, 0.1, 12)
    assert (rule.noise_ms, rule.token_noise_ms) == (2.0, 0.5)


def test_rule_by_hand() -> None:
    rule = WarmRule(window=3, spread=0.1, noise_ms=1.0, token_noise_ms=1.0)
    assert unsteady([50.0, 10.0, 10.5, 10.9], [5.0] * 4, rule) is None
    assert "first token" in (unsteady([10.0, 10.0, 11.5], [5.0] * 3, rule) or "")
    assert "time per token" in (unsteady([10.0] * 3, [5.0, 5.0, 7.0], rule) or "")
    assert "2 of the 3" in (unsteady([1.0, 1.0], [1.0, 1.0], rule) or "")
    assert unsteady([1.0, 1.9, 1.0], [0.1, 0.9, 0.5], rule) is None
    # Each series has a noise of its own; both bounds are inclusive.
    assert "time per token" in (unsteady([1.0] * 3, [0.1, 0.9, 0.5], WarmRule()) or "")
    assert unsteady([10.0, 11.0, 10.0], [1.0, 1.1, 1.0], WarmRule(noise_ms=0.0)) is None
    assert unsteady([10.0, 12.0, 10.0], [1.0] * 3, WarmRule(noise_ms=2.0)) is None


def test_the_message_has_the_numbers() -> None:
    rule = WarmRule(window=2, noise_ms=0.0)
    assert unsteady([9.0, 10.0, 12.0], [1.0] * 3, rule) == (
        "first token still varies from 10.00 to 12.00 ms over 2 rounds"
    )
