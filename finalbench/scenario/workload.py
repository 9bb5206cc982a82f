"""What is asked of a server, how fast, and what counts as a good answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from finalbench.scenario.base import Frozen, PositiveInt
from finalbench.stats.steady import WarmRule


class Limits(Frozen):
    """What a request must meet to count as good, seconds; null limits nothing.

    Times to first token and of the whole request are from its scheduled send.
    """

    ttft_s: Annotated[float, Field(gt=0)] | None = None
    tpot_s: Annotated[float, Field(gt=0)] | None = None
    e2e_s: Annotated[float, Field(gt=0)] | None = None


class Workload(Frozen):
    """What is asked. Lengths are tokens, counts are requests of one cell in one block."""

    text_class: Literal["natural", "random"] = "natural"
    domains: tuple[str, ...] = ()
    requests: PositiveInt
    warmup_requests: Annotated[int, Field(ge=0)] = 1
    warmup_output_len: PositiveInt = 16
    # Rounds of `concurrency` requests until times are steady, at most so many; null: exactly
    # `warmup_requests` requests. Without warm-up requests there are no rounds either.
    warmup_rounds: Annotated[int, Field(ge=3, le=100)] | None = None
    ignore_eos: bool = True
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1

    # closed: each stream sends when its last request ended. poisson, constant: by the clock, at
    # `rate_per_s`, with at most `concurrency` in flight.
    arrivals: Literal["closed", "poisson", "constant"] = "closed"
    rate_per_s: Annotated[float, Field(gt=0)] | None = None
    limits: Limits | None = None  # for goodput

    @property
    def warm_rule(self) -> WarmRule | None:
        """None: a fixed number of warm-up requests, perhaps none."""
        if self.warmup_rounds is None or not self.warmup_requests:
            return None
        return WarmRule(max_rounds=self.warmup_rounds)

    def identity(self) -> dict[str, Any]:
        """What makes two workloads the same; what came later takes part only where it is set."""
        found = self.model_dump(mode="json")
        later = {"warmup_rounds": None, "arrivals": "closed", "rate_per_s": None, "limits": None}
        return {k: v for k, v in found.items() if k not in later or v != later[k]}

    @model_validator(mode="after")
    def _rate_fits_arrivals(self) -> Workload:
        if (self.arrivals == "closed") != (self.rate_per_s is None):
            raise ValueError(
                "rate_per_s: goes with arrivals poisson or constant, and is needed there"
            )
        return self
