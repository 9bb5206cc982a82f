"""Where a server of another kind finds the model, and how many token ids the model knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from finalbench.arms.engine import model_argument


def shape_folder(model: str) -> Path | None:
    """A folder with nothing but this model's config.json, for weights that are not there."""
    folder = Path(str(resources.files("finalbench.scenarios"))) / "shapes" / model
    return folder if (folder / "config.json").is_file() else None


def model_folder(settings: Mapping[str, Any]) -> str:
    """The checkpoint; without one, the shape's folder; else the name, for the server to look up."""
    if settings.get("path") is None and str(settings["weights"]).startswith("random"):
        folder = shape_folder(str(settings["model"]))
        if folder is not None:
            return str(folder)
    return model_argument(settings)


def served_model(settings: Mapping[str, Any]) -> str:
    """The name our own servers give this model: the folder's, or the model's."""
    path = settings.get("path")
    return str(settings["model"]) if path is None else Path(str(path)).resolve().name


def vocabulary_size(settings: Mapping[str, Any]) -> int | None:
    """From the config.json of the checkpoint or the shape; None where there is none."""
    path = Path(model_folder(settings)) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    size = (config.get("text_config") or config).get("vocab_size")
    return int(size) if isinstance(size, int) else None
