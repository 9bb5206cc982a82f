"""Fixtures that save time where the thing they stand in for is not what is tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def drawn_once() -> Iterator[None]:
    """Equal figures are drawn once a module: matplotlib takes a tenth of a second for each.

    Not for tests of the plots themselves, nor of two renderings giving the same bytes.
    """
    from finalbench.report import plots

    known: dict[str, str] = {}
    draw = plots.svg

    def svg(figure: plots.Figure) -> str:
        key = figure.model_dump_json()
        if key not in known:
            known[key] = draw(figure)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "svg", svg)
        yield
