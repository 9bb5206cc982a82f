"""Write README.md, the model card, from eval.json: every number in it comes from there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def sources(data: dict[str, Any]) -> str:
    """What the model has read."""
    rows = [
        (p["package"], p["file"].split("_")[1].replace("%3a", ":"), p["kind"], p["licence"],
         f"{p['text_bytes'] / 1e6:.1f} MB")
        for p in data["packages"]
    ]  # fmt: skip
    return table(("Debian package", "version", "taken", "licence", "text"), rows)


def retokenized(data: dict[str, Any]) -> str:
    """What the tokenizer's later change did to the tokens, where there was one."""
    released = data.get("released_tokenizer")
    if released is None:
        return ""
    return f"""

These tokens, and those of the evaluation, were made before NFC normalisation and the splitting
at combining marks were added to the tokenizer (transformers applies both for this model type).
Vocabulary and merges are the same; the released tokenizer gives
{released["train_tokens"]:,} and {released["heldout_tokens"]:,} tokens."""


def acceptance(free: dict[str, Any], forced: dict[str, Any]) -> str:
    """Acceptance by position for each depth, both ways of counting."""
    rows = []
    for name, runs in (("free-running", free), ("teacher-forced", forced)):
        for depth, run in runs.items():
            shares = [f"{share:.3f}" for share in run["accepted_per_position"]]
            shares += ["-"] * (len(runs) - len(shares))
            rows.append((name, depth, run["rounds"], *shares, f"{run['acceptance_length']:.2f}"))
    head = ("text", "k", "rounds", "position 1", "position 2", "position 3", "acceptance length")
    return table(head, rows)


def quoted(sample: dict[str, str]) -> str:
    """One sample; the prompt ends at the mark."""
    fence = "````"
    return (
        f"{sample['name']}, {sample['mode']}:\n\n{fence}text\n{sample['prompt']}⟦…⟧"
        f"{sample['text'].rstrip()}\n{fence}"
    )


def card(result: dict[str, Any]) -> str:
    """The whole README.md."""
    data, run = result["data"], result["training"]
    heldout, free = result["heldout"], result["free_running"]
    settings = run["settings"]
    losses = table(
        ("text", "tokens", "vk-tiny", "bigram", "unigram", "most likely token right"),
        (
            (kind, row["tokens"], row["model"], row["bigram"], row["unigram"], row["accuracy"])
            for kind, row in heldout["nats_per_token"].items()
        ),
    )
    by_position = table(
        ("position in the file", "nats per token"), heldout["nats_by_position"].items()
    )
    worst = max(result["agreement"]["largest_logit_difference"].values())
    before_repeat = free["tokens_before_first_repeat"] / free["prompts"]
    epochs = run["tokens"] / data["train_tokens"]
    samples = "\n\n".join(quoted(sample) for sample in result["samples"])
    return f"""# vk-tiny

A language model of {result["parameters"] / 1e6:.2f} million parameters with the architecture of
Qwen3.5-MoE: 6 gated DeltaNet and 2 gated attention layers, 8 experts of which 2 are chosen plus
a shared one, and an MTP layer ({result["mtp_parameters"] / 1e6:.2f} million parameters of these)
that drafts tokens. It exists so that the engine, its drafting and the harness can be tested with
real weights on a laptop. It is of no use for anything else: it knows what Python's documentation
and source look like, and little of what they mean.

`config.json` and `model.safetensors` load with transformers (`AutoModelForCausalLM`, which leaves
out the MTP layer) and `tokenizer.json` with `AutoTokenizer`. Hidden size 256, context
{settings["length"]}, byte-level BPE of 4,096 tokens, tied embeddings, bf16.

## Data and licences

{sources(data)}

Taken are the sources of the documentation (reStructuredText, Markdown) and `*.py` files between
200 bytes and 400 kB that are not tables of numbers. Duplicate files are dropped. Every fiftieth
file, by a hash of its path, is held out: {data["train_files"]:,} files
({data["train_tokens"]:,} tokens, {data["train_bytes"] / 1e6:.1f} MB) are for training,
{data["heldout_files"]} files ({data["heldout_tokens"]:,} tokens) are held out. The tokenizer was
trained on training files alone. The split is by file, so a held-out file can share licence
headers and idioms with files of the same package.{retokenized(data)}

All of these licences let the text be copied and changed on condition that their notices stay
with copies of it: PSF-2.0 (Copyright © 2001-2023 Python Software Foundation), BSD, MIT and
Apache-2.0, each with its authors' notices in the packages named. The weights are under the
repository's licence, Apache-2.0.

## Training

`data.py` makes the tokens from those packages, `train.py` trains, `evaluate.py` writes
`eval.json`, `card.py` writes this file. {run["steps"]:,} steps of {settings["batch"]} windows of
{settings["length"]:,} tokens: {run["tokens"] / 1e6:.0f} million tokens, about {epochs:.0f} times
the data, in {run["seconds"]:.0f} s on one {run["device"]} (torch {run["torch"]}; {run["form"]}).
The loss is the next token's cross-entropy, plus {settings["draft_weights"][0]},
{settings["draft_weights"][1]} and {settings["draft_weights"][2]} times that of three chained MTP
steps, plus {settings["balance_weight"]} times the load-balancing loss; AdamW, peak rate
{settings["peak_lr"]}, cosine. A chained step is trained as it runs: its hidden input is the MTP
layer's own output after `mtp.norm`, and it attends to the trunk-fed entries and to the steps
before it.

## Held-out loss

First {4096:,} tokens of every held-out file, nats per token. Unigram and bigram (Witten-Bell
interpolated) are counted on the training tokens.

{losses}

{by_position}

Largest difference of a logit between `model.py` and transformers
{result["agreement"]["transformers"]}, fp32, prompts of 1 to 513 tokens: {worst:.1e}.

## Acceptance of drafts

Acceptance length is 1 + accepted drafts per verify round; a draft is accepted when it is the
trunk's most likely token and all drafts before it in its round were accepted. Free-running:
greedy continuations ({free["new_tokens"]} tokens, by transformers, fp32) of {free["prompts"]}
held-out prompts of {free["prompt_tokens"]} tokens, counting only tokens before the first repeated
8-gram: {free["tokens_before_first_repeat"]:,} of {free["generated_tokens"]:,} (a round counts when
all its drafts stand before it). Teacher-forced: a
round at every position of the held-out text, where the drafter reads the text's own tokens.

{acceptance(free["by_depth"], heldout["teacher_forced"])}

## Samples

The prompt ends at ⟦…⟧. Sampled: temperature 0.7, top-p 0.9.

{samples}

## Limits

- Small and briefly trained: it invents names and contradicts itself, and its greedy text soon
  goes in circles: on average the first 8-gram recurs after {before_repeat:.0f} tokens.
- English and Python only; chat works as a format, not as a conversation.
- Trained on windows of {settings["length"]:,} tokens; longer contexts are untested.
- Acceptance depends on the text: easy, repetitive text accepts more. The figures above hold for
  this model and say nothing about larger ones.
"""


def main() -> None:
    """Write README.md beside this file."""
    result = json.loads((HERE / "eval.json").read_text())
    (HERE / "README.md").write_text(card(result))


if __name__ == "__main__":
    main()
