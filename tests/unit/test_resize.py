"""Moving memory between KV cache and slots: the arithmetic, the pages that get other numbers, and the HTTP side."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.cache.budget import Budget
from shardwise.cache.pages import PagePool
from shardwise.engine.messages import CacheResized, ResizeCache
from shardwise.engine.resize import RankSizes, ResizeRefused, resized
from tests.fake_engine import FakeEngine
from tests.unit.server_fixtures import client, echo, make_app

NOW = Budget(4, 64, 160, 5, 101, 16, expert_slots=6)
KEY = {"authorization": "Bearer k"}


def of_pages(budget: Budget, sizes: Sequence[RankSizes]) -> list[int]:
    return [budget.pages * size.page_bytes + budget.expert_slots * size.slot_bytes for size in sizes]


@given(
    st.lists(st.builds(RankSizes, st.integers(1, 99), st.integers(0, 5000)), min_size=1, max_size=4),
    st.integers(1, 40), st.integers(1, 4000),
)  # fmt: skip
@example([RankSizes(1, 0)], 1, 1601)  # a rank without experts has only its pages
def test_no_rank_holds_more_than_before(sizes: list[RankSizes], slots: int, tokens: int) -> None:
    for asked in (ResizeCache("", expert_slots=slots), ResizeCache("", kv_tokens=tokens)):
        try:
            found = resized(asked, NOW, sizes, 2, 32)
        except ResizeRefused:
            continue
        before, after = of_pages(NOW, sizes), of_pages(found, sizes)
        assert all(new <= old for new, old in zip(after, before, strict=True))
        assert 2 <= found.expert_slots <= 32
        assert found.kv_tokens >= NOW.max_model_len
        larger = replace(found, pages=found.pages + 1) if asked.expert_slots else None
        assert larger is None or any(new > old for new, old in zip(of_pages(larger, sizes), before, strict=True))


@pytest.mark.parametrize(
    ("now", "asked", "words"),
    [
        (NOW, ResizeCache("", expert_slots=1), "2 to 8 are possible"),
        (NOW, ResizeCache("", expert_slots=9), "2 to 8 are possible"),
        (NOW, ResizeCache("", expert_slots=8), "0 tokens of KV cache would be left, and a request may have 160"),
        (NOW, ResizeCache("", kv_tokens=159), "a request may have 160"),
        (NOW, ResizeCache("", kv_tokens=100_000), "ask for at most 9600"),
        (replace(NOW, expert_slots=0), ResizeCache("", kv_tokens=500), "--experts offload"),
    ],
)
def test_what_cannot_be_is_refused_with_numbers(now: Budget, asked: ResizeCache, words: str) -> None:
    with pytest.raises(ResizeRefused, match=words):
        resized(asked, now, [RankSizes(10, 1250)], 2, 8)


@given(st.data())
def test_pages_in_use_keep_their_holders(data: st.DataObject) -> None:
    pool = PagePool(data.draw(st.integers(1, 20)), 4)
    taken = pool.take(data.draw(st.integers(0, pool.pages)))
    gone = [page for page in taken if data.draw(st.booleans())]
    pool.release(gone)
    held = [page for page in taken if page not in gone]
    for page in held[::2]:
        pool.keep(page)
    before = {page: pool.holders(page) for page in held}
    pages = data.draw(st.integers(1, 30))
    if pages < len(held):
        with pytest.raises(ValueError, match="are in use"):
            pool.resize(pages)
        return
    moves = pool.resize(pages)
    pool.check()
    assert {page for page in held if page > pages} == set(moves)
    assert not set(moves.values()) & set(held)
    assert {moves.get(page, page): count for page, count in before.items()} == {
        page: pool.holders(page) for page in range(1, pages + 1) if pool.holders(page)
    }
    assert pool.free == pages - len(held)
    assert len(pool.take(pool.free)) == pages - len(held)


class Resizable(FakeEngine):
    """Takes any number of slots but 13."""

    async def resize(self, request_id: str, expert_slots: int = 0, kv_tokens: int = 0) -> CacheResized:
        if expert_slots == 13:
            return CacheResized(request_id, 6, 1600, "expert_slots 13: 2 to 8 are possible")
        return CacheResized(request_id, expert_slots or 3, kv_tokens or 960)


async def test_the_key_moves_memory() -> None:
    async with client(make_app(Resizable(echo), api_key="k")) as http:
        done = await http.post("/admin/cache", json={"expert_slots": 4}, headers=KEY)
        assert (done.status_code, done.json()) == (200, {"expert_slots": 4, "kv_tokens": 960})
        refused = await http.post("/admin/cache", json={"expert_slots": 13}, headers=KEY)
        assert refused.status_code == 409
        assert "2 to 8" in refused.json()["error"]["message"]
        for body in ({}, {"expert_slots": 4, "kv_tokens": 5}, {"expert_slots": 0}, {"slots": 3}, {"kv_tokens": "5"}):
            assert (await http.post("/admin/cache", json=body, headers=KEY)).status_code == 400
        assert (await http.post("/admin/cache", json={"expert_slots": 4})).status_code == 401


async def test_without_a_key_nobody_does() -> None:
    async with client(make_app(Resizable(echo))) as http:
        assert (await http.post("/admin/cache", json={"expert_slots": 4})).status_code == 404
