"""What `serve` settles before ranks start: GPUs, ranks and ratios of made-up hardware, and every way to be refused."""

import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from shardwise.cache.budget import LEAST_SEQS, idle_bytes, sequences, settle
from shardwise.commands.prepare import settle_split
from shardwise.config import ConfigError, RankEnvironment, ServeConfig, load_model_config
from shardwise.engine.build import blueprint, free_bytes
from shardwise.engine.decide import Hardware, decide, reasons
from shardwise.engine.place import place, sharers
from shardwise.parallel import probe
from shardwise.parallel.comm import Alone
from shardwise.parallel.devices import UNKNOWN, Device, Link, Machine
from shardwise.parallel.probe import ProbeError
from tests.unit.balance_cases import GEOMETRY, GIB

UNEQUAL = (
    Device("RTX 3090 Ti", 24 * GIB, 8e11, 8e13, index=0, uuid="GPU-8f2c"),
    Device("RTX 4060 Ti", 16 * GIB, 2.5e11, 4e13, index=1, uuid="GPU-8f9d"),
)
EQUAL = tuple(Device("H200", 141 * GIB, 4e12, 8e14, index=index, uuid=f"GPU-{index}") for index in range(4))
NVFP4 = "qwen3.6-35b-a3b-nvfp4"
LINK = Link(2e-5, 1e10)


def hardware(there: Sequence[Device], asked: list[Any] | None = None, link: Link = LINK) -> Hardware:
    """Made-up GPUs; `asked` gets those that are measured."""

    def measured(devices: Sequence[Device]) -> Machine:
        if asked is not None:
            asked.append([device.index for device in devices])
        by_index = {device.index: device for device in there}
        return Machine(tuple(by_index[device.index] for device in devices), link, measured=True)

    unmeasured = [replace(device, read_bytes_per_s=UNKNOWN, flops_per_s=UNKNOWN) for device in there]
    return Hardware(lambda: unmeasured, measured)


def settled(there: Sequence[Device], name: str = NVFP4, asked: list[Any] | None = None, **options: Any) -> Any:
    serve = ServeConfig(model=str(GEOMETRY / name), load_format="dummy", **options)
    return decide(serve, hardware(there, asked), "cuda")


def test_unequal_cards_are_measured_and_split_by_what_they_can_do():
    asked = list[Any]()
    serve, decision = settled(UNEQUAL, asked=asked, ranks=0, gpu=("0", "1"))
    assert asked == [[0, 1]]
    assert (serve.ranks, serve.gpu, serve.ratio) == (2, ("0", "1"), ())
    assert set(serve.group_ratios) == {"attention", "delta", "expert", "mlp", "vision", "vision_mlp", "vocab"}
    for weights in (serve.group_ratios["expert"], serve.group_ratios["delta"]):
        assert weights[0] > 2 * weights[1]
    text = "\n".join(reasons(decision))
    for words in ("rank 0: RTX 3090 Ti, 24.0 GiB, reads 800 GB/s (measured)", "an even split: ", "tokens of KV cache"):
        assert words in text
    assert decision.choice.best.kv_tokens >= 262_144


@pytest.mark.parametrize(("comm", "ranks"), [("auto", 2), ("p2p", 2), ("torch", 1)])
def test_sums_over_peers_memory_make_a_second_card_worth_it(comm: Any, ranks: int):
    """One request of 35B-A3B in NVFP4: 80 sums of 20 us by the library are more than half of the step on one card."""
    serve = ServeConfig(
        model=str(GEOMETRY / NVFP4), load_format="dummy", gpu=("0", "1"), ranks=0, comm=comm, objective="speed"
    )
    pair = tuple(replace(one, name=f"card {n}") for n, one in enumerate(EQUAL[:2]))  # unlike ones are measured
    decided, _ = decide(serve, hardware(pair, link=Link(2e-5, 2.8e11, peers=True)), "cuda")
    assert decided.ranks == ranks


@pytest.mark.parametrize(("count", "reaches", "found"), [(2, True, True), (2, False, False), (9, True, False)])
def test_a_link_is_over_peers_memory_where_ranks_would_use_it(
    monkeypatch: pytest.MonkeyPatch, count: int, reaches: bool, found: bool
):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: reaches)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=str(device)))
    assert probe.reached(range(count)) is found


def test_every_rank_makes_the_same_partitions_of_what_was_written():
    serve, decision = settled(UNEQUAL, ranks=0, gpu=("GPU-8f9d", "GPU-8f2c"))
    assert serve.gpu == ("1", "0")
    travelled = msgspec.json.decode(msgspec.json.encode(serve), type=ServeConfig)
    assert blueprint(travelled, "cuda").partitions == decision.choice.best.partitions
    again, _ = decide(travelled, hardware(UNEQUAL), "cuda")
    assert again.group_ratios == serve.group_ratios


