"""Train the miniature Qwen3.5-MoE from scratch and save its weights; on one H200 a few minutes are enough.

python -m recipes.miniature.train --out FOLDER --seconds 440
"""

import argparse
import json
import math
import multiprocessing
import os
import queue
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, Qwen3_5MoeForConditionalGeneration

from recipes.miniature import fast_model, packing


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path(str(files("shardwise") / "miniature")),
        help="folder with config.json and tokenizer.json, from prepare.py; default: the miniature itself",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished checkpoint")
    parser.add_argument("--seconds", type=float, default=440, help="time from the start of the program to the saving")
    parser.add_argument("--mtp-share", type=float, default=0.12, help="share of that time for the MTP layer")
    parser.add_argument("--rows", type=int, default=32, help="rows in a batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens in a row")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


class Batches:
    """Training batches: made by worker processes, fetched from them by a thread."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = args.device
        context = multiprocessing.get_context("fork")
        self.made, self.ready = context.Queue(maxsize=24), queue.Queue(maxsize=3)
        for seed in range(args.workers):
            context.Process(
                target=packing.worker,
                daemon=True,
                args=(self.made, args.checkpoint / "tokenizer.json", 1000 + seed, args.rows, args.length),
            ).start()

    def start(self) -> None:
        threading.Thread(target=self.fetch, daemon=True).start()

    def fetch(self) -> None:
        while True:
            batch = {key: torch.as_tensor(value) for key, value in self.made.get().items()}
            if self.device == "cuda":  # from pinned memory the copy to the device waits for nothing
                batch = {key: value.pin_memory() for key, value in batch.items()}
            self.ready.put(batch)

    def waiting(self) -> int:
        """Batches that are made and not yet fetched."""
        return self.made.qsize()

    def next(self) -> dict[str, Any]:
        return to_device(self.ready.get(timeout=300), self.device)


def to_device(batch: Mapping[str, Any], device: str) -> dict[str, Any]:
    """A batch from packing.py as tensors on the device, indices as int64."""
    layout = tuple(int(n) for n in batch["layout"])
    out = {key: torch.as_tensor(value).to(device, non_blocking=True) for key, value in batch.items()}
    for key in ("ids", "image", "slot", "coordinates", "interpolation_index"):
        out[key] = out[key].long()
    out["rope"] = torch.stack([out.pop("rope_t"), out.pop("rope_h"), out.pop("rope_w")])
    return {**out, "layout": layout}


class RouterLogits(list[Tensor]):
    """Collects what the routers of some layers say during a forward pass."""

    def __init__(self, layers: Iterable[Any]) -> None:
        super().__init__()
        self.hooks = [
            layer.mlp.gate.register_forward_hook(lambda _, inputs, output: self.append(output[0])) for layer in layers
        ]

    def detach(self) -> None:
        for hook in self.hooks:
            hook.remove()


def initialise(model: nn.Module) -> None:
    """Every matrix passes the size of its input on; what adds to the residual stream begins small."""
    for name, p in model.named_parameters():
        if name.endswith("A_log"):
            p.data.uniform_(1, 16).log_()
        elif name.endswith("dt_bias"):  # so that softplus(dt_bias) is between 0.001 and 0.1: half-lives of all lengths
            steps = torch.empty_like(p).uniform_(math.log(0.001), math.log(0.1)).exp()
            p.data.copy_(steps + torch.log(-torch.expm1(-steps)))
        elif "embed_tokens" in name or "pos_embed" in name:
            p.data.normal_(std=0.3)
        elif "mlp.gate.weight" in name or "in_proj_a" in name:
            p.data.normal_(std=0.02)
        elif p.ndim >= 2:
            fan_in = p[0].numel() if "conv1d" in name or "patch_embed" in name else p.shape[-1]
            into_residual = any(part in name for part in ("out_proj", "o_proj", "down_proj"))
            p.data.normal_(std=(0.3 if into_residual else 1.0) * fan_in**-0.5)


def optimiser(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.05},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=parameters[0].is_cuda)


def rate(step: int, progress: float) -> float:
    """Factor of the learning rate: a short warm-up, then a cosine over the time."""
    return min(1, (step + 1) / 150) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1, progress))))


def prediction_loss(logits: Tensor, batch: Mapping[str, Any], ahead: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted cross entropy of the token `ahead` places on, whether the best guess was right, and where it counts."""
    targets = batch["ids"][:, ahead:]
    same_document = batch["position"][:, ahead:] >= ahead
    weight = batch["weight"][:, ahead:] * same_document
    logits = logits[:, :-ahead].float()
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(weight)
    return (loss * weight).sum() / weight.sum(), (logits.argmax(-1) == targets), weight >= 1


