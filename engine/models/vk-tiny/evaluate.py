"""Measure vk-tiny on held-out files and write eval.json, from which card.py makes the README.

    python evaluate.py --data DATA --run OUT

Runs in fp32, on a CPU or a GPU. Greedy continuations come from transformers' `generate`, so the
text does not depend on this folder's own forward pass; the logits of both are compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from blocks import Config
from data import END_OF_TEXT, bucket, load_tokens
from model import Network
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

HERE = Path(__file__).parent
WINDOW = 4096
PROMPT_TOKENS, NEW_TOKENS, PROMPTS = 128, 256, 64
REPEAT = 8
STEPS = 3
SAMPLES = {
    "code": "def read_config(path):\n",
    "class": 'class Stack:\n    """',
    "docs": "The :mod:`json` module\n======================\n\n",
    "test": "class ListTest(unittest.TestCase):\n\n    def test_append(self):\n",
    "prose": "This tutorial explains how to",
}
log = logging.getLogger("evaluate")


@dataclass(slots=True)
class Acceptance:
    """Counts over verify rounds; `at[j]` counts rounds whose draft j+1 was accepted."""

    depth: int
    rounds: int = 0
    at: list[int] = field(default_factory=list)

    def add(self, leading: int) -> None:
        """One round with so many leading drafts accepted."""
        self.at = self.at or [0] * self.depth
        self.rounds += 1
        for position in range(leading):
            self.at[position] += 1

    def summary(self) -> dict[str, object]:
        """Shares per position and the acceptance length, 1 + accepted / rounds."""
        return {
            "rounds": self.rounds,
            "accepted_per_position": [round(n / self.rounds, 4) for n in self.at],
            "acceptance_length": round(1 + sum(self.at) / self.rounds, 4),
        }


def leading(matches: list[list[bool]], last: int, depth: int) -> int:
    """Drafts accepted in the round whose last committed token stands at `last`.

    matches[s][q]: did step s + 1 at entry q predict the token chosen for position q + 2?
    """
    count = 0
    while count < depth and matches[count][last - 1 + count]:
        count += 1
    return count


def count_rounds(matches: list[list[bool]], first: int, end: int, depth: int) -> Acceptance:
    """Play the rounds of draft depth `depth` whose drafts all lie before position `end`."""
    result = Acceptance(depth)
    last = first
    while last + depth < end:
        accepted = leading(matches, last, depth)
        result.add(accepted)
        last += accepted + 1
    return result


def merge(parts: list[Acceptance]) -> Acceptance:
    """The sum of counts of one depth."""
    total = Acceptance(parts[0].depth, at=[0] * parts[0].depth)
    for part in parts:
        total.rounds += part.rounds
        for position, count in enumerate(part.at):
            total.at[position] += count
    return total


def before_repeat(tokens: list[int]) -> int:
    """How many tokens come before the first 8-gram that has occurred already is complete."""
    seen: set[tuple[int, ...]] = set()
    for end in range(REPEAT, len(tokens) + 1):
        gram = tuple(tokens[end - REPEAT : end])
        if gram in seen:
            return end - 1
        seen.add(gram)
    return len(tokens)


class Baselines:
    """Unigram and interpolated bigram log probabilities, counted on the training tokens."""

    def __init__(self, train: np.ndarray, vocab: int) -> None:
        self.unigram = (np.bincount(train, minlength=vocab) + 1.0) / (len(train) + vocab)
        pairs = train[:-1].astype(np.int64) * vocab + train[1:]
        self.pairs = np.bincount(pairs, minlength=vocab * vocab).reshape(vocab, vocab)
        self.totals = self.pairs.sum(1)
        # Witten-Bell: trust a context by how many different followers it has shown.
        kinds = (self.pairs > 0).sum(1)
        self.trust = self.totals / np.maximum(self.totals + kinds, 1)

    def losses(self, tokens: np.ndarray) -> tuple[float, float]:
        """Summed nats of tokens[1:] under both."""
        before, after = tokens[:-1].astype(np.int64), tokens[1:].astype(np.int64)
        unigram = self.unigram[after]
        share = self.pairs[before, after] / np.maximum(self.totals[before], 1)
        bigram = self.trust[before] * share + (1 - self.trust[before]) * unigram
        return float(-np.log(unigram).sum()), float(-np.log(bigram).sum())


