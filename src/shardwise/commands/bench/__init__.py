"""`shardwise bench`: decode and prefill speed, or a serving load, of an engine of its own or of a server at a URL.

An engine is measured without HTTP in between, and each figure stands beside the most that the bytes it must read allow.
"""

import argparse
import asyncio
import json
import random
from pathlib import Path

import msgspec
from rich.console import Console

from shardwise.commands.bench.limits import ByteLimit, byte_limit, measure_bandwidth
from shardwise.commands.bench.load import figures, mix, offer
from shardwise.commands.bench.plot import check_plot, draw
from shardwise.commands.bench.report import Report, show
from shardwise.commands.bench.speed import Stopwatch, check_fits
from shardwise.commands.bench.target import EngineTarget, Target
from shardwise.commands.bench.url import UrlTarget, make_client
from shardwise.commands.prepare import check_split, resolve_model, set_up_logging, settle_split
from shardwise.config import ConfigError, ServeConfig
from shardwise.engine.build import blueprint
from shardwise.engine.client import EngineFailed
from shardwise.engine.group import running_engine
from shardwise.parallel.probe import ProbeError

PREFILLS = ((1, 1024), (1, 4096), (8, 2048))  # prompts, tokens of each
WARM_UP = (32, 8)  # tokens of a prompt and an answer before a load


async def measure(target: Target, options: argparse.Namespace, seed: int, report: Report, limit: ByteLimit | None):
    """Put into `report` what `options` ask for. Raises ConfigError for what the target cannot take, or EngineFailed."""
    if options.load:
        await measure_load(target, options, seed, report, limit)
        return
    long, short, prompt = options.new_tokens, options.short_tokens, options.prompt_tokens
    check_fits(options.batch, prompt + long, target.limits, "--prompt-tokens or --new-tokens")
    watch = Stopwatch(target, seed, options.repeats)
    chosen = PREFILLS if options.prefill is None else options.prefill
    taken = list[tuple[int, int]]()
    for batch, tokens in chosen:
        try:
            check_fits([batch], tokens + 1, target.limits, "--prefill")
            taken.append((batch, tokens))
        except ConfigError as error:
            if options.prefill is not None:
                raise
            report.notes.append(f"prefill of {batch} x {tokens} left out: {error}")
    for batch in options.batch:
        report.decode.append(await watch.decode(batch, prompt, short, long, limit))
        if report.decode[-1].tokens_per_s is None:
            report.notes.append(f"batch {batch}: {long} tokens took no longer than {short}; raise --new-tokens")
    for batch, tokens in taken:
        report.prefill.append(await watch.prefill(batch, tokens, limit))


async def measure_load(
    target: Target, options: argparse.Namespace, seed: int, report: Report, limit: ByteLimit | None
) -> None:
    """The load at every rate asked for, one after the other. Raises EngineFailed if nothing is answered at all."""
    trial = await target.answer(target.prompt(random.Random(seed), WARM_UP[0]), WARM_UP[1])
    if trial.fault:
        raise EngineFailed(f"a request of {WARM_UP[0]} + {WARM_UP[1]} tokens: {trial.fault}")
    for number, rate in enumerate(options.rate):
        asked = mix(rate, options.requests, options.mix, seed, target.limits.max_model_len)
        # Other texts at each rate, of the same lengths: else a prefix cache would know them.
        report.load.append(figures(rate, await offer(target, asked, seed + number), limit))


async def bench_engine(options: argparse.Namespace, config: ServeConfig, limit: ByteLimit | None, report: Report):
    """Measure an engine of our own."""
    vocab_size = check_split(config).vocab_size
    async with running_engine(config) as client:
        await client.wait_ready()
        await measure(EngineTarget(client, vocab_size), options, config.seed, report, limit)


async def bench_url(options: argparse.Namespace, config: ServeConfig) -> Report:
    """Measure the server at `options.url`; MODEL, if given, is what it serves on this machine's devices."""
    async with make_client(options.url, options.api_key) as client:
        target = await UrlTarget.connect(client, options.model_flag or "", options.api)
        report, limit = Report(target.model, options.url, notes=target.notes), None
        if options.model_name:
            config = resolve_model(config)
            if not any(Path(config.model).glob("*.safetensors")):
                config = msgspec.structs.replace(config, load_format="dummy")  # config.json says all that is needed
            limit = find_limit(config, report)
        else:
            report.notes.append("limits are not known; for them give MODEL, a folder of what is served on this machine")
        await measure(target, options, config.seed, report, limit)
    return report


def find_limit(config: ServeConfig, report: Report) -> ByteLimit | None:
    """The limit of the ranks of `config` on this machine, noted in `report`; None if its devices cannot be asked."""
    made = blueprint(config)
    try:
        bandwidth = measure_bandwidth(config, made.device_type)
    except ProbeError as error:
        report.notes.append(f"limits are not known: {error}")
        return None
    report.bandwidth = bandwidth
    speeds = ", ".join(f"{speed / 1e9:,.4g}" for speed in bandwidth.read_bytes_per_s)
    report.notes.append(
        f"limit: the bytes that a step must read (weights once, the experts chosen, keys and values, states) at "
        f"{speeds} GB/s a rank, measured: {bandwidth.source}; what a cache holds can be faster than that"
    )
    if config.experts in ("offload", "hybrid"):
        report.notes.append("limits are those of a device that holds all experts")
    return byte_limit(config, made, bandwidth)


def engine_report(options: argparse.Namespace, config: ServeConfig) -> Report:
    """Measure the device, then the engine on it."""
    config = settle_split(resolve_model(config))
    check_split(config)
    report = Report(config.served_model_name[0], "engine", config.ranks)
    limit = find_limit(config, report)
    asyncio.run(bench_engine(options, config, limit, report))
    return report


def check_options(options: argparse.Namespace) -> None:
    """Raises ConfigError for flags that do not go together, and files that could not be written in the end."""
    if options.short_tokens >= options.new_tokens:
        raise ConfigError(
            f"--short-tokens {options.short_tokens}: decode speed is told by the difference to "
            f"--new-tokens {options.new_tokens}; give fewer"
        )
    for flag, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{flag} {path}: there is no folder {Path(path).absolute().parent}")
    if options.plot is not None:
        check_plot(options.plot)


def run(options: argparse.Namespace, config: ServeConfig) -> int:
    """Print tables, and write JSON and a plot if asked; 1 if the engine or the server failed. Raises ConfigError."""
    check_options(options)
    set_up_logging(config)
    try:
        report = asyncio.run(bench_url(options, config)) if options.url else engine_report(options, config)
    except EngineFailed as error:
        Console(stderr=True).print(f"shardwise: error: {error}", markup=False)
        return 1
    show(report, Console(width=max(110, Console().width)))
    if options.json:
        options.json.write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
    if options.plot:
        draw(report, options.plot)
    return int(any(not one.answered for one in report.load))
