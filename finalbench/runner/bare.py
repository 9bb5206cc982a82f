"""The baseline's own generate loop without HTTP, timed once, where it cannot take turns.

In a container or on a GPU, which may hold the weights only once; elsewhere see `turns`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finalbench.arms import arm, bare_command
from finalbench.record import BareLoop, Run
from finalbench.runtime.process import ServerProcess, describe_exit, last_lines
from finalbench.runtime.server import Wanted, server_environment, vk_executable

if TYPE_CHECKING:
    from finalbench.runtime.container import ContainerRuntime

_TIMEOUT_S = 900.0


def time_bare_loop(
    run: Run,
    environment: Mapping[str, str],
    path: Path,
    containers: ContainerRuntime | None = None,
) -> BareLoop:
    """Time the baseline at the base cell's lengths; a failure is a reason, not an error."""
    scenario = run.scenario
    name = scenario.baseline
    if name is None or not arm(name).bare_loop:
        return _none("the baseline has no bare loop")
    settings = next(run.plan.servers[c.server_key] for c in run.plan.cells if c.arm == name)
    prompt, output = scenario.base.seq_len, scenario.base.output_len
    lengths = {
        "prompt_tokens": prompt,
        "output_tokens": output,
        "repeat": scenario.workload.requests,
    }
    log = path / "logs" / "bare.log"
    log.unlink(missing_ok=True)
    if containers is not None:
        wanted = Wanted(name, run.run_id, log, _TIMEOUT_S)
        code, reason = containers.run_bare(settings, wanted, lengths)
    else:
        command = bare_command(vk_executable(environment), settings, **lengths)
        code, reason = _run(command, log, server_environment(environment, settings, ""))
    if code != 0:
        return _none(reason)
    document = _last_document(log)
    if document is None or "decode_tok_s" not in document:
        return _none("the command printed no result")
    return BareLoop(
        decode_tok_s=document["decode_tok_s"],
        tokens=document.get("tokens"),
        seconds=document.get("seconds"),
        prompt_tokens=prompt,
        output_tokens=output,
        reason=None,
        raw=document,
    )


def _run(command: list[str], log: Path, environment: Mapping[str, str]) -> tuple[int | None, str]:
    process = ServerProcess.start(command, log, environment)
    try:
        code = process.wait(_TIMEOUT_S)
    finally:
        process.stop()
    if code is None:
        return None, f"not done after {_TIMEOUT_S:g} s"
    return code, f"{describe_exit(code)}: {' | '.join(last_lines(log, 3))}"


def _last_document(log: Path) -> dict[str, Any] | None:
    """The last line that is a JSON object, or the whole text when it is one."""
    text = log.read_text(encoding="utf-8", errors="replace")
    for candidate in [*reversed(text.splitlines()), text[text.find("\n{") + 1 :]]:
        if candidate.lstrip().startswith("{"):
            try:
                value = json.loads(candidate)
            except ValueError:
                continue
            if isinstance(value, dict):
                return value
    return None


def _none(reason: str) -> BareLoop:
    return BareLoop(
        decode_tok_s=None,
        tokens=None,
        seconds=None,
        prompt_tokens=None,
        output_tokens=None,
        reason=reason,
        raw=None,
    )