def balance_loss(router_logits: Iterable[Tensor], top_k: int) -> tuple[Tensor, Tensor]:
    """Switch-style: 1 where all experts are used equally, more where not. Also the shares of the experts."""
    losses, shares = [], []
    for logits in router_logits:
        probabilities = logits.float().softmax(-1)
        chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(top_k, dim=-1).indices, 1 / top_k)
        shares.append(chosen.mean(0))
        losses.append(logits.shape[-1] * (shares[-1] * probabilities.mean(0)).sum())
    return torch.stack(losses).mean(), torch.stack(shares)


@dataclass(frozen=True)
class Step:
    """What a training step says of itself."""

    number: int
    phase: str
    loss: Tensor
    right: Tensor  # [rows, tokens]: was the best guess right
    counts: Tensor  # and does it count
    skills: Tensor  # [rows, length]
    balance: Tensor
    shares: Tensor  # of the experts, by layer


class Report:
    """Prints progress about every ten seconds; the accuracy is that of answers' tokens, seen for the first time."""

    def __init__(self, args: argparse.Namespace, start: float) -> None:
        self.tokens, self.start, self.last, self.step = args.rows * args.length, start, time.time(), 0
        self.log = args.out / "train_log.txt"
        self.log.write_text("")

    def say(self, text: str) -> None:
        text = f"[{time.time() - self.start:5.0f} s] {text}"
        print(text, flush=True)
        with self.log.open("a") as log:
            print(text, file=log)

    def due(self, step: int) -> bool:
        return time.time() - self.last > 10 or step in (1, 10)

    def progress(self, step: Step, more: str = "") -> None:
        now, last = time.time(), self.step if step.number > self.step else 0  # a new phase counts from 0
        speed = (step.number - last) * self.tokens / (now - self.last) / 1000
        skills, accuracy = step.skills[:, -step.right.shape[1] :], []
        for i, name in enumerate(packing.SKILL_NAMES):
            of_skill = (skills == i) & step.counts
            share = (step.right & of_skill).sum().item() / max(1, of_skill.sum().item())
            accuracy.append(f"{name} {100 * share:.0f}")
        self.say(
            f"{step.phase} step {step.number}, loss {step.loss.item():.4f}, {speed:.0f}k tokens/s, "
            f"balance {step.balance.item():.3f}, experts {100 * step.shares.min().item():.1f} to "
            f"{100 * step.shares.max().item():.1f} %{more}; " + ", ".join(accuracy)
        )
        self.last, self.step = now, step.number


def set_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