def test_equal_cards_need_no_measurement():
    asked = list[Any]()
    serve, decision = settled(EQUAL, asked=asked, ranks=2)
    assert (serve.ranks, serve.gpu, serve.group_ratios, decision, asked) == (2, ("0", "1"), {}, None, [])
    serve, _ = settled(EQUAL, asked=asked, ranks=0, gpu=("3",))
    assert (serve.ranks, serve.gpu, asked) == (1, ("3",), [])


def test_a_ratio_of_the_users_is_kept():
    serve, decision = settled(UNEQUAL, ranks=2, gpu=("0", "1"), ratio=(5, 3))
    assert (serve.ratio, decision) == ((5, 3), None)
    serve, _ = settled(UNEQUAL, ranks=2, gpu=("0", "1"), group_ratios={"expert": (1, 1), "attention": (1, 0)})
    assert serve.group_ratios["expert"][0] == serve.group_ratios["expert"][1]
    assert serve.group_ratios["attention"][1] == 0
    assert serve.group_ratios["delta"][0] > serve.group_ratios["delta"][1]


def test_a_card_that_only_slows_the_other_down_is_left_out_and_named():
    slow = (EQUAL[0], replace(UNEQUAL[1], read_bytes_per_s=5e10))
    serve, decision = settled(slow, ranks=0, gpu=("0", "1"))
    assert (serve.ranks, serve.gpu, serve.group_ratios) == (1, ("0",), {})
    text = "\n".join(reasons(decision))
    assert "not used: RTX 4060 Ti" in text
    assert "1 of 2 devices are used" in text
    assert "--tp 2 uses them nevertheless" in text


def test_the_same_card_twice_is_two_ranks_with_half_of_it_each():
    serve, decision = settled(EQUAL, ranks=0, gpu=("0", "0"))
    assert (serve.ranks, serve.gpu) == (2, ("0", "0"))
    assert "ranks share a device" in "\n".join(reasons(decision))
    whole = settled(EQUAL, ranks=0, gpu=("0", "1"))[1].choice.full
    assert decision.choice.best.kv_tokens < whole.kv_tokens


def test_a_spec_needs_no_hardware():
    serve, decision = settled((), ranks=0, gpu_spec="24GiB:936GB/s,16GiB:288GB/s")
    assert serve.ranks == 2
    assert serve.gpu_spec == ""
    assert decision.choice.best.kv_tokens >= 262_144, "the pair holds the longest context"
    assert settled((), ranks=3, gpu_spec="24GiB:936GB/s")[0].ranks == 3


