"""The figures as a plot: throughput and latency over batch size or rate. Needs matplotlib, imported only here."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.commands.bench.load import PERCENTILES
from shardwise.commands.bench.report import Report
from shardwise.config import ConfigError

SUFFIXES = (".svg", ".png")
PANEL_INCHES = (5.2, 4.0)
DOTS_AN_INCH = 150


def check_plot(path: Path) -> None:
    """Raises ConfigError, before anything is measured, if `path` could not be drawn in the end."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path}: give a name that ends in {' or '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {path}: matplotlib is not installed; pip install shardwise[plot]")


def draw(report: Report, path: Path) -> None:
    """Write `path`, SVG or PNG by its suffix. Raises ConfigError if there is nothing to draw or no place to write."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = [*([decode_speed, decode_step] if report.decode else ())]
    panels += [load_speed, load_first, load_between] if finite(report) else []
    if not panels:
        raise ConfigError(f"--plot {path}: no figures of decoding, nor of a load at a finite rate, to draw")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "shardwise"}):
        width, height = PANEL_INCHES
        figure = Figure(figsize=(width * len(panels), height), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            panel(report, axes)
            axes.grid(alpha=0.3)
            axes.set_ylim(bottom=0)
            axes.legend()
        figure.suptitle(report.name)
        try:
            figure.savefig(path, dpi=DOTS_AN_INCH)
        except OSError as error:
            raise ConfigError(f"--plot {path}: {error.strerror or error}") from None


def finite(report: Report) -> Sequence[Any]:
    """Figures of the load that have a place on an axis of rates."""
    return sorted((one for one in report.load if not math.isinf(one.rate)), key=lambda one: one.rate)


def decode_speed(report: Report, axes: Any) -> None:
    known = [one for one in report.decode if one.tokens_per_s]
    axes.plot([one.batch for one in known], [one.tokens_per_s for one in known], marker="o", label="measured")
    limited = [one for one in report.decode if one.limit_tokens_per_s]
    if limited:
        axes.plot(
            [one.batch for one in limited], [one.limit_tokens_per_s for one in limited], "--", label="limit by bytes"
        )
    batches(report, axes)
    axes.set_ylabel("decode, tokens/s")


def decode_step(report: Report, axes: Any) -> None:
    known = [(one.batch, 1e3 * one.batch / one.tokens_per_s) for one in report.decode if one.tokens_per_s]
    axes.plot([batch for batch, _ in known], [step_ms for _, step_ms in known], marker="o", label="measured")
    batches(report, axes)
    axes.set_ylabel("time of a decode step, ms")


def batches(report: Report, axes: Any) -> None:
    sizes = sorted({one.batch for one in report.decode})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("batch, requests at once")


def load_speed(report: Report, axes: Any) -> None:
    there = finite(report)
    rates = [one.rate for one in there]
    axes.plot(rates, [one.answer_tokens_per_s for one in there], marker="o", label="answers")
    axes.plot(rates, [one.tokens_per_s for one in there], marker="o", label="prompts and answers")
    axes.set_xlabel("offered load, requests/s")
    axes.set_ylabel("throughput, tokens/s")


def load_first(report: Report, axes: Any) -> None:
    latency(axes, {one.rate: one.first_token_s for one in finite(report)})
    axes.set_ylabel("time to first token, ms")


def load_between(report: Report, axes: Any) -> None:
    latency(axes, {one.rate: one.between_tokens_s for one in finite(report)})
    axes.set_ylabel("time between tokens, ms")


def latency(axes: Any, by_rate: Mapping[float, Mapping[int, float] | None]) -> None:
    """A line a percentile, over rates at which something was answered."""
    known = {rate: found for rate, found in by_rate.items() if found}
    for wanted in PERCENTILES:
        axes.plot(list(known), [1e3 * found[wanted] for found in known.values()], marker="o", label=f"p{wanted}")
    axes.set_xlabel("offered load, requests/s")
