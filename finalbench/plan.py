"""Scenario -> Plan: cells with stable ids, and blocks in which the arms alternate. Pure.

A cell is one point of the grid in one arm. Cells that one server process can serve share a
`server_key`; a block starts every key's server once, fresh, so blocks are the replicates.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from finalbench.arms import ARMS, server_settings, serves_draft
from finalbench.scenario import (
    CacheState,
    DraftSetting,
    Frozen,
    Point,
    Sampling,
    Scenario,
    cached_share,
    digest,
)

Axis = Literal["base", "seq_len", "output_len", "sampling", "draft", "concurrency", "cache", "grid"]

# What a server holds and how it is sized: equal in every arm, or a ratio measures that instead.
_STATE = ("model", "weights", "device", "dtype", "threads", "max_model_len", "max_sequences")
_AXES: tuple[Axis, ...] = ("seq_len", "output_len", "sampling", "draft", "concurrency", "cache")


class Cell(Frozen):
    """One point of the grid in one arm, as it is sent and as it is reported.

    `pair_key` is equal for cells whose prompts and sampling are equal: the baseline of a cell is
    the baseline arm's cell with the same key, and drafts on and off share it within an arm.
    """

    id: str
    arm: str
    model: str
    seq_len: int
    output_len: int
    sampling: Sampling
    draft: DraftSetting
    concurrency: int
    text_class: Literal["natural", "random"]
    domain: str | None
    requests: int
    server_key: str
    axis: Axis
    pair_key: str
    cache: CacheState = "cold"

    @property
    def label(self) -> str:
        load = "" if self.concurrency == 1 else f" c{self.concurrency}"
        load += "" if self.cache == "cold" else f" {self.cache}"
        return f"{self.arm} {self.seq_len} {self.sampling.name} {self.draft.label}{load}"

    @property
    def shared_tokens(self) -> int:
        """Tokens of each prompt that are in the cache by plan, of a server that has one."""
        return round(self.seq_len * cached_share(self.cache))


class Block(Frozen):
    """One replicate: servers in order, and for each server its cells in order."""

    index: int
    order: tuple[str, ...]
    cells: dict[str, tuple[str, ...]]


class Plan(Frozen):
    """What will run. `hash` ignores nothing: two plans with one hash measure the same."""

    scenario_hash: str
    cells: tuple[Cell, ...]
    blocks: tuple[Block, ...]
    servers: dict[str, dict[str, str | int | None]]  # server_key -> start settings
    estimate_s: float
    hash: str

    def cell(self, cell_id: str) -> Cell:
        return next(c for c in self.cells if c.id == cell_id)


def make_plan(scenario: Scenario) -> Plan:
    """Expand, group and order; the same scenario always gives the same plan."""
    cells = tuple(_cells(scenario))
    servers = {
        c.server_key: server_settings(c.arm, scenario, c.draft, c.cache != "cold") for c in cells
    }
    blocks = tuple(_blocks(scenario, cells))
    body = {
        "scenario": scenario.hash(),
        "cells": [c.id for c in cells],
        "blocks": [b.model_dump(mode="json") for b in blocks],
    }
    return Plan(
        scenario_hash=scenario.hash(),
        cells=cells,
        blocks=blocks,
        servers=servers,
        estimate_s=round(_estimate_s(scenario, cells), 1),
        hash=digest(body),
    )


def unequal_settings(plan: Plan) -> list[str]:
    """Start settings that differ between servers whose cells are compared; a sentence for each."""
    found = []
    for name in _STATE:
        values: dict[str, list[str]] = {}
        for key, settings in plan.servers.items():
            values.setdefault(repr(settings.get(name)), []).append(key)
        if len(values) > 1:
            text = "; ".join(f"{value} for {', '.join(keys)}" for value, keys in values.items())
            found.append(f"{name} is not planned alike: {text}")
    return found


def _points(scenario: Scenario) -> dict[Point, Axis]:
    """Grid points in reading order, each with the axis it varies."""
    axes, base = scenario.axes, scenario.base
    points: dict[Point, Axis] = {base: "base"}
    if scenario.grid == "full":
        for values in itertools.product(*(getattr(axes, axis) for axis in _AXES)):
            point = base.model_copy(update=dict(zip(_AXES, values, strict=True)))
            points.setdefault(point, _axis_of(point, base))
        return points
    for axis in _AXES:
        for value in getattr(axes, axis):
            points.setdefault(base.model_copy(update={axis: value}), axis)
    undrafted = _undrafted(scenario)
    if undrafted is not None:
        # Drafts on must equal drafts off in every cell, so each cell needs its undrafted twin.
        for point, axis in list(points.items()):
            points.setdefault(point.model_copy(update={"draft": undrafted}), axis)
    return points


def _axis_of(point: Point, base: Point) -> Axis:
    varied = [a for a in _AXES if getattr(point, a) != getattr(base, a)]
    return varied[0] if len(varied) == 1 else "grid"


def _undrafted(scenario: Scenario) -> str | None:
    names = [n for n in scenario.axes.draft if scenario.drafts[n].method == "none"]
    return names[0] if names else None


def _cells(scenario: Scenario) -> Iterable[Cell]:
    undrafted = DraftSetting()
    for arm in scenario.arms:
        drafts = ARMS[arm].drafts != "none"
        limit = scenario.output_limits.get(arm)
        seen: set[str] = set()
        for point, axis in _points(scenario).items():
            draft = scenario.drafts[point.draft] if drafts else undrafted
            if not serves_draft(arm, draft) or (limit is not None and point.output_len > limit):
                continue
            # In an arm without drafts a point that differs only in its draft is the base again.
            kept: Axis = "base" if not drafts and axis == "draft" else axis
            cell = _cell(scenario, arm, point, draft, kept)
            if cell.id not in seen:
                seen.add(cell.id)
                yield cell


def _cell(scenario: Scenario, arm: str, point: Point, draft: DraftSetting, axis: Axis) -> Cell:
    sampling = scenario.samplings[point.sampling]
    settings = {
        k: v
        for k, v in server_settings(arm, scenario, draft, point.cache != "cold").items()
        if k != "path"
    }
    work: dict[str, Any] = {
        "model": scenario.model.name,
        "seq_len": point.seq_len,
        "output_len": point.output_len,
        "sampling": sampling.fields(),
        "concurrency": point.concurrency,
        "workload": scenario.workload.identity(),
    }
    if point.cache != "cold":  # the axis came later: cold cells keep their ids
        work["cache"] = point.cache
    identity = work | {"arm": arm, "settings": settings, "draft": draft.model_dump(mode="json")}
    return Cell(
        id=f"{arm}-{digest(identity)[:10]}",
        arm=arm,
        model=scenario.model.name,
        seq_len=point.seq_len,
        output_len=point.output_len,
        sampling=sampling,
        draft=draft,
        concurrency=point.concurrency,
        text_class=scenario.workload.text_class,
        domain=scenario.workload.domains[0] if len(scenario.workload.domains) == 1 else None,
        requests=max(scenario.workload.requests, point.concurrency),
        server_key=f"{arm}-{digest(settings)[:6]}",
        axis=axis,
        pair_key=digest(work)[:10],
        cache=point.cache,
    )


def _blocks(scenario: Scenario, cells: Sequence[Cell]) -> Iterable[Block]:
    keys = list(dict.fromkeys(c.server_key for c in cells))
    shuffler = random.Random(scenario.measure.seed)
    orders = _orders(keys, scenario.measure.blocks, scenario.measure.order, shuffler)
    for index, order in enumerate(orders):
        chosen: dict[str, tuple[str, ...]] = {}
        for key in keys:
            ids = [c.id for c in cells if c.server_key == key]
            shuffler.shuffle(ids)
            chosen[key] = tuple(ids)
        yield Block(index=index, order=tuple(order), cells=chosen)


def _orders(
    keys: list[str], blocks: int, kind: Literal["abba", "shuffled"], shuffler: random.Random
) -> list[list[str]]:
    """Balanced server orders: over each pair of blocks every key is as often early as late."""
    forward, backward = list(keys), list(reversed(keys))
    orders: list[list[str]] = []
    while len(orders) < blocks:
        if kind == "shuffled":
            forward = list(keys)
            shuffler.shuffle(forward)
            backward = list(reversed(forward))
            orders += [forward, backward]
        else:
            orders += [forward, backward]
    return orders[:blocks]


def _estimate_s(scenario: Scenario, cells: Sequence[Cell]) -> float:
    """Wall seconds of the whole plan, from the scenario's own rough costs per arm."""
    total = 0.0
    for key in dict.fromkeys(c.server_key for c in cells):
        served = [c for c in cells if c.server_key == key]
        cost = scenario.estimates.get(served[0].arm)
        if cost is None:
            continue
        total += cost.start_s
        for cell in served:
            warm = scenario.workload.warmup_requests
            warm += cell.requests if cell.cache == "warm" else 0
            prompts = cell.requests + warm
            tokens = cell.requests * cell.output_len + warm * scenario.workload.warmup_output_len
            total += tokens * cost.ms_per_token / 1e3 / cell.concurrency
            total += prompts * cell.seq_len * cost.prefill_us_per_token / 1e6
    return total * scenario.measure.blocks
