"""Kernels whose codes go straight into registers (kernels/linear/fragments.py), on a GPU, against the fp32 reference.

    python -m tests.gpu.check_fragments

Triton's interpreter has no Gluon, so that nothing but a GPU can run them. Odd sizes, cut widths, all formats, memory
that holds NaN before. An error is 1e-2 at most. Ends with 1 if anything is off. Writes $OUT/check_fragments.json.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.weight import Weight
from shardwise.kernels.conv.reference import causal_conv
from shardwise.kernels.linear.fragments import fits
from shardwise.kernels.linear.tiles import operand
from shardwise.kernels.linear.triton import arranged
from shardwise.kernels.linears import fragments as splits
from shardwise.kernels.linears import held, neighbours, reference, resident, triton
from shardwise.kernels.linears.reference import Conv
from shardwise.kernels.moe.triton import route
from shardwise.kernels.moe_block import fragments as tiles
from shardwise.kernels.moe_block import reference as block
from shardwise.kernels.moe_block import triton as fast
from shardwise.kernels.moe_block.banks import Banks
from shardwise.kernels.moe_block.combine import combine
from tests.kernels.sequences import make_sequences
from tests.kernels.weights import make_weight

DEVICE, TAPS = "cuda", 4
FORMATS = ("nvfp4", "nvfp4_ct", "nvfp4_row", "fp8_block", "fp8_block_f32", "fp8_channel", "fp8_tensor")
found: list[dict[str, Any]] = []


def poison() -> None:
    """What is allocated next was NaN, and numbers no index may be."""
    ids = [torch.full((n,), 0x7FFFFFFF, dtype=torch.int32, device=DEVICE) for n in (1 << 8, 1 << 10, 1 << 12) * 6]
    held = [
        torch.full((n,), float("nan"), device=DEVICE) for n in (1 << 12, 1 << 16, 1 << 20, 1 << 22) for _ in range(6)
    ]
    del held, ids


def judge(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    error = float((got.double() - want.double()).norm() / want.double().norm())
    found.append({"what": what, "error": error, "right": error <= 1e-2})
    if not error <= 1e-2:
        sys.stdout.write(f"WRONG {what}: {error:.2e}\n")


def check_linears(form: str, shapes: list[tuple[int, int]], tokens: int, conv: bool) -> None:
    weights: list[Weight] = [make_weight(shape, form, n, DEVICE) for n, shape in enumerate(shapes)]
    weights += [make_weight((24, shapes[0][1]), "bf16", 9, DEVICE)] if len(shapes) > 1 else []
    x_TH = torch.randn(tokens, shapes[0][1], device=DEVICE).bfloat16()
    of = [operand(weight, True) for weight in weights]
    if not all(fits(each, x_TH.dtype) for each in of):
        found.append({"what": f"{form} {shapes}", "error": 0.0, "right": True, "left_out": True})
        return
    dtypes: list[torch.dtype | None] = [torch.bfloat16 if n < 2 else torch.float32 for n in range(len(weights))]
    for config in (splits.split_rule(sum(shape[0] for shape in shapes), tokens), splits.Split(32, 8, 4, 2)):

        def launch(how: Conv | None, pdl: bool, config: splits.Split = config) -> list[torch.Tensor]:
            return triton._split(x_TH, of, [dtype or torch.bfloat16 for dtype in dtypes], how, config, pdl)

        compare_linears(
            f"linears {form} {shapes} T={tokens} conv={conv} {config}", weights, x_TH, conv, launch, (False,)
        )


def compare_linears(
    what: str,
    weights: Sequence[Weight],
    x_TH: torch.Tensor,
    conv: bool,
    launch: Callable[[Conv | None, bool], list[torch.Tensor]],
    pdls: Sequence[bool] = (False, True),
) -> None:
    """Judge what `launch` gives, with and without overlap, and if the first weight's output goes through a convolution,
    that one's state."""
    tokens, channels = len(x_TH), weights[0].shape[0]
    taps_CW = torch.randn(channels, TAPS, device=DEVICE).bfloat16()
    state_RCW = torch.randn(tokens + 2, channels, TAPS - 1, device=DEVICE).bfloat16()
    seqs = make_sequences([5 * (n % 3) for n in range(tokens)], [1] * tokens, 16, torch.device(DEVICE))
    wanted_state = state_RCW.clone()
    want = reference.linears(x_TH.float(), weights, [torch.float32] * len(weights))
    if conv:
        want[0] = causal_conv(want[0].bfloat16(), taps_CW, wanted_state, seqs)
    for pdl in pdls:
        poison()
        mine = state_RCW.clone()
        got = launch(Conv(taps_CW, mine, seqs) if conv else None, pdl)
        for n, (a, b) in enumerate(zip(got, want, strict=True)):
            judge(f"{what}[{n}] pdl={pdl}", a, b)
        if conv:
            judge(f"state of {what} pdl={pdl}", mine, wanted_state)


