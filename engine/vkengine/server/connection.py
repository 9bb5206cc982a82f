"""A connection whose running answer can be written to without the ASGI messages in between.

Each of them passes three of Starlette's wrappers and uvicorn's own send, which together cost about
as much as everything else a chunk needs (docs/exactness.md). Only chunks in the middle of an answer
go this way; its head and its end are ASGI messages as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    from starlette.types import Scope

_EXTENSION = "vkengine.send_chunk"


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, which tells the application how to write past it."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: Any = self.scope
        scope["extensions"] = {_EXTENSION: self._chunk_sender}

    def _chunk_sender(self) -> Callable[[bytes], bool]:
        flow, closing, write = self.flow, self.transport.is_closing, self.transport.write

        def send_chunk(body: bytes) -> bool:
            if flow.write_paused or closing():
                return False
            write(b"%x\r\n%b\r\n" % (len(body), body))
            return True

        return send_chunk


def chunk_sender(scope: Scope) -> Callable[[bytes], bool] | None:
    """A function that writes one chunk of the answer whose head is out; None under another server
    than ours. False: the client reads too slowly, nothing was written, and an ASGI send must wait.
    """
    make = (scope.get("extensions") or {}).get(_EXTENSION)
    return make() if make is not None else None
