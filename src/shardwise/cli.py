"""The command line: flags to a checked ServeConfig, and the subcommand that gets it.

Nothing heavy is imported before the flags are found good, so that a wrong one is told within a blink.
"""

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from shardwise.config import ConfigError, ServeConfig

COMMANDS = {
    "serve": "serve a model through the OpenAI API",
    "plan": "print what every rank would hold, without loading anything",
    "verify": "compare greedy answers at one rank and at --tp ranks",
    "chat": "talk to a model in the terminal",
    "bench": "measure prefill and decode speed",
    "quantize": "write a checkpoint's FP8 or NVFP4 sibling",
    "launch": "configure a coding agent for a running server",
    "demo": "serve the miniature over two ranks and check its answers",
}
OWN_OPTIONS = ("launch", "quantize", "demo")  # commands that take no ServeConfig
LAYOUTS = ("fp8", "nvfp4", "nvfp4-ct", "mixed")
RATIO_GROUP = re.compile(r"(?P<group>[a-z_]+)=(?P<weights>.+)")


class Parser(argparse.ArgumentParser):
    """Wrong flags are a ConfigError: one line, without the usage above it."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` lists the options")


def number(low: float, high: float, kind: type = int) -> Any:
    """An argparse type: a `kind` from `low` to `high`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            what = "a whole number" if kind is int else "a number"
            limits = f"of {low} or more" if high == float("inf") else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} {limits}")
        return value

    return parse


COUNT = number(1, float("inf"))


def expert_mode(text: str) -> str:
    """Where experts are; `fused` is another server's word for resident."""
    return "resident" if text == "fused" else text


def ratio(text: str) -> tuple[str, tuple[float, ...]]:
    """`5,3` for all groups of dimensions, or `expert=5,3` for one. Zero is a rank that owns nothing of the group."""
    match = RATIO_GROUP.fullmatch(text)
    group, weights = (match["group"], match["weights"]) if match else ("", text)
    try:
        parsed = tuple(float(weight) for weight in re.split("[,:]", weights))
    except ValueError:
        parsed = ()
    if not parsed or not all(0 <= weight < float("inf") for weight in parsed) or not sum(parsed):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of weights such as 5,3 or expert=5,3")
    return group, parsed


