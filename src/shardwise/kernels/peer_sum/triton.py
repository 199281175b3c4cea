"""All-reduces of small messages through peers' memory, in one launch: each rank writes its part into every peer.

How words travel, words.py says.

Legend: W ranks (in kernels also the index of one), T tokens, H hidden, G programs of every launch.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.overlap import after_previous, let_next_come
from shardwise.kernels.peer_sum import combine, route
from shardwise.kernels.peer_sum.mail import MOST_RANKS, Mail, constants, padded
from shardwise.kernels.peer_sum.words import awaited, clear, done, push, sent, summed, summed_norm, value_of

WIDEST = 16384  # columns of a row that a program can normalise


@triton.jit(do_not_specialize=["patience"])
def peer_sum_kernel(
    x, out, inbox, p0, p1, p2, p3, p4, p5, p6, p7, state, trouble, words, patience, RANK: tl.constexpr, W: tl.constexpr,
    WP: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, G: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = the sum of all ranks' x, of `words` elements."""
    let_next_come(PDL)
    after_previous(PDL)
    peers = (p0, p1, p2, p3, p4, p5, p6, p7)
    first = tl.program_id(0) * BLOCK
    slot, last = tl.load(state + 2 * tl.program_id(0)), tl.load(state + 2 * tl.program_id(0) + 1)
    for begin in range(first, words, G * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < words, other=0)
        push(sent(value), at, at < words, peers, slot, RANK, W, CAPACITY)
    clear(inbox, slot, last, RANK, W, CAPACITY, BLOCK, G)
    for begin in range(first, words, G * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        own = tl.load(x + at, mask=at < words, other=0)
        total = summed(own, inbox, slot, at, at < words, patience, trouble, RANK, W, WP, CAPACITY)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=at < words)
    done(state, slot, (words + BLOCK - 1) // BLOCK)


@triton.jit
def _own(x, row, rows, h_H, ok_H, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """A row of this rank's x, of which there are parts to be added."""
    value_H = tl.load(x + row * WIDTH + h_H, mask=ok_H, other=0)
    for part in tl.static_range(1, PARTS):
        value_H += tl.load(x + (part * rows + row) * WIDTH + h_H, mask=ok_H, other=0)
    return value_H


@triton.jit(do_not_specialize=["rows", "patience"])
def peer_norm_kernel(
    x, residual, norm, normed, total, inbox, p0, p1, p2, p3, p4, p5, p6, p7, state, trouble, rows, patience, eps,
    RANK: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
    G: tl.constexpr, WIDTH: tl.constexpr, BH: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """total = residual + the sum of all ranks' x, normed = norm(total), of some rows a program. PARTS: of this rank's
    x, one behind another."""
    let_next_come(PDL)
    after_previous(PDL)
    peers = (p0, p1, p2, p3, p4, p5, p6, p7)
    h_H = tl.arange(0, BH)
    n_H = tl.max_contiguous(tl.arange(0, BH), 4)  # narrow types by as many columns a thread as fp32: no shuffling
    ok_H = h_H < WIDTH
    slot, last = tl.load(state + 2 * tl.program_id(0)), tl.load(state + 2 * tl.program_id(0) + 1)
    for row in range(tl.program_id(0), rows, G):
        value_H = _own(x, row, rows, h_H, ok_H, WIDTH, PARTS)
        push(sent(value_H), row * WIDTH + h_H, ok_H, peers, slot, RANK, W, CAPACITY)
    clear(inbox, slot, last, RANK, W, CAPACITY, BLOCK, G)
    factor_H = 1.0 + tl.load(norm + n_H, mask=ok_H, other=0).to(tl.float32)
    for row in range(tl.program_id(0), rows, G):
        at_H = row * WIDTH + h_H
        own_H = _own(x, row, rows, h_H, ok_H, WIDTH, PARTS)
        y_H = summed_norm(own_H, residual, total, inbox, slot, at_H, ok_H, factor_H, eps, patience, trouble, RANK, W,
                          WP, CAPACITY, WIDTH)  # fmt: skip
        tl.store(normed + row * WIDTH + n_H, y_H.to(normed.dtype.element_ty), mask=ok_H)
    done(state, slot, (rows * WIDTH + BLOCK - 1) // BLOCK)


@triton.jit
def _sender(
    x, out, inbox, peers, slot, rows, width, first, total, patience, trouble, w: tl.constexpr, RANK: tl.constexpr,
    W: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Put what rank w sent (or this rank has) to its place in `out`; who has nothing sends a word nonetheless."""
    for begin in range(tl.program_id(0) * BLOCK, tl.maximum(rows * width, 1), G * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        ok = at < rows * width
        if w == RANK:
            word = sent(tl.load(x + at, mask=ok, other=0))
        else:
            word = awaited(inbox, (slot * W + w) * CAPACITY, at, at < tl.maximum(rows * width, 1), patience, trouble)
        tl.store(out + (at // width).to(tl.int64) * total + first + at % width, value_of(word), mask=ok)


@triton.jit(do_not_specialize=["rows", "most", "total", "patience", *[f"w{n}" for n in range(MOST_RANKS)]])
def peer_gather_kernel(
    x, out, inbox, p0, p1, p2, p3, p4, p5, p6, p7, state, trouble, rows, most, total, patience, w0, w1, w2, w3, w4, w5,
    w6, w7, RANK: tl.constexpr, W: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, G: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [rows, total] = all ranks' x [rows, width of the rank] in fp32, side by side; most: of the widths."""
    let_next_come(PDL)
    after_previous(PDL)
    peers = (p0, p1, p2, p3, p4, p5, p6, p7)
    widths = (w0, w1, w2, w3, w4, w5, w6, w7)
    slot, last = tl.load(state + 2 * tl.program_id(0)), tl.load(state + 2 * tl.program_id(0) + 1)
    words = rows * widths[RANK]
    for begin in range(tl.program_id(0) * BLOCK, tl.maximum(words, 1), G * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < words, other=0)
        push(sent(value), at, at < tl.maximum(words, 1), peers, slot, RANK, W, CAPACITY)
    clear(inbox, slot, last, RANK, W, CAPACITY, BLOCK, G)
    first = rows * 0
    for w in tl.static_range(W):
        _sender(
            x, out, inbox, peers, slot, rows, widths[w], first, total, patience, trouble, w, RANK, W, CAPACITY, BLOCK, G
        )
        first += widths[w]
    done(state, slot, (rows * most + BLOCK - 1) // BLOCK)


def peer_sum(x: torch.Tensor, mail: Mail) -> torch.Tensor:
    """The sum of all ranks' contiguous x (at most `capacity` elements), in its dtype; added in fp32."""
    out = torch.empty_like(x)
    peer_sum_kernel[(mail.state.shape[0],)](
        x, out, *mail.arguments(), x.numel(), mail.patience, **mail.constants(WP=padded(len(mail.inboxes))),
        num_warps=4,
    )  # fmt: skip
    return out


def peer_norm(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float, mail: Mail
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of residual + the sum of all ranks' x, in the weight's dtype, and that sum, in the residual's.

    x may be parts [S, T, H], which are added first, as many as this rank likes.
    x and residual are contiguous, of at most WIDEST columns and `capacity` elements.
    """
    rows, width = residual_TH.shape
    normed_TH = torch.empty(residual_TH.shape, dtype=weight_H.dtype, device=x_TH.device)
    total_TH = torch.empty_like(residual_TH)
    sizes, warps = _norm_config(width, len(mail.inboxes))
    peer_norm_kernel[(mail.state.shape[0],)](
        x_TH, residual_TH, weight_H, normed_TH, total_TH, *mail.arguments(), rows, mail.patience, eps,
        **mail.constants(**sizes, PARTS=len(x_TH) if x_TH.dim() > 2 else 1), num_warps=warps,
    )  # fmt: skip
    return normed_TH, total_TH


def _norm_config(width: int, world: int) -> tuple[dict[str, int], int]:
    """Constants of a width, and warps: some 8 columns a thread."""
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "BH": block, "WP": padded(world)}, min(16, max(1, block // 256))


def peer_gather(x: torch.Tensor, widths: Sequence[int], mail: Mail) -> torch.Tensor:
    """All ranks' contiguous fp32 x [.., widths[rank]] side by side; the widest has at most `capacity` elements."""
    out = torch.empty((*x.shape[:-1], sum(widths)), dtype=torch.float32, device=x.device)
    rows = out.numel() // max(sum(widths), 1)
    peer_gather_kernel[(mail.state.shape[0],)](
        x, out, *mail.arguments(), rows, max(widths), sum(widths), mail.patience, *widths,
        *[0] * (MOST_RANKS - len(widths)), **mail.constants(), num_warps=4,
    )  # fmt: skip
    return out


def compile_cases() -> Iterator[CompileCase]:
    """Two ranks and eight; rows of 2,048 and of 5,120."""
    types = dict.fromkeys(("x", "out", "residual", "total"), "*fp32") | {"norm": "*bf16", "normed": "*bf16"}
    types |= {"inbox": "*i32", "state": "*i32", "trouble": "*i32", "eps": "fp32"} | {
        f"p{w}": "*i32" for w in range(MOST_RANKS)
    }
    for rank, world, capacity in ((0, 2, 1 << 20), (1, 2, 1 << 20), (5, 8, 1 << 18)):
        fixed = constants(rank, world, capacity) | {"PDL": False}
        constexprs = fixed | {"WP": padded(world)}
        yield CompileCase(peer_sum_kernel, signature(peer_sum_kernel, constexprs, types), constexprs, 4, 1)
        for width in (2048, 5120):
            sizes, warps = _norm_config(width, world)
            constexprs = fixed | sizes | {"PARTS": 4 if world > 2 else 1}
            yield CompileCase(peer_norm_kernel, signature(peer_norm_kernel, constexprs, types), constexprs, warps, 1)
        narrow = types | {"total": "i32"}
        yield CompileCase(peer_gather_kernel, signature(peer_gather_kernel, fixed, narrow), fixed, 4, 1)
    yield from route.compile_cases()
    yield from combine.compile_cases()
