"""A pseudo-model without weights: the next token is a hash of the tokens so far.

Enough of a language model for a harness to be tested on: four candidate tokens with logits at
each position, greedy and seeded-sampled choice, scoring of given tokens, and a byte-level
tokenizer with merges, so that text and ids do not map one to one.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

EOS = 256
MAX_LENGTH = 32768
_MASK = (1 << 64) - 1
_TIE_GAP = 0.0005
_TAIL_LOGIT = -6.0

_WORD_TEXT = (
    "the of and to in is that for it as with on be by this are from at or an not have was which "
    "can one all but we they if when there their will more what so no out up into has its time "
    "some than other do only new these two may then first any like over such our even most made "
    "after also did many must before back see through way where get much go well your should "
    "each just those people how too little state good very make world still own long both "
    "between under never day same another know while last might great year come since against "
    "right used take three def return self import class None True False list dict value name "
    "key item index count result data line text file path open read write print range len str "
    "int float error raise try except finally yield lambda async await token model server "
    "client request stream number string bytes field table column row query cache queue lock "
    "thread process step layer weight batch prompt answer question summary translate explain "
    "compute sum product total mean "
)
_WORDS = _WORD_TEXT.split()
_PIECES: list[bytes] = [b" " + word.encode() for word in dict.fromkeys(_WORDS)]
_PIECES += [a + b for a in (b"e", b"t", b"a", b"o", b"n") for b in (b"r", b"s", b"n", b"t", b"d")]
_PIECES += [b". ", b", ", b"\n\n", b"    ", b"(", b")"][:4]

PIECES: list[bytes] = [bytes([value]) for value in range(256)] + [b""] + _PIECES
VOCAB_SIZE = len(PIECES)
_FIRST_WORD = 257
_WORD_COUNT = len(dict.fromkeys(_WORDS))
_MULTIBYTE = "é日ж🙂".encode()


def _by_first_byte() -> dict[int, list[tuple[bytes, int]]]:
    table: dict[int, list[tuple[bytes, int]]] = {}
    for token, piece in enumerate(PIECES):
        if len(piece) > 1:
            table.setdefault(piece[0], []).append((piece, token))
    for rows in table.values():
        rows.sort(key=lambda row: -len(row[0]))
    return table


_MERGES = _by_first_byte()


def encode(text: str, *, merges: bool = True) -> list[int]:
    """Longest match from the left over bytes; without `merges` one token a byte."""
    data = text.encode()
    if not merges:
        return list(data)
    ids: list[int] = []
    position = 0
    while position < len(data):
        for piece, token in _MERGES.get(data[position], ()):
            if data.startswith(piece, position):
                ids.append(token)
                position += len(piece)
                break
        else:
            ids.append(data[position])
            position += 1
    return ids


def decode_bytes(ids: Sequence[int]) -> bytes:
    return b"".join(PIECES[token] for token in ids)


def decode(ids: Sequence[int]) -> str:
    return decode_bytes(ids).decode("utf-8", errors="replace")


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def unit(*parts: int) -> float:
    """A number in (0, 1) decided by the parts alone."""
    value = 0
    for part in parts:
        value = _mix(value ^ (part & _MASK))
    return ((value >> 11) + 0.5) / (1 << 53)


def prefix_state(ids: Sequence[int], state: int = 0) -> int:
    """CRC of the ids as 32-bit words; continues from `state`."""
    return zlib.crc32(array("I", ids).tobytes(), state)


def extend_state(state: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little"), state)


@dataclass(frozen=True, slots=True)
class Sampler:
    """The sampler fields the toy acts on. `top_k` 0 means off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PseudoModel:
    """`tie_every`: one position in so many has its two best logits 0.0005 apart (0: none)."""

    tie_every: int = 0
    alphabet: str = "words"  # words | multibyte | newlines

    def candidates(self, state: int) -> list[tuple[int, float]]:
        """Four distinct (id, logit), best first, for the position after the prefix."""
        bits = _mix(state)
        base = bits % _WORD_COUNT
        stride = 1 + (bits >> 16) % 7
        ids = [_FIRST_WORD + (base + index * stride) % _WORD_COUNT for index in range(4)]
        gap = 0.5 + ((bits >> 24) & 0xFF) / 64.0
        if self.tie_every and (bits >> 32) % self.tie_every == 0:
            gap = _TIE_GAP
        return [(ids[0], 8.0), (ids[1], 8.0 - gap), (ids[2], 3.0), (ids[3], 2.0)]

    def greedy(self, state: int, position: int) -> int:
        if self.alphabet == "newlines":
            return 10
        if self.alphabet == "multibyte":
            return _MULTIBYTE[position % len(_MULTIBYTE)]
        return _FIRST_WORD + _mix(state) % _WORD_COUNT

    def choose(self, state: int, position: int, sampler: Sampler) -> int:
        """The token at absolute `position`: argmax of scaled logits + noise of (seed, position)."""
        if sampler.temperature == 0.0 or self.alphabet != "words":
            return self.greedy(state, position)
        rows = self.candidates(state)
        if sampler.top_k:
            rows = rows[: sampler.top_k]
        scaled = [(token, logit / sampler.temperature) for token, logit in rows]
        best = scaled[0][1]
        weights = [math.exp(logit - best) for _, logit in scaled]
        total, mass = sum(weights), 0.0
        kept: list[tuple[int, float]] = []
        for (token, logit), weight in zip(scaled, weights, strict=True):
            if kept and (mass >= sampler.top_p or weight < sampler.min_p):
                break
            kept.append((token, logit))
            mass += weight / total
        return max(
            kept,
            key=lambda row: row[1] - math.log(-math.log(unit(sampler.seed, position, row[0]))),
        )[0]

    def logit(self, state: int, token: int) -> float:
        for candidate, logit in self.candidates(state):
            if candidate == token:
                return logit
        return _TAIL_LOGIT - (_mix(state ^ token) & 7)

    def score(self, ids: Sequence[int], top: int, *, logits: bool) -> list[dict | None]:
        """`prompt_logprobs` of a prompt: entry 0 is None, others map id to logprob and rank."""
        rows: list[dict | None] = [None]
        state = extend_state(0, ids[0])
        for token in ids[1:]:
            candidates = self.candidates(state)
            tail = (VOCAB_SIZE - 4) * math.exp(_TAIL_LOGIT - 3.0)
            norm = math.log(sum(math.exp(logit) for _, logit in candidates) + tail)
            row: dict[str, dict[str, float | int]] = {}
            ranked = [(cand, logit, rank) for rank, (cand, logit) in enumerate(candidates, 1)]
            shown = ranked[:top]
            if token not in [cand for cand, _, _ in shown]:
                found = [entry for entry in ranked if entry[0] == token]
                shown = shown + (found or [(token, self.logit(state, token), 5 + token % 100)])
            for candidate, logit, rank in shown:
                entry: dict[str, float | int] = {"logprob": logit - norm, "rank": rank}
                if logits:
                    entry["logit"] = logit
                row[str(candidate)] = entry
            rows.append(row)
            state = extend_state(state, token)
        return rows
