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

from shardwise.kernels.linear.dequantise import plain_view
from shardwise.kernels.linear.halves import halve_rows
from shardwise.kernels.linear.tiles import operand, target_of
from shardwise.kernels.linears import hopper as linears
from shardwise.kernels.linears import reference as each_alone
from shardwise.kernels.linears import wide, wide_config
from shardwise.kernels.linears.reference import Conv
from shardwise.kernels.linears.wide_config import Wide
from shardwise.kernels.moe import grouped, warpgroups
from shardwise.kernels.moe import reference as routed
from shardwise.kernels.moe.triton import route
from shardwise.kernels.moe_block import hopper as experts
from shardwise.kernels.moe_block import matched, persistent
from shardwise.kernels.moe_block import reference as block
from shardwise.kernels.moe_block.banks import Banks
from shardwise.kernels.moe_block.combine import combine
from tests.gpu.check_fragments import DEVICE, compare_linears, found, judge, poison
from tests.kernels.weights import make_weight

FORMATS = ("bf16", "fp8_block", "fp8_channel", "fp8_tensor", "nvfp4", "nvfp4_ct")
EXPERTS, TOP_K = 20, 8
WIDE = (17, Wide(64, 1, 6)), (33, Wide(128, 1, 6)), (64, Wide(64, 1, 4)), (77, Wide(128, 1, 4))


def check_linears(form: str, shapes: list[tuple[int, int]], tokens: int, config: linears.Rows) -> None:
    """One weight, or two with a convolution and a plain one of few rows."""
    weights = [make_weight(shape, form, n, DEVICE) for n, shape in enumerate(shapes)]
    weights += [make_weight((24, shapes[0][1]), "bf16", 9, DEVICE)] if len(shapes) > 1 else []
    x_TH = torch.randn(tokens, shapes[0][1], device=DEVICE).bfloat16()
    of, parts = [operand(weight, True) for weight in weights], config.parts > 1
    dtypes = [torch.float32 if parts or n == 2 else torch.bfloat16 for n in range(len(weights))]
    what = f"linears {form} {shapes} T={tokens} {config}"
    assert linears.possible(of, x_TH, config), what

    def launch(how: Conv | None, pdl: bool) -> list[torch.Tensor]:
        found = linears.hopper_linears(x_TH, of, dtypes, how, config, pdl)
        return [out.sum(0) for out in found] if parts else found

    compare_linears(what, weights, x_TH, len(shapes) > 1, launch)


