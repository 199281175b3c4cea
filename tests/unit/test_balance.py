"""The cost model against numbers worked out by hand, the search against brute force, every split that is promised."""

from itertools import combinations, pairwise, product
from typing import Any

import pytest

from benchmarks import forecast
from shardwise.config import ConfigError
from shardwise.parallel.balance import partitions, split
from shardwise.parallel.choice import Candidate, Problem, choose, judge, score, search_units
from shardwise.parallel.cost import Load, alone, distinct_share
from shardwise.parallel.devices import Machine
from shardwise.shard import Partition, local_bytes
from tests.unit.balance_cases import GIB, machine, planned, problem

MOE, FP8, NVFP4 = "qwen3.6-35b-a3b", "qwen3.6-35b-a3b-fp8", "qwen3.6-35b-a3b-nvfp4"
DENSE = ("qwen3.5-9b", "qwen3.5-27b")


@pytest.mark.parametrize("name", [MOE, FP8, NVFP4, *DENSE])
@pytest.mark.parametrize("ratio", [(1,), (1, 1), (5, 3), (3, 2, 2)])
def test_stages_hold_exactly_what_the_specs_say(name: str, ratio: tuple[float, ...]):
    made, asked = planned(name, len(ratio), ratio), problem(name)
    for rank in range(len(ratio)):
        total = asked.anatomy.total(made.partitions, rank)
        assert total.weights_bytes == sum(local_bytes(spec, made.partitions, rank) for spec in made.specs.values())
        assert total.page_bytes == made.caches.page_bytes(made.partitions, rank)
        assert total.row_bytes == made.caches.row_bytes(made.partitions, rank)


def test_a_step_of_one_rank_is_its_bytes_over_its_bandwidth():
    """35B-A3B at one request: 8 of 256 experts, all other weights but the embedding, KV, and the state twice."""
    made, asked = planned(MOE), problem(MOE)
    weights = {name: local_bytes(spec, made.partitions, 0) for name, spec in made.specs.items()}
    experts = sum(size for name, size in weights.items() if ".experts." in name)
    norms = sum(
        size for name, size in weights.items() if name == "norm" or name.endswith(("input_norm", "attention_norm"))
    )
    visual = sum(size for name, size in weights.items() if name.startswith("visual."))
    others = sum(weights.values()) - experts - weights["embed"] - norms - visual
    kv = made.caches.page_bytes(made.partitions, 0) // 64 * 1000
    state = 2 * made.caches.row_bytes(made.partitions, 0)
    forecast = asked.anatomy.forecast(made.partitions, machine((80, 1000)), Load(1, 1000))
    assert forecast.step_s == pytest.approx((others + experts * 8 / 256 + kv + state) / 1e12, rel=1e-3)
    assert forecast.collectives_s == 0
    assert forecast.limit == "reading on rank 0"


def test_experts_read_grow_with_the_batch():
    assert distinct_share(256, 8, 1) == 8 / 256
    assert distinct_share(4, 1, 2) == pytest.approx(1 - (3 / 4) ** 2)
    assert distinct_share(256, 8, 10_000) == pytest.approx(1)
    assert distinct_share(0, 0, 1) == 0


def test_collectives_and_kernels_cost_what_they_are_said_to():
    cut = partitions(problem(MOE).specs, 2)
    free = machine((80, 1e9), (80, 1e9), latency_s=1e-4, kernel_s=0.0)
    forecast = problem(MOE).anatomy.forecast(cut, free, Load(1, 1))
    assert forecast.collectives_s == pytest.approx(82e-4, rel=0.02)  # 1 + 2 * 40 all-reduces, and the logits
    assert forecast.limit == "collectives"
    slow = machine((80, 1e9), (80, 1e9), latency_s=0.0, kernel_s=1e-5)
    assert problem(MOE).anatomy.forecast(cut, slow, Load(1, 1)).limit == "fixed cost of kernels"


def test_a_rank_waits_for_the_slowest_in_every_stage():
    cut, asked = partitions(problem(MOE).specs, 2), problem(MOE)
    even = asked.anatomy.forecast(cut, machine((80, 500), (80, 500)), Load()).step_s
    unequal = asked.anatomy.forecast(cut, machine((80, 5000), (80, 500)), Load())
    assert unequal.step_s == pytest.approx(even, rel=1e-3)
    assert set(unequal.slowest.values()) - {0} == {1}


