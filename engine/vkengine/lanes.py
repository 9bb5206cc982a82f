"""The device's cursors of the sequences that decode: what a round reads and moves."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

#: Columns of the token and record rows: up to 9 tokens; the record's last column is the count.
WIDTH = 16
#: Records that the host may still have to read while further rounds run.
TURNS = 8


def host_records(batch: int, device: torch.device) -> Tensor:
    """Memory of the host that a GPU writes by itself: no copy stands between two rounds."""
    on = torch.device("cpu") if device.type == "cuda" else device
    records = torch.zeros(TURNS, batch, WIDTH, dtype=torch.int32, device=on)
    return records.pin_memory() if device.type == "cuda" else records


@dataclass(slots=True)
class Lanes:
    """Device cursors of B sequences, shared by the rounds of every depth."""

    tokens: Tensor  # [B, 16] i32: last committed token, then drafts
    record: Tensor  # [B, 16] i32: committed tokens of the round (-1 beyond), count last
    slot: Tensor  # [B] i32
    pos: Tensor  # [B] i32: first row of the round in flight
    next_pos: Tensor  # [B] i32: first row of the next round
    limit: Tensor  # [B] i32: drafts that exist
    temperature: Tensor  # [B] f32
    acceptance: Tensor  # [B] f32: synthetic chance, negative compares
    seed: Tensor  # [B, 3] i32: low, high, choice
    row: Tensor  # [B] i32: the row the first draft is drawn from
    chain_pos: Tensor  # [16, B] i32
    cap: Tensor  # [B] i32: drafts the sequence wants at most
    banned: Tensor  # [B, 4] i32: ids forbidden before ban_until, -1 for none
    ban_until: Tensor  # [B] i32: absolute position
    turn: Tensor  # [1] i32: rounds begun
    host: Tensor  # [8, B, 16] i32 in the host's memory: the record of round ``turn % 8``

    @staticmethod
    def make(batch: int, null_slot: int, device: torch.device) -> Lanes:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return Lanes(
            tokens=ints(batch, WIDTH),
            record=ints(batch, WIDTH),
            slot=torch.full((batch,), null_slot, dtype=torch.int32, device=device),
            pos=ints(batch),
            next_pos=ints(batch),
            limit=ints(batch),
            temperature=torch.zeros(batch, device=device),
            acceptance=torch.full((batch,), -1.0, device=device),
            seed=ints(batch, 3),
            row=ints(batch),
            chain_pos=ints(WIDTH, batch),
            cap=torch.full((batch,), WIDTH, dtype=torch.int32, device=device),
            banned=torch.full((batch, 4), -1, dtype=torch.int32, device=device),
            ban_until=ints(batch),
            turn=ints(1),
            host=host_records(batch, device),
        )

    def first(self, batch: int) -> Lanes:
        """The first ``batch`` lanes: views, except of what lives within a round."""
        parts = {f.name: getattr(self, f.name)[:batch] for f in fields(self)}
        parts["host"] = self.host[:, :batch]
        parts["chain_pos"] = torch.zeros(WIDTH, batch, dtype=torch.int32, device=self.slot.device)
        return Lanes(**parts)

    def per_lane(self) -> list[Tensor]:
        """The tensors that hold a sequence between rounds, lane first."""
        own = {"row", "chain_pos", "record", "turn", "host"}
        return [getattr(self, f.name) for f in fields(self) if f.name not in own]

    def join(
        self,
        lane: int,
        slot: int,
        token: int,
        pos: int,
        *,
        seed: int = 0,
        choice: int = 0,
        temperature: float = 0.0,
        acceptance: float | None = None,
        cap: int = WIDTH,
        banned: tuple[int, ...] = (),
        ban_until: int = 0,
    ) -> None:
        """Start a sequence whose tokens before ``pos`` are in the state; ``token`` is at pos."""

        def i32(word: int) -> int:
            word &= 0xFFFFFFFF
            return word - (1 << 32) if word >> 31 else word

        self.tokens[lane] = 0
        self.tokens[lane, 0] = token
        self.slot[lane] = slot
        self.next_pos[lane] = pos
        self.limit[lane] = 0
        self.temperature[lane] = temperature
        self.acceptance[lane] = -1.0 if acceptance is None else acceptance
        self.cap[lane] = cap
        self.ban_until[lane] = ban_until
        ids = (*banned, -1, -1, -1, -1)[:4]
        self.banned[lane] = torch.tensor(ids, dtype=torch.int32, device=self.seed.device)
        words = [i32(seed), i32(seed >> 32), i32(choice)]
        self.seed[lane] = torch.tensor(words, dtype=torch.int32, device=self.seed.device)

    def leave(self, lane: int, null_slot: int) -> None:
        """Point the lane at the null slot."""
        self.join(lane, null_slot, 0, 0)
