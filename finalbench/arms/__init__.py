"""The catalogue of servers, and each engine's dialect. Pure: nothing here starts or asks one."""

from __future__ import annotations

from finalbench.arms.catalogue import (
    ARMS,
    ENGINES,
    Arm,
    arm,
    default_baseline,
    engine_of,
    serve_command,
    server_settings,
    serves_draft,
)
from finalbench.arms.engine import NAME_MARK, Address, Engine, Settings, model_argument
from finalbench.arms.shapes import model_folder, served_model, shape_folder, vocabulary_size
from finalbench.arms.vk import bare_command

__all__ = [
    "ARMS",
    "ENGINES",
    "NAME_MARK",
    "Address",
    "Arm",
    "Engine",
    "Settings",
    "arm",
    "bare_command",
    "default_baseline",
    "engine_of",
    "model_argument",
    "model_folder",
    "serve_command",
    "served_model",
    "server_settings",
    "serves_draft",
    "shape_folder",
    "vocabulary_size",
]
