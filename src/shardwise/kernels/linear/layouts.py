"""Which thread of a program holds what of a product by matrix instructions: layouts of fragments.py.

Legend: S splits of `in`, M rows, T tokens, K values of `in` of a step, N words of it, G groups under one scale.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from shardwise.kernels.linear.tiles import COLUMNS, FINE, FP4_WORDS, FP8, KIND


@constexpr_function
def product_layout(WARPS, SPLITS):
    """Of sums [S, M, T]: each split of `in` has warps of its own."""
    return gl.NVMMADistributedLayout([2, 0], [SPLITS, WARPS // SPLITS, 1], [1, 16, 8])


@constexpr_function
def parted_layout(WARPS, SPLITS, BM):
    """Of the same sums where a thread has a sum's parts of all splits, and few sums."""
    lanes = min(BM, 32)
    along = min(WARPS, BM // lanes)
    return gl.BlockedLayout([SPLITS, 1, 1], [1, lanes, 32 // lanes], [1, along, WARPS // along], [1, 2, 0])


@constexpr_function
def parted(W, SPLITS):
    """Whether each thread adds the parts of its own sums. Two parts of products with e2m1 are left to Triton's sum:
    what its layout makes of the loop is faster (H200, gates and ups of 4 tokens: 16.6 us, and 19.3 to 20.8)."""
    return (2 if W[KIND] >= FP4_WORDS else 1) < SPLITS


@constexpr_function
def sum_layout(W, WARPS, SPLITS, BM):
    """Of sums [M, T] over all splits."""
    return gl.SliceLayout(0, parted_layout(WARPS, SPLITS, BM) if parted(W, SPLITS) else product_layout(WARPS, SPLITS))


@constexpr_function
def tokens_layout(WARPS, SPLITS, K_WIDTH):
    """Of the tokens of an input; K_WIDTH: consecutive values of `in` that a thread has."""
    return gl.SliceLayout(0, gl.SliceLayout(0, gl.DotOperandLayout(1, product_layout(WARPS, SPLITS), K_WIDTH)))


@constexpr_function
def word_layout(BM, WORDS, RUN, UNDER, WARPS, SPLITS):
    """Of words [S, M, N]; with UNDER words under one scale, of [S, M, G, UNDER]."""

    def place(s, m, n):
        return [s, m, n // UNDER, n % UNDER] if UNDER else [s, m, n]

    def powers(first, stop):
        return [first << shift for shift in range((stop // first).bit_length() - 1)] if stop > first else []

    rows = 16 * (WARPS // SPLITS)
    registers = [place(0, 0, n) for n in powers(1, RUN)] + [place(0, 8, 0), place(0, 0, 4 * RUN)]
    registers += [place(0, 0, n) for n in powers(8 * RUN, WORDS)] + [place(0, m, 0) for m in powers(rows, BM)]
    lanes = [place(0, 0, RUN), place(0, 0, 2 * RUN), place(0, 1, 0), place(0, 2, 0), place(0, 4, 0)]
    warps = [place(0, m, 0) for m in powers(16, rows)] + [place(s, 0, 0) for s in powers(1, SPLITS)]
    shape = [SPLITS, BM, WORDS // UNDER, UNDER] if UNDER else [SPLITS, BM, WORDS]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], shape)


@constexpr_function
def scale_layout(wide):
    """Of scales [S, M, G] over words [S, M, G, UNDER], each held once."""

    def cut(bases):
        return [basis[:3] for basis in bases]

    registers = [basis for basis in cut(wide.reg_bases) if any(basis)]
    return gl.DistributedLinearLayout(registers, cut(wide.lane_bases), cut(wide.warp_bases), [], wide.shape[:3])


@constexpr_function
def values_of(W):
    """Values of a word."""
    return 8 if W[KIND] >= FP4_WORDS else 4 if W[KIND] == FP8 else 2


@constexpr_function
def words_scaled(W, BK):
    """Words under one scale where scales vary within a step; 0 where they do not."""
    return W[FINE] // values_of(W) if W[FINE] and W[FINE] % BK else 0


@constexpr_function
def split_columns(W, BK, SPLITS):
    """Values of `in` of a split, in whole steps."""
    return (W[COLUMNS] + SPLITS * BK - 1) // (SPLITS * BK) * BK