def names(text: str) -> tuple[str, ...]:
    """`0,1` or `GPU-8f2c,1`."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 0,1")
    return parts


def choices(field: str) -> list[str]:
    """What ServeConfig allows for `field`."""
    info = next(info for info in msgspec.inspect.type_info(ServeConfig).fields if info.name == field)  # pyright: ignore
    return sorted(info.type.values)


def model_options(parser: argparse.ArgumentParser) -> None:
    """Which model, split how, run how. Destinations are ServeConfig's field names; unset ones keep its defaults."""
    parser.add_argument("model_name", metavar="MODEL", nargs="?", help="local folder or hub id; default: the miniature")
    group = parser.add_argument_group("model")
    unset: dict[str, Any] = {"default": argparse.SUPPRESS}
    group.add_argument("--model", "--model-path", dest="model_flag", metavar="MODEL", help="the same, as a flag")
    group.add_argument("--load-format", choices=choices("load_format"), help="dummy: made-up weights", **unset)
    group.add_argument("--dtype", choices=choices("dtype"), help="of activations and plain weights", **unset)
    group.add_argument("--seed", type=number(0, 2**63 - 1), **unset)
    group = parser.add_argument_group("split")
    group.add_argument(
        "-tp",
        "--tp",
        "--tp-size",
        "--tensor-parallel-size",
        dest="ranks",
        type=COUNT,
        metavar="N",
        help="ranks",
        **unset,
    )
    group.add_argument(
        "--ratio", type=ratio, action="append", metavar="5,3", help="a weight per rank, or GROUP=5,3; may be repeated"
    )
    group.add_argument("--gpu", "--gpus", type=names, metavar="0,1", help="by index, UUID or its beginning", **unset)
    group.add_argument(
        "--gpu-spec", metavar="24GiB:936GB/s,...", help="facts of the devices, [:TFLOPS] behind; not measured", **unset
    )
    group.add_argument("--device-profile", metavar="FILE", help="the same, as TOML", **unset)
    group.add_argument("--objective", choices=choices("objective"), help="of a split that is chosen", **unset)
    group = parser.add_argument_group("pictures")
    group.add_argument("--vision", choices=choices("vision"), help="tower: cut, whole on each rank, or none", **unset)
    group.add_argument(
        "--text-model-only", dest="vision", action="store_const", const="off", help="the same as --vision off", **unset
    )
    group.add_argument("--vision-cache-tokens", type=COUNT, metavar="TOKENS", help="of pictures to keep", **unset)
    group.add_argument("--max-image-pixels", type=COUNT, metavar="PIXELS", help="scale larger ones down", **unset)
    group = parser.add_argument_group("execution")
    group.add_argument("--device", choices=choices("device"), **unset)
    group.add_argument("--kernels", choices=choices("kernels"), **unset)
    group.add_argument(
        "--no-graphs", "--enforce-eager", dest="graphs", action="store_false", help="launch kernels one by one", **unset
    )
    group.add_argument("--overlap", action=argparse.BooleanOptionalAction, help="start kernels early (sm_90)", **unset)
    group.add_argument("--shortlist", action=argparse.BooleanOptionalAction, help="bound logits first", **unset)
    group.add_argument("--comm", choices=choices("comm"), help="how ranks add up; auto measures", **unset)
    group = parser.add_argument_group("capacity")
    group.add_argument("--max-model-len", "--context-length", type=COUNT, metavar="TOKENS", help="a request", **unset)
    group.add_argument("--max-num-seqs", "--max-running-requests", type=COUNT, metavar="N", help="at once", **unset)
    group.add_argument("--max-num-batched-tokens", type=COUNT, metavar="TOKENS", help="in one step", **unset)
    group.add_argument(
        "--gpu-memory-utilization", "--mem-fraction-static", type=number(0.01, 1, float), metavar="SHARE", **unset
    )
    group.add_argument("--kv-tokens", type=COUNT, metavar="TOKENS", help="size of the KV cache", **unset)
    group.add_argument("--kv-cache-dtype", choices=choices("kv_cache_dtype"), help="of keys and values", **unset)
    group.add_argument("--page-tokens", type=number(1, 4096), metavar="TOKENS", help="of a page of KV cache", **unset)
    expert_options(parser)
    group = parser.add_argument_group("prefix cache")
    group.add_argument(
        "--prefix-cache", action=argparse.BooleanOptionalAction, help="keep what prompts have in common", **unset
    )
    group.add_argument("--snapshot-rows", type=COUNT, metavar="N", help="recurrent states to keep", **unset)
    group.add_argument(
        "--snapshot-every", type=COUNT, metavar="TOKENS", help="of a prompt, besides the ends of turns", **unset
    )
    group.add_argument(
        "--host-cache-gib", type=number(0, 1 << 20, float), metavar="GIB", help="of each rank's host memory", **unset
    )
    parser.add_argument("--log-level", choices=choices("log_level"), **unset)


def expert_options(parser: argparse.ArgumentParser) -> None:
    """Where experts are, and what they may take."""
    unset: dict[str, Any] = {"default": argparse.SUPPRESS}
    group = parser.add_argument_group("experts")
    group.add_argument(
        "--experts", "--moe-backend", type=expert_mode, choices=choices("experts"), metavar="MODE",
        help="auto, resident, offload (host memory with slots on the device), hybrid (computed on the CPU, too)",
        **unset,
    )  # fmt: skip
    group.add_argument("--bank-cache", metavar="FOLDER", help="keep them as they lie in host memory", **unset)
    group.add_argument("--expert-slots", type=COUNT, metavar="N", help="of each layer, on the device", **unset)
    group.add_argument("--kv-reserve-tokens", type=COUNT, metavar="TOKENS", help="of KV cache, before slots", **unset)


def server_options(parser: argparse.ArgumentParser) -> None:
    """Where and to whom."""
    group = parser.add_argument_group("server")
    unset: dict[str, Any] = {"default": argparse.SUPPRESS}
    group.add_argument("--host", **unset)
    group.add_argument("--port", type=number(0, 65535), help="0: any free one", **unset)
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="names to answer to", **unset)
    group.add_argument("--api-key", help="that every request must bring", **unset)
    group.add_argument("--reasoning-parser", choices=choices("reasoning_parser"), help="none: keep <think>", **unset)
    group.add_argument(
        "--tool-call-parser", choices=choices("tool_call_parser"), help="form of tool calls; none: keep text", **unset
    )
    group.add_argument("--grammar-backend", choices=choices("grammar_backend"), help="of structured output", **unset)
    group.add_argument("--max-body-bytes", type=COUNT, metavar="BYTES", help="of one request", **unset)
    group.add_argument("--max-images", type=number(0, float("inf")), metavar="N", help="of one request", **unset)
    group.add_argument(
        "--allow-remote-images", nargs="?", const="public", choices=choices("allow_remote_images"),
        help="fetch http(s) URLs: of public addresses, or of any", **unset,
    )  # fmt: skip
    group.add_argument("--allowed-media-path", metavar="FOLDER", help="file:// URLs below it are read", **unset)
    group.add_argument("--no-ui", dest="ui", action="store_false", help="no page at /", **unset)
    group.add_argument("--max-queued-requests", type=number(0, float("inf")), metavar="N", help="0: any", **unset)
    group.add_argument("--drain-seconds", type=number(0, 86400, float), help="for what runs, on SIGTERM", **unset)
    # Between our own processes: a whole config; the folder and the launcher of ranks that are there already (see
    # commands/serve.py); a process to die with; another engine than the real one, in tests.
    parser.add_argument("--config-file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--attach", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--launcher", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--engine", default="", help=argparse.SUPPRESS)


