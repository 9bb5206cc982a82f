"""Stands in for the `vllm` command: the toy model behind vLLM's flags, routes, log and counters.

Strict where vLLM is: an unknown flag ends it with 2. FAKE_VLLM holds `key=value` pairs separated by
commas: `start_s` (the wait before it listens), `dtype` (what it says it runs with), and knobs of
the toy's behaviour.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from finalbench.testing.behaviour import parse_behaviour
from finalbench.testing.toy import ToyServer, bind
from finalbench.testing.toy_protocol import error_response
from finalbench.testing.toy_state import ToyState

VERSION = "0.26.0"


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags of vLLM 0.26 that the arm uses; test_arms.py holds them against a wider list."""
    parser = argparse.ArgumentParser(prog="vllm", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", allow_abbrev=False)
    serve.add_argument("model")
    serve.add_argument("--served-model-name", nargs="+")
    serve.add_argument("--host")
    serve.add_argument("--port", type=int)
    serve.add_argument("--dtype", default="auto")
    serve.add_argument("--max-model-len", type=int)
    serve.add_argument("--max-num-seqs", type=int)
    serve.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    serve.add_argument("--generation-config", default="auto")
    serve.add_argument("--seed", type=int)
    serve.add_argument("--language-model-only", action="store_true")
    serve.add_argument("--gpu-memory-utilization", type=float)
    serve.add_argument("--load-format", default="auto")
    serve.add_argument("--skip-tokenizer-init", action="store_true")
    serve.add_argument("--speculative-config", type=json.loads)
    serve.add_argument("--gdn-prefill-backend", choices=["flashinfer", "triton", "cutedsl"])
    return parser.parse_args(argv)


class FakeVllm(ToyServer):
    """No /v1/settings, drafts by the start alone, fields it does not know ignored."""

    def __init__(self, state: ToyState, options: argparse.Namespace) -> None:
        super().__init__(state)
        self.options = options

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/version", self.version),
                Route("/metrics", self.metrics),
                Route("/v1/models", self.models),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
            ]
        )

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def metrics(self, request: Request) -> Response:
        lines = self.state.metrics_text().replace("vk:", "vllm:").splitlines()
        if self.options.speculative_config is None:
            lines = [line for line in lines if "spec_decode" not in line]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def models(self, request: Request) -> Response:
        row = {"id": self.state.model, "object": "model", "owned_by": "vllm"}
        row["max_model_len"] = self.options.max_model_len
        return JSONResponse({"object": "list", "data": [row]})

    async def tokenize(self, request: Request) -> Response:
        if self.options.skip_tokenizer_init:
            return error_response(400, "Tokenizer not available when `skip_tokenizer_init=True`")
        return await super().tokenize(request)

    async def completions(self, request: Request) -> Any:
        body = json.loads(await request.body())
        if "draft" in body:
            return error_response(400, "draft: not a field of vLLM", "draft")
        drafts = self.options.speculative_config
        if drafts is not None:
            body["draft"] = {"method": "mtp", "k": drafts["num_speculative_tokens"]}
            rates = drafts.get("synthetic_acceptance_rates")
            if rates:
                body["draft"]["acceptance"] = {"synthetic": rates[0]}
        request._body = json.dumps(body).encode()
        return await super().completions(request)


def log_line(options: argparse.Namespace, dtype: str) -> str:
    """The engine's start line, cut to what the harness may read of it."""
    drafts = options.speculative_config
    told = "None"
    if drafts is not None:
        k = drafts["num_speculative_tokens"]
        told = f"SpeculativeConfig(method='mtp', model='{options.model}', num_spec_tokens={k})"
    return (
        f"(EngineCore pid=7) INFO 12-01 01:00:00 [core.py:117] Initializing a V1 LLM engine "
        f"(v{VERSION}) with config: model='{options.model}', speculative_config={told}, "
        f"tokenizer='{options.model}', skip_tokenizer_init={options.skip_tokenizer_init}, "
        f"dtype=torch.{dtype}, max_seq_len={options.max_model_len}, "
        f"load_format={options.load_format}, quantization=None, enforce_eager=False, "
        f"kv_cache_dtype=auto, device_config=cpu, seed={options.seed}, "
        f"enable_prefix_caching={bool(options.enable_prefix_caching)}, compilation_config={{"
        f"'cudagraph_mode': <CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>}}"
    )


def main() -> None:
    options = parse(sys.argv[1:])
    asked = os.environ.get("FAKE_VLLM", "").split(",")
    knobs = dict(pair.split("=", 1) for pair in asked if pair)
    start_s = float(knobs.pop("start_s", "0"))
    dtype = knobs.pop("dtype", options.dtype)
    name = knobs.pop("name", options.served_model_name[0])
    sys.stdout.write(log_line(options, dtype) + "\n")
    sys.stdout.flush()
    time.sleep(start_s)
    text = ",".join(["ok,counters=absent,cache=false", *(f"{k}={v}" for k, v in knobs.items())])
    state = ToyState(parse_behaviour(text), "vk", name)
    config = uvicorn.Config(
        FakeVllm(state, options).app(), log_level="warning", access_log=False, lifespan="off"
    )
    uvicorn.Server(config).run(sockets=[bind(options.host, options.port)])


if __name__ == "__main__":
    main()