def test_ranks_on_one_device_share_it():
    cut, asked, one = partitions(problem(MOE).specs, 2), problem(MOE), machine((80, 1000))
    twice = Machine(one.devices * 2, one.link)
    shared = asked.anatomy.forecast(cut, twice, Load())
    assert shared.step_s - shared.collectives_s == pytest.approx(
        asked.anatomy.forecast(alone(cut), one, Load()).step_s, rel=0.02
    )


def shares(candidate: Candidate, group: str) -> list[float]:
    units = candidate.ratios()[group]
    return [each / sum(units) for each in units]


def test_the_best_split_of_a_made_up_pair_is_that_of_their_bandwidths():
    """With nothing but bytes to pay, 3:1 in bandwidth is 3:1 in every group, but for KV heads that both hold."""
    found = choose(problem(MOE), machine((80, 900), (80, 300)), all_of_them=True).best
    for group in ("attention", "delta", "expert", "vocab"):
        assert shares(found, group)[0] == pytest.approx(0.75, abs=0.07 if group == "attention" else 0.04), group


def test_equal_devices_get_equal_shares():
    found = choose(problem(MOE), machine((80, 900), (80, 900)), all_of_them=True)
    assert found.best.partitions == partitions(problem(MOE).specs, 2)
    assert len(found.candidates) == 1


def every_split(asked: Problem, group: str, members: int) -> list[Partition]:
    units = search_units(asked.specs, group, members)
    cuts = combinations(range(1, units), members - 1)
    return [Partition((0, *cut, units)) for cut in cuts]


@pytest.mark.parametrize("facts", [((80, 900), (80, 300)), ((48, 700), (40, 1100)), ((60, 400), (24, 950))])
@pytest.mark.parametrize("objective", ["speed", "context", "balanced"])
def test_the_search_finds_what_brute_force_finds(facts: Any, objective: Any):
    """Two devices, all units of attention and experts; the other groups are given."""
    asked = problem(MOE, objective)
    given = {"delta": (2, 1), "mlp": (1, 1), "vocab": (2, 1), "vision": (1, 1), "vision_mlp": (1, 1)}
    cards = machine(*facts, latency_s=1e-5, kernel_s=1e-6)
    found = choose(asked, cards, group_ratios=given, all_of_them=True).best
    fixed = {group: partitions(asked.specs, 2, (), given)[group] for group in given}
    every = (
        judge(asked, cards, (0, 1), {**fixed, "attention": attention, "expert": expert}, "")
        for attention, expert in product(every_split(asked, "attention", 2), every_split(asked, "expert", 2))
    )
    best = max(score(asked, one) for one in every)
    assert score(asked, found) == pytest.approx(best, rel=1e-9)


def test_three_devices_by_brute_force():
    asked, cards = problem(MOE), machine((80, 900), (80, 300), (80, 500))
    given = dict.fromkeys(set(asked.groups) - {"attention"}, (3, 1, 2))
    found = choose(asked, cards, group_ratios=given, all_of_them=True).best
    fixed = {group: partitions(asked.specs, 3, (), given)[group] for group in given}
    splits = every_split(asked, "attention", 3)
    best = max(score(asked, judge(asked, cards, (0, 1, 2), {**fixed, "attention": one}, "")) for one in splits)
    assert score(asked, found) == pytest.approx(best, rel=1e-9)


def test_memory_bounds_the_split():
    """The fast card is too small for the share that its speed asks for."""
    small, large = machine((30, 2000), (80, 500)), machine((80, 2000), (80, 500))
    asked = problem(MOE)
    bounded, free = choose(asked, small, all_of_them=True).best, choose(asked, large, all_of_them=True).best
    assert bounded.short_bytes == free.short_bytes == 0
    assert asked.anatomy.total(bounded.partitions, 0).weights_bytes < 30 * GIB * 0.9
    assert shares(bounded, "expert")[0] < shares(free, "expert")[0]
    assert bounded.forecast.tokens_per_s < free.forecast.tokens_per_s


def test_objectives_differ_as_they_say():
    cards = machine((26, 936), (16, 288), latency_s=2e-5, kernel_s=2.7e-6)
    speed, context = (choose(problem(NVFP4, one), cards).best for one in ("speed", "context"))
    assert speed.forecast.tokens_per_s > context.forecast.tokens_per_s
    assert speed.kv_tokens < context.kv_tokens
    assert speed.ranks == 1, "the fast card alone is faster than both"
    assert context.kv_tokens >= 262_144


