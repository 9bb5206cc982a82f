"""Secrets kept out of a run's own records: what servers print, are started with, and answer.

An upload is cleaned again, by allow-list (`hub.redact`). Here only what looks like a secret goes,
so that a command can be repeated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finalbench.hub.redact import REMOVED, scrub, scrub_document, secret_values

_SECRET_OPTION = re.compile(r"(?i)(token|secret|passw|credential|cookie|auth|(^|-)key)(?!.*-env$)")
_HARMLESS = re.compile(r"(?i)^--(.*tokens|tokenizer|.*-tokens-.*|.*-tokenizer-.*|skip-token.*)")


@dataclass(frozen=True, slots=True)
class Cleaner:
    """Knows the secret-looking values of the environment the servers are started in."""

    values: tuple[str, ...]

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Cleaner:
        return cls(secret_values(environment))

    def text(self, text: str | None) -> str | None:
        """Free text, such as an error."""
        return None if text is None else scrub(text, self.values)

    def command(self, words: Sequence[str]) -> tuple[str, ...]:
        """Words of a command; the value of an option that is named like a secret goes whole."""
        kept: list[str] = []
        hidden = False
        for word in words:
            if word.startswith("--"):
                name, sign, _ = word.partition("=")
                hidden = bool(_SECRET_OPTION.search(name)) and not _HARMLESS.match(name)
                kept.append(f"{name}={REMOVED}" if hidden and sign else scrub(word, self.values))
                hidden = hidden and not sign
            else:
                kept.append(REMOVED if hidden else scrub(word, self.values))
                hidden = False
        return tuple(kept)

    def document(self, value: dict[str, Any] | None) -> dict[str, Any] | None:
        """Settings as a server tells them."""
        return None if value is None else scrub_document(value, self.values)

    def log(self, path: Path | None) -> None:
        """A server's log in place, once the server has ended."""
        if path is None or not path.is_file():
            return
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
        cleaned = scrub(text, self.values)
        if cleaned != text:
            path.write_text(cleaned, encoding="utf-8", errors="surrogateescape")