def check_held(shape: tuple[int, int], tokens: int) -> None:
    """Parts of a product, of Hopper's kernel; as the rule has it, where it has this shape."""
    weight, x_TK = make_weight(shape, "bf16", 0, DEVICE), torch.randn(tokens, shape[1], device=DEVICE).bfloat16()
    of, want = operand(weight, True), reference.linear_parts(x_TK.float(), weight)
    if not held.possible(of, x_TK):
        found.append({"what": f"held {shape}", "error": 0.0, "right": True, "left_out": True})
        return
    for config in {held.held_rule(of, tokens) or held.Held(64, 128, 16, 4), held.Held(64, 256, 32, 4)}:
        poison()
        got = held.held_linear(x_TK, of, config, False)
        judge(f"held {shape} T={tokens} {config}", got.sum(0), want.sum(0))


def check_resident(shapes: list[tuple[int, int]], tokens: int, config: resident.Resident) -> None:
    """Plain weights that are asked for early: one, or two neighbours with a convolution and one of few rows."""
    weights: list[Weight] = [make_weight(shape, "bf16", n, DEVICE) for n, shape in enumerate(shapes)]
    neighbours.adjoin(weights)
    weights += [make_weight((24, shapes[0][1]), "bf16", 9, DEVICE)] if len(shapes) > 1 else []
    x_TH = torch.randn(tokens, shapes[0][1], device=DEVICE).bfloat16()
    of = [operand(weight, True) for weight in weights]
    dtypes = [torch.bfloat16 if n < 2 else torch.float32 for n in range(len(weights))]
    what = f"resident {shapes} T={tokens} {config}"
    if not resident.possible(of, len(neighbours.together(weights, x_TH.dtype)), x_TH, dtypes, config):
        found.append({"what": what, "error": 0.0, "right": True, "left_out": True})
        return

    def launch(how: Conv | None, pdl: bool) -> list[torch.Tensor]:
        return resident.resident_linears(x_TH, of, dtypes, how, config, pdl)

    compare_linears(what, weights, x_TH, len(shapes) > 1, launch)


def check_router(rows: int, columns: int, tokens: int) -> None:
    """A plain weight of few rows, as the rule has it."""
    weight, x_TH = make_weight((rows, columns), "bf16", 0, DEVICE), torch.randn(tokens, columns, device=DEVICE)
    (want,) = reference.linears(x_TH.bfloat16().float(), [weight], [torch.float32])
    poison()
    (got,) = triton.linears(x_TH.bfloat16(), [weight], [torch.float32])
    judge(f"router {rows} x {columns} T={tokens}", got, want)
    (_, got) = triton.linears(x_TH.bfloat16(), [make_weight((640, columns), "bf16", 1, DEVICE), weight], [None, None])
    judge(f"beside another weight {rows} x {columns} T={tokens}", got, want)


def check_experts(form: str, shared_form: str, width: int, experts: int, tokens: int) -> None:
    hidden, top_k = 256, 8
    up = make_weight((experts, 2 * width, hidden), form, 0, DEVICE)
    down = make_weight((experts, hidden, width), form, 1, DEVICE)
    shared_up = make_weight((2 * width, hidden), shared_form, 2, DEVICE)
    shared_down = make_weight((hidden, width), shared_form, 3, DEVICE)
    x_TH = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    gate_T1, logits_TE = torch.randn(tokens, 1, device=DEVICE), torch.randn(tokens, experts, device=DEVICE)
    logits_TE[:, 1] += 2 * (tokens > 8)  # some experts are liked by more tokens than a tile has
    shares_Tk, ids_Tk = route(logits_TE, top_k)
    of = [operand(weight, True) for weight in (up, down, shared_up, shared_down)]
    if not all(fits(each, x_TH.dtype) for each in of):
        found.append({"what": f"{form} {width}", "error": 0.0, "right": True, "left_out": True})
        return
    want = block.moe_shared(x_TH.float(), up, down, ids_Tk, shares_Tk, [shared_up], [shared_down], gate_T1)
    for order in ("as stored", "moved"):
        if order == "moved":
            of[:2] = (operand(arranged(weight), True) for weight in (up, down))
        poison()
        got = combine(tiles.moe(x_TH, Banks(*of), ids_Tk, experts, "", False), ids_Tk, shares_Tk, gate_T1, False)
        judge(f"experts {form} {order}, {shared_form} shared, {width} wide, {experts} of them, T={tokens}", got, want)


