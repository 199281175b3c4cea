"""Facts of the devices that ranks run on: measured (parallel/probe.py), given as a spec, or read from a profile.

Nothing here touches a device. Bytes, seconds, bytes a second and floating-point operations a second throughout.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.config import ConfigError

UNITS = {"GiB": 1 << 30, "GB": 10**9, "MiB": 1 << 20, "MB": 10**6, "TB": 10**12}
FLOPS_A_BYTE = 75.0  # of cards in general: what a spec without a matmul rate is taken to do
REACHED = 0.8  # of a data sheet's bandwidth, by kernels that stream plain weights: 3.8 of 4.8 TB/s on an H200
KERNEL_S = 1.5e-6  # fitted to captured steps of 35B-A3B on an H200 (benchmarks/forecast.py)
SPEC = "24GiB:936GB/s,16GiB:288GB/s, with :TFLOPS behind each if known"
UNKNOWN = float("inf")  # the speed of a device that nobody has said or measured
BUSY_SHARE = 0.5  # of a device's memory held by others, from which on it is busy


@dataclass(frozen=True)
class Device:
    """One device. memory_bytes: all of it; held_bytes: what other processes hold of it.

    read_bytes_per_s: what kernels get when they stream weights. kernel_s: what one kernel of a captured step costs
    beside its bytes. index: torch's number of it, None where there is no such device on this machine.
    """

    name: str
    memory_bytes: int
    read_bytes_per_s: float
    flops_per_s: float
    kernel_s: float = KERNEL_S
    held_bytes: int = 0
    index: int | None = None
    uuid: str = ""


@dataclass(frozen=True)
class Link:
    """What collectives run over. latency_s: of a small all-reduce between two devices, by the vendor's library; peers:
    whether every device reaches the others' memory."""

    latency_s: float = 25e-6
    bytes_per_s: float = 10e9
    peers: bool = False


PEER_LATENCY_S = 3.3e-6  # of a small sum over peers' memory, between two H200s (tests.gpu.peer_case)
HOST_LINK = Link(latency_s=250e-6, bytes_per_s=3e9)  # through the host's memory, between ranks that share a device


