"""What files a model came from: where a name points, and a digest that both arms must share."""

from __future__ import annotations

import hashlib
from pathlib import Path

BUNDLED = Path(__file__).resolve().parent.parent / "models"


def checkpoint_folder(model: str) -> Path | None:
    """The folder a name or path means, or None when there is none on this machine."""
    for folder in (Path(model), BUNDLED / model):
        if (folder / "config.json").is_file():
            return folder
    return None


def model_digest(folder: Path) -> str:
    """sha256 over config.json and, per safetensors file, its name, size and header.

    Reads no weights, so it costs milliseconds on any size; a truncated file changes it.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            head = file.read(8)
            header = file.read(min(int.from_bytes(head, "little"), 1 << 27))
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(head + header)
    return digest.hexdigest()