def shape(text: str) -> tuple[int, int]:
    """`8x2048`: prompts and the tokens of each."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of prompts and of their tokens, such as 8x2048")
    return int(match[1]), int(match[2])


def rate(text: str) -> float:
    """Requests a second; `inf`: all at once."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of requests a second above 0, or inf")
    return value


def medians(text: str) -> tuple[int, int]:
    """`90,200`: tokens of a prompt and of an answer."""
    match = re.fullmatch(r"([1-9]\d*),([1-9]\d*)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers of tokens, such as 90,200")
    return int(match[1]), int(match[2])


def bench_options(parser: argparse.ArgumentParser) -> None:
    """What is measured, and where it is written."""
    group = parser.add_argument_group("speed")
    group.add_argument("--batch", type=COUNT, nargs="+", default=[1, 8], metavar="N", help="requests at once (1 8)")
    group.add_argument("--prompt-tokens", type=COUNT, default=128, metavar="N", help="of decoded requests (128)")
    group.add_argument(
        "--new-tokens", type=number(2, float("inf")), default=256, metavar="N", help="of a long answer (256)"
    )
    group.add_argument("--short-tokens", type=COUNT, default=32, metavar="N", help="of a short answer (32)")
    group.add_argument(
        "--prefill", type=shape, nargs="*", metavar="8x2048", help="prompts (1x1024 1x4096 8x2048); nothing: none"
    )
    group.add_argument("--repeats", type=COUNT, default=3, metavar="N", help="of which the best counts (3)")
    group = parser.add_argument_group("serving load")
    group.add_argument("--load", action="store_true", help="measure a load of random arrivals instead")
    group.add_argument("--rate", type=rate, nargs="+", default=[1.0], metavar="R", help="requests/s (1); inf: at once")
    group.add_argument("--requests", type=COUNT, default=64, metavar="N", help="at each rate (64)")
    group.add_argument("--mix", type=medians, default=(90, 200), metavar="90,200", help="medians: prompt, answer")
    group = parser.add_argument_group("another server")
    group.add_argument("--url", help="of an OpenAI API; --model: its name there; MODEL: a folder to tell limits by")
    group.add_argument("--api", choices=["completions", "chat"], default="completions")
    group.add_argument("--api-key", help="of that server", default="")
    group = parser.add_argument_group("results")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    group.add_argument("--plot", type=Path, metavar="FILE.svg|png", help="draw them; needs shardwise[plot]")


def quantize_options(parser: argparse.ArgumentParser) -> None:
    """From what to what."""
    parser.add_argument("model", metavar="MODEL", help="local folder or hub id of a plain checkpoint")
    parser.add_argument("out", metavar="OUT", help="a new or empty folder")
    parser.add_argument("--to", choices=LAYOUTS, required=True, help="the layout to write")
    parser.add_argument("--load-format", choices=choices("load_format"), default="auto", help="dummy: made-up weights")
    parser.add_argument("--seed", type=number(0, 2**63 - 1), default=0, help="of made-up weights")
    parser.add_argument("--device", default="cpu", help="that computes, such as cuda:0 (default cpu)")


