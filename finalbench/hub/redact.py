"""Secrets: removed from what is published by allow-list, then searched for once more.

Names and shapes of secrets are many, so a command line keeps only values of options known to be
harmless, an environment keeps only variables known to be harmless, and free text is searched for
known shapes. Words that merely contain one (`tokenizer`, `token_count`) are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

REMOVED = "<removed>"

# Options whose values may be shown. Everything else on a command line keeps its name only.
OPTIONS = frozenset(
    {
        "--api-key-env",
        "--arms",
        "--blocks",
        "--checkpoint",
        "--chat-template",
        "--concurrency",
        "--device",
        "--draft",
        "--dtype",
        "--endpoint",
        "--fresh",
        "--grid",
        "--host",
        "--json",
        "--max-model-len",
        "--max-sequences",
        "--model",
        "--no-progress",
        "--output-tokens",
        "--port",
        "--profile",
        "--prompt-tokens",
        "--quiet",
        "--repeat",
        "--results-dir",
        "--resume",
        "--runtime",
        "--scenario",
        "--set",
        "--served-model-name",
        "--threads",
        "--weights",
        # of servers of other projects, as finalbench starts them
        "--alias",
        "--cache-ram",
        "--context-length",
        "--ctx-size",
        "--gdn-prefill-backend",
        "--generation-config",
        "--gpu-memory-utilization",
        "--load-format",
        "--max-num-seqs",
        "--max-running-requests",
        "--mem-fraction-static",
        "--model-path",
        "--n-gpu-layers",
        "--parallel",
        "--random-seed",
        "--sampling-defaults",
        "--seed",
        "--speculative-algorithm",
        "--speculative-config",
        "--speculative-eagle-topk",
        "--speculative-num-draft-tokens",
        "--speculative-num-steps",
        "--threads-batch",
    }
)
VARIABLES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "HF_HUB_OFFLINE",
        "KMP_AFFINITY",
        "MKL_NUM_THREADS",
        "NVIDIA_TF32_OVERRIDE",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "TOKENIZERS_PARALLELISM",
    }
)

_SHAPES = {
    "Hugging Face token": r"\bhf_[A-Za-z0-9]{16,}",
    "OpenAI or Anthropic key": r"\bsk-[A-Za-z0-9_-]{16,}",
    "NVIDIA key": r"\bnvapi-[A-Za-z0-9_-]{16,}",
    "AWS key id": r"\b(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}\b",
    "Google key": r"\bAIza[0-9A-Za-z_-]{35}",
    "Google OAuth token": r"\bya29\.[0-9A-Za-z_-]{20,}",
    "GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{22,})",
    "GitLab token": r"\bglpat-[A-Za-z0-9_-]{16,}",
    "Slack token": r"\bxox[abeprs]-[A-Za-z0-9-]{10,}",
    "PyPI token": r"\bpypi-[A-Za-z0-9_-]{30,}",
    "npm token": r"\bnpm_[A-Za-z0-9]{30,}",
    "Daytona token": r"\bdtn_[A-Za-z0-9]{16,}",
    "Stripe key": r"\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,}",
    "JSON web token": r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",
    "private key": (
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[^-]|-(?!----END))*(?:-----END[^-]*-----)?"
    ),
    # A digit or a change of case tells a credential from a word of prose.
    "bearer credential": (
        r"\b(?i:bearer|basic)\s+(?=[A-Za-z._~+/-]*(?:[0-9]|[a-z][A-Z]))[A-Za-z0-9._~+/-]{12,}=*"
    ),
    "address with a password": r"(?<=://)[^/\s:@\"'<]{1,64}:[^/\s@\"']{3,}(?=@)",
}
_NAMES = (
    r"authorization|proxy-authorization|cookie|set-cookie|x-api-key|x-auth-token|api[_-]?keys?"
    r"|passw(?:or)?d|passphrase|secret|client[_-]?secret|secret[_-]?(?:access[_-]?)?key"
    r"|access[_-]?key|private[_-]?key|(?:access|auth|refresh|session|id|bearer)[_-]?token|token"
    r"|credentials?"
)
# The name may carry a prefix (`HF_TOKEN`, `aws_secret_access_key`), never a suffix (`token_count`).
_NAMED = re.compile(
    rf"(?i)(?P<name>(?<![A-Za-z0-9])(?:[A-Za-z0-9]+[_-])*(?:{_NAMES})(?![A-Za-z0-9_-]))"
    r"(?P<sign>\\?[\"']?\s*[:=]\s*\\?[\"']?)(?P<value>(?!<removed>)[^\s\"',;}\]\\]{8,})"
)
_SECRET_NAME = re.compile(rf"(?i)(?:[a-z0-9]+[_-])*(?:{_NAMES})")
_SECRET_VARIABLE = re.compile(r"(?i)token|secret|passw|credential|cookie|auth|(?:^|_)key(?:$|_)")
_SHAPE = {name: re.compile(pattern) for name, pattern in _SHAPES.items()}


def scrub(text: str, values: Iterable[str] = ()) -> str:
    """Free text with every known shape, and every one of `values`, taken out.

    All are looked for in the text as it is: one taken out first could break another's shape.
    """
    found = [m.span() for value in values for m in re.finditer(re.escape(value), text)]
    found += [m.span() for pattern in _SHAPE.values() for m in pattern.finditer(text)]
    found += [m.span("value") for m in _NAMED.finditer(text)]
    if not found:
        return text
    parts, end = [], 0
    for start, stop in sorted(found):
        if start >= end:
            parts += [text[end:start], REMOVED]
        end = max(end, stop)
    return "".join(parts) + text[end:]


def scrub_command(words: Iterable[str], values: Iterable[str] = ()) -> list[str]:
    """A command line whose values stay only behind options on the allow-list."""
    kept: list[str] = []
    option: str | None = None
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, sign, _ = word.partition("=")
            option = None if sign else name
            harmless = not sign or name in OPTIONS
            kept.append(scrub(word, values) if harmless else f"{name}={REMOVED}")
        elif option is not None:
            kept.append(scrub(word, values) if option in OPTIONS else REMOVED)
            option = None
        else:
            # A program, a subcommand or a model; a bare word elsewhere is scrubbed by its shape.
            kept.append(scrub(word, values) if index or "=" not in word else REMOVED)
    return kept


def scrub_document(value: Any, values: tuple[str, ...] = (), key: str = "") -> Any:
    """A JSON value without secrets; numbers and structure stay as they are."""
    if isinstance(value, dict):
        if key == "environment":
            value = {name: item for name, item in value.items() if name in VARIABLES}
        return {name: scrub_document(item, values, name) for name, item in value.items()}
    if isinstance(value, list):
        if key in ("command", "argv") and all(isinstance(item, str) for item in value):
            return scrub_command(value, values)
        return [scrub_document(item, values, key) for item in value]
    if isinstance(value, str):
        named = _SECRET_NAME.fullmatch(key) is not None and value not in ("", REMOVED)
        return REMOVED if named else scrub(value, values)
    return value


def secret_values(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Values of this process's own secret-looking variables, longest first."""
    found = {
        value
        for name, value in environment.items()
        if _SECRET_VARIABLE.search(name) and len(value) >= 8 and not value.startswith("/")
    }
    return tuple(sorted(found, key=lambda value: (-len(value), value)))


def find_secrets(text: str, values: Iterable[str] = ()) -> Iterator[tuple[int, str]]:
    """(line, kind) of everything in `text` that looks like a secret; never the secret itself."""
    for value in values:
        for match in re.finditer(re.escape(value), text):
            yield _line(text, match.start()), "value of a variable of this machine"
    for kind, pattern in _SHAPE.items():
        for match in pattern.finditer(text):
            yield _line(text, match.start()), kind
    for match in _NAMED.finditer(text):
        yield _line(text, match.start()), f"value named {match['name']}"


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
