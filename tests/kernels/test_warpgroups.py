"""What kernels by Hopper's warp group instructions are made of that runs without a GPU: tokens as rows of e4m3, and
what they are chosen by. The kernels themselves: tests/gpu/check_hopper.py.
"""

import pytest
import torch

from shardwise.kernels.hopper import SHARED_KIB, is_hopper
from shardwise.kernels.linear.geometry import case
from shardwise.kernels.linear.halves import Halved
from shardwise.kernels.linear.tiles import operand
from shardwise.kernels.linear.warpgroups import fits, held_steps, shared_bytes
from shardwise.kernels.linears import hopper as linears
from shardwise.kernels.moe_block import hopper, persistent
from shardwise.kernels.moe_block.banks import Banks
from shardwise.kernels.moe_block.rank import rank_tiles
from tests.kernels.weights import make_weight


def halved(x_TH: torch.Tensor, top_k: int = 2, experts: int = 5) -> tuple[Halved, torch.Tensor, torch.Tensor]:
    """What the kernel makes of tokens; with it the sort of pairs that goes through the same launch."""
    tokens, hidden = x_TH.shape
    ids_Tk = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
    nothing = torch.full((tokens, 2, hidden), float("nan")).to(torch.float8_e4m3fn)
    halves = Halved(x_TH, nothing, torch.full((tokens,), float("nan")))
    return halves, ids_Tk, rank_tiles(ids_Tk, experts, 4, False, halves)[0]


def values(halves: Halved) -> torch.Tensor:
    """The tokens that rows of e4m3 and their factors stand for."""
    high, low = halves.halves_T2H.double().unbind(1)
    return (high + low / 16) * halves.back_T.double()[:, None]


@pytest.mark.parametrize("hidden", [128, 384])
@pytest.mark.parametrize("scale", [1e-30, 3e-5, 1.0, 7e4, 1e30])
def test_two_rows_of_e4m3_are_a_token_in_bf16_but_for_what_is_far_below_its_largest_value(
    hidden: int, scale: float
) -> None:
    torch.manual_seed(0)
    x_TH = (torch.randn(9, hidden) * scale).bfloat16()
    x_TH[3] = 0
    x_TH[4, 5] *= 4096
    halves, _, _ = halved(x_TH)
    exact, largest = x_TH.double(), x_TH.double().abs().amax(1, keepdim=True)
    near = exact.abs() >= largest / 2**10
    assert torch.equal(values(halves)[near], exact[near])
    assert bool(((values(halves) - exact).abs() <= largest / 2**16).all())
    assert not values(halves)[3].any()


def test_pairs_are_sorted_beside_it() -> None:
    torch.manual_seed(1)
    _, ids_Tk, order_M = halved(torch.randn(17, 128).bfloat16())
    assert torch.equal(order_M.long(), ids_Tk.flatten().sort(stable=True).indices)


@pytest.mark.parametrize("wrong", [float("inf"), float("-inf")])
def test_a_token_that_is_not_finite_gives_products_that_are_not_and_harms_no_other(wrong: float) -> None:
    """NaN is a matter of conversions that the interpreter does otherwise, see tests/gpu/check_hopper.py."""
    x_TH = torch.randn(3, 128).bfloat16()
    x_TH[1, 7] = wrong
    found = values(halved(x_TH)[0])
    assert found[1].isnan().any()
    assert found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("kind", ["bf16", "fp8_block", "fp8_tensor"])
@pytest.mark.parametrize("tokens", [2, 4, 8, 9, 16, 17, 64, 128, 160])
def test_what_the_rule_takes_fits_in_shared_memory_and_parts_banks_into_whole_tiles(kind: str, tokens: int) -> None:
    up, down = case(1024, 2048, kind, True, halves=2).of, case(2048, 512, kind, True).of
    config = hopper.hopper_rule(down, tokens)
    assert (config is None) == (tokens > 16 if kind == "bf16" else tokens < 9)
    if config is None:
        return
    for bank, BM, slots in ((up, config.up_BM, config.up_slots), (down, config.down_BM, config.down_slots)):
        if BM:
            assert bank.layout[2] % BM == 0
            assert shared_bytes(bank.layout, BM, config.BT, slots) <= SHARED_KIB * 1024
    assert tokens <= config.BT or config.up_BM  # gates and ups of another kernel are not sorted


@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 161, 8192])
def test_the_rule_takes_nothing_that_was_not_measured(tokens: int) -> None:
    half = hopper.hopper_rule(case(2048, 256, "fp8_block", True).of, tokens)
    assert (half is None) == (tokens != 16)
    assert hopper.hopper_rule(case(2048, 128, "fp8_block", True).of, tokens) is None
    assert hopper.hopper_rule(case(2048, 256, "bf16", True).of, tokens) is None
    assert hopper.hopper_rule(case(2048, 512, "nvfp4_moved", True).of, tokens) is None
    if tokens in (1, 161, 8192):
        assert hopper.hopper_rule(case(2048, 512, "fp8_block", True).of, tokens) is None


