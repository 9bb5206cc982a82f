"""What else could have made the number: a client at its limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from finalbench.plan import Cell
from finalbench.record import ClientCeiling, RequestRecord
from finalbench.validity.violation import Violation, violation

NS = 1e-9
CLIENT_HEADROOM = 3.0
MAX_CLIENT_LATE_MS = 10.0


def check_client(
    cell: Cell, requests: Sequence[RequestRecord], ceilings: Sequence[ClientCeiling]
) -> Iterator[Violation]:
    """The client must be able to read several times the chunks that this cell sent."""
    rate = chunks_per_s(cell, requests)
    if rate is None:
        return
    own = [c for c in ceilings if c.streams == cell.concurrency]
    if not own or own[0].chunks_per_s is None:
        reason = own[0].reason if own and own[0].reason else "it was not measured"
        yield violation("client_unmeasured", f"ceiling of the client: {reason}", cell_id=cell.id)
        return
    most, late = own[0].chunks_per_s, own[0].added_p99_ms
    if rate * CLIENT_HEADROOM > most:
        yield violation(
            "client_bound",
            f"the client reads at most {most:.0f} chunks/s, less than {CLIENT_HEADROOM:g} times "
            f"the cell's {rate:.0f}",
            cell_id=cell.id,
            ceiling_chunks_s=most,
            chunks_s=rate,
        )
    if late is not None and late > MAX_CLIENT_LATE_MS:
        yield violation(
            "client_late",
            f"under load the client's time stamps are up to {late:.1f} ms late",
            cell_id=cell.id,
            added_p99_ms=late,
        )


def chunks_per_s(cell: Cell, requests: Sequence[RequestRecord]) -> float | None:
    """Content chunks per second while streaming; None when no request has two."""
    streams = [[at for at, _ in r.chunks] for r in requests if r.chunks]
    seconds = sum(times[-1] - times[0] for times in streams) * NS
    if seconds <= 0:
        return None
    one_stream = sum(len(times) - 1 for times in streams) / seconds
    return one_stream * cell.concurrency
