"""What kernels in Gluon are made of that can be run without a GPU: the moves of codes, by an interpreter of their few
instructions, and the sort of pairs. The kernels themselves: tests/gpu/check_fragments.py.
"""

import re

import pytest
import torch

from shardwise.kernels.linear import arrange, fragments
from shardwise.kernels.moe_block.fragments import MATCHED_TOKENS, tokens_tile
from shardwise.kernels.moe_block.rank import rank_tiles

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
MASK = (1 << 32) - 1


def halves(word: int) -> torch.Tensor:
    """The two bf16 of a word, the lower first."""
    bits = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.uint16)
    return bits.view(torch.bfloat16).double()


def word_of(values: torch.Tensor) -> int:
    low, high = values.to(torch.bfloat16).view(torch.int16).tolist()
    return (low & 0xFFFF) | (high & 0xFFFF) << 16


def ran(program: str, operands: dict[str, int]) -> dict[str, int]:
    """Registers after a program of the instructions that fragments.py uses; a result may overwrite no input."""
    held = dict(operands)
    for line in re.findall(r"([a-z0-9_.]+ [^;{}]+);", re.sub(r"\.reg [^;]+;", "", program)):
        name, rest = line.split(" ", 1)
        to, *given = [part.strip() for part in rest.split(",")]
        of = [held[each] if each in held else int(each, 0) for each in given]
        if name == "mov.b32":
            held[to] = of[0]
        elif name == "shr.u32":
            held[to] = of[0] >> of[1]
        elif name == "and.b32":
            held[to] = of[0] & of[1]
        elif name == "mul.lo.u32":
            held[to] = of[0] * of[1] & MASK
        elif name == "lop3.b32" and of[3] == 0xF8:
            held[to] = of[0] | of[1] & of[2]
        elif name == "fma.rn.bf16x2":
            held[to] = word_of(halves(of[0]) * halves(of[1]) + halves(of[2]))
        else:
            raise AssertionError(line)
    return held


@pytest.mark.parametrize("scale", [0.015625, 0.1015625, 1.0, 448.0, 2.0**-9])
def test_words_of_e2m1_become_their_values_times_a_scale_in_the_order_of_pairs(scale: float) -> None:
    byte = int(torch.tensor(scale).to(torch.float8_e4m3fn).view(torch.uint8))
    scales = ran(fragments.E4M3_SCALE.value, {"$1": byte})["$0"]
    for first in range(16):
        codes = [(first + 5 * n) % 16 for n in range(8)]
        word = sum(code << 4 * n for n, code in enumerate(codes))
        found = ran(fragments.E2M1.value, {"$4": word, "$5": scales})
        values = [E2M1[code & 7] * (-1 if code & 8 else 1) for code in codes]
        for pair in range(4):
            want = torch.tensor([values[pair], values[pair + 4]], dtype=torch.float64) * scale / 128
            assert torch.equal(halves(found[f"${pair}"]), want), (codes, pair)


def test_words_whose_codes_were_moved_become_the_same_values() -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(1 << 31), 1 << 31, (500,), generator=generator).int()
    moved = arrange.moved(words)
    assert torch.equal(arrange.as_stored(moved), words)
    scale = ran(fragments.E4M3_SCALE.value, {"$1": 0x3A})["$0"]
    for word, other in zip(words.tolist(), moved.tolist(), strict=True):
        want = ran(fragments.E2M1.value, {"$4": word & MASK, "$5": scale})
        found = ran(fragments.E2M1_MOVED.value, {"$4": other & MASK, "$5": scale})
        assert [found[f"${pair}"] for pair in range(4)] == [want[f"${pair}"] for pair in range(4)]


def test_words_of_e4m3_become_their_values_in_the_order_of_pairs() -> None:
    finite = [code for code in range(256) if code & 127 != 127]
    for at in range(len(finite) - 3):
        codes = finite[at : at + 4]
        found = ran(fragments.E4M3.value, {"$2": sum(code << 8 * n for n, code in enumerate(codes))})
        values = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        assert torch.equal(halves(found["$0"]), values[[0, 2]]), codes
        assert torch.equal(halves(found["$1"]), values[[1, 3]]), codes


def test_a_scale_multiplies_both_halves() -> None:
    found = ran(
        fragments.TIMES.value, {"$1": word_of(torch.tensor([1.5, -3.0])), "$2": word_of(torch.tensor([2.0, 0.5]))}
    )
    assert halves(found["$0"]).tolist() == [3.0, -1.5]


SORTED = [(9, 2, 5, 8), (40, 3, 7, 8), (36, 8, 128, 8), (33, 1, 1, 16), (16, 8, 256, 8), (20, 2, 300, 8)]


@pytest.mark.parametrize(("tokens", "top_k", "experts", "BT"), SORTED)
def test_pairs_are_sorted_into_tiles_of_one_expert(tokens: int, top_k: int, experts: int, BT: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    scores_TE = torch.rand(tokens, experts, generator=generator) ** 4
    ids_Tk = scores_TE.topk(top_k, 1).indices.int()
    order_M, tiles_3P = rank_tiles(ids_Tk, experts, BT, False)
    sorted_M, want_M = ids_Tk.flatten().sort(stable=True)
    assert torch.equal(order_M, want_M.int())
    found, places = [tile for tile in tiles_3P.T.tolist() if tile[0] >= 0], list[int]()
    for expert, first, stop in found:
        assert 0 < stop - first <= BT
        assert (sorted_M[first:stop] == expert).all()
        places += range(first, stop)
    assert sorted(places) == list(range(tokens * top_k)), "each pair is in one tile"
    tile_counts = [-(-int(count) // BT) for count in ids_Tk.flatten().long().bincount()]
    assert len(found) == sum(tile_counts), "and tiles are as full as can be"


def test_tiles_grow_with_what_an_expert_has() -> None:
    sizes = [tokens_tile(tokens, 8, 256) for tokens in (1, 64, 128, 256, 512, 4096)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (MATCHED_TOKENS, 32)


@pytest.mark.parametrize("values", [2, 4, 8])
def test_activations_lie_in_the_order_of_the_words_they_meet(values: int) -> None:
    """Pairs of a word's halves, as its moves make them."""
    in_order_K = torch.arange(32).view(-1, 2, values // 2).transpose(1, 2).flatten()
    places = [fragments.turned_place.fn(k, values) for k in range(32)]
    assert in_order_K[places].tolist() == list(range(32))
