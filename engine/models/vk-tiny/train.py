"""Train vk-tiny: trunk and MTP layer together, on one GPU or (slowly) on a CPU.

    python data.py DATA
    python train.py --data DATA --out OUT --minutes 6.5

The loss is the trunk's cross-entropy on the next token plus that of three chained MTP steps on
the token after it, plus load balancing. fp32 master weights, bf16 activations on a GPU, AdamW,
a cosine schedule over the time allowed. The step is captured in a CUDA graph; blocks are fused
with torch.compile when the fused losses and gradients agree with the plain ones.
Weights (bf16) and train.json are written to OUT at intervals, so an interrupted run keeps them.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from blocks import Config, compile_blocks
from data import load_tokens
from model import Network
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
START = time.monotonic()
log = logging.getLogger("train")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run depends on, kept in train.json."""

    batch: int
    length: int
    draft_steps: int
    draft_weights: tuple[float, ...]
    balance_weight: float
    peak_lr: float
    final_lr_share: float
    warmup_steps: int
    weight_decay: float
    betas: tuple[float, float]
    clip: float
    seed: int


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.5, help="from the process's start")
    parser.add_argument("--steps", type=int, help="at most so many steps")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--length", type=int, default=4096, help="positions of a sequence")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", type=Path, help="start from these weights")
    parser.add_argument("--export-seconds", type=float, default=75.0)
    parser.add_argument("--fuse", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def optimizer_for(network: Network, settings: Settings, device: torch.device) -> torch.optim.AdamW:
    """Weight decay on matrices only; not on the embedding, the convolutions and vectors."""
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        plain = parameter.ndim < 2 or "embed_tokens" in name or "conv1d" in name
        (free if plain else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    on_gpu = device.type == "cuda"
    rate = torch.tensor(settings.peak_lr, device=device) if on_gpu else settings.peak_lr
    return torch.optim.AdamW(
        groups, lr=rate, betas=settings.betas, eps=1e-10, fused=True, capturable=on_gpu
    )


def set_rate(optimizer: torch.optim.AdamW, rate: float) -> None:
    """Also when a captured graph reads the rate."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class Trainer:
    """The training step on fixed buffers: `tokens` [B, S + 2] in, `report` out.

    report: losses and accuracies of trunk and draft steps, balance, gradient norm.
    """

    def __init__(self, network: Network, settings: Settings, device: torch.device) -> None:
        self.network = network
        self.settings = settings
        self.optimizer = optimizer_for(network, settings, device)
        shape = (settings.batch, settings.length + 2)
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.report = torch.zeros(2 * (1 + settings.draft_steps) + 2, device=device)
        self.weights = torch.tensor([1.0, *settings.draft_weights], device=device)
        self.replay: Callable[[], None] | None = None

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The loss to differentiate and the figures to report."""
        losses, right, balance = self.network.losses(tokens, self.settings.draft_steps)
        loss = (losses * self.weights).sum() + self.settings.balance_weight * balance
        return loss, torch.cat([losses, right, balance[None]]).detach()

    def gradients(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Loss figures and gradient norm, gradients left in place."""
        self.optimizer.zero_grad(set_to_none=True)
        loss, figures = self.forward(tokens)
        loss.backward()
        return figures, nn.utils.get_total_norm(self._gradients())

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.network.parameters() if p.grad is not None]

    def plain_step(self) -> None:
        """One update; a step whose gradient is not finite changes nothing."""
        figures, norm = self.gradients(self.tokens)
        scale = (self.settings.clip / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(self._gradients(), scale)
        # The fused optimizer skips the update on the device when this is 1, as for GradScaler.
        setattr(self.optimizer, "found_inf", (~torch.isfinite(norm)).float())  # noqa: B010
        self.optimizer.step()
        self.report.copy_(torch.cat([figures, norm[None]]))

    def capture(self) -> None:
        """Record the step; `step` replays it from then on."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.plain_step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.plain_step()
        self.replay = graph.replay

    def step(self) -> None:
        """One update on `tokens`."""
        (self.replay or self.plain_step)()

    @torch.no_grad()
    def evaluate(self, windows: Windows) -> list[float]:
        """The figures of `forward` on one batch of `windows`."""
        windows.draw(self.tokens)
        _, figures = self.forward(self.tokens)
        return [round(x, 4) for x in figures.tolist()]


class Windows:
    """Random windows of a token stream on the device, the same for the same seed."""

    def __init__(self, path: Path, settings: Settings, device: torch.device) -> None:
        self.stream = torch.from_numpy(load_tokens(path).astype(np.int32)).to(device)
        self.generator = torch.Generator(device=device).manual_seed(settings.seed)
        self.settings = settings
        self.offsets = torch.arange(settings.length + 2, device=device)

    def draw(self, into: Tensor) -> None:
        """Fill `into` [B, S + 2]."""
        last = len(self.stream) - self.settings.length - 2
        starts = torch.randint(
            last, (self.settings.batch, 1), generator=self.generator, device=self.stream.device
        )
        into.copy_(self.stream[starts + self.offsets])


def choose_form(trainer: Trainer, fuse: bool) -> str:
    """Settle how blocks and chained attention run: fast where that agrees with plain torch."""
    network = trainer.network
    compile_blocks(False)

    def agrees(name: str, expected: tuple[Tensor, Tensor], tokens: Tensor) -> bool:
        began = time.monotonic()
        try:
            figures, norm = trainer.gradients(tokens)
        except Exception:  # whatever a compiler or a kernel raises: run without it
            log.exception("%s does not run here", name)
            return False
        losses = len(trainer.weights)
        error = (figures - expected[0])[:losses].abs().max().item()
        drift = abs(norm.item() / expected[1].item() - 1)
        seconds = time.monotonic() - began
        log.info("%s: loss differs by %.1e, gradient by %.1e, %.1f s", name, error, drift, seconds)
        return error < 2e-2 and drift < 0.1

    part = trainer.tokens[:2, :1026]  # the plain chain holds whole score matrices
    network.fused_chain = False
    expected = trainer.gradients(part)
    log.info("plain: loss %.4f gradient %.4f", expected[0][0].item(), expected[1].item())
    network.fused_chain = True
    network.fused_chain = agrees("fused chained attention", expected, part)
    form = "fused chain" if network.fused_chain else "plain chain"
    if fuse:
        expected = trainer.gradients(trainer.tokens)
        compile_blocks(True)
        if agrees("compiled blocks", expected, trainer.tokens):
            return f"{form}, compiled blocks"
        compile_blocks(False)
    return f"{form}, plain blocks"


def export(network: Network, out: Path, record: dict[str, object]) -> None:
    """bf16 weights and the record, each replaced whole."""
    tensors = {
        name: tensor.detach().to(torch.bfloat16).cpu().contiguous()
        for name, tensor in network.state_dict().items()
    }
    save_file(tensors, out / "model.tmp", metadata={"format": "pt"})
    (out / "model.tmp").replace(out / "model.safetensors")
    (out / "train.tmp").write_text(json.dumps(record, indent=1) + "\n")
    (out / "train.tmp").replace(out / "train.json")


def rate_at(share: float, step: int, settings: Settings) -> float:
    """Linear warm-up by steps, then a cosine over the share of the run that is over."""
    wave = 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
    wave = settings.final_lr_share + (1 - settings.final_lr_share) * wave
    return settings.peak_lr * wave * min(1.0, (step + 1) / settings.warmup_steps)


def train(arguments: argparse.Namespace, settings: Settings) -> None:
    """Set up, run until the time or the steps are over, export."""
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")
    if on_gpu:
        torch.backends.cuda.enable_cudnn_sdp(False)
    config = Config.read(HERE / "config.json")
    network = Network(config, torch.bfloat16 if on_gpu else torch.float32)
    if arguments.resume:
        network.load_state_dict({k: v.float() for k, v in load_file(arguments.resume).items()})
    network = network.to(device)
    trainer = Trainer(network, settings, device)
    windows = Windows(arguments.data / "train.bin.xz", settings, device)
    heldout = Windows(arguments.data / "heldout.bin.xz", settings, device)
    log.info("%.1f s: data and model ready", time.monotonic() - START)
    windows.draw(trainer.tokens)
    form = choose_form(trainer, arguments.fuse)
    step = 0
    if on_gpu:
        set_rate(trainer.optimizer, rate_at(0.0, 0, settings))
        torch.cuda.empty_cache()
        try:
            trainer.capture()
            torch.cuda.empty_cache()
            form += ", captured"
            compile_blocks(False)  # the graph keeps the fused kernels; evaluation runs plain
        except RuntimeError:
            log.exception("the step cannot be captured: running it launch by launch")
        step = 3
        peak = torch.cuda.max_memory_allocated() / 2**30
        log.info("%.1f s: captured, %.1f GiB", time.monotonic() - START, peak)
    curve: list[dict[str, object]] = []
    began = time.monotonic()
    end = START + 60 * arguments.minutes
    exported = began
    while True:
        now = time.monotonic()
        share = (now - began) / (end - began)
        if arguments.steps:
            share = max(share, step / arguments.steps)
        over = share >= 1
        if step % 100 == 0 or over:
            figures = [round(x, 4) for x in trainer.report.tolist()]
            tokens = step * settings.batch * settings.length
            rate = tokens / max(time.monotonic() - began, 1e-9)
            log.info("step %d share %.3f %.2f Mtok/s %s", step, share, rate / 1e6, figures)
            curve.append({"step": step, "figures": figures})
        if over or now - exported > arguments.export_seconds:
            exported = now
            record = {
                "steps": step,
                "tokens": step * settings.batch * settings.length,
                "seconds": round(time.monotonic() - began, 1),
                "finished": over,
                "form": form,
                "device": torch.cuda.get_device_name() if on_gpu else "cpu",
                "torch": torch.__version__,
                "settings": asdict(settings),
                "heldout_batch": trainer.evaluate(heldout),
                "curve": curve,
            }
            log.info("export at step %d, held-out batch %s", step, record["heldout_batch"])
            export(network, arguments.out, record)
        if over:
            return
        set_rate(trainer.optimizer, rate_at(share, step, settings))
        windows.draw(trainer.tokens)
        trainer.step()
        step += 1
        if on_gpu and step % 8 == 0:
            torch.cuda.synchronize()  # the schedule reads the clock: stay close to the device


def main() -> None:
    """Parse and train."""
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    handlers = [logging.StreamHandler(), logging.FileHandler(arguments.out / "train.log", "w")]
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=handlers)
    settings = Settings(
        batch=arguments.batch,
        length=arguments.length,
        draft_steps=3,
        draft_weights=(0.3, 0.2, 0.15),
        balance_weight=0.01,
        peak_lr=arguments.lr,
        final_lr_share=0.02,
        warmup_steps=300,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        clip=1.0,
        seed=arguments.seed,
    )
    train(arguments, settings)


if __name__ == "__main__":
    main()
