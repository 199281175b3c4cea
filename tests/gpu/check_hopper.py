"""Kernels by Hopper's warp group instructions (kernels/linear/warpgroups.py), on such a GPU, against the reference.

    python -m tests.gpu.check_hopper

Triton's interpreter has no Gluon, so that nothing but a GPU can run them. Odd numbers of tokens, halved widths, values
far apart, memory that holds NaN before. An error is 1e-2 at most. Ends with 1 if anything is off. Writes
$OUT/check_hopper.json.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from shardwise.kernels.linear.tiles import operand
from shardwise.kernels.moe.triton import route
from shardwise.kernels.moe_block import hopper as experts
from shardwise.kernels.moe_block import matched
from shardwise.kernels.moe_block import reference as block
from shardwise.kernels.moe_block.banks import Banks
from shardwise.kernels.moe_block.combine import combine
from tests.gpu.check_fragments import DEVICE, found, judge, poison
from tests.kernels.weights import make_weight

FORMATS = ("bf16", "fp8_block", "fp8_channel", "fp8_tensor")
EXPERTS, TOP_K = 20, 8


def check_experts(form: str, width: int, tokens: int, config: experts.Hopper, apart: float = 1.0) -> None:
    """All of a block, or, where gates and ups go by another kernel, with that one. apart: factor of some values."""
    hidden = 1024
    shapes = (EXPERTS, 2 * width, hidden), (EXPERTS, hidden, width), (2 * width, hidden), (hidden, width)
    up, down, shared_up, shared_down = (make_weight(shape, form, n, DEVICE) for n, shape in enumerate(shapes))
    x_TH = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    x_TH[:, 7] *= apart
    gate_T1, logits_TE = torch.randn(tokens, 1, device=DEVICE), torch.randn(tokens, EXPERTS, device=DEVICE)
    logits_TE[:, 1] += 2 * (tokens > 8)  # some experts are liked by more tokens than a tile has
    shares_Tk, ids_Tk = route(logits_TE, TOP_K)
    of = Banks(*(operand(weight, True) for weight in (up, down, shared_up, shared_down)))
    what = f"experts {form} {width} wide, T={tokens} {config} apart {apart}"
    assert experts.possible(of, x_TH.dtype, config), what
    banks = up, down, ids_Tk, shares_Tk, [shared_up], [shared_down], gate_T1
    want = block.moe_shared(x_TH.float(), *banks)
    assert isinstance(want, torch.Tensor)
    for pdl in (False, True):
        poison()
        if config.up_BM:
            got = experts.moe(x_TH, of, ids_Tk, EXPERTS, config, pdl)
        else:
            configs = matched.Matched(64, 64, 4, 3), config
            got = matched.moe(x_TH, of, ids_Tk, configs, pdl)
        judge(f"{what} pdl={pdl}", combine(got, ids_Tk, shares_Tk, gate_T1, False), want)


def check_not_finite(form: str, tokens: int, config: experts.Hopper) -> None:
    """NaN or infinity of a token makes all its outputs so, and no other's."""
    width, hidden = 128, 256
    shapes = (EXPERTS, 2 * width, hidden), (EXPERTS, hidden, width), (2 * width, hidden), (hidden, width)
    of = Banks(*(operand(make_weight(shape, form, n, DEVICE), True) for n, shape in enumerate(shapes)))
    x_TH, gate_T1 = torch.randn(tokens, hidden, device=DEVICE).bfloat16(), torch.randn(tokens, 1, device=DEVICE)
    shares_Tk, ids_Tk = route(torch.randn(tokens, EXPERTS, device=DEVICE), TOP_K)
    x_TH[0, 9], x_TH[2, 70] = float("nan"), float("inf")
    got = experts.moe(x_TH, of, ids_Tk, EXPERTS, config, False)
    wrong_T = ~combine(got, ids_Tk, shares_Tk, gate_T1, False).isfinite()
    right = bool(wrong_T[[0, 2]].all()) and not wrong_T[1].any() and not wrong_T[3:].any()
    found.append({"what": f"not finite {form} {config}", "error": float(not right), "right": right})
    if not right:
        sys.stdout.write(f"WRONG not finite {form} {config}: {wrong_T.sum(1).tolist()}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="*", default=FORMATS, help="one process each compiles side by side")
    torch.manual_seed(0)
    for form in parser.parse_args().formats:
        for width in (256, 128):
            check_experts(form, width, 1, experts.Hopper(8, 64, 6, 64, 8))
            check_experts(form, width, 4, experts.Hopper(8, 128, 3, 128, 2))
            check_experts(form, width, 7, experts.Hopper(8, 64, 2, 64, 2), apart=1e4)
            check_experts(form, width, 77, experts.Hopper(8, 128, 4, 128, 4))
            check_experts(form, width, 13, experts.Hopper(16, 0, 0, 128, 2))
        check_not_finite(form, 4, experts.Hopper(8, 64, 6, 64, 4))
        check_not_finite(form, 20, experts.Hopper(8, 128, 4, 128, 4))
        if form != "bf16":
            check_experts(form, 256, 3, experts.Hopper(4, 64, 4, 64, 4))
            check_experts(form, 256, 16, experts.Hopper(4, 128, 6, 64, 4))
            check_experts(form, 256, 150, experts.Hopper(16, 64, 4, 64, 4))
    wrong = [each for each in found if not each["right"]]
    worst = max(each["error"] for each in found)
    sys.stdout.write(f"{len(found)} checks, {len(wrong)} wrong, worst {worst:.1e}\n")
    folder = Path(os.environ.get("OUT", "."))
    (folder / "check_hopper.json").write_text(json.dumps(found, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