def heldout_files(data: Path) -> list[tuple[dict[str, object], np.ndarray]]:
    """Facts and tokens (end-of-text included) of every held-out file."""
    stream = load_tokens(data / "heldout.bin.xz")
    files = json.loads((data / "heldout.json").read_text())
    ends = np.cumsum([int(file["tokens"]) for file in files])
    return list(zip(files, np.split(stream, ends[:-1]), strict=True))


def ids(tokens: np.ndarray, network: Network) -> Tensor:
    """Token ids as int64 beside the network."""
    return torch.from_numpy(tokens.astype(np.int64)).to(network.model.norm.weight.device)


@torch.no_grad()
def draft_matches(network: Network, tokens: Tensor) -> list[list[bool]]:
    """matches[s][q] of `leading` for one sequence [1, S] of tokens that the trunk chose."""
    hidden, _ = network.trunk(tokens)
    drafted, _ = network.drafts(hidden[:, :-2], tokens[:, 1:-1], STEPS)
    return [(network.logits(s)[0].argmax(-1) == tokens[0, 2:]).tolist() for s in drafted]


@torch.no_grad()
def heldout(
    network: Network, files: list[tuple[dict[str, object], np.ndarray]], baselines: Baselines
) -> dict[str, object]:
    """Loss beside the baselines', and teacher-forced acceptance, on each file's first window.

    Teacher-forced: every prefix is the file's own text, and a draft counts as accepted when it is
    the trunk's most likely token for that prefix and all drafts before it were accepted.
    """
    kinds: dict[str, dict[str, float]] = {}
    rounds: dict[int, Acceptance] = {depth: Acceptance(depth) for depth in range(1, STEPS + 1)}
    by_position: dict[str, list[float]] = {}
    for facts, content in files:
        window = content[:WINDOW]
        tokens = ids(window, network)[None]
        hidden, _ = network.trunk(tokens)
        logits = network.logits(hidden)[0]
        nats = F.cross_entropy(logits[:-1], tokens[0, 1:], reduction="none")
        unigram, bigram = baselines.losses(window)
        for kind in (str(facts["kind"]), "all"):
            row = kinds.setdefault(
                kind, {"tokens": 0, "model": 0.0, "unigram": 0.0, "bigram": 0.0, "right": 0}
            )
            row["tokens"] += len(nats)
            row["model"] += float(nats.sum())
            row["unigram"] += unigram
            row["bigram"] += bigram
            row["right"] += int((logits[:-1].argmax(-1) == tokens[0, 1:]).sum())
        for start in range(0, len(nats), 1024):
            by_position.setdefault(f"{start}-{start + 1023}", []).extend(
                nats[start : start + 1024].tolist()
            )
        if len(window) < 16:
            continue
        drafted, _ = network.drafts(hidden[:, :-1], tokens[:, 1:], STEPS)
        chosen = logits.argmax(-1)  # the trunk's choice for position q + 1
        matches = [(network.logits(s)[0].argmax(-1) == chosen[1:]).tolist() for s in drafted]
        for depth, total in rounds.items():
            for last in range(1, len(window) - depth):
                total.add(leading(matches, last, depth))
    losses = {
        kind: {
            "tokens": int(row["tokens"]),
            "model": round(row["model"] / row["tokens"], 4),
            "bigram": round(row["bigram"] / row["tokens"], 4),
            "unigram": round(row["unigram"] / row["tokens"], 4),
            "accuracy": round(row["right"] / row["tokens"], 4),
        }
        for kind, row in sorted(kinds.items())
    }
    return {
        "nats_per_token": losses,
        "nats_by_position": {k: round(float(np.mean(v)), 4) for k, v in by_position.items()},
        "teacher_forced": {str(depth): total.summary() for depth, total in rounds.items()},
    }


