"""A peer's benchmark client, unchanged, against `vk`'s server: its token counts are ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from serving import running
from vkengine.digest import checkpoint_folder
from vkengine.load import load_engine
from vkengine.sampling import Draft
from vkengine.tokenizer import Tokenizer

GUIDELLM = shutil.which("guidellm")


@pytest.mark.nightly
@pytest.mark.skipif(GUIDELLM is None, reason="guidellm is not installed")
def test_guidellm_counts_the_same_tokens(tmp_path: Path) -> None:
    folder = checkpoint_folder("vk-tiny")
    assert folder is not None
    assert GUIDELLM is not None
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path)
    engine = load_engine("vk-tiny", device="cpu", threads=1, default_draft=Draft("mtp", 3))
    report = tmp_path / "report.json"
    with running(engine, Tokenizer(folder)) as server:
        command = [GUIDELLM, "run", "--disable-progress"]
        target = f"kind=openai_http,target={server.url},request_format=/v1/completions"
        for option, value in (
            ("--backend", target),
            ("--profile", "kind=concurrent,streams=2"),
            ("--constraint", "kind=max_requests,count=8"),
            ("--tokenizer", f"kind=hf_auto,model={tmp_path}"),
            ("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32"),
            ("--output", f"kind=json,path={report}"),
        ):
            command += [option, value]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, env=environment, timeout=250, capture_output=True)
        metrics = server.send("GET", "/metrics").body.decode()
    requests = json.loads(report.read_text("utf-8"))["benchmarks"][0]["requests"]
    assert len(requests["successful"]) == 8
    assert not requests["errored"]
    counted = {
        line.split("{")[0]: float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith(("vk:prompt_tokens_total", "vk:generation_tokens_total"))
    }
    assert counted == {
        "vk:prompt_tokens_total": sum(r["prompt_tokens"] for r in requests["successful"]),
        "vk:generation_tokens_total": sum(r["output_tokens"] for r in requests["successful"]),
    }
