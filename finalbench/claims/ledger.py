"""results/claims.yaml: published figures with what is known and unknown about each."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from finalbench.errors import UsageError
from finalbench.record import write_atomic
from finalbench.scenario import Frozen

State = Literal["self-reported", "replicated", "verified", "contested", "stale"]
Id = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,79}$")]

# What a reader needs to repeat a speed figure; whatever a claim leaves null is listed as unknown.
PROTOCOL = (
    "baseline",
    "baseline_version",
    "engine_version",
    "precision",
    "sampling",
    "draft",
    "seq_len",
    "output_len",
    "prompts",
    "repeats",
    "interval",
    "token_source",
    "output_equality",
)
_HEADER = """\
# Published speed claims, ours and others'. `finalbench claim list` shows them, `claim check` judges
# them; a state moves only through `claim replicate` and `claim contest`, never by editing.
"""


class Figure(Frozen):
    """What is claimed. `ratio` is engine / baseline; rates in tok/s; a rank has its event."""

    ratio: Annotated[float, Field(gt=0)] | None = None
    engine_tok_s: Annotated[float, Field(gt=0)] | None = None
    baseline_tok_s: Annotated[float, Field(gt=0)] | None = None
    engine_tok_s_range: tuple[float, float] | None = None
    rank: Annotated[int, Field(gt=0)] | None = None
    event: str | None = None

    @model_validator(mode="after")
    def _says_something_consistent(self) -> Figure:
        if self.ratio is None and self.engine_tok_s is None and self.rank is None:
            raise ValueError("a claim needs a ratio, a rate or a rank")
        if self.rank is not None and not self.event:
            raise ValueError("event: a rank holds only within a named event")
        if self.ratio and self.engine_tok_s and self.baseline_tok_s:
            quotient = self.engine_tok_s / self.baseline_tok_s
            if abs(quotient / self.ratio - 1) > 0.01:
                raise ValueError(
                    f"ratio: {self.ratio:g} does not follow from {self.engine_tok_s:g} / "
                    f"{self.baseline_tok_s:g} = {quotient:.4g}"
                )
        return self


class Source(Frozen):
    """Who says so and where."""

    who: str
    title: str
    url: str | None = None
    published: date | None = None


class Evidence(Frozen):
    """One sealed run held against a claim. `host` and `key` are digests and name nobody."""

    kind: Literal["origin", "replication", "contest"]
    run_id: str
    root: str
    host: str
    key: str | None = None
    by: str
    on: date
    ratio: float
    ratio_interval: tuple[float, float]
    verdict: Literal["FASTER", "SLOWER", "EQUIVALENT", "INCONCLUSIVE"]


class Move(Frozen):
    """One change of state, kept for ever."""

    on: date
    before: State
    after: State
    reason: str


class Claim(Frozen):
    """A published figure, its conditions as far as stated, and what has been held against it."""

    id: Id
    model: str
    scenario: str | None = None
    figure: Figure
    scope: str
    hardware: str | None = None
    protocol: dict[str, str | int | float | None] = Field(default_factory=dict)
    source: Source
    status: State = "self-reported"
    note: str | None = None
    digests: dict[str, str] = Field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()
    history: tuple[Move, ...] = ()

    @model_validator(mode="after")
    def _protocol_is_known(self) -> Claim:
        for name in self.protocol:
            if name not in PROTOCOL:
                raise ValueError(f"protocol.{name}: not one of {', '.join(PROTOCOL)}")
        if not self.scope.strip():
            raise ValueError("scope: a figure without its scope says nothing")
        return self

    @model_validator(mode="after")
    def _state_has_a_history(self) -> Claim:
        reached = self.history[-1].after if self.history else "self-reported"
        if self.status != reached:
            raise ValueError(f"status: is {self.status}, its history ends at {reached}")
        return self

    @property
    def unknown(self) -> tuple[str, ...]:
        """Conditions the source does not state."""
        missing = [name for name in PROTOCOL if self.protocol.get(name) is None]
        if self.hardware is None:
            missing.insert(0, "hardware")
        return tuple(name.replace("_", " ") for name in missing)

    @property
    def origin(self) -> Evidence | None:
        return next((e for e in self.evidence if e.kind == "origin"), None)

    def text(self) -> str:
        """The claim in words, made from its fields, its scope and hardware included."""
        figure, parts = self.figure, []
        if figure.ratio is not None:
            parts.append(f"{figure.ratio:g}x {self.protocol.get('baseline') or 'a baseline'}")
        if figure.baseline_tok_s is not None and figure.engine_tok_s is not None:
            parts.append(f"{figure.baseline_tok_s:g} to {figure.engine_tok_s:g} tok/s")
        elif figure.engine_tok_s is not None:
            parts.append(f"{figure.engine_tok_s:g} tok/s")
        if figure.engine_tok_s_range is not None:
            low, high = figure.engine_tok_s_range
            parts.append(f"range {low:g} to {high:g} tok/s")
        if figure.rank is not None:
            parts.append(f"rank {figure.rank} in {figure.event}, by that event's rules only")
        return f"{', '.join(parts)}; {self.scope}"


class Ledger(Frozen):
    """The whole file."""

    schema_version: Literal[1] = 1
    claims: tuple[Claim, ...] = ()

    @model_validator(mode="after")
    def _ids_are_unique(self) -> Ledger:
        ids = [claim.id for claim in self.claims]
        repeated = sorted({name for name in ids if ids.count(name) > 1})
        if repeated:
            raise ValueError(f"claims: ids repeat: {', '.join(repeated)}")
        return self

    def get(self, claim_id: str) -> Claim:
        """The claim of this id, or a usage error that lists the ids there are."""
        for claim in self.claims:
            if claim.id == claim_id:
                return claim
        known = ", ".join(claim.id for claim in self.claims) or "none"
        raise UsageError(f"no claim {claim_id!r}; claims are {known}")

    def put(self, claim: Claim) -> Ledger:
        """A ledger with this claim in its old place, or at the end."""
        ids = [old.id for old in self.claims]
        if claim.id not in ids:
            return Ledger(claims=(*self.claims, claim))
        return Ledger(claims=tuple(claim if c.id == claim.id else c for c in self.claims))


def load_ledger(path: Path) -> Ledger:
    """Errors: `UsageError` naming the file and the field."""
    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML: {error}") from error
    try:
        return Ledger.model_validate(data or {})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "top level"
        raise UsageError(f"{path}: {where}: {first['msg']}") from error


def save_ledger(path: Path, ledger: Ledger) -> None:
    """Replace the file; fields that say nothing are left out."""
    document = ledger.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    document = {"schema_version": 1, **document}
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
    write_atomic(path, (_HEADER + text).encode())
