"""A baseline pinned by digest, and its refresh: explicit, in both directions, with the interval."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

from finalbench.bundle import read_manifest
from finalbench.errors import BundleBroken, UsageError
from finalbench.record import write_atomic
from finalbench.scenario import Frozen


class Pin(Frozen):
    """A small file to commit: which sealed run is the baseline. `run` is relative to the file."""

    schema_version: Literal[1] = 1
    run: str
    run_id: str
    root: str
    headline: str


class Refresh(Frozen):
    """What a refresh replaced; `old` is None for a first pin."""

    old: Pin | None
    new: Pin
    ratio: float | None
    interval: tuple[float, float] | None
    reason: str | None

    @property
    def text(self) -> str:
        before = "nothing" if self.old is None else self.old.headline
        line = f"baseline: {before} -> {self.new.headline}"
        if self.ratio is not None:
            line += f", {self.ratio - 1:+.1%}"
        if self.interval is not None:
            line += f" (95 % interval {self.interval[0] - 1:+.1%} to {self.interval[1] - 1:+.1%})"
        return line + (f"; {self.reason}" if self.reason else "")


def resolve(path: Path) -> Path:
    """A run folder, or the folder a pin file names, if its seal still has the pinned root."""
    if path.is_dir():
        return path
    pin = read_pin(path)
    folder = path.parent / pin.run
    root = read_manifest(folder).root
    if root != pin.root:
        raise BundleBroken(f"{folder}: its root is {root[:12]}, {path} pins {pin.root[:12]}")
    return folder


def read_pin(path: Path) -> Pin:
    if not path.is_file():
        raise UsageError(f"{path} is neither a run folder nor a pinned baseline")
    try:
        return Pin.model_validate_json(path.read_bytes())
    except ValueError as error:
        raise BundleBroken(f"{path} is not a pinned baseline: {error}") from error


def refresh_pin(path: Path, run_dir: Path) -> Refresh:
    """Pin a sealed run, better or worse than the one before; the same estimator either way."""
    from finalbench.aggregate import analyse
    from finalbench.gate.judge import gate

    analysis = analyse(run_dir)
    head = analysis.headline
    if head.decode_tok_s is None:
        raise UsageError(f"{run_dir} has no headline rate: {head.reasons.get('decode_tok_s')}")
    new = Pin(
        run=os.path.relpath(run_dir, path.parent),
        run_id=analysis.run_id,
        root=read_manifest(run_dir).root,
        headline=f"{head.decode_tok_s:.4g} tok/s ({analysis.run_id})",
    )
    old = read_pin(path) if path.is_file() else None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    reason: str | None = None
    if old is not None:
        result = gate(path, run_dir)
        reason = None if result.cells else "; ".join(result.reasons)
        if result.cells:
            ratio, interval = result.cells[0].ratio, result.cells[0].interval
    text = json.dumps(new.model_dump(mode="json"), indent=1)
    write_atomic(path, text.encode() + b"\n")
    return Refresh(old=old, new=new, ratio=ratio, interval=interval, reason=reason)