def launch_options(parser: argparse.ArgumentParser) -> None:
    """Which agent, and the server that it is sent to."""
    parser.add_argument("agent", choices=["claude", "codex", "opencode", "qwen"])
    parser.add_argument("--url", help="of the server", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", help="of that server", default="")
    parser.add_argument("--model", help="its name; default: what the server serves", default="")
    parser.add_argument("--dry-run", action="store_true", help="print the configuration, write nothing")
    parser.add_argument("--undo", action="store_true", help="restore the configuration that was before")


def make_parser() -> Parser:
    """All subcommands and their options."""
    about = "Serve Qwen3.5 / Qwen3.6 models over any number of GPUs."
    parser = Parser(prog="shardwise", description=about, allow_abbrev=False)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    made = {name: subparsers.add_parser(name, help=text, allow_abbrev=False) for name, text in COMMANDS.items()}
    for name in ("serve", "plan", "verify", "chat", "bench"):
        model_options(made[name])
    server_options(made["serve"])
    made["plan"].add_argument("--json", action="store_true", help="print JSON")
    made["plan"].add_argument(
        "--memory", default="", metavar="24GiB[,16GiB]", help="of each rank, not the devices' own"
    )
    made["plan"].add_argument(
        "--requests", type=COUNT, default=0, metavar="N", help="decoded at once, with a context each"
    )
    made["plan"].add_argument("--html", type=Path, metavar="FILE", help="write a page there too")
    made["verify"].add_argument("--max-tokens", type=COUNT, default=32, help="of each answer (default 32)")
    made["chat"].add_argument("--url", help="of a running server, such as http://127.0.0.1:8000; no model is started")
    made["chat"].add_argument("--api-key", help="of that server", default="")
    made["chat"].add_argument("--system", help="a system message", default="")
    made["chat"].add_argument("--max-tokens", type=COUNT, help="of each answer")
    made["chat"].add_argument("--temperature", type=number(0, 10, float))
    bench_options(made["bench"])
    quantize_options(made["quantize"])
    made["demo"].add_argument("-tp", "--tp", type=COUNT, default=2, metavar="N", help="ranks (default 2)")
    launch_options(made["launch"])
    return parser


def serve_config(options: argparse.Namespace) -> ServeConfig:
    """The options as a ServeConfig whose model is still the name that the user gave. Raises ConfigError."""
    if getattr(options, "config_file", None):
        return msgspec.json.decode(options.config_file.read_bytes(), type=ServeConfig)
    elsewhere = options.command == "bench" and options.url  # then --model is the name there
    if options.model_name and options.model_flag and options.model_name != options.model_flag and not elsewhere:
        raise ConfigError(f"two models: {options.model_name} and --model {options.model_flag}; name one")
    ratios = dict(options.ratio or ())
    if len(ratios) != len(options.ratio or ()):
        raise ConfigError("--ratio: given twice for one group; give it once")
    even = ratios.pop("", ())
    chosen = {name: value for name, value in vars(options).items() if name in ServeConfig.__struct_fields__}
    lengths = {len(weights) for weights in (even, *ratios.values()) if weights}
    facts = [flag for flag in ("gpu_spec", "device_profile") if chosen.get(flag)]
    if len(facts) == 2:
        raise ConfigError("--gpu-spec and --device-profile both say what the devices are; give one of them")
    ours = bool(facts or chosen.get("gpu"))  # then how many ranks is ours to choose
    ranks = chosen.setdefault("ranks", max(lengths, default=0 if ours else 1))
    if any(not weight for weight in even):
        raise ConfigError(
            f"--ratio {','.join(f'{weight:g}' for weight in even)}: a rank with nothing at all; leave it out, or "
            "give it nothing of one group, such as --ratio attention=1,0"
        )
    for group, weights in {"": even, **ratios}.items():
        if weights and len(weights) != ranks:
            text = f"{group}{'=' * bool(group)}{','.join(f'{weight:g}' for weight in weights)}"
            raise ConfigError(f"--ratio {text}: {len(weights)} weights for {ranks} ranks; give one a rank")
    if "max_model_len" in chosen and chosen["max_model_len"] > chosen.get("kv_tokens", float("inf")):
        raise ConfigError(
            f"--max-model-len {chosen['max_model_len']} is more than --kv-tokens {chosen['kv_tokens']}; "
            "a request's tokens must fit in the KV cache"
        )
    chosen["served_model_name"] = tuple(chosen.get("served_model_name", ()))
    name = options.model_name or options.model_flag or ""
    return ServeConfig(**{**chosen, "model": name, "ratio": even, "group_ratios": ratios})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code: 0 well, 1 failed or different, 2 asked for what cannot be."""
    try:
        options = make_parser().parse_args(arguments)
        config = None if options.command in OWN_OPTIONS else serve_config(options)
        command = importlib.import_module(f"shardwise.commands.{options.command}")
        return command.run(options) if config is None else command.run(options, config)
    except ConfigError as error:
        print(f"shardwise: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
