"""Facts of devices: specs, profiles, selection by index and UUID; each wrong one as a line with the way out."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.config import ConfigError
from shardwise.parallel import probe
from shardwise.parallel.devices import (
    REACHED,
    UNKNOWN,
    Device,
    Link,
    Machine,
    load_profile,
    parse_gpu_spec,
    profile_text,
    refuse_busy,
    select,
)

GIB = 1 << 30
HERE = (
    Device("RTX 3090 Ti", 24 * GIB, 9e11, 8e13, index=0, uuid="GPU-8f2c1111-aaaa"),
    Device("RTX 4060 Ti", 16 * GIB, 2.5e11, 4e13, index=1, uuid="GPU-8f9d2222-bbbb"),
    Device("H200", 141 * GIB, 4e12, 8e14, index=2, uuid="GPU-01aa3333-cccc"),
)


def test_a_spec_names_memory_bandwidth_and_perhaps_a_rate():
    found = parse_gpu_spec("24GiB:936GB/s, 16GB:0.288TB/s:22,80GiB:2TB/s:312TFLOPS").devices
    assert [device.memory_bytes for device in found] == [24 * GIB, 16 * 10**9, 80 * GIB]
    assert [device.read_bytes_per_s for device in found] == pytest.approx(
        [936e9 * REACHED, 288e9 * REACHED, 2e12 * REACHED]
    )
    assert [device.flops_per_s for device in found[1:]] == [22e12, 312e12]


@pytest.mark.parametrize(
    "text",
    ["", "24GiB", "24GiB:936", "24:936GB/s", "24GiB:936GB/s,", "24GiB:936GB/s:x", "24GiB:936GB/s:1:2", "0GiB:1GB/s"],
)
def test_a_wrong_spec_is_shown_a_right_one(text: str):
    with pytest.raises(ConfigError, match=re.escape("is no device; write 24GiB:936GB/s")):
        parse_gpu_spec(text)


def test_a_profile_is_read_as_it_is_written(tmp_path: Path):
    file = tmp_path / "cards.toml"
    file.write_text(profile_text(Machine(HERE[:2], Link(2e-5, 1e10))))
    found = load_profile(file)
    assert [device.name for device in found.devices] == ["RTX 3090 Ti", "RTX 4060 Ti"]
    assert [device.memory_bytes for device in found.devices] == [24 * GIB, 16 * GIB]
    assert found.devices[1].read_bytes_per_s == pytest.approx(2.5e11)
    assert (found.link.latency_s, found.link.bytes_per_s) == pytest.approx((2e-5, 1e10))


CARD = '[[device]]\nname = "a"\nmemory_gib = 24\nread_gb_per_s = 800\ntflops = 80\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no [[device]] in it"),
        ("[[device]]\nmemory_gib = 1", "number 0 has no name"),
        (CARD + CARD.replace("tflops = 80\n", ""), "[[device]] number 1 has no tflops"),
        (CARD.replace("24", "-24"), "memory_gib = -24"),
        (CARD.replace("800", '"fast"'), "read_gb_per_s = 'fast'"),
        (CARD + "memory = 3", "unknown field 'memory'"),
        (CARD + "[link]\nlatency_us = 5", "[link] has no gb_per_s"),
        ("[[device", "cards.toml"),
    ],
)
def test_a_profile_with_a_fault_says_where(text: str, words: str, tmp_path: Path):
    (tmp_path / "cards.toml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        load_profile(tmp_path / "cards.toml")
    assert "\n" not in str(error.value)


def test_gpus_by_index_uuid_and_its_beginning():
    assert select(["1", "0"], HERE) == (HERE[1], HERE[0])
    assert select(["GPU-01aa3333-cccc"], HERE) == (HERE[2],)
    assert select(["gpu-8f9", "01aa"], HERE) == (HERE[1], HERE[2])
    assert select(["0", "0"], HERE) == (HERE[0], HERE[0])


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (["3"], "'3' is not there; this machine has 0: RTX 3090 Ti (GPU-8f2c1111)"),
        (["0", "GPU-77"], "--gpu 0,GPU-77: 'GPU-77' is not there"),
        (["GPU-8f"], "'GPU-8f' begins the UUIDs of 2 GPUs"),
        (["GPU-"], "is not there"),
    ],
)
def test_a_gpu_that_is_not_there(wanted: list[str], words: str):
    with pytest.raises(ConfigError, match=re.escape(words)):
        select(wanted, HERE)
    with pytest.raises(ConfigError, match="no GPU"):
        select(["0"], ())


def test_a_busy_gpu_is_refused_with_what_others_hold():
    refuse_busy([replace(HERE[0], held_bytes=2 * GIB)])
    with pytest.raises(ConfigError, match=re.escape("--gpu 0: RTX 3090 Ti is busy: 20.0 of 24.0 GiB")):
        refuse_busy([HERE[1], replace(HERE[0], held_bytes=20 * GIB)])


def test_machines_know_what_they_are():
    assert Machine((HERE[0], replace(HERE[0], index=1, uuid="x"))).uniform
    assert not Machine(HERE[:2]).uniform
    assert not Machine((HERE[0], replace(HERE[0], index=1, held_bytes=4 * GIB))).uniform
    assert Machine((HERE[0], HERE[0])).doubled
    assert not Machine(HERE).doubled
    assert not Machine(tuple(replace(device, index=None) for device in HERE)).doubled


def test_what_a_probe_says_arrives_as_it_was():
    """Speeds that are not known, too: they are infinite, which JSON cannot say."""
    report = probe.Report([Device("card", 24 << 30, UNKNOWN, UNKNOWN, index=1), Device("other", 1 << 30, 9e11, 7e13)])
    assert probe.decoded(probe.encoded(report)) == report


def test_a_probe_without_gpus_finds_none_and_one_that_fails_says_why(monkeypatch: pytest.MonkeyPatch):
    assert probe.ask().devices == []
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match=re.escape("the GPUs could not be probed: ")) as error:
        probe.ask()
    assert "\n" not in str(error.value)
