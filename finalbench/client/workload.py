"""Prompts of exact length, the same for every arm and draft setting of a group of cells.

The harness has no tokenizer: text goes through the server's own `/tokenize` and is sent as ids,
so a prompt has the length that was asked for by construction, whatever merges the text has.
Each request starts with a salt of its own, so no prompt shares a prefix with another by accident.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import httpx2

from finalbench.errors import EnvironmentMissing, UsageError
from finalbench.prompts import DOMAINS, load_prompts
from finalbench.scenario import DraftSetting, Sampling

MIN_NATURAL = 16  # tokens; below that a prompt would be all salt
SHARED = "shared"
_COMMENT = {"code": "# section {salt}\n\n"}
_PLAIN = "Note {salt}.\n\n"


class Encoder(Protocol):
    """Text to token ids of the served model."""

    def encode(self, text: str) -> list[int]: ...


class ServerTokenizer:
    """`/tokenize` of a server, with a memory. EnvironmentMissing when it is not served."""

    def __init__(
        self, http: httpx2.Client, base_url: str, model: str | None = None, field: str = "prompt"
    ) -> None:
        self._field = field  # the name its server has for the text
        self._http = http
        self._url = f"{base_url}/tokenize"
        self._model = model
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        if text in self._known:
            return self._known[text]
        body: dict[str, Any] = {self._field: text, "add_special_tokens": False}
        if self._model is not None:
            body["model"] = self._model
        try:
            answer = self._http.post(self._url, json=body)
            answer.raise_for_status()
            ids = answer.json()["tokens"]
        except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
            raise EnvironmentMissing(
                f"{self._url}: {error}",
                hint="prompts of exact length need the server's own tokenizer; with random "
                "weights, `--set workload.text_class=random` draws ids instead",
            ) from error
        self._known[text] = ids
        return ids


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to send. `shared` leading tokens are common to all prompts of the group."""

    index: int
    domain: str | None
    token_ids: tuple[int, ...]
    digest: str
    shared: int = 0


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """What prompts to build. The same spec and tokenizer always give the same prompts.

    `group` names the cells that must share prompts (arms, draft settings); another group, another
    `purpose` or another `seed` gives prompts with no common prefix. `shared_share` is the planned
    share of each prompt that all prompts of the group have in common, whatever their purpose, so
    that a warm-up puts it into a cache (0: cold cells).
    """

    length: int
    count: int
    group: str
    seed: int = 0
    text_class: Literal["natural", "random"] = "natural"
    domains: tuple[str, ...] = ("code",)
    purpose: Literal["measure", "warmup", "probe"] = "measure"
    shared_share: float = 0.0

    def check(self) -> None:
        """UsageError for a length or domain that cannot be built."""
        least = 1 if self.text_class == "random" else MIN_NATURAL
        if self.length < least:
            raise UsageError(
                f"seq_len: {self.length} is too short, text class {self.text_class} needs at "
                f"least {least} tokens"
            )
        if self.count < 1:
            raise UsageError(f"requests: must be at least 1, not {self.count}")
        if not 0.0 <= self.shared_share < 1.0:
            raise UsageError(f"shared_share: must be 0 to below 1, not {self.shared_share}")
        own = self.length - round(self.length * self.shared_share)
        if own < least:
            raise UsageError(
                f"cache: {self.length} tokens leave {own} that a prompt does not share; text class "
                f"{self.text_class} needs at least {least}"
            )
        unknown = [name for name in self.domains if name not in DOMAINS]
        if unknown or not self.domains:
            raise UsageError(f"domains: unknown {unknown}; known are {', '.join(DOMAINS)}")


def build_prompts(
    spec: PromptSpec, tokenizer: Encoder, vocabulary: Sequence[int] | None = None
) -> list[Prompt]:
    """`spec.count` prompts of exactly `spec.length` ids each.

    `vocabulary`: ids that random prompts draw from; by default the ids in our own texts.
    """
    spec.check()
    if spec.text_class == "random" and vocabulary is None:
        vocabulary = text_vocabulary(tokenizer)
    shared_length = round(spec.length * spec.shared_share)
    shared = _ids(spec, tokenizer, vocabulary, SHARED, spec.domains[0], shared_length)
    prompts = []
    for index in range(spec.count):
        domain = spec.domains[index % len(spec.domains)]
        own = _ids(spec, tokenizer, vocabulary, str(index), domain, spec.length - shared_length)
        ids = tuple(shared + own)
        prompts.append(
            Prompt(
                index=index,
                domain=domain if spec.text_class == "natural" else None,
                token_ids=ids,
                digest=digest_ids(ids),
                shared=shared_length,
            )
        )
    return prompts