@torch.no_grad()
def free_running(
    network: Network,
    stock: transformers.Qwen3_5MoeForCausalLM,
    files: list[tuple[dict[str, object], np.ndarray]],
) -> dict[str, object]:
    """Acceptance in greedy continuations of held-out text, up to the first repeated 8-gram."""
    prompts = []
    for facts, content in files:
        room = len(content) - PROMPT_TOKENS - 1
        if room > 0 and len(prompts) < PROMPTS:
            start = bucket(str(facts["name"]), room)
            prompts.append(content[start : start + PROMPT_TOKENS].astype(np.int64))
    parts: dict[int, list[Acceptance]] = {depth: [] for depth in range(1, STEPS + 1)}
    generated = counted = 0
    for start in range(0, len(prompts), 64):
        batch = ids(np.stack(prompts[start : start + 64]), network)
        texts = stock.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=END_OF_TEXT,
        )
        for row in texts:
            new = row[PROMPT_TOKENS:].tolist()
            if END_OF_TEXT in new:
                new = new[: new.index(END_OF_TEXT)]
            kept = before_repeat(new)
            generated += len(new)
            counted += kept
            tokens = row[: PROMPT_TOKENS + len(new)][None]
            matches = draft_matches(network, tokens)
            for depth, runs in parts.items():
                # The prompt's last row yields the first new token, at position PROMPT_TOKENS.
                runs.append(count_rounds(matches, PROMPT_TOKENS, PROMPT_TOKENS + kept, depth))
    return {
        "prompts": len(prompts),
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "generated_tokens": generated,
        "tokens_before_first_repeat": counted,
        "by_depth": {str(depth): merge(runs).summary() for depth, runs in parts.items()},
    }


@torch.no_grad()
def compare(
    network: Network, stock: transformers.Qwen3_5MoeForCausalLM, stream: np.ndarray
) -> dict[str, object]:
    """Largest logit difference from transformers' module in fp32, by prompt length."""
    worst = {}
    for length in (1, 5, 64, 70, 513):
        tokens = ids(stream[:length], network)[None]
        own = network.logits(network.trunk(tokens)[0])
        worst[str(length)] = float((stock(tokens).logits - own).abs().max())
    return {"transformers": transformers.__version__, "largest_logit_difference": worst}


@torch.no_grad()
def samples(
    stock: transformers.Qwen3_5MoeForCausalLM, tokenizer: transformers.PreTrainedTokenizerFast
) -> object:
    """Continuations of fixed prompts, greedy and sampled."""
    result = []
    for name, prompt in SAMPLES.items():
        tokens = tokenizer(prompt, return_tensors="pt")["input_ids"].to(stock.device)
        for mode in ("greedy", "sampled"):
            torch.manual_seed(0)
            how = {"temperature": 0.7, "top_p": 0.9} if mode == "sampled" else {}
            out = stock.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=96,
                do_sample=mode == "sampled",
                pad_token_id=END_OF_TEXT,
                **how,
            )
            text = tokenizer.decode(out[0, tokens.shape[1] :])
            result.append({"name": name, "mode": mode, "prompt": prompt, "text": text})
    return result


def main() -> None:
    """Evaluate the weights beside this file (or in --model) and write eval.json there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True, help="folder with train.json")
    parser.add_argument("--model", type=Path, default=HERE)
    parser.add_argument("--files", type=int, help="at most so many held-out files")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)
    weights = arguments.model / "model.safetensors"
    network = Network(Config.read(arguments.model / "config.json"))
    network.load_state_dict({k: v.float() for k, v in load_file(weights).items()})
    network.eval().to(arguments.device)
    network.fused_chain = arguments.device == "cpu"  # the GPU's fused kernel has no fp32
    stock = transformers.Qwen3_5MoeForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    stock.eval().to(arguments.device)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(arguments.model)
    files = heldout_files(arguments.data)[: arguments.files]
    train = load_tokens(arguments.data / "train.bin.xz")
    result: dict[str, object] = {
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "parameters": sum(p.numel() for p in network.parameters()),
        "mtp_parameters": sum(p.numel() for p in network.mtp.parameters()),
        "data": json.loads((arguments.data / "data.json").read_text()),
        "training": json.loads((arguments.run / "train.json").read_text()),
        "agreement": compare(network, stock, np.concatenate([t for _, t in files])),
    }
    log.info("logits compared: %s", result["agreement"])
    result["samples"] = samples(stock, tokenizer)
    result["free_running"] = free_running(network, stock, files)
    log.info("free-running: %s", result["free_running"])
    result["heldout"] = heldout(network, files, Baselines(train, network.config.vocab_size))
    log.info("held-out: %s", result["heldout"])
    (arguments.model / "eval.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
