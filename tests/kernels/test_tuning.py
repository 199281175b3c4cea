"""Choices that were measured on a GPU: found by its name, sizes and tokens, and taken by the operations."""

import json
from unittest import mock

import pytest
import torch

from shardwise.kernels import tuning
from shardwise.kernels.linear.fragments import Fragments
from shardwise.kernels.linear.geometry import case
from shardwise.kernels.linear.tiles import Target
from shardwise.kernels.linears import fragments as splits
from shardwise.kernels.linears import hopper as by_rows
from shardwise.kernels.linears import reference
from shardwise.kernels.linears import triton as fast
from shardwise.kernels.linears.fragments import Split
from shardwise.kernels.linears.hopper import Rows
from shardwise.kernels.linears.wide_config import Wide
from shardwise.kernels.moe_block.hopper import Hopper
from shardwise.kernels.moe_block.persistent import Persistent
from tests.gpu import choices
from tests.kernels.weights import make_weight

LAYOUT = (1, 1, 48, 96, 0, 0, 0, 0, 0, -1, 0, 0)


def test_a_choice_is_found_by_name_sizes_and_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "files", lambda _: tmp_path)
    folder = tmp_path / "tuned"
    folder.mkdir()
    (folder / "A_GPU_9.json").write_text(json.dumps({"shared_kib": [227], "tiled fp8:48x96 16": [1, 2]}))
    assert tuning.choice("A GPU 9", "tiled", [LAYOUT], 5) == tuning.choice("A GPU 9", "tiled", [LAYOUT], 16) == [1, 2]
    assert tuning.choice("A GPU 9", "tiled", [LAYOUT], 17) is None
    assert tuning.choice("A GPU 9", "tiled", [LAYOUT, LAYOUT], 5) is None
    assert tuning.choice("Another GPU 9", "tiled", [LAYOUT], 5) is None
    assert list(tuning.measured()) == [("A GPU 9", 227)]
    assert not list(tuning.measured(native_fp8=False))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("choice", [(0,), (1, 16, 32, 32, 4, 2), (1, 64, 16, 16, 4, 2), (2,)])
def test_linears_are_done_as_chosen(choice, monkeypatch, device):
    monkeypatch.setattr(tuning, "choice", lambda _, what, *__: choice if what == "linears" else None)
    generator = torch.Generator().manual_seed(1)
    for tokens, rows in ((3, (40, 24)), (35, (40,))):
        x = torch.randn(tokens, 72, generator=generator).half().to(device)
        weights = [make_weight((n, 72), "fp16", n, str(device)) for n in rows]
        dtypes = [torch.float32] * len(rows)
        got = fast.linears(x, weights, dtypes, target=Target(native_fp8=True, shared_kib=227, name="A GPU"))
        for one, expected in zip(got, reference.linears(x, weights, dtypes), strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-3, atol=1e-3)


def test_tables_that_are_kept_have_numbers_for_sizes_and_tokens():
    for name, kib in tuning.measured():
        assert kib >= 64
        for key, numbers in tuning.table(name).items():
            assert all(isinstance(number, int) for number in numbers)
            assert key == tuning.SHARED_KIB or int(key.split()[-1]) in (0, *tuning.BUCKETS)


CHOSEN = {
    "fragments": Fragments,
    "hopper": Hopper,
    "persistent": Persistent,
    "rows": Rows,
    "split": Split,
    "wide": Wide,
}
OTHERS = {
    "delta", "delta_step", "down", "experts", "gate_up", "grouped", "linears", "many", "matched", "normed", "resident",
    "stream", "tiled",
}  # fmt: skip


def test_what_tables_call_a_choice_is_one_kind_of_configuration():
    for name, _ in tuning.measured():
        for key, numbers in tuning.table(name).items():
            what = key.split()[0]
            assert what in {*CHOSEN, *OTHERS, tuning.SHARED_KIB}
            if what in CHOSEN:
                assert tuple(CHOSEN[what](*numbers))[: len(numbers)] == tuple(numbers)


def test_a_comparison_says_which_keys_nobody_asks_for(monkeypatch, capsys):
    def measure(*_):
        tuning.choice("A GPU 9", "tiled", [LAYOUT], 5)
        return {"kernel": 10.0}

    monkeypatch.setattr(choices, "measure", measure)
    choices.compare(mock.Mock(), 5, ["tiled fp8:48x96 16"], [[1, 2]])
    assert "not asked for" not in capsys.readouterr().out
    choices.compare(mock.Mock(), 5, ["tiled fp4:48x96 16"], [[1, 2]])
    assert "not asked for: tiled fp4:48x96 16" in capsys.readouterr().out


@pytest.mark.parametrize("parts", [1, 3])
def test_rows_in_halves_are_taken_where_their_parts_may_be(parts, monkeypatch, device):
    weight, x_TH = make_weight((40, 72), "fp16", 0, str(device)), torch.randn(3, 72).half().to(device)
    asked = []

    def launch(x_TH, operands, dtypes, conv, config, pdl):
        asked.append(config)
        outputs = [
            torch.full((parts * len(x_TH), of.layout[2]), 7.0, dtype=dtype)
            for of, dtype in zip(operands, dtypes, strict=True)
        ]
        return [out.view(parts, len(x_TH), -1) for out in outputs] if parts > 1 else outputs

    monkeypatch.setattr(by_rows, "rows_config", lambda *_: Rows(4, parts, 2))
    monkeypatch.setattr(by_rows, "hopper_linears", launch)
    target = Target(native_fp8=True, shared_kib=227, name="")
    assert fast.linear_parts(x_TH, weight, target=target).shape == (parts, 3, 40)
    assert len(asked) == 1
    (whole_TO,) = fast.linears(x_TH, [weight], [torch.float32], target=target)
    assert whole_TO.shape == (3, 40)
    assert len(asked) == (2 if parts == 1 else 1)  # a sum in parts is none of `linears`
    fast.linears(x_TH[:1], [weight, weight], [torch.float32] * 2, target=target)  # one token is streamed
    assert len(asked) == (2 if parts == 1 else 1)


def test_rows_in_halves_are_for_scales_of_blocks(monkeypatch):
    monkeypatch.setattr(by_rows, "fits", lambda *_: True)
    monkeypatch.setattr(by_rows.tuning, "choice", lambda *_: [4, 1, 2])
    x_TH = torch.zeros(3, 2048).bfloat16()
    for kind, taken in (("fp8_block", True), ("fp8_tensor", False)):
        found = by_rows.rows_config([case(512, 2048, kind, True).of], x_TH, "a GPU")
        assert (found == Rows(4, 1, 2)) == taken


def test_one_token_goes_by_fragments_where_that_was_measured(monkeypatch):
    x_TH, (one, other) = torch.zeros(1, 2048).bfloat16(), (case(rows, 2048, "nvfp4", True).of for rows in (4096, 2048))
    monkeypatch.setattr(splits, "fits", lambda *_: True)
    monkeypatch.setattr(
        splits.tuning, "choice", lambda _, what, layouts, *__: [16, 8, 4, 4] if layouts == [one.layout] else None
    )
    target = Target(native_fp8=True, shared_kib=227, name="a GPU")
    assert splits.split_config([one], x_TH, target) == Split(16, 8, 4, 4)
    assert splits.split_config([other], x_TH, target) is None
    assert splits.split_config([one], x_TH[:0], target) is None