def test_pairs_that_another_kernel_left_unsorted_have_a_column_each(monkeypatch: pytest.MonkeyPatch) -> None:
    up, down = case(2 * 512, 2048, "bf16", True).of, case(2048, 512, "bf16", True).of
    banks = Banks(up, down, up, down)
    monkeypatch.setattr(hopper, "possible", lambda *_: True)
    monkeypatch.setattr(hopper.tuning, "choice", lambda *_: [8, 0, 0, 64, 4])
    assert hopper.hopper_config(banks, torch.bfloat16, 8, "a GPU") == (8, 0, 0, 64, 4)
    assert hopper.hopper_config(banks, torch.bfloat16, 9, "a GPU") is None


def test_persistent_programs_take_no_wider_input_than_was_measured() -> None:
    for columns, taken in ((2048, True), (2176, False), (4096, False)):
        up = case(1024, columns, "fp8_block", True, halves=2).of
        assert (persistent.persistent_rule(up, 4) is not None) == taken


@pytest.mark.parametrize("kind", ["bf16", "fp8_block", "fp8_tensor", "nvfp4_moved"])
@pytest.mark.parametrize("width", [512, 256, 128])
def test_what_persistent_programs_take_fits_and_has_a_column_for_every_token(kind: str, width: int) -> None:
    up = case(2 * width, 2048, kind, True, halves=2).of
    for tokens in range(1, 20):
        config = persistent.persistent_rule(up, tokens)
        narrowest = {"bf16": 512, "fp8_block": 256}.get(kind, 1 << 30)
        assert (config is not None) == (width >= narrowest and tokens in range(5 if kind == "bf16" else 2, 9))
        if config is not None:
            assert tokens <= config.BT <= persistent.MOST_TOKENS
            assert up.layout[2] % config.BM == 0
            assert 2048 * (2 if kind == "bf16" else 1) // 128 % config.slots == 0
            assert persistent.shared_bytes_of(up.layout, config) <= SHARED_KIB * 1024


def test_a_choice_for_fewer_tokens_is_not_taken_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    up, down = case(2 * 512, 2048, "fp8_block", True, halves=2).of, case(2048, 512, "fp8_block", True).of
    banks, chosen = Banks(up, down, up, down), [4, 64, 8, 1, 128, 2]
    monkeypatch.setattr(persistent, "fits", lambda *_: True)
    monkeypatch.setattr(hopper, "fits", lambda *_: True)
    monkeypatch.setattr(persistent.tuning, "choice", lambda *_: chosen)
    assert persistent.persistent_config(banks, torch.bfloat16, (4, 8), "a GPU") == tuple(chosen)
    assert persistent.persistent_config(banks, torch.bfloat16, (5, 8), "a GPU") is None
    assert persistent.persistent_config(banks, torch.bfloat16, (4, 16), "a GPU") is not None
    assert persistent.persistent_config(banks, torch.bfloat16, (4, 17), "a GPU") is None  # more pairs than in a list
    for slots, possible in ((2, False), (4, True), (5, False), (16, True)):
        config = persistent.Persistent(4, 64, slots, 1, 128, 2)
        assert persistent.possible(banks, torch.bfloat16, config) == possible
    wider = banks._replace(shared_up=case(2 * 1024, 2048, "fp8_block", True, halves=2).of)
    assert not persistent.possible(wider, torch.bfloat16, persistent.Persistent(*chosen))


@pytest.mark.parametrize(
    ("kinds", "rows", "tokens", "possible"),
    [
        (["fp8_block"], linears.Rows(4, 1, 5), 4, True),
        (["fp8_block"], linears.Rows(4, 1, 5), 5, False),
        (["fp8_block"], linears.Rows(4, 4, 4), 3, True),
        (["fp8_block"], linears.Rows(4, 32, 4), 3, False),  # less than a step a half
        (["fp8_block"], linears.Rows(8, 1, 16), 3, True),
        (["fp8_block"], linears.Rows(32, 1, 16), 3, False),  # more than shared memory holds
        (["fp8_block", "fp8_block", "bf16"], linears.Rows(4, 1, 5), 2, True),
        (["fp8_block", "bf16"], linears.Rows(4, 2, 5), 2, False),  # a plain weight has no parts
        (["fp8_block"] * 3, linears.Rows(4, 1, 5), 2, False),
        (["bf16"], linears.Rows(4, 1, 5), 2, False),
    ],
)
def test_which_linears_go_by_rows_in_halves(
    kinds: list[str], rows: linears.Rows, tokens: int, possible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "fits", lambda *_: True)
    monkeypatch.setattr(linears, "fragment_fits", lambda *_: True)
    operands = [case(64 if kind == "bf16" else 512, 4096, kind, True).of for kind in kinds]
    assert linears.possible(operands, torch.zeros(tokens, 4096).bfloat16(), rows) == possible


def test_two_steps_are_held_at_least_and_no_more_than_there_are() -> None:
    four, one = (case(64, columns, "fp8_block", True).of.layout for columns in (512, 128))
    assert [held_steps(four, slots) for slots in (1, 2, 3, 9)] == [2, 2, 3, 4]
    assert held_steps(one, 6) == 1


def test_nothing_but_a_hopper_card_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = make_weight((4, 128, 256), "fp8_block", 0, "cpu")
    assert not fits(operand(bank, True), torch.bfloat16, 64)
    for capability in ((8, 9), (9, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert is_hopper(torch.device("cuda")) == (capability == (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert not is_hopper(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not is_hopper(torch.device("cuda"))
