"""How far logits are apart, by position and in words.

Legend: L positions, R those of a part that is compared at once, V vocabulary.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

TOP, KL = 0.999, 1e-3  # bounds: same likeliest token, mean KL divergence (nats)
MARGINS = (0.03, 0.1, 0.3)
ROWS = 128  # of logits that are compared at once, in float64


@torch.inference_mode()
def compare(expected_LV: torch.Tensor, found_LV: torch.Tensor) -> dict[str, torch.Tensor]:
    """By position: whether the likeliest token is the same, KL(expected || found), the largest difference, margin."""
    parts: dict[str, list[torch.Tensor]] = {"same": [], "kl": [], "difference": [], "margin": []}
    for expected_RV, found_RV in zip(expected_LV.split(ROWS), found_LV.split(ROWS), strict=True):
        best_R2 = expected_RV.topk(2, -1).values
        parts["margin"].append(best_R2[:, 0] - best_R2[:, 1])
        parts["same"].append(expected_RV.argmax(-1) == found_RV.argmax(-1))
        parts["difference"].append((expected_RV - found_RV).abs().amax(-1))
        log_p_RV, log_q_RV = (x_RV.double().log_softmax(-1) for x_RV in (expected_RV, found_RV))
        parts["kl"].append((log_p_RV.exp() * (log_p_RV - log_q_RV)).sum(-1))
    return {name: torch.cat(values).double().cpu() for name, values in parts.items()}


def summary(by_position: dict[str, torch.Tensor], rows: Sequence[int]) -> dict[str, Any]:
    """Figures of some positions."""
    same, kl, difference, margin = (by_position[name][list(rows)] for name in ("same", "kl", "difference", "margin"))
    clear = {str(least): margin >= least for least in MARGINS}
    return {
        "positions": len(rows),
        "top1": float(same.mean()),
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "difference_max": float(difference.max()),
        "top1_by_margin": {
            key: [float(same[mask].mean()) if bool(mask.any()) else None, int(mask.sum())]
            for key, mask in clear.items()
        },
        "margin_max_of_other_token": float(margin[same == 0].max()) if bool((same == 0).any()) else 0.0,
    }


def line(what: str, part: str, found: dict[str, Any]) -> str:
    """A row of the table."""
    clear = "  ".join(
        f"{'-' if top is None else f'{top:.2%}':>7} ({count})" for top, count in found["top1_by_margin"].values()
    )
    return (
        f"{what:23} {part:20} {found['positions']:5}  {found['top1']:7.2%}  {found['kl_mean']:.1e}  "
        f"{found['kl_max']:.1e}  {found['difference_max']:.3f}  {clear}  {found['margin_max_of_other_token']:.3f}\n"
    )


class Report:
    """What is known so far, printed and written as it comes."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        self.begin_s, self.args = time.monotonic(), args
        self.file = Path(os.environ.get("OUT", "."), f"agreement-{name}.json")
        self.found: dict[str, Any] = {"args": vars(args), "seconds": {}, "compared": {}}
        if torch.cuda.is_available():
            self.found["gpu"] = torch.cuda.get_device_name()

    def done(self, what: str) -> None:
        """The time of a stage that has ended."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.found["seconds"][what] = time.monotonic() - self.begin_s
        self.say(f"{self.found['seconds'][what]:6.1f} s: {what}\n")

    def say(self, text: str) -> None:
        """Print, and write what is known."""
        sys.stdout.write(text)
        sys.stdout.flush()
        self.file.write_text(json.dumps(self.found, indent=1))

    def time_for(self, seconds: float) -> bool:
        """Whether so many are left."""
        return time.monotonic() - self.begin_s + seconds < self.args.limit_s

    def compared(
        self, what: str, parts: Mapping[str, list[int]], expected_LV: torch.Tensor, found_LV: torch.Tensor
    ) -> None:
        """Compare logits [L, V] by parts, which are rows of them, and in all."""
        by_position = compare(expected_LV, found_LV)
        parts = {**parts, "all": [row for rows in parts.values() for row in rows]}
        self.found["compared"][what] = {part: summary(by_position, rows) for part, rows in parts.items()}

    def table(self) -> None:
        """Everything that was compared; last what the bounds are about."""
        margins = "  ".join(f"margin >= {least}" for least in MARGINS)
        self.say(
            f"compared, part, positions, same top token, mean and largest KL, |logits|; {margins}; margin of others\n"
        )
        for what, parts in self.found["compared"].items():
            self.say("".join(line(what, part, found) for part, found in parts.items()))
        for what, parts in self.found["compared"].items():
            top, kl = parts["all"]["top1"], parts["all"]["kl_mean"]
            said = [
                f"{top:.2%} {'>=' if top >= TOP else '<'} {TOP:.1%}",
                f"{kl:.1e} {'<=' if kl <= KL else '>'} {KL:.0e}",
            ]
            self.say(f"{what}: same top token {said[0]}, mean KL {said[1]}\n")