def check_wide(form: str, rows: tuple[int, ...], columns: int, tokens: int, config: Wide, apart: float = 1.0) -> None:
    """One weight or two, and with two a plain one of few rows: each token's outputs for themselves, one being small."""
    weights = [make_weight((n, columns), form, n, DEVICE) for n in rows]
    weights += [make_weight((24, columns), "bf16", 9, DEVICE)] if len(rows) > 1 else []
    x_TH = torch.randn(tokens, columns, device=DEVICE).bfloat16()
    x_TH[:, 7] *= apart
    x_TH[tokens // 2] *= 1e-4
    of, parts = [operand(weight, True) for weight in weights], config.parts > 1
    dtypes = [torch.float32 if parts or n == 2 else torch.bfloat16 for n in range(len(weights))]
    what = f"wide {form} {rows} x {columns} T={tokens} {config} apart {apart}"
    assert wide_config.possible(of, x_TH, config), what
    wanted = each_alone.linears(x_TH.float(), weights, [torch.float32] * len(weights))
    for pdl in (False, True):
        poison()
        outputs = wide.wide_linears(halve_rows(x_TH, wide_config.room(tokens), pdl), of, dtypes, config, pdl)
        for got, want in zip(outputs, wanted, strict=True):
            sizes_T1 = want.norm(dim=1, keepdim=True)
            judge(f"{what} pdl={pdl}", (got.sum(0) if parts else got.float()) / sizes_T1, want / sizes_T1)


def check_wide_not_finite(form: str) -> None:
    """NaN or infinity of a token makes all its outputs so, and no other's."""
    x_TH = torch.randn(64, 1024, device=DEVICE).bfloat16()
    x_TH[3, 9], x_TH[5, 70] = float("nan"), float("inf")
    of = [operand(make_weight((256, 1024), form, 1, DEVICE), True)]
    (got,) = wide.wide_linears(halve_rows(x_TH, 64), of, [torch.bfloat16], Wide(64, 1, 4), False)
    wrong_T = ~got.isfinite()
    right = bool(wrong_T[[3, 5]].all()) and int(wrong_T.any(1).sum()) == 2
    found.append({"what": f"wide not finite {form}", "error": float(not right), "right": right})
    if not right:
        sys.stdout.write(f"WRONG wide not finite {form}: {wrong_T.sum(1).tolist()}\n")


Config = experts.Hopper | persistent.Persistent


def check_experts(
    form: str, width: int, tokens: int, config: Config, apart: float = 1.0, alike: bool = False, top_k: int = TOP_K
) -> None:
    """All of a block, or, where gates and ups go by another kernel, with that one. apart: factor of some values; alike:
    all tokens choose the same experts."""
    hidden = 1024
    shapes = (EXPERTS, 2 * width, hidden), (EXPERTS, hidden, width), (2 * width, hidden), (hidden, width)
    up, down, shared_up, shared_down = (make_weight(shape, form, n, DEVICE) for n, shape in enumerate(shapes))
    x_TH = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    x_TH[:, 7] *= apart
    gate_T1, logits_TE = torch.randn(tokens, 1, device=DEVICE), torch.randn(tokens, EXPERTS, device=DEVICE)
    logits_TE[:, 1] += 2 * (tokens > 8)  # some experts are liked by more tokens than a tile has
    shares_Tk, ids_Tk = route(logits_TE[:1].expand(tokens, -1) if alike else logits_TE, top_k)
    of = Banks(*(operand(weight, True) for weight in (up, down, shared_up, shared_down)))
    what = f"experts {form} {width} wide, T={tokens} {config} apart {apart}"
    held = isinstance(config, persistent.Persistent)
    assert (persistent if held else experts).possible(of, x_TH.dtype, config), what  # pyright: ignore[reportArgumentType]
    banks = up, down, ids_Tk, shares_Tk, [shared_up], [shared_down], gate_T1
    want = block.moe_shared(x_TH.float(), *banks)
    assert isinstance(want, torch.Tensor)
    arrivals = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for pdl in (False, True):
        poison()
        if isinstance(config, persistent.Persistent):
            got = persistent.moe(x_TH, of, ids_Tk, arrivals, config, pdl)
            assert not arrivals.item(), what
        elif config.up_BM:
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


def check_chosen_twice(form: str, config: persistent.Persistent) -> None:
    """A first token of NaN, which chooses one expert again and again, leaves the others' outputs alone."""
    width, hidden, tokens = 256, 1024, 4
    shapes = (EXPERTS, 2 * width, hidden), (EXPERTS, hidden, width), (2 * width, hidden), (hidden, width)
    up, down, shared_up, shared_down = (make_weight(shape, form, n, DEVICE) for n, shape in enumerate(shapes))
    of = Banks(*(operand(weight, True) for weight in (up, down, shared_up, shared_down)))
    x_TH, gate_T1 = torch.randn(tokens, hidden, device=DEVICE).bfloat16(), torch.randn(tokens, 1, device=DEVICE)
    logits_TE = torch.randn(tokens, EXPERTS, device=DEVICE)
    x_TH[0], logits_TE[0] = float("nan"), float("nan")
    shares_Tk, ids_Tk = route(logits_TE, TOP_K)
    assert len(set(ids_Tk[0].tolist())) < TOP_K, "the case has gone: logits that are NaN choose different experts"
    want = block.moe_shared(x_TH.float(), up, down, ids_Tk, shares_Tk, [shared_up], [shared_down], gate_T1)
    assert isinstance(want, torch.Tensor)
    arrivals = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for _ in range(2):
        poison()
        got = combine(persistent.moe(x_TH, of, ids_Tk, arrivals, config, False), ids_Tk, shares_Tk, gate_T1, False)
        judge(f"chosen twice {form} {config}", got[1:], want[1:])
        assert not got[0].isfinite().any()
        assert not arrivals.item()


def check_persistent(form: str) -> None:
    columns = 4 if form != "bf16" else 8
    for tokens in range(1, 5):
        check_experts(form, 256, tokens, persistent.Persistent(columns, 64, 8, 1, 128, 2))
    check_experts(form, 128, 4, persistent.Persistent(columns, 64, 4, 2, 64, 2), alike=True)
    check_experts(form, 128, 3, persistent.Persistent(columns, 128, 4, 1, 64, 4), apart=1e4)
    check_experts(form, 256, 7, persistent.Persistent(8, 64, 4, 1, 128, 2), top_k=6)
    check_chosen_twice(form, persistent.Persistent(columns, 64, 8, 1, 128, 2))
    check_chosen_twice(form, persistent.Persistent(columns, 64, 4, 2, 128, 2))


def check_many(form: str, width: int, pairs: list[int], top_k: int) -> None:
    """So many pairs for each expert, one of which is NaN, and some more for another rank's experts on both sides."""
    hidden, experts, first = 1024, len(pairs), 3
    ids = [first + n for n, count in enumerate(pairs) for _ in range(count)] + [first - 1, first + experts] * 5
    ids += [first + experts] * (-len(ids) % top_k)
    ids_Tk = torch.tensor(ids)[torch.randperm(len(ids))].view(-1, top_k).int().to(DEVICE)
    x_TH = torch.randn(len(ids_Tk), hidden, device=DEVICE).bfloat16()
    x_TH[5] = float("nan")
    shares_Tk = torch.rand(ids_Tk.shape, device=DEVICE) + 0.1
    up, down = (
        make_weight(shape, form, n, DEVICE)
        for n, shape in enumerate(((experts, 2 * width, hidden), (experts, hidden, width)))
    )
    of, what = [operand(weight, True) for weight in (up, down)], f"many {form} {width} wide, {pairs} of {top_k}"
    assert warpgroups.possible(x_TH, *(plain_view(each) for each in of), ids_Tk.numel()), what
    want = routed.moe(x_TH, up, down, ids_Tk, shares_Tk, first)
    poison()
    got = grouped.moe(x_TH, *of, ids_Tk, shares_Tk, first, experts, target_of(torch.device(DEVICE)))
    whole_T = want.isfinite().all(1)
    assert whole_T[:5].all()
    assert torch.equal(whole_T, got.isfinite().all(1)), what
    judge(what, got[whole_T], want[whole_T])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="*", default=FORMATS, help="one process each compiles side by side")
    torch.manual_seed(0)
    for form in parser.parse_args().formats:
        for width in (256, 512) if form != "fp8_channel" else ():  # a scale for each row is for other kernels
            check_many(form, width, [0, 1, 127, 128, 129, 1500, 191, 193, 0, 64, 65, 985], 8)
            check_many(form, width, [256 + (17 * n) % 60 for n in range(20)], 1)
            check_many(form, width, [0, 0, 1100, 0], 4)
        if form.startswith("nvfp4"):
            continue
        check_persistent(form)
        if form != "bf16":
            for tokens, config in (
                (17, Wide(64, 1, 6)),
                (33, Wide(128, 1, 6)),
                (64, Wide(64, 1, 4)),
                (77, Wide(128, 1, 4)),
            ):
                check_wide(form, (256, 128), 1024, tokens, config, 1e4 if tokens % 2 else 1.0)
                check_wide(form, (384,), 2048, tokens, Wide(config.BM, 4, config.slots))
            check_wide(form, (128,), 2048, 128, Wide(64, 1, 4))
            check_wide_not_finite(form)
            for tokens, rows in ((1, linears.Rows(4, 1, 6)), (3, linears.Rows(4, 1, 2)), (7, linears.Rows(8, 1, 3))):
                check_linears(form, [(256, 1024)], tokens, rows)
                check_linears(form, [(256, 1024), (128, 1024)], tokens, rows)
            check_linears(form, [(256, 2048)], 4, linears.Rows(4, 2, 8))
            check_linears(form, [(128, 4096)], 2, linears.Rows(4, 4, 2))
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
