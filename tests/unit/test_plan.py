"""`shardwise plan`: JSON, tables and page from config.json and facts of devices alone, held against the specs."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.engine.experts import sizes_of
from shardwise.shard import local_bytes
from tests.unit.balance_cases import GEOMETRY, GIB, planned

PAIR = ("--gpu-spec", "24GiB:936GB/s,16GiB:288GB/s")
NVFP4 = "qwen3.6-35b-a3b-nvfp4"


def plan(capsys: pytest.CaptureFixture[str], *arguments: str, name: str = NVFP4) -> dict[str, Any]:
    assert main(["plan", str(GEOMETRY / name), "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_pair_of_cards_holds_the_longest_context(capsys: pytest.CaptureFixture[str]):
    found = plan(capsys, *PAIR)
    assert found["ranks"] == 2
    assert found["context_tokens"] == 262_144
    experts = sum(rank["weights_bytes"]["experts"] for rank in found["each"])
    assert experts / GIB == pytest.approx(16.9, abs=0.05)
    for rank in found["each"]:
        used = (
            rank["total_weights_bytes"] + (found["max_num_seqs"] + 1 + found["snapshot_rows"]) * rank["state_row_bytes"]
        )
        used += found["kv_tokens"] * rank["kv_token_bytes"] + rank["idle_bytes"]
        assert used <= rank["memory_bytes"] < used + 65 * 64 * rank["kv_token_bytes"], "all bytes are told"
    assert min(rank["kv_tokens"] for rank in found["each"]) == found["kv_tokens"]
    assert found["each"][found["kv_limited_by_rank"]]["idle_bytes"] == 0


def test_candidates_are_compared_and_the_chosen_one_is_marked(capsys: pytest.CaptureFixture[str]):
    found = plan(capsys, *PAIR)["candidates"]
    by_name = {(one["name"], len(one["devices"])): one for one in found}
    assert {"even", "by bandwidth", "by memory", "in between", "searched", "one rank"} == {one["name"] for one in found}
    (chosen,) = [one for one in found if one["chosen"]]
    assert chosen["tokens_per_s"] >= by_name["by bandwidth", 2]["tokens_per_s"] > by_name["even", 2]["tokens_per_s"]
    assert not next(one for one in found if one["devices"] == [1])["fits"], "the small card alone holds no 19 GiB"
    assert all(sum(shares) == pytest.approx(1) for one in found for shares in one["shares"].values())


def test_bytes_are_those_of_the_specs(capsys: pytest.CaptureFixture[str]):
    found = plan(capsys, "--gpu-spec", "80GiB:2TB/s", "--ratio", "5,3", name="qwen3.6-35b-a3b")
    made = planned("qwen3.6-35b-a3b", 2, (5, 3))
    for rank in found["each"]:
        size = sum(local_bytes(spec, made.partitions, rank["rank"]) for spec in made.specs.values())
        listed = rank["weights_bytes"].pop("shortlist", 0)
        assert sum(rank["weights_bytes"].values()) == rank["total_weights_bytes"] - listed == size
    assert found["units"]["attention"] == [10, 6]


def test_requests_share_the_cache(capsys: pytest.CaptureFixture[str]):
    one, four = (plan(capsys, *PAIR, "--requests", str(count)) for count in (1, 4))
    assert four["max_num_seqs"] == 4
    assert four["context_tokens"] == min(four["kv_tokens"] // 4, 262_144)
    assert four["tokens_per_s"] > one["tokens_per_s"]


def test_devices_of_unknown_speed_are_planned_without_a_prediction(capsys: pytest.CaptureFixture[str]):
    found = plan(capsys, "--memory", "24GiB,16GiB", "--tp", "2", "--dtype", "bfloat16")
    assert found["tokens_per_s"] is None
    assert [rank["memory_bytes"] for rank in found["each"]] == [24 * GIB, 16 * GIB]


class Text(HTMLParser):
    """Words of a page, and whether its tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.words = list[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "plan.html"
    assert main(["plan", str(GEOMETRY / NVFP4), *PAIR, "--html", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"https?://|<script|<link|src=", text), "nothing is fetched"
    assert "prefers-color-scheme: dark" in text
    page = Text()
    page.feed(text)
    assert page.open == []
    words = " ".join(page.words)
    for expected in ("262,144", "experts", "searched", "does not fit", "rank 1"):
        assert expected in words
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%;background", text)]
    assert widths
    assert sum(widths[: len(widths) // 2]) <= 100.1
    out = capsys.readouterr().out
    for expected in ("GiB held", "units owned", "tokens/s", "█", "an even split: "):
        assert expected in out


@pytest.mark.parametrize("tp", [1, 2])
def test_experts_in_host_memory_are_planned(tp: int, capsys: pytest.CaptureFixture[str]):
    """As many slots as the memory holds beside the floor; bytes of device and host by rank."""
    wish = ("--memory", "10GiB", "--tp", str(tp), "--experts", "offload", "--kv-reserve-tokens", "4096")
    found, made = plan(capsys, *wish, "--dtype", "bfloat16", "--device", "cpu"), planned(NVFP4, tp)
    assert 8 <= found["expert_slots"] < 256
    assert found["tokens_per_s"] is None
    for rank, each in enumerate(found["each"]):
        sizes = sizes_of(made.model, made.specs, made.partitions, rank)
        assert each["host_bytes"] == sizes.bank_bytes
        assert each["weights_bytes"]["experts"] == sizes.device_bytes(found["expert_slots"])
        rows = found["max_num_seqs"] + 1 + found["snapshot_rows"]
        used = each["total_weights_bytes"] + rows * each["state_row_bytes"] + 4096 * each["kv_token_bytes"]
        assert used <= each["memory_bytes"] < used + 2 * sizes.slot_bytes
    assert found["kv_tokens"] >= 4096


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--memory", "3GiB", "--experts", "offload"], "a token wants 8 of 256 experts at once"),
        (["--gpu-spec", "24GiB:936GB/s,16GiB:288GB/s", "--tp", "3"], "--tp names 3"),
        (
            ["--gpu-spec", "4GiB:936GB/s", "--experts", "resident"],
            "the nearest that fits is an even split over 6 devices",
        ),
        (["--memory", "24GiB,1GB,2GB", "--tp", "2"], "3 sizes for 2 ranks"),
        (["--memory", "lots"], "'lots' is no size"),
        (["--requests", "0"], "'0' is not a whole number"),
    ],
)
def test_wrong_wishes_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", str(GEOMETRY / NVFP4), "--dtype", "bfloat16", "--device", "cpu", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
