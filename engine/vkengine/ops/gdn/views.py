"""Views of state and scratch for the CPU path, made once (a slice is not free)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vkengine.rows import Workspace
from vkengine.state import GdnState

#: Positions per block; the rings hold two.
BLOCK = 8


@dataclass(slots=True)
class Entry:
    """Buffers for a sequence's m new rows on their way through the convolution."""

    recent: Tensor  # [3, C]: the three rows before
    new: Tensor  # [m, C]
    taps: Tensor  # [4, m, C]: row i of tap t is window row i + t
    products: Tensor  # [4, m, C]
    y: Tensor  # [m, C]
    qk: Tensor  # [m, 2*Hk, dk], of y
    v_t: Tensor  # [Hv, m, dv], of y
    unit: Tensor  # [m, 2*Hk, dk]: qk at unit length
    q_t: Tensor  # [Hk, 1, m, dk], of unit
    k: Tensor  # [m, Hk, dk], of unit


def entry_views(dims: tuple[int, int, int, int], m: int, ws: Workspace) -> Entry:
    """Entry buffers for head layout ``dims`` = (Hk, Hv, dk, dv)."""
    key = (*dims, m)
    found = ws.views.get(key)
    if found is None:
        hk, hv, dk, dv = dims
        c = 2 * hk * dk + hv * dv
        window = ws.get("gdn.window", (m + 3, c))
        y, unit = ws.get("gdn.y", (m, c)), ws.get("gdn.unit", (m, 2 * hk, dk))
        found = Entry(
            recent=window[:3],
            new=window[3:],
            taps=window.as_strided((4, m, c), (c, c, 1)),
            products=ws.get("gdn.products", (4, m, c)),
            y=y,
            qk=y[:, : 2 * hk * dk].view(m, 2 * hk, dk),
            v_t=y[:, 2 * hk * dk :].view(m, hv, dv).transpose(0, 1),
            unit=unit,
            q_t=unit[:, :hk].transpose(0, 1).unsqueeze(1),
            k=unit[:, hk:],
        )
        ws.views[key] = found
    return found


@dataclass(slots=True)
class Half:
    """Views of one block's half of a slot's rings."""

    ring: tuple[Tensor, Tensor, Tensor]  # keys [8, Hk, dk], updates [8, Hv, dv], decay [8, Hv]
    keys: Tensor  # [Hk, 1, 8, dk]
    past: Tensor  # [Hv, 8, dv]
    decay: Tensor  # [Hv, 1, 8]
    updates: tuple[Tensor, ...]  # eight of [Hv, dv]


@dataclass(slots=True)
class Slot:
    """Views of one slot of one layer's state, made once: slicing costs as much as arithmetic."""

    conv: Tensor
    s: Tensor
    ring_k: Tensor
    ring_g: Tensor
    halves: tuple[Half, Half]


def slot_views(state: GdnState, slot: int) -> Slot:
    found = state.views.get(slot)
    if found is None:
        halves = []
        for start in (0, BLOCK):
            span = slice(start, start + BLOCK)
            k, u, g = (r[slot, span] for r in (state.ring_k, state.ring_u, state.ring_g))
            halves.append(
                Half(
                    ring=(k, u, g),
                    keys=k.transpose(0, 1).unsqueeze(1),
                    past=u.transpose(0, 1),
                    decay=g.t().unsqueeze(1),
                    updates=u.unbind(0),
                )
            )
        found = Slot(
            state.conv[slot], state.S[slot], state.ring_k[slot], state.ring_g[slot],
            (halves[0], halves[1]),
        )  # fmt: skip
        state.views[slot] = found
    return found


@dataclass(slots=True)
class Scratch:
    """Buffers of one block and their views for rows ``first..first+m-1``."""

    x: Tensor  # [Hv, 16, dk]: the block's keys, then queries
    x_keys: Tensor  # [Hk, rep, 8, dk]
    x_queries: Tensor  # [Hk, rep, m, dk]
    keys_t: Tensor  # [Hv, dk, 8]
    read: Tensor  # [Hv, 16, dv]: S^T k, then S^T q
    read_halves: Tensor  # [Hv, 2, 8, dv]
    read_keys: Tensor  # [Hv, m, dv]
    read_queries: Tensor  # [Hv, 8, dv]
    dots: Tensor  # [Hv, 16, 8]
    dots_halves: Tensor  # [Hv, 2, 8, 8]
    dots_keys: Tensor  # [Hv, m, 8]
    dots_queries: Tensor  # [Hv, 8, 8]
    gates: Tensor  # [Hv, 9, 8]
    decay: Tensor  # [Hv, 9, 8]
    between: Tensor  # [Hv, 1, 8, 8]: decay from column to row
    start: Tensor  # [Hv, 1, 8, 1]
    rest: Tensor  # [Hv, m, dv]
    rest_rows: tuple[Tensor, ...]  # m of [Hv, dv]
    mix: Tensor  # [Hv, m, 8]
    mix_rows: tuple[Tensor, ...]  # m of [Hv, 1, 8]
    done: Tensor  # [Hv, 1, dv]
    done_row: Tensor  # [Hv, dv]
    out: Tensor  # [Hv, 8, dv]
    out_rows: Tensor  # [m, Hv, dv]


def scratch_views(dims: tuple[int, int, int, int], first: int, m: int, ws: Workspace) -> Scratch:
    key = (*dims, first, m)
    found = ws.views.get(key)
    if found is None:
        (hk, hv, dk, dv), last = dims, first + m
        x = ws.get("gdn.x", (hk, hv // hk, 2 * BLOCK, dk))
        read = ws.get("gdn.read", (hv, 2 * BLOCK, dv))
        dots = ws.get("gdn.dots", (hv, 2 * BLOCK, BLOCK))
        decay = ws.get("gdn.decay", (hv, BLOCK + 1, BLOCK))
        rest, mix = ws.get("gdn.rest", (hv, m, dv)), ws.get("gdn.mix", (hv, m, BLOCK))
        done, out = ws.get("gdn.done", (hv, 1, dv)), ws.get("gdn.out", (hv, BLOCK, dv))
        flat = x.view(hv, 2 * BLOCK, dk)
        read4, dots4 = read.view(hv, 2, BLOCK, dv), dots.view(hv, 2, BLOCK, BLOCK)
        found = Scratch(
            x=flat,
            x_keys=x[:, :, :BLOCK],
            x_queries=x[:, :, BLOCK + first : BLOCK + last],
            keys_t=flat[:, :BLOCK].transpose(1, 2),
            read=read,
            read_halves=read4,
            read_keys=read4[:, 0, first:last],
            read_queries=read4[:, 1],
            dots=dots,
            dots_halves=dots4,
            dots_keys=dots4[:, 0, first:last],
            dots_queries=dots4[:, 1],
            gates=ws.get("gdn.gates", (hv, BLOCK + 1, BLOCK)),
            decay=decay,
            between=decay[:, 1:].transpose(1, 2).unsqueeze(1),
            start=decay[:, 0].view(hv, 1, BLOCK, 1),
            rest=rest,
            rest_rows=rest.unbind(1),
            mix=mix,
            mix_rows=mix.split(1, dim=1),
            done=done,
            done_row=done[:, 0],
            out=out,
            out_rows=out[:, first:last].transpose(0, 1),
        )
        ws.views[key] = found
    return found