def check_sorted(width: int, experts: int, tokens: int) -> None:
    """Plain banks, whose pairs are sorted for tiles in shared memory; with the norm, overlapping and not."""
    hidden, top_k = 1024, 8
    shapes = (experts, 2 * width, hidden), (experts, hidden, width), (2 * width, hidden), (hidden, width)
    up, down, shared_up, shared_down = (make_weight(shape, "bf16", n, DEVICE) for n, shape in enumerate(shapes))
    x_TH = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    gate_T1, logits_TE = torch.randn(tokens, 1, device=DEVICE), torch.randn(tokens, experts, device=DEVICE)
    logits_TE[:, 1] += 2
    shares_Tk, ids_Tk = route(logits_TE, top_k)
    banks = up, down, ids_Tk, shares_Tk, [shared_up], [shared_down], gate_T1
    then = block.Then(torch.randn(tokens, hidden, device=DEVICE), torch.randn(hidden, device=DEVICE), 1e-6)
    want, total = block.moe_shared(x_TH.float(), *banks, then)
    for pdl in (False, True):
        poison()
        got, summed = fast.moe_shared(x_TH, *banks, then, pdl=pdl)
        judge(f"sorted {width} wide, {experts} of them, T={tokens} pdl={pdl}", summed, total)
        judge(f"its norm {width} wide, {experts} of them, T={tokens} pdl={pdl}", got, want)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="*", default=FORMATS, help="one process each compiles side by side")
    torch.manual_seed(0)
    for tokens in (3, 8, 16, 61, 65, 128):
        for rows, columns in ((257, 2048), (65, 1088), (9, 160)):
            check_router(rows, columns, tokens)
        for width, experts in ((512, 40), (176, 13), (80, 200)) if tokens > 32 else ():
            check_sorted(width, experts, tokens)
    for tokens in (2, 16, 31, 64, 130):
        for shape in ((2048, 4096), (192, 1536), (128, 256), (100, 512)):
            check_held(shape, tokens)
    for tokens in (2, 5, 8, 16):
        for shapes in ([(96, 2048)], [(176, 2048)], [(48, 4096)], [(1024, 2048), (640, 2048)]):
            for config in ((32, 16, 8, 3, 2, 0), (16, 16, 8, 2, 4, 128), (16, 8, 16, 3, 1, 0)):
                check_resident(shapes, tokens, resident.Resident(*config))
    for form in parser.parse_args().formats:
        for tokens in (1, 2, 7, 8, 9, 16, 31):
            for shapes in ([(96, 512)], [(40, 1536)], [(200, 352)], [(128, 512), (72, 512)]):
                check_linears(form, shapes, tokens, conv=len(shapes) > 1)
        for shared_form in dict.fromkeys((form, "bf16")):
            for width in (512, 176, 64):
                for tokens in (1, 2, 8, 9, 33, 130, 300):
                    check_experts(form, shared_form, width, 20 if tokens < 100 else 37, tokens)
    wrong = [each for each in found if not each["right"]]
    out = Path(os.environ.get("OUT", "results"))
    out.mkdir(parents=True, exist_ok=True)
    (out / f"check_fragments-{parser.parse_args().formats[0]}.json").write_text(json.dumps(found))
    ran = [each for each in found if not each.get("left_out")]
    worst = max(ran, key=lambda each: each["error"])
    sys.stdout.write(
        f"{len(ran)} checks, {len(found) - len(ran)} sizes that these kernels leave to others, {len(wrong)} wrong; "
        f"worst {worst['error']:.2e} ({worst['what']})\n"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
