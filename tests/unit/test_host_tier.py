"""The host tier's bytes and sizes by themselves; what it is for is in test_reuse.py and test_prefix.py (parallel)."""

import psutil
import pytest
import torch

from shardwise.cache import store
from shardwise.cache.budget import GIB, Budget, host_places
from shardwise.cache.host import Copies
from shardwise.cache.store import HostStore
from shardwise.config import ConfigError, ServeConfig
from shardwise.engine.build import blueprint
from shardwise.engine.hosttier import with_host_tier
from shardwise.layers.attention import KVCache
from shardwise.layers.delta import DeltaState
from shardwise.models.qwen3_5 import LayerCache
from shardwise.parallel.comm import Alone
from tests.golden import eval as evaluation


def caches(heads: int, dtype: torch.dtype = torch.float32) -> list[LayerCache]:
    """Two layers of each kind, filled with noise. heads: local; may be 0."""
    noise = torch.Generator().manual_seed(0)

    def filled(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise).to(dtype)

    attention = [KVCache(filled(9, heads, 4, 6), filled(9, heads, 4, 6)) for _ in range(2)]
    return [*attention, *(DeltaState(filled(7, 3 * heads, 3), filled(7, heads, 2, 5).float()) for _ in range(2))]


def tensors(layers: list[LayerCache]) -> list[torch.Tensor]:
    return [part for layer in layers for part in vars(layer).values() if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize("staging_bytes", [1, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("heads", [0, 1, 3])
def test_what_went_to_the_host_comes_back_the_same(
    heads: int, dtype: torch.dtype, staging_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "STAGING_BYTES", staging_bytes)
    layers = caches(heads, dtype)
    before = [tensor.float().clone() for tensor in tensors(layers)]
    held = HostStore(layers, 5, 3)
    held.out(Copies(pages_out=[(8, 1), (2, 5)], rows_out=[(6, 3)]))
    for tensor in tensors(layers):
        tensor.view(torch.uint8).fill_(0x7F)  # NaN, or as good as
    held.back(Copies(pages_in=[(1, 3), (5, 8), (1, 4)], rows_in=[(3, 1), (3, 5)]))
    for old, new in zip(before, (tensor.float() for tensor in tensors(layers)), strict=True):
        if len(old) == 9:
            assert torch.equal(new[[3, 4, 8]], old[[8, 8, 2]])
        else:
            assert torch.equal(new[[1, 5]], old[[6, 6]])
        untouched = [0, 1, 2] if len(old) == 9 else [0, 2, 6]
        assert not (new[untouched] == old[untouched]).any()


def test_places_fit_into_the_bytes() -> None:
    for host_bytes, row_bytes, page_bytes in ((GIB, 60_000_000, 1_300_000), (GIB, 10, 10), (GIB, 0, 7), (GIB, 7, 0)):
        pages, rows = host_places(host_bytes, row_bytes, page_bytes)
        assert pages > 0
        assert rows > 0
        assert pages * page_bytes + rows * row_bytes <= host_bytes
    assert host_places(GIB, 60_000_000, 1_300_000)[1] == 8
    assert host_places(100, 90, 20)[1] == 0


def test_too_much_and_too_little_are_told() -> None:
    made = blueprint(ServeConfig(model=str(evaluation.miniature()), device="cpu"))

    class Context:
        comm, partitions, rank = Alone(), made.partitions, 0

    def places(gib: float, snapshot_rows: int = 4) -> tuple[int, int]:
        limits = Budget(1, 1, 1, 2, 2, 64, snapshot_rows)
        serve = ServeConfig(model="", host_cache_gib=gib)
        found = with_host_tier(serve, made.caches, Context, 2, limits)  # pyright: ignore[reportArgumentType]
        return found.host_pages, found.host_rows

    assert places(0) == places(0.1, snapshot_rows=0) == (0, 0)
    assert min(places(0.1)) > 10
    with pytest.raises(ConfigError, match=r"--host-cache-gib 1e-07: too little .* rank 0; give more"):
        places(1e-7)
    too_much = psutil.virtual_memory().total / GIB
    with pytest.raises(ConfigError, match=r"2 ranks of a host .* available at most 80% may be"):
        places(too_much)
