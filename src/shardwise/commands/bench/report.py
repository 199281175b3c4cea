"""What was measured, as tables for people and as JSON for programs."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwise.commands.bench.limits import Bandwidth
from shardwise.commands.bench.load import PERCENTILES, LoadFigures
from shardwise.commands.bench.speed import Decode, Prefill


@dataclass
class Report:
    """All figures of one run. target: "engine" or the URL. notes: what a reader of the figures must know."""

    model: str
    target: str
    ranks: int | None = None
    bandwidth: Bandwidth | None = None
    decode: list[Decode] = field(default_factory=list)
    prefill: list[Prefill] = field(default_factory=list)
    load: list[LoadFigures] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.model}: {f'{self.ranks} rank(s)' if self.ranks else self.target}"

    def as_json(self) -> dict[str, Any]:
        """Plain values; an infinite rate is null, as JSON has none."""
        made: dict[str, Any] = {"shardwise": version("shardwise"), **asdict(self)}
        for kind in ("decode", "prefill", "load"):
            made[kind] = [{**asdict(one), "share_of_limit": one.share} for one in getattr(self, kind)]
        for one in made["load"]:
            one["rate"] = None if math.isinf(one["rate"]) else one["rate"]
        return made


def per_cent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def milliseconds(values: Mapping[int, float] | None) -> str:
    """Percentiles in ms, divided by slashes."""
    return "-" if values is None else " / ".join(f"{values[one] * 1e3:,.4g}" for one in PERCENTILES)


def decode_table(report: Report) -> Table:
    made = Table(
        "batch", "tokens/s", "tokens/s a request", "ms a step", "GB a step", "limit, tokens/s", "of the limit",
        title=f"{report.name}: decode", title_justify="left",
    )  # fmt: skip
    for one in report.decode:
        speed = one.tokens_per_s
        made.add_row(
            str(one.batch), figure(speed), figure(speed and speed / one.batch),
            "-" if not speed else f"{1e3 * one.batch / speed:.3g}",
            "-" if one.step_bytes is None else f"{one.step_bytes / 1e9:.3g}",
            figure(one.limit_tokens_per_s), per_cent(one.share),
        )  # fmt: skip
    return made


def prefill_table(report: Report) -> Table:
    made = Table(
        "prompts", "wall, ms", "tokens/s", "limit, ms", "of the limit",
        title=f"{report.name}: prefill, until all have their first token", title_justify="left",
    )  # fmt: skip
    for one in report.prefill:
        limit_ms = None if one.limit_s is None else one.limit_s * 1e3
        made.add_row(
            f"{one.batch} x {one.prompt_tokens:,.0f}", figure(one.wall_s * 1e3), figure(one.tokens_per_s),
            figure(limit_ms), per_cent(one.share),
        )  # fmt: skip
    return made


def load_table(report: Report) -> Table:
    """A column a rate, since there is much to say of each."""
    rates = ["all at once" if math.isinf(one.rate) else f"{one.rate:g} requests/s" for one in report.load]
    named = "p" + "/".join(map(str, PERCENTILES))
    made = Table("offered", *rates, title=f"{report.name}: serving load", title_justify="left")
    rows = {
        "answered": lambda one: f"{one.answered} of {one.requests}",
        "requests/s": lambda one: f"{one.requests_per_s:.3g}",
        "tokens of answers/s": lambda one: figure(one.answer_tokens_per_s),
        "tokens of prompts and answers/s": lambda one: figure(one.tokens_per_s),
        "requests at once, mean": lambda one: figure(one.mean_at_once),
        "limit at so many, tokens/s": lambda one: figure(one.limit_tokens_per_s),
        "of the limit": lambda one: per_cent(one.share),
        f"first token (TTFT), ms, {named}": lambda one: milliseconds(one.first_token_s),
        f"between tokens (ITL), ms, {named}": lambda one: milliseconds(one.between_tokens_s),
        f"whole answer, ms, {named}": lambda one: milliseconds(one.whole_s),
    }
    for name, text in rows.items():
        made.add_row(name, *map(text, report.load))
    return made


def show(report: Report, console: Console) -> None:
    """Print the tables of what was measured, and the notes."""
    for figures, table in (
        (report.decode, decode_table), (report.prefill, prefill_table), (report.load, load_table),
    ):  # fmt: skip
        if figures:
            console.print(table(report))
    for one in report.load:
        for fault, count in one.failures.items():
            console.print(f"rate {one.rate:g}: {count} failed: {fault}", markup=False, highlight=False)
    for note in report.notes:
        console.print(note, markup=False, highlight=False)
