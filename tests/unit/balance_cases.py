"""Geometries, problems and made-up devices for tests of splits."""

from functools import lru_cache
from pathlib import Path

import msgspec

from shardwise.config import ServeConfig
from shardwise.engine.build import Blueprint, blueprint
from shardwise.engine.decide import problem_of
from shardwise.parallel.choice import Objective, Problem
from shardwise.parallel.devices import Device, Link, Machine

GEOMETRY = Path(__file__).parents[2] / "benchmarks" / "geometry"
GIB = 1 << 30


@lru_cache(maxsize=16)
def planned(name: str, ranks: int = 1, ratio: tuple[float, ...] = ()) -> Blueprint:
    """A geometry of benchmarks/, on GPUs that need not be here."""
    serve = ServeConfig(model=str(GEOMETRY / name), load_format="dummy", ranks=ranks, ratio=ratio)
    return blueprint(serve, "cuda")


def problem(name: str, objective: Objective = "speed", requests: int = 1, **options: int) -> Problem:
    serve = ServeConfig(model=str(GEOMETRY / name), load_format="dummy", objective=objective)
    return problem_of(msgspec.structs.replace(serve, **options), planned(name), requests)


def machine(*facts: tuple[float, float], latency_s: float = 1e-6, kernel_s: float = 1e-9) -> Machine:
    """Devices of (GiB, GB/s), nearly without costs but for bytes."""
    devices = tuple(
        Device(f"{gib} GiB at {rate}", int(gib * GIB), rate * 1e9, 1e15, kernel_s, index=n)
        for n, (gib, rate) in enumerate(facts)
    )
    return Machine(devices, Link(latency_s, 1e12), measured=True)