@pytest.mark.parametrize(
    ("there", "options", "words"),
    [
        (UNEQUAL, {"ranks": 0, "gpu": ("0", "2")}, "--gpu 0,2: '2' is not there; this machine has 0: RTX 3090 Ti"),
        (EQUAL, {"ranks": 8}, "8 ranks, and this machine has 4 GPUs; use --tp 4 or less"),
        (EQUAL, {"ranks": 3, "gpu": ("0", "1")}, "--tp names 3"),
        ((replace(EQUAL[0], held_bytes=100 * GIB),), {"ranks": 0, "gpu": ("0",)}, "is busy: 100.0 of 141.0 GiB"),
        (UNEQUAL, {"ranks": 0, "gpu": ("0", "1"), "gpu_spec": "1GiB:1GB/s," * 2 + "1GiB:1GB/s"}, "--gpu names 2"),
        (
            (),
            {"ranks": 0, "gpu_spec": "8GiB:500GB/s,8GiB:500GB/s", "experts": "resident"},
            "the nearest that fits is an even split over 3 devices",
        ),
        (
            (),
            {"ranks": 2, "gpu_spec": "24GiB:936GB/s,16GiB:288GB/s", "ratio": (1, 7), "experts": "resident"},
            "the nearest split that fits is --ratio",
        ),
        (
            (),
            {"ranks": 1, "gpu_spec": "21GiB:936GB/s", "max_model_len": 262_144, "experts": "resident"},
            "the nearest that fits is --max-model-len ",
        ),
    ],
)
def test_what_cannot_be_is_one_line_with_the_way_out(there: Any, options: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        settled(there, **options)
    assert "\n" not in str(error.value)


def test_the_split_that_is_proposed_does_fit():
    with pytest.raises(ConfigError) as error:
        settled((), ranks=2, gpu_spec="24GiB:936GB/s,16GiB:288GB/s", ratio=(1, 7), experts="resident")
    ratios = {
        group: tuple(map(float, each.split(",")))
        for group, each in re.findall(r"--ratio (\w+)=([\d,]+)", str(error.value).split("fits is")[1])
    }
    assert settled((), ranks=2, gpu_spec="24GiB:936GB/s,16GiB:288GB/s", group_ratios=ratios)[0].ranks == 2


def test_experts_that_fit_nowhere_go_to_host_memory():
    """Only if where they are is ours to choose; then the split stands as it was asked for."""
    serve, decision = settled((), ranks=2, gpu_spec="8GiB:500GB/s,8GiB:500GB/s", max_model_len=4096)
    assert (serve.ranks, serve.experts) == (2, "offload")
    assert decision.problem.anatomy.total(decision.choice.best.partitions, 0).weights_bytes < 4 * GIB


def test_a_cpu_has_no_gpus_to_name():
    with pytest.raises(ConfigError, match="ranks run on the CPU here"):
        decide(ServeConfig(model=str(GEOMETRY / NVFP4), gpu=("0",), device="cpu"), hardware(()))


def test_a_cache_that_does_not_fit_shrinks_with_a_warning_and_is_refused_when_useless(caplog: pytest.LogCaptureFixture):
    model = load_model_config(GEOMETRY / NVFP4)
    serve = ServeConfig(model="m", kv_tokens=100_000)
    found = settle(serve, model, "cuda", 4, 1000)
    assert found.kv_tokens == 999 * 64
    assert "--kv-tokens 100000: only 63936 tokens" in caplog.text
    with pytest.raises(ConfigError, match="only 1216 tokens"):
        settle(serve, model, "cuda", 4, 20)
    with pytest.raises(ConfigError, match="a request of 80000 tokens needs 1250 pages"):
        settle(msgspec.structs.replace(serve, max_model_len=80_000), model, "cuda", 4, 1000)


def test_idle_bytes_are_those_beyond_the_smallest_rank():
    assert idle_bytes(100, 40, 7) == 420
    assert idle_bytes(40, 40, 7) == 0
    assert idle_bytes(1 << 40, 40, 0) == 0, "a rank that holds nothing of the cache has nothing idle"


def test_rows_make_way_for_the_longest_request():
    serve = ServeConfig(model="m")
    assert sequences(serve, "cuda", 1000, 1) == 128
    assert sequences(serve, "cuda", 1000, 1, 950) == 32
    assert sequences(serve, "cuda", 1000, 1, 2000) == LEAST_SEQS
    assert sequences(msgspec.structs.replace(serve, max_num_seqs=77), "cuda", 1000, 1, 2000) == 77


def environment(rank: int, ranks: int = 2) -> RankEnvironment:
    return RankEnvironment(rank, ranks, rank, ranks, 0)


def test_a_rank_is_on_the_gpu_that_was_named_for_it(monkeypatch: pytest.MonkeyPatch):
    current = list[Any]()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    serve = ServeConfig(model="m", ranks=2, gpu=("2", "0"))
    assert [place(serve, environment(rank), "cuda") for rank in (0, 1)] == [torch.device("cuda", n) for n in (2, 0)]
    assert current == [torch.device("cuda", 2), torch.device("cuda", 0)]
    assert place(ServeConfig(model="m"), environment(1), "cuda").index == 1
    with pytest.raises(ConfigError, match="--gpu 2,0: 2 for 3 ranks of this host"):
        place(serve, environment(0, 3), "cuda")
    with pytest.raises(ConfigError, match=re.escape("rank 1 is for GPU 5 of this host and there are 3 GPUs")):
        place(msgspec.structs.replace(serve, gpu=("2", "5")), environment(1), "cuda")


def test_memory_of_a_shared_gpu_is_divided(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    ctx: Any = SimpleNamespace(device=torch.device("cuda", 0), comm=Alone())
    serve = ServeConfig(model="m", ranks=3, gpu=("0", "0", "1"), gpu_memory_utilization=0.5)
    assert [sharers(serve, torch.device("cuda", n)) for n in (0, 1)] == [2, 1]
    assert free_bytes(serve, ctx, 3) == 5
    assert free_bytes(msgspec.structs.replace(serve, gpu=()), ctx, 3) == 10


def test_a_probe_that_fails_stops_only_who_asked_for_it(monkeypatch: pytest.MonkeyPatch):
    def fail(config: ServeConfig) -> Any:
        raise ProbeError("no answer")

    monkeypatch.setattr("shardwise.engine.decide.decide", fail)
    serve = ServeConfig(model="m", ranks=2)
    assert settle_split(serve) is serve
    with pytest.raises(ConfigError, match="no answer"):
        settle_split(msgspec.structs.replace(serve, gpu=("0", "1")))
