"""Chunked transfer coding and server-sent events, incrementally and independent of cuts. Pure.

Source: RFC 9112 section 7.1 and the WHATWG HTML standard, section 9.2.6.
"""

from __future__ import annotations

_BOM = b"\xef\xbb\xbf"


class FramingError(ValueError):
    """The bytes are not what the framing says they must be."""


class Dechunker:
    """Removes chunked transfer coding. `feed` takes any cut of the stream and returns its body.

    `done` is true once the last chunk and its trailers are in.
    """

    __slots__ = ("_need", "_rest", "_trailers", "done")

    def __init__(self) -> None:
        self._need = 0  # payload bytes of the open chunk still to come, its CRLF not counted
        self._rest = b""
        self._trailers = False
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """Body bytes in `data`. FramingError on a bad size line or bytes after the end."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        out: list[bytes] = []
        at, size = 0, len(data)
        while at < size:
            if self.done:
                raise FramingError("bytes after the end of the response")
            if self._need:
                # `_need` counts the payload and the CRLF behind it.
                left = self._need - 2
                if left > 0:
                    piece = data[at : at + left]
                    out.append(piece)
                    at += len(piece)
                    self._need -= len(piece)
                    continue
                take = min(self._need, size - at)
                if data[at : at + take] != b"\r\n"[2 - self._need : 2 - self._need + take]:
                    raise FramingError("a chunk does not end with CRLF")
                at += take
                self._need -= take
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                self._rest = data[at:]
                break
            line = data[at:end]
            at = end + 2
            if self._trailers:
                self.done = not line
                continue
            length = _chunk_length(line)
            if length:
                self._need = length + 2
            else:
                self._trailers = True
        return out[0] if len(out) == 1 else b"".join(out)


def _chunk_length(line: bytes) -> int:
    digits = line.split(b";", 1)[0].strip()
    try:
        if not digits or not digits.isalnum():
            raise ValueError
        return int(digits, 16)
    except ValueError:
        raise FramingError(f"bad chunk size {line[:40]!r}") from None


class EventParser:
    """Cuts a body into events. `feed` returns the (name, data) pairs that the bytes complete.

    The name is None for events without an `event` field. Comments and empty blocks vanish.
    """

    __slots__ = ("_after_cr", "_buffer", "_start")

    def __init__(self) -> None:
        self._buffer = b""
        self._after_cr = False
        self._start = True

    def feed(self, data: bytes) -> list[tuple[str | None, bytes]]:
        if self._after_cr or b"\r" in data:
            data = self._unix_lines(data)
        buffer = self._buffer + data if self._buffer else data
        if self._start:
            if len(buffer) < 3 and _BOM.startswith(buffer):
                self._buffer = buffer
                return []
            buffer = buffer.removeprefix(_BOM)
            self._start = False
        if b"\n\n" not in buffer:
            self._buffer = buffer
            return []
        *blocks, self._buffer = buffer.split(b"\n\n")
        found = []
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:
                found.append((None, block[6:]))
            else:
                event = _parse_block(block)
                if event is not None:
                    found.append(event)
        return found

    def rest(self) -> tuple[str | None, bytes] | None:
        """The event the stream ended in, without its blank line."""
        return _parse_block(self._buffer)

    def _unix_lines(self, data: bytes) -> bytes:
        """CRLF and CR as LF; a CR at the end of one piece and LF at the start of the next is one.

        A CR counts at once, so an event is complete when its last CR is in.
        """
        if not data:
            return data
        if self._after_cr and data[:1] == b"\n":
            data = data[1:]
            self._after_cr = False
            if not data:
                return data
        self._after_cr = data[-1:] == b"\r"
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _parse_block(block: bytes) -> tuple[str | None, bytes] | None:
    name: str | None = None
    lines: list[bytes] = []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            lines.append(value)
        elif field == b"event":
            name = value.decode("utf-8", errors="replace")
    if not lines:
        return None
    return name, b"\n".join(lines)
