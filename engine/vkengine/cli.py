"""The `vk` command: serve, generate, bench. Parses, calls one function, prints."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .bringup import (
    Device,
    Dtype,
    Profile,
    StartFailed,
    load_engine_for,
    model_settings,
    parse_draft,
    tokenizer_for,
)

if TYPE_CHECKING:
    from .engine import Engine
    from .tokenizer import Tokenizer

USAGE, ENVIRONMENT, BUG, INTERRUPTED = 2, 3, 70, 130

app = typer.Typer(
    name="vk",
    help="VK: serves a model over HTTP, generates text, times the engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A checkpoint folder, or a name: vk-tiny.")
]
ProfileOption = Annotated[Profile, typer.Option(help="Which engine.")]
Weights = Annotated[str, typer.Option(help="auto (the checkpoint's) or random:SEED.")]
DeviceOption = Annotated[Device, typer.Option(help="Where to run.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Of the weights.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.")]
MaxLen = Annotated[int | None, typer.Option(min=2, help="Longest prompt and output, tokens.")]
MaxSequences = Annotated[int, typer.Option(min=1, help="Sequences decoded at once.")]
DraftOption = Annotated[str, typer.Option(help="Default draft: none, mtp:K or ngram:K.")]


@app.command()
def serve(
    model: Model,
    profile: ProfileOption = Profile.vkae,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    weights: Weights = "auto",
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.auto,
    threads: Threads = None,
    max_model_len: MaxLen = None,
    max_sequences: MaxSequences = 8,
    draft: DraftOption = "none",
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable that holds the API key.")
    ] = None,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait.")] = 512,
    max_body_mib: Annotated[int, typer.Option(min=1, help="Largest request body.")] = 16,
    request_timeout_s: Annotated[float, typer.Option(min=0.1, help="Longest request.")] = 3600.0,
    shutdown_timeout_s: Annotated[int, typer.Option(min=0, help="Grace at the end.")] = 10,
) -> None:
    """Serves MODEL with an OpenAI-compatible API until SIGTERM or Ctrl-C."""
    from .server.app import Limits
    from .server.serve import PortInUse, bind
    from .server.serve import serve as run

    default_draft = parse_draft(draft)
    api_key = _api_key(api_key_env)
    limits = Limits(max_waiting, max_body_mib << 20, request_s=request_timeout_s)

    def load() -> tuple[Engine, Tokenizer | None, dict[str, Any]]:
        engine = load_engine_for(
            model, profile, weights, device, dtype, threads, max_model_len, max_sequences,
            default_draft,
        )  # fmt: skip
        return engine, tokenizer_for(model), model_settings(model)

    try:
        code = run(
            load,
            bind(host, port),
            limits=limits,
            api_key=api_key,
            announce=_say,
            shutdown_s=shutdown_timeout_s,
        )
    except PortInUse as error:
        raise StartFailed(str(error)) from error
    raise typer.Exit(code)


@app.command()
def generate(
    model: Model,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads standard input.")
    ],
    profile: ProfileOption = Profile.vkae,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    top_p: Annotated[float, typer.Option(max=1)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0)] = 0,
    seed: Annotated[int | None, typer.Option()] = None,
    chat: Annotated[bool, typer.Option(help="Put the prompt through the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    weights: Weights = "auto",
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.auto,
    threads: Threads = None,
    draft: DraftOption = "none",
) -> None:
    """Continues PROMPT and prints the text as it comes."""
    from .generate import generate_text
    from .sampling import SamplingParams

    text = sys.stdin.read() if prompt == "-" else prompt
    try:
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    tokenizer = tokenizer_for(model)
    if tokenizer is None:
        raise StartFailed(f"'{model}' has no tokenizer.json, so text cannot be read")
    engine = load_engine_for(
        model, profile, weights, device, dtype, threads, None, 1, parse_draft(draft)
    )
    try:
        document = generate_text(
            engine, tokenizer, text, params, chat=chat, write=None if as_json else _write
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    finally:
        engine.close()
    if as_json:
        _print_json(document)
    else:
        _write("\n")


@app.command()
def bench(
    model: Model,
    profile: ProfileOption = Profile.vkae,
    bare: Annotated[bool, typer.Option(help="transformers' generate alone.")] = False,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 128,
    output_tokens: Annotated[int, typer.Option(min=3)] = 128,
    repeat: Annotated[int, typer.Option(min=1)] = 3,
    weights: Weights = "auto",
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.auto,
    threads: Threads = None,
    draft: DraftOption = "none",
    kernels: Annotated[
        bool, typer.Option(help="On a GPU: rounds on random weights, kernel by kernel.")
    ] = False,
    experts_per_token: Annotated[
        int | None, typer.Option(min=1, help="With --kernels: another number than the model's.")
    ] = None,
    stdin: Annotated[
        bool,
        typer.Option("--stdin", help="With --bare: JSON lists of token ids, timed as they come."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Times decoding without a server in between."""
    if bare != profile.is_stock:
        raise typer.BadParameter("--bare times transformers' generate: it needs --profile stock")
    if stdin and not bare:
        raise typer.BadParameter("--stdin takes turns with a server: it needs --bare")
    if experts_per_token is not None and not kernels:
        raise typer.BadParameter("--experts-per-token splits a kernel's time: it needs --kernels")
    if kernels:
        document, text = _kernels(model, prompt_tokens, experts_per_token)
    else:
        engine = load_engine_for(
            model, profile, weights, device, dtype, threads, None, 1, parse_draft(draft)
        )
        from . import bare as loops

        loop: Any = loops.bare_loop if bare else loops.engine_loop
        try:
            if stdin:
                turns: Any = loops.bare_turns
                turns(engine, sys.stdin, _print_json, output_tokens=output_tokens)
                return
            document = loop(
                engine, prompt_tokens=prompt_tokens, output_tokens=output_tokens, repeat=repeat
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        finally:
            engine.close()
        text = f"{document['decode_tok_s']:.1f} tok/s, decode alone, median of {repeat}"
    if as_json:
        _print_json(document)
    else:
        _write(text + "\n")


def _kernels(model: str, context: int, experts: int | None) -> tuple[dict[str, Any], str]:
    import torch

    from .config import KNOWN_SHAPES

    if model not in KNOWN_SHAPES:
        raise typer.BadParameter(f"--kernels: '{model}' is none of {', '.join(KNOWN_SHAPES)}")
    most = KNOWN_SHAPES[model].experts_per_token
    if experts is not None and experts > most:
        has = f"takes 1 to {most} a token" if most else "is dense: leave it out"
        raise typer.BadParameter(f"--experts-per-token: {model} {has}")
    if not torch.cuda.is_available():
        raise StartFailed("--kernels needs a CUDA device")
    from .bench import bench_decode, render

    document = bench_decode(model, context=context, experts_per_token=experts)
    return document, render(document)


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise StartFailed(f"the environment variable {variable} holds no API key")
    return key


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)  # noqa: T201


def _write(text: str) -> None:
    print(text, end="", flush=True)  # noqa: T201


def _print_json(document: dict[str, Any]) -> None:
    import json

    _write(json.dumps(document) + "\n")


def main() -> None:
    """Entry point; the one place where an exception becomes an exit code."""
    try:
        app()
    except StartFailed as error:
        _say(f"error: {error}")
        sys.exit(ENVIRONMENT)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.exit(0)
    except Exception:  # noqa: BLE001 (a bug: say so, with its trace, under its own code)
        import traceback

        traceback.print_exc()
        _say("error: this is a bug in vk")
        sys.exit(BUG)