def text_vocabulary(tokenizer: Encoder) -> list[int]:
    """Sorted ids that occur in our own prompts: no special tokens, all within the vocabulary."""
    found: set[int] = set()
    for prompt in load_prompts():
        found.update(tokenizer.encode(prompt.text))
    return sorted(found)


def _ids(
    spec: PromptSpec,
    tokenizer: Encoder,
    vocabulary: Sequence[int] | None,
    part: str,
    domain: str,
    length: int,
) -> list[int]:
    if length == 0:
        return []
    purpose = "all" if part == SHARED else spec.purpose
    key = f"{spec.seed}/{spec.group}/{purpose}/{spec.text_class}/{part}"
    draw = random.Random(hashlib.sha256(key.encode()).digest())
    if spec.text_class == "random":
        choices = vocabulary or ()
        return [choices[draw.randrange(len(choices))] for _ in range(length)]
    salt = f"{draw.getrandbits(48):012x}"
    text = _COMMENT.get(domain, _PLAIN).format(salt=salt)
    ids: list[int] = []
    texts: list[str] = []
    while len(ids) < length:
        if not texts:
            texts = _reading_order(domain, draw)
        # Add about as many characters as are missing, then count again in the whole text: ids of
        # parts do not add up.
        wanted = len(text) + 3 * (length - len(ids))
        while texts and len(text) < wanted:
            text += texts.pop() + "\n\n\n"
        ids = tokenizer.encode(text)
    return ids[:length]


def _reading_order(domain: str, draw: random.Random) -> list[str]:
    """All texts, last one first: the domain's own, then those of the others before any repeats."""
    own = [prompt.text for prompt in load_prompts(domain)]
    others = [prompt.text for prompt in load_prompts() if prompt.domain != domain]
    draw.shuffle(own)
    draw.shuffle(others)
    return others + own


def digest_ids(ids: Iterable[int]) -> str:
    """sha256 in hex over the ids as little-endian 32-bit words."""
    words = array("I", ids)
    return hashlib.sha256(words.tobytes()).hexdigest()


def check_disjoint(*groups: Sequence[Prompt]) -> None:
    """UsageError when a prompt occurs in two groups (warm-up, probe, measured) or twice in one."""
    seen: dict[str, int] = {}
    for number, prompts in enumerate(groups):
        for prompt in prompts:
            if prompt.digest in seen:
                where = "twice in one group" if seen[prompt.digest] == number else "in two groups"
                raise UsageError(f"prompt {prompt.index}: occurs {where}; it would meet a cache")
            seen[prompt.digest] = number


def reuse_factor(prompts: Sequence[Prompt]) -> float:
    """Requests per distinct prompt; 1.0 when none repeats."""
    return len(prompts) / len({prompt.digest for prompt in prompts})


def request_body(
    prompt: Prompt,
    *,
    model: str | None,
    output_len: int,
    sampling: Sampling,
    draft: DraftSetting | None,
    seed: int,
    ignore_eos: bool = True,
) -> dict[str, Any]:
    """Body of one timed request; every sampler field is sent, so no server default fills a gap.

    `draft` None leaves the field out, for servers that do not know it.
    """
    body: dict[str, Any] = {
        "prompt": list(prompt.token_ids),
        "max_tokens": output_len,
        **sampling.fields(),
        "seed": seed,
        "ignore_eos": ignore_eos,
        "n": 1,
    }
    if model is not None:
        body["model"] = model
    if draft is not None:
        acceptance = None if draft.acceptance is None else {"synthetic": draft.acceptance}
        body["draft"] = {
            "method": draft.method,
            "k": draft.k,
            "head_rows": draft.head_rows,
            "acceptance": acceptance,
        }
    return body
