"""Choices that were measured on a GPU: found by its name, sizes and tokens, and taken by the operations."""

import json

import pytest
import torch

from shardwise.kernels import tuning
from shardwise.kernels.linear.tiles import Target
from shardwise.kernels.linears import reference
from shardwise.kernels.linears import triton as fast
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