@dataclass(frozen=True)
class Machine:
    """The devices that may be used, one a rank, in order. `measured`: not taken on somebody's word."""

    devices: tuple[Device, ...]
    link: Link = Link()
    measured: bool = False

    def only(self, chosen: Sequence[int]) -> "Machine":
        """This machine with the devices at places `chosen`."""
        return replace(self, devices=tuple(self.devices[place] for place in chosen))

    def over_peers(self) -> "Machine":
        """This machine with small sums over peers' memory, where that is reached."""
        least_s = min(self.link.latency_s, PEER_LATENCY_S)
        return replace(self, link=replace(self.link, latency_s=least_s)) if self.link.peers else self

    @property
    def known(self) -> bool:
        """Whether the speed of every device is known."""
        return all(0 < device.read_bytes_per_s < UNKNOWN for device in self.devices)

    @property
    def uniform(self) -> bool:
        """Whether all devices are of one kind, so that nothing is gained by an uneven split."""
        kinds = {
            (device.name, device.memory_bytes, device.read_bytes_per_s, device.flops_per_s) for device in self.devices
        }
        return len(kinds) == 1 and not any(device.held_bytes > device.memory_bytes // 50 for device in self.devices)

    @property
    def doubled(self) -> bool:
        """Whether some device is listed twice."""
        there = [device.index for device in self.devices if device.index is not None]
        return len(set(there)) < len(there)


def size_bytes(text: str) -> int | None:
    """Bytes of "24GiB" and such; None if it is no size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB|TB)\s*", text)
    return int(float(match[1]) * UNITS[match[2]]) if match else None


def parse_gpu_spec(text: str) -> Machine:
    """The machine of `--gpu-spec 24GiB:936GB/s,16GiB:288GB/s[:TFLOPS]`; bandwidth as data sheets have it.

    Raises ConfigError.
    """
    devices = list[Device]()
    for part in text.split(","):
        fields = part.strip().split(":")
        memory = size_bytes(fields[0])
        read = size_bytes(fields[1].removesuffix("/s")) if len(fields) > 1 and fields[1].endswith("/s") else None
        flops = re.fullmatch(r"(\d+(?:\.\d+)?)(?:TFLOPS)?", fields[2]) if len(fields) == 3 else None
        if not memory or not read or len(fields) > 3 or (len(fields) == 3 and (not flops or not float(flops[1]))):
            raise ConfigError(f"--gpu-spec {text}: {part.strip()!r} is no device; write {SPEC}")
        rate = float(flops[1]) * 1e12 if flops else read * FLOPS_A_BYTE
        devices.append(Device(f"{fields[0]} at {fields[1]}", memory, read * REACHED, rate))
    return Machine(tuple(devices))


def load_profile(path: Path) -> Machine:
    """The machine of a TOML file: a [[device]] for each with the fields of FIELDS, and [link] if known.

    Raises ConfigError naming the field that is missing or no number.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--device-profile {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--device-profile {path}: {error}") from None
    entries = data.get("device")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"--device-profile {path}: no [[device]] in it; give one for each rank")
    devices = tuple(_profiled(path, n, entry) for n, entry in enumerate(entries))
    link = Link()
    if given := data.get("link"):
        where = f"--device-profile {path}: [link]"
        link = Link(_number(where, given, "latency_us") * 1e-6, _number(where, given, "gb_per_s") * 1e9)
    return Machine(devices, link)


def _profiled(path: Path, n: int, entry: Mapping[str, Any]) -> Device:
    where = f"--device-profile {path}: [[device]] number {n}"
    name = entry.get("name")
    if not isinstance(name, str):
        raise ConfigError(f'{where} has no name; write name = "RTX 3090 Ti"')
    known = {"name", "memory_gib", "read_gb_per_s", "tflops", "kernel_us"}
    if unknown := sorted(set(entry) - known):
        raise ConfigError(f"{where} ({name}): unknown field {unknown[0]!r}; expected {', '.join(sorted(known))}")
    return Device(
        name,
        int(_number(where, entry, "memory_gib") * (1 << 30)),
        _number(where, entry, "read_gb_per_s") * 1e9,
        _number(where, entry, "tflops") * 1e12,
        _number(where, entry, "kernel_us", KERNEL_S * 1e6) * 1e-6,
    )


def _number(where: str, entry: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value = entry.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        what = f"has no {field}" if value is None else f"has {field} = {value!r}"
        raise ConfigError(f"{where} {what}; give a number above 0")
    return float(value)


def profile_text(machine: Machine) -> str:
    """`machine` as a profile that `load_profile` reads."""
    lines = list[str]()
    for device in machine.devices:
        lines += [
            "[[device]]",
            f'name = "{device.name}"',
            f"memory_gib = {device.memory_bytes / (1 << 30):.3f}",
            f"read_gb_per_s = {device.read_bytes_per_s / 1e9:.1f}",
            f"tflops = {device.flops_per_s / 1e12:.2f}",
            f"kernel_us = {device.kernel_s * 1e6:.2f}",
            "",
        ]
    link = machine.link
    return "\n".join(
        [*lines, "[link]", f"latency_us = {link.latency_s * 1e6:.2f}", f"gb_per_s = {link.bytes_per_s / 1e9:.2f}", ""]
    )


def select(wanted: Sequence[str], there: Sequence[Device]) -> tuple[Device, ...]:
    """The devices that `--gpu` names, by index, UUID, or a prefix of one; a device may be named twice.

    Raises ConfigError for one that is not there, and for a prefix of several.
    """
    flag = f"--gpu {','.join(wanted)}"
    listed = ", ".join(f"{device.index}: {device.name} ({device.uuid[:12]})" for device in there) or "no GPU"
    chosen = list[Device]()
    for text in wanted:
        if text.isdecimal():
            found = [device for device in there if device.index == int(text)]
        else:
            low = text.lower().removeprefix("gpu-")
            found = [device for device in there if low and device.uuid.lower().removeprefix("gpu-").startswith(low)]
        if not found:
            raise ConfigError(f"{flag}: {text!r} is not there; this machine has {listed}")
        if len(found) > 1:
            raise ConfigError(f"{flag}: {text!r} begins the UUIDs of {len(found)} GPUs; give more of it ({listed})")
        chosen += found
    return tuple(chosen)


def refuse_busy(devices: Sequence[Device]) -> None:
    """Raises ConfigError for a device of whose memory others hold more than BUSY_SHARE."""
    for device in devices:
        if device.held_bytes > device.memory_bytes * BUSY_SHARE:
            raise ConfigError(
                f"--gpu {device.index}: {device.name} is busy: {device.held_bytes / (1 << 30):.1f} of "
                f"{device.memory_bytes / (1 << 30):.1f} GiB are held by other processes; end them or name another GPU"
            )
