"""Text to token ids and back, for the server and the command line.

Wraps the `tokenizers` file of a checkpoint folder; needs no torch. The engine knows only ids.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

from tokenizers import Tokenizer as FastTokenizer

REPLACEMENT = "\ufffd"


class TemplateMissing(ValueError):
    """The checkpoint has no chat template, so messages cannot become a prompt."""


class TemplateFailed(ValueError):
    """The chat template refused the messages."""


class Detokenizer(Protocol):
    """Ids in, text out; text comes only once it can no longer change."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class Tokenizer:
    """One checkpoint's tokenizer. `vocab_size` counts added tokens too."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path.name} is missing from the checkpoint folder")
        self._fast = FastTokenizer.from_file(str(path))
        self._fast.no_truncation()
        self._fast.no_padding()
        config_path = folder / "tokenizer_config.json"
        self._config: dict[str, Any] = (
            json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
        )
        template_path = folder / "chat_template.jinja"
        self._template = (
            template_path.read_text("utf-8")
            if template_path.is_file()
            else _default_template(self._config.get("chat_template"))
        )
        self._compiled: Any = None
        self.vocab_size = self._fast.get_vocab_size(with_added_tokens=True)
        added = self._fast.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        self.added = {i: token.content for i, token in added.items()}
        self._byte_level = _decodes_bytes(self._fast)
        self._bytes: dict[int, bytes] = {}
        #: Texts of tokens that begin and end with whole characters and are always shown.
        self.whole_texts: dict[int, str] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._fast.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of one token alone; broken UTF-8 shows as the replacement character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; ids outside the vocabulary stand for none."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._bytes_of(token_id)
        return known

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self.added:
            return self.added[token_id].encode()
        piece = self._fast.id_to_token(token_id)
        if piece is None:
            return b""
        if not self._byte_level:
            return self._fast.decode([token_id], skip_special_tokens=False).encode()
        try:
            return bytes(_BYTE_OF[char] for char in piece)
        except KeyError:
            return piece.encode()

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        skip = self._special if skip_special_tokens else frozenset()
        if self._byte_level:
            return _ByteDetokenizer(self, skip)
        return _WindowDetokenizer(self._fast, skip)

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Renders the checkpoint's chat template. Raises TemplateMissing or TemplateFailed."""
        if self._template is None:
            raise TemplateMissing("this model's tokenizer has no chat template")
        from jinja2 import TemplateError

        if self._compiled is None:
            self._compiled = _compile(self._template)
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        special = {name: _content(self._config[name]) for name in names if self._config.get(name)}
        try:
            return self._compiled.render(
                **{**special, **variables},
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise TemplateFailed(f"chat template: {error}") from error


class _ByteDetokenizer:
    """Byte-level vocabularies: ids are bytes, so an incremental UTF-8 decoder is exact."""

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        self._bytes = tokenizer.token_bytes
        self._whole = tokenizer.whole_texts
        self._skip = skip
        self._added = tokenizer.added
        self._rest = b""  # the start of a character whose end is still to come

    def push(self, token_id: int) -> str:
        if not self._rest and (known := self._whole.get(token_id)) is not None:
            return known
        if token_id in self._skip:
            return ""
        data = self._rest + self._bytes(token_id)
        text, used = codecs.utf_8_decode(data, "replace", False)
        if not self._rest and used == len(data) and token_id not in self._added:
            self._whole[token_id] = text
        self._rest = data[used:]
        return text

    def flush(self) -> str:
        rest, self._rest = self._rest, b""
        return codecs.utf_8_decode(rest, "replace", True)[0]


class _WindowDetokenizer:
    """Any other decoder: decode a short window twice and emit the difference."""

    def __init__(self, fast: FastTokenizer, skip: frozenset[int]) -> None:
        self._fast = fast
        self._skip = skip
        self._ids: list[int] = []
        self._emitted = ""  # the part of those ids' text that is out

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._ids.append(token_id)
        return self._advance(final=False)

    def flush(self) -> str:
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        text = self._fast.decode(self._ids, skip_special_tokens=False)
        if final:
            rest = text[len(self._emitted) :]
            return rest if text.startswith(self._emitted) else REPLACEMENT
        # An unfinished character shows as replacement characters, and with byte fallback it
        # spoils the whole run of bytes before it: wait until both are settled.
        if text.endswith(REPLACEMENT) or not text.startswith(self._emitted):
            return ""
        new = text[len(self._emitted) :]
        self._emitted = text
        self._shorten()
        return new

    def _shorten(self) -> None:
        """Keeps a few ids as context: some decoders strip the space before a first piece."""
        if len(self._ids) > 32:
            kept = self._fast.decode(self._ids[-8:], skip_special_tokens=False)
            if self._emitted.endswith(kept) and REPLACEMENT not in kept:
                self._ids = self._ids[-8:]
                self._emitted = kept


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE writes for the 256 bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    table.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return table


_BYTE_OF = _byte_alphabet()


def _decodes_bytes(fast: FastTokenizer) -> bool:
    decoder = json.loads(fast.to_str()).get("decoder") or {}
    steps = decoder.get("decoders", [decoder]) if decoder.get("type") == "Sequence" else [decoder]
    return len(steps) == 1 and steps[0].get("type") == "ByteLevel"


def _default_template(value: object) -> str | None:
    """`chat_template` is a string, or a list of named ones."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        return named.get("default")
    return None


def _content(token: object) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _compile(source: str) -> Any:
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def now(form: str) -> str:
        return datetime.now().strftime(form)

    def to_json(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = to_json
    functions: dict[str, Any] = {"raise_exception": refuse, "strftime_now": now}
    environment.globals.update(functions)
    return environment.from_string(source)
