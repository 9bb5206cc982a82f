"""Our own prompts, by domain; original text under the licence of this repository."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

DOMAINS = ("chat", "code", "maths", "translation", "extraction", "summary")


@dataclass(frozen=True, slots=True)
class PromptText:
    """One prompt. `id` is unique over all domains."""

    id: str
    domain: str
    text: str


@cache
def load_prompts(domain: str | None = None) -> tuple[PromptText, ...]:
    """All prompts, or those of one domain, in file order. KeyError for an unknown domain."""
    if domain is not None and domain not in DOMAINS:
        raise KeyError(domain)
    rows: list[PromptText] = []
    for name in DOMAINS if domain is None else (domain,):
        lines = resources.files(__name__).joinpath(f"{name}.jsonl").read_text(encoding="utf-8")
        rows += [PromptText(**json.loads(line)) for line in lines.splitlines() if line]
    return tuple(rows)