def train_model(model: Any, batches: Batches, args: argparse.Namespace, report: Report, until: float) -> None:
    """The model itself, until that time."""
    optimizer = optimiser(model.parameters(), args.lr)
    router_logits = RouterLogits(model.model.language_model.layers)
    begin, number, peak, good = time.time(), 0, args.lr, copy_of(model)
    while time.time() < until:
        batch = batches.next()
        set_rate(optimizer, peak * rate(number, (time.time() - begin) / (until - begin)))
        router_logits.clear()
        with autocast(args):
            hidden, _ = fast_model.hidden_states(model, batch)
            loss, right, counts = prediction_loss(model.lm_head(hidden), batch, ahead=1)
            balance, shares = balance_loss(router_logits, model.config.text_config.num_experts_per_tok)
        (loss + 0.01 * balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        if report.due(number):
            if not math.isfinite(norm.item() + loss.item()):  # never seen, but the time on the machine is short
                report.say(f"step {number}: not finite; back to the last good weights, at half the rate")
                model.load_state_dict(good)
                optimizer, peak = optimiser(model.parameters(), args.lr), peak / 2
                continue
            good = copy_of(model)
            step = Step(number, "model", loss, right, counts, batch["skill"], balance, shares)
            report.progress(step, f", gradient {norm.item():.2f}, {batches.waiting()} batches waiting")
    router_logits.detach()


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def train_mtp(
    model: Any, mtp: fast_model.MTP, batches: Batches, args: argparse.Namespace, report: Report, until: float
) -> None:
    """The MTP layer on top of the finished model, until that time."""
    optimizer = optimiser(mtp.parameters(), args.lr / 2)
    model.requires_grad_(False)
    text, begin, number = model.model.language_model, time.time(), 0
    router_logits = RouterLogits(mtp.layers)
    while time.time() < until:
        batch = batches.next()
        set_rate(optimizer, args.lr / 2 * rate(number, (time.time() - begin) / (until - begin)))
        router_logits.clear()
        with autocast(args):
            with torch.no_grad():
                hidden, embeds = fast_model.hidden_states(model, batch)
                cos_sin = text.rotary_emb(hidden, batch["rope"])
                mask = fast_model.document_mask(batch["position"])
            guess = mtp(embeds.roll(-1, dims=1), hidden, cos_sin, mask)
            loss, right, counts = prediction_loss(model.lm_head(guess), batch, ahead=2)
            balance, shares = balance_loss(router_logits, model.config.text_config.num_experts_per_tok)
        (loss + 0.01 * balance).backward()
        torch.nn.utils.clip_grad_norm_(mtp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        if report.due(number):
            report.progress(Step(number, "mtp", loss, right, counts, batch["skill"], balance, shares))
    router_logits.detach()


def save(model: nn.Module, mtp: nn.Module, folder: Path, shard_bytes: int = 15 * 2**20) -> int:
    """bf16 safetensors under the names of the Qwen3.5 checkpoints, in shards; returns their bytes."""
    weights = {**model.state_dict(), **{"mtp." + key: value for key, value in mtp.state_dict().items()}}
    weights = {key: value.to("cpu", torch.bfloat16).contiguous() for key, value in sorted(weights.items())}
    shards: list[dict[str, Tensor]] = [{}]
    size_bytes = 0
    for key, value in weights.items():
        if size_bytes + value.nbytes > shard_bytes:
            shards.append({})
            size_bytes = 0
        shards[-1][key] = value
        size_bytes += value.nbytes
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # safetensors leaves it to the owner alone
        weight_map |= dict.fromkeys(shard, name)
    total_bytes = sum(value.nbytes for value in weights.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return total_bytes


def autocast(args: argparse.Namespace) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16, enabled=args.device == "cuda")


def main() -> None:
    start = time.time()
    args = arguments()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are forks
    shutil.copytree(args.checkpoint, args.out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*"))
    batches = Batches(args)  # first of all: its processes must be forked before there are threads and a GPU context
    batches.start()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config: Any = AutoConfig.from_pretrained(args.checkpoint)
    model = Qwen3_5MoeForConditionalGeneration(config)
    model = model.float().to(args.device)
    initialise(model)
    report = Report(args, start)
    report.say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} million weights")

    end = start + args.seconds
    mtp = fast_model.MTP(model).to(args.device)
    try:
        with fast_model.installed():
            train_model(model, batches, args, report, end - args.mtp_share * args.seconds)
            mtp.start_from(model)
            train_mtp(model, mtp, batches, args, report, end)
    finally:  # what there is may be worth a look, even after an error
        size_bytes = save(model, mtp, args.out)
        report.say(f"saved {size_bytes / 1e6:.1f} MB in {args.out}")


if __name__ == "__main__":
    main()
