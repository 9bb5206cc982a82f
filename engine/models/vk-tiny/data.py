"""Training data of vk-tiny: Debian packages -> files -> tokens.

Every byte comes from the packages in `SOURCES` (Debian 12, free licences without a share-alike
clause). `python data.py DIR` downloads them with apt, splits the files into training and
held-out ones by a hash of their path, trains the tokenizer on training files and writes
`train.bin.xz` and `heldout.bin.xz` (uint16 token ids), `heldout.json` and `data.json`.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import lzma
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

VOCAB_SIZE = 4096
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_OF_TEXT = 0
HELDOUT_ONE_IN = 50
FILE_BYTES = (200, 400_000)
TOKENIZER_ONE_IN = 4  # the tokenizer sees every fourth training file

# The splitting of Qwen3.5's tokenizer: AutoTokenizer rebuilds it for this model type whatever
# tokenizer.json says, so the file says the same.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Source:
    """A Debian package, the licence of what is taken from it, and the kind of its text."""

    package: str
    licence: str
    kind: str  # "docs": the sources of the documentation; "code": *.py


SOURCES = (
    Source("python3.11-doc", "PSF-2.0", "docs"),
    Source("python-sqlalchemy-doc", "MIT", "docs"),
    Source("python-sklearn-doc", "BSD-3-Clause", "docs"),
    Source("python-pytest-doc", "MIT", "docs"),
    Source("python-setuptools-doc", "MIT", "docs"),
    Source("python-flask-doc", "BSD-3-Clause", "docs"),
    Source("python-jinja2-doc", "BSD-3-Clause", "docs"),
    Source("python-tornado-doc", "Apache-2.0", "docs"),
    Source("python-attr-doc", "MIT", "docs"),
    Source("sphinx-doc", "BSD-2-Clause", "docs"),
    Source("libpython3.11-minimal", "PSF-2.0", "code"),
    Source("libpython3.11-stdlib", "PSF-2.0", "code"),
    Source("libpython3.11-testsuite", "PSF-2.0", "code"),
    Source("python3-numpy", "BSD-3-Clause", "code"),
    Source("python3-django", "BSD-3-Clause", "code"),
    Source("python3-sqlalchemy", "MIT", "code"),
    Source("python3-sphinx", "BSD-2-Clause", "code"),
    Source("python3-twisted", "MIT", "code"),
)


@dataclass(frozen=True, slots=True)
class Document:
    """One file: `name` is package/path, `text` its content."""

    name: str
    kind: str
    text: str


def download(packages: list[str], folder: Path) -> list[Path]:
    """Fetch the packages' .deb files into `folder` (those already there are kept)."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in packages:
        if not list(folder.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=folder, check=True)
    return [sorted(folder.glob(f"{package}_*.deb"))[-1] for package in packages]


def _wanted(path: Path, kind: str) -> bool:
    name = path.name.removesuffix(".gz")
    if kind == "code":
        return name.endswith(".py")
    return name.endswith((".rst.txt", ".md.txt", ".rst")) or (
        name.endswith(".txt") and "_sources" in path.parts
    )


def _readable(text: str) -> bool:
    """No tables of numbers, no generated one-line files."""
    size = len(text.encode())
    if not FILE_BYTES[0] <= size <= FILE_BYTES[1]:
        return False
    digits = sum(character.isdigit() for character in text)
    return digits < 0.2 * len(text) and len(text) < 120 * (text.count("\n") + 1)


def documents(source: Source, archive: Path) -> Iterator[Document]:
    """The package's readable files of its kind, in path order."""
    with tempfile.TemporaryDirectory() as unpacked:
        subprocess.run(["dpkg-deb", "-x", archive, unpacked], check=True)
        root = Path(unpacked)
        for path in sorted(root.rglob("*")):
            if path.is_symlink() or not path.is_file() or not _wanted(path, source.kind):
                continue
            raw = path.read_bytes()
            if path.suffix == ".gz":
                raw = gzip.decompress(raw)
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError:
                continue
            text = text.replace("\r\n", "\n")
            if _readable(text):
                yield Document(f"{source.package}/{path.relative_to(root)}", source.kind, text)


