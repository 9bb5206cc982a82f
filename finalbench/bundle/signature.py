"""An optional Ed25519 signature over a seal's root hash. Keys are PEM files of the user's."""

from __future__ import annotations

import json
from pathlib import Path

from finalbench.errors import BundleBroken, EnvironmentMissing, UsageError
from finalbench.record import write_atomic

SIGNATURE_FILE = "signature.json"
CONTEXT = b"finalbench seal v1\n"


def sign(run_dir: Path, root: str, key_path: Path) -> str:
    """Sign `root` with the PEM private key; returns the public key in hex."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        data = key_path.read_bytes()
    except OSError as error:
        raise EnvironmentMissing(f"cannot read the key {key_path}: {error.strerror}") from error
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{key_path} is not an unencrypted PEM private key") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{key_path} is not an Ed25519 key")
    public = key.public_key().public_bytes_raw().hex()
    document = {
        "schema_version": 1,
        "algorithm": "ed25519",
        "public_key": public,
        "signature": key.sign(CONTEXT + root.encode()).hex(),
    }
    write_atomic(run_dir / SIGNATURE_FILE, _file(document))
    return public


def check_signature(run_dir: Path, root: str) -> tuple[str | None, str | None]:
    """(public key in hex, None) when valid, (None, None) when unsigned, (None, fault) otherwise."""
    path = run_dir / SIGNATURE_FILE
    if not path.is_file():
        return None, None
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    data = path.read_bytes()
    try:
        document = json.loads(data)
        if data != _file(document):
            raise BundleBroken("bytes differ from the form in which signatures are written")
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(document["public_key"]))
        key.verify(bytes.fromhex(document["signature"]), CONTEXT + root.encode())
    except InvalidSignature:
        return None, "the signature does not belong to this root"
    except (ValueError, KeyError, TypeError, BundleBroken) as error:
        return None, f"not a signature: {error}"
    return str(document["public_key"]), None


def _file(document: object) -> bytes:
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"
