"""YAML -> Scenario, with `--set` overrides; every error names its place and the nearest valid key.

YAML is read by the 1.2 core rules, so `no` stays a word, `1e3` is a number, `012` is 12 and `3:30`
is a word; a key given twice is an error.
"""

from __future__ import annotations

import difflib
import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from finalbench.errors import UsageError
from finalbench.scenario.models import Scenario

Place = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """SafeLoader by the rules of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("int", r"^[-+]?[0-9]+$", "-+0123456789"),
    (
        "float",
        r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$",
        "-+.0123456789",
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)))


def _construct_map(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[object] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if key in seen:
            raise yaml.MarkedYAMLError(None, None, f"key {key!r} is given twice", node.start_mark)
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_map)


@dataclass(frozen=True, slots=True)
class Override:
    """One value set from outside the file; `origin` is how the user wrote it."""

    path: str
    value: object
    origin: str


def scenario_files() -> dict[str, Path]:
    """Shipped scenarios, name -> file."""
    folder = Path(str(resources.files("finalbench.scenarios")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_scenario(name: str) -> Path:
    """A shipped scenario by its name, or a YAML file by its path."""
    shipped = scenario_files()
    if name in shipped:
        return shipped[name]
    path = Path(name)
    if path.suffix in {".yaml", ".yml"}:
        if path.is_file():
            return path
        raise UsageError(f"no scenario file {name}")
    near = difflib.get_close_matches(name.lower(), shipped, n=1, cutoff=0.4)
    guess = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(
        f"unknown model or scenario {name!r}{guess}", hint=f"there are: {', '.join(shipped)}"
    )


def parse_override(text: str) -> Override:
    """`a.b=c` of `--set`; the value is YAML."""
    path, separator, value = text.partition("=")
    if not separator or not path or any(not part for part in path.split(".")):
        raise UsageError(f"--set {text}: write it as path.to.key=value")
    return Override(path, _read_yaml(value, f"--set {text}"), f"--set {text}")


def load_scenario(name: str, overrides: Sequence[Override] = ()) -> Scenario:
    """Read, override and validate. Errors: `UsageError` naming file, line, key, nearest key."""
    path = find_scenario(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    data = _read_yaml(text, path.name)
    if not isinstance(data, dict):
        raise UsageError(f"{path.name}: a scenario is a mapping of keys to values")
    for override in overrides:
        _apply(data, override)
    _name_samplings(data)
    try:
        # Strict JSON mode: no silent "1e3" -> 1000.0 or true -> 1, but lists become tuples.
        return Scenario.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise UsageError(_explain(error, path.name, text, overrides)) from None
    except TypeError as error:
        raise UsageError(f"{path.name}: {error}") from error


def _read_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"{where}{line}: {error.problem or 'not valid YAML'}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{where}: not valid YAML ({error})") from error


def _apply(data: dict[str, Any], override: Override) -> None:
    *parents, last = override.path.split(".")
    place = data
    for part in parents:
        inner = place.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UsageError(f"{override.origin}: {part} has no keys inside")
        place = inner
    place[last] = override.value


def _name_samplings(data: dict[str, Any]) -> None:
    """In YAML a sampling is named by its key alone."""
    samplings = data.get("samplings")
    if isinstance(samplings, dict):
        for key, fields in samplings.items():
            if isinstance(fields, dict):
                fields.setdefault("name", key)


def _explain(error: ValidationError, file: str, text: str, overrides: Sequence[Override]) -> str:
    """The first complaint in one line; unknown keys first, as they often cause the others."""
    complaints = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    first = complaints[0]
    place: Place = tuple(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = f"unknown key{_nearest(place)}"
    elif first["type"] == "missing":
        message = "is missing"
    elif first["type"] == "value_error" and (named := re.match(r"([\w.]+): (.*)", message)):
        place, message = (*place, *named[1].split(".")), named[2]
    elif not isinstance(first["input"], dict | list):
        message = f"{message[:1].lower()}{message[1:]}, not {first['input']!r}"
    dotted = ".".join(str(part) for part in place if not _is_branch(part))
    for override in reversed(overrides):
        inside = dotted == override.path or dotted.startswith(f"{override.path}.")
        unknown = first["type"] == "extra_forbidden" and override.path.startswith(f"{dotted}.")
        if inside or unknown:
            return f"{override.origin}: {dotted}: {message}"
    line = _line_of(text, place)
    return f"{file}{f':{line}' if line else ''}: {dotted or 'scenario'}: {message}"


def _is_branch(part: str | int) -> bool:
    """Pydantic puts the tried branch of a union into the place; a reader has no use for it."""
    return isinstance(part, str) and (part.startswith("literal[") or part == "constrained-int")


def _nearest(place: Place) -> str:
    paths = list(_valid_paths(Scenario, "", place))
    dotted = ".".join(str(part) for part in place)
    siblings = [p for p in paths if p.rpartition(".")[0] == dotted.rpartition(".")[0]]
    near = difflib.get_close_matches(dotted, siblings, n=1, cutoff=0.5)
    last = dotted.rpartition(".")[2]
    near = near or [p for p in paths if p.rpartition(".")[2] == last][:1]
    near = near or difflib.get_close_matches(dotted, paths, n=1, cutoff=0.3)
    return f"; the nearest valid one is {near[0]}" if near else ""


def _valid_paths(model: type[BaseModel], prefix: str, place: Place) -> Iterator[str]:
    """Dotted keys of a model; a mapping's own key is taken from `place`, where it passes there."""
    for name, info in model.model_fields.items():
        path = f"{prefix}{name}"
        yield path
        inner, keyed = _inner_model(info.annotation)
        if inner is None:
            continue
        depth = len(path.split("."))
        if not keyed:
            yield from _valid_paths(inner, f"{path}.", place)
        elif len(place) > depth and ".".join(map(str, place[:depth])) == path:
            yield from _valid_paths(inner, f"{path}.{place[depth]}.", place)


def _inner_model(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model inside an annotation, and whether it is the value of a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (dict, Mapping):
        return _inner_model(arguments[1])[0], True
    if origin in (Union, types.UnionType):
        for argument in arguments:
            inner, keyed = _inner_model(argument)
            if inner is not None:
                return inner, keyed
    return None, False


def _line_of(text: str, place: Place) -> int | None:
    """Line of the deepest part of `place` that the file holds."""
    node = yaml.compose(text, Loader=_Loader)
    line: int | None = None
    for part in place:
        if isinstance(node, yaml.MappingNode):
            found = [(k, v) for k, v in node.value if k.value == str(part)]
            if not found:
                break
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line