def bucket(name: str, count: int) -> int:
    """A stable number below `count` for a file name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % count


def collect(folder: Path) -> tuple[list[Document], list[Document], list[dict[str, object]]]:
    """Training documents, held-out documents (both without duplicates), package facts."""
    train: list[Document] = []
    heldout: list[Document] = []
    facts: list[dict[str, object]] = []
    seen: set[bytes] = set()
    archives = download([source.package for source in SOURCES], folder)
    for source, archive in zip(SOURCES, archives, strict=True):
        size = 0
        for document in documents(source, archive):
            digest = hashlib.sha256(document.text.encode()).digest()
            if digest in seen:
                continue
            seen.add(digest)
            size += len(document.text.encode())
            side = heldout if bucket(document.name, HELDOUT_ONE_IN) == 0 else train
            side.append(document)
        deb = hashlib.sha256(archive.read_bytes()).hexdigest()
        facts.append({**asdict(source), "file": archive.name, "sha256": deb, "text_bytes": size})
    # One order for training, mixed across packages and independent of the listing's order.
    train.sort(key=lambda document: hashlib.sha256(document.name.encode()).digest())
    return train, heldout, facts


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Byte-level BPE of `VOCAB_SIZE` entries; the special tokens come first."""
    tokenizer = Tokenizer(models.BPE(continuing_subword_prefix="", end_of_word_suffix=""))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and the tokenizer_config.json that AutoTokenizer reads."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen3_5Tokenizer",
        "bos_token": None,
        "eos_token": SPECIAL_TOKENS[END_OF_TEXT],
        "pad_token": SPECIAL_TOKENS[END_OF_TEXT],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode(tokenizer: Tokenizer, items: list[Document]) -> list[np.ndarray]:
    """Token ids of each document, end-of-text last."""
    encoded: list[np.ndarray] = []
    for start in range(0, len(items), 256):
        texts = [item.text for item in items[start : start + 256]]
        for result in tokenizer.encode_batch(texts, add_special_tokens=False):
            encoded.append(np.array([*result.ids, END_OF_TEXT], dtype=np.uint16))
    return encoded


def save_tokens(path: Path, tokens: np.ndarray) -> None:
    """Token ids as xz-packed little-endian uint16."""
    path.write_bytes(lzma.compress(tokens.astype("<u2").tobytes(), preset=6))


def load_tokens(path: Path) -> np.ndarray:
    """The inverse of `save_tokens`."""
    return np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2")


def main() -> None:
    """Write the data folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the data goes")
    parser.add_argument("--debs", type=Path, help="where the packages are kept")
    parser.add_argument("--tokenizer", type=Path, help="folder whose tokenizer.json is to be used")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    train, heldout, facts = collect(arguments.debs or folder / "debs")
    if arguments.tokenizer:
        tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    else:
        chosen = (d.text for d in train if bucket(d.text[:4096], TOKENIZER_ONE_IN) == 0)
        tokenizer = train_tokenizer(chosen)
        write_tokenizer(tokenizer, folder)
    train_tokens = np.concatenate(encode(tokenizer, train))
    heldout_tokens = encode(tokenizer, heldout)
    save_tokens(folder / "train.bin.xz", train_tokens)
    save_tokens(folder / "heldout.bin.xz", np.concatenate(heldout_tokens))
    index = [
        {"name": document.name, "kind": document.kind, "tokens": len(tokens)}
        for document, tokens in zip(heldout, heldout_tokens, strict=True)
    ]
    (folder / "heldout.json").write_text(json.dumps(index, indent=1) + "\n")
    summary = {
        "packages": facts,
        "train_files": len(train),
        "train_tokens": len(train_tokens),
        "train_bytes": sum(len(document.text.encode()) for document in train),
        "heldout_files": len(heldout),
        "heldout_tokens": sum(len(tokens) for tokens in heldout_tokens),
        "heldout_bytes": sum(len(document.text.encode()) for document in heldout),
        "train_sha256": hashlib.sha256(train_tokens.tobytes()).hexdigest(),
    }
    (folder / "data.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
