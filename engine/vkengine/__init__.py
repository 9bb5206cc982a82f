"""VK: a lossless LLM inference engine in PyTorch and Triton.

``load_engine`` brings up an :class:`Engine`; ``add`` and ``step`` run requests::

    engine = load_engine("vk-tiny", default_draft=Draft("mtp", 3))
    engine.add("a", prompt_token_ids, SamplingParams(max_tokens=32, temperature=0))
    while engine.has_work():
        for output in engine.step():
            ...

Names are imported on first use, so that ``import vkengine`` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine, load_engine
    from .output import EngineFull, Output
    from .sampling import Draft, SamplingParams

_HOMES = {
    "Draft": "sampling",
    "Engine": "engine",
    "EngineFull": "output",
    "Output": "output",
    "SamplingParams": "sampling",
    "load_engine": "engine",
}

__all__ = ["Draft", "Engine", "EngineFull", "Output", "SamplingParams", "load_engine"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