def test_devices_are_left_out_only_for_a_clear_gain():
    slow_link = machine((80, 2000), (80, 2000), latency_s=1e-3)
    found = choose(problem(NVFP4), slow_link)
    assert found.best.ranks == 1
    assert found.full.ranks == 2
    assert choose(problem(NVFP4), machine((80, 2000), (80, 2000))).best.ranks == 2
    assert choose(problem(NVFP4), slow_link, all_of_them=True).best.ranks == 2


def test_what_is_written_down_is_the_same_split_again():
    found = choose(problem(FP8), machine((40, 900), (24, 300), (24, 500)), all_of_them=True).best
    assert partitions(problem(FP8).specs, 3, (), found.ratios()) == found.partitions


def test_a_ratio_is_followed_and_judged():
    found = choose(problem(MOE), machine((80, 900), (80, 300)), ratio=(5, 3)).best
    assert found.partitions == partitions(problem(MOE).specs, 2, (5, 3))
    with pytest.raises(ConfigError, match="3 weights for 2 ranks"):
        choose(problem(MOE), machine((80, 900), (80, 300)), group_ratios={"expert": (1, 2, 3)})
    with pytest.raises(ConfigError, match="no such group"):
        choose(problem(MOE), machine((80, 900), (80, 300)), group_ratios={"experts": (1, 2)})


@pytest.mark.parametrize("name", [MOE, FP8, NVFP4, *DENSE])
@pytest.mark.parametrize("ranks", range(1, 17))
def test_every_number_of_ranks_has_a_legal_split(name: str, ranks: int):
    """All groups have a share on each rank, what is cut adds up, and every rank can say what it holds."""
    made = planned(name, ranks)
    for group, partition in made.partitions.items():
        assert all(start < stop for start, stop in pairwise(partition.bounds)), f"{group}: {partition.bounds}"
    caches = {**made.caches.page, **made.caches.row}
    each = [sum(local_bytes(spec, made.partitions, rank) for spec in made.specs.values()) for rank in range(ranks)]
    whole = sum(local_bytes(spec, alone(made.partitions), 0) for spec in made.specs.values())
    spare = sum(each) - whole  # norms and routers on every rank, shared heads, scales of blocks that a cut parts
    assert 0 <= spare < 0.06 * whole + (ranks - 1) * 0.012 * whole, (each, whole)
    assert max(each) * ranks < 1.3 * sum(each), "the largest share is near the mean: it is what all wait for"
    assert all(local_bytes(spec, made.partitions, rank) for spec in caches.values() for rank in range(ranks))


@pytest.mark.parametrize("weights", [(5, 3), (3, 1), (3, 3, 1, 1), (1, 2, 3, 4, 5), (7, 1)])
def test_ratios_are_followed_exactly_where_units_allow(weights: tuple[float, ...]):
    for name in (MOE, FP8, NVFP4):
        specs = planned(name).specs
        partition = split(specs, "expert", weights)
        if 512 // 16 % sum(weights) == 0:
            counts = [stop - start for start, stop in pairwise(partition.bounds)]
            assert [count / partition.units for count in counts] == [weight / sum(weights) for weight in weights]


def test_published_bytes_of_35b_a3b():
    """bf16: 60 / 30 / 15 GB of experts a card at 1 / 2 / 4; 6 / 3 / 1.5 of others, a vision tower (0.9) among them."""
    for ranks, experts_gb, others_gb in ((1, 60, 6), (2, 30, 3), (4, 15, 1.5)):
        made = planned(MOE, ranks)
        sizes = {name: local_bytes(spec, made.partitions, 0) for name, spec in made.specs.items()}
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        assert experts / GIB == pytest.approx(experts_gb, rel=0.02)
        assert (sum(sizes.values()) - experts) / 1e9 == pytest.approx(others_gb, rel=0.05)
    nvfp4 = planned(NVFP4)
    experts = [spec for name, spec in nvfp4.specs.items() if ".experts." in name]
    assert sum(local_bytes(spec, nvfp4.partitions, 0) for spec in experts) / GIB == pytest.approx(16.9, abs=0.05)


def test_the_model_forecasts_the_steps_that_were_measured() -> None:
    assert forecast.main([]) <= 0.15
