"""What a checkpoint's quantisation config says of each module: one reader for the three dialects in use.

`fp8` (one scheme and `modules_to_not_convert`), `modelopt` (one `quant_algo`, or `quantized_layers` with one each; also
in hf_quant_config.json) and `compressed-tensors` (`config_groups` with `targets`).
What is left out beats every rule, an exact name beats a pattern, and a pattern beats a class name.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate
from itertools import combinations
from typing import Any, Literal

from shardwise.checkpoint.names import PREFIXES, bare
from shardwise.config import ConfigError

NOT_LINEAR = ("gate", "conv1d", "embed_tokens", "experts", "gate_up_proj")  # a router is a class of its own
FP8_ALGORITHMS = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel", "FP8_PB_WO": "block"}
NVFP4_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
METHODS = ("fp8", "modelopt", "modelopt_fp4", "modelopt_mixed", "compressed-tensors")


@dataclass(frozen=True)
class Scheme:
    """How a module is quantised: what its values are, and what one scale stands for.

    scale: "any" is per tensor or per channel, as the scale's own shape says. block: rows and columns of one.
    dialect: whose names for the tensors to expect where no file says.
    """

    values: Literal["fp8", "nvfp4"]
    scale: Literal["tensor", "channel", "block", "any"]
    block: tuple[int, int] = (1, 1)
    dialect: str = "fp8"


class Patterns:
    """Module names, `re:` patterns, globs and class names, matched whatever prefix the text model has there."""

    def __init__(self, entries: Iterable[str], anywhere: bool = False) -> None:
        """anywhere: a name may stand anywhere in the module's, in whole parts, as in modules_to_not_convert."""
        entries = list(entries)
        plain = [entry for entry in entries if not entry.startswith("re:") and "*" not in entry]
        self._classes = {entry for entry in plain if "." not in entry and entry[:1].isupper()}
        self._names = {bare(entry) for entry in plain} - self._classes
        patterns = [entry[3:] for entry in entries if entry.startswith("re:")]
        patterns += [translate(entry) for entry in entries if "*" in entry and not entry.startswith("re:")]
        try:
            self._patterns = [re.compile(pattern) for pattern in patterns]
        except re.error as error:
            raise ConfigError(f"quantization_config: pattern {error.pattern!r} is no regular expression") from None
        self._anywhere = anywhere

    def strength(self, module: str) -> int:
        """3 for a name that matches, 2 for a pattern, 1 for a class, 0 for nothing."""
        name = bare(module)
        parts = name.split(".")
        starts = combinations(range(len(parts) + 1), 2) if self._anywhere else ((0, n + 1) for n in range(len(parts)))
        if self._names and any(".".join(parts[start:stop]) in self._names for start, stop in starts):
            return 3
        if self._patterns:
            aliases = {module, name, *(prefix + name for prefix in PREFIXES)}
            if any(pattern.match(alias) for pattern in self._patterns for alias in aliases):
                return 2
        linear = parts[-1] not in NOT_LINEAR and not parts[-1].endswith("norm")
        if "Linear" in self._classes and (linear or "experts" in parts):
            return 1
        return int("experts" in parts and any("Expert" in name or "MoE" in name for name in self._classes))


class Quantization:
    """The scheme of any module of a checkpoint, and of its KV cache. Raises ConfigError for what is not known."""

    def __init__(self, raw: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None = None) -> None:
        """raw: config.json. hf_quant_config: hf_quant_config.json, which fills in what config.json does not say."""
        text = raw.get("text_config") or {}
        beside = (hf_quant_config or {}).get("quantization") or {}
        config = raw.get("quantization_config") or text.get("quantization_config") or raw.get("compression_config")
        if config is None and beside.get("quant_algo"):
            config = {"quant_method": "modelopt"}
        self._config: Mapping[str, Any] = config or {}
        self._beside = beside
        self.method = self._config.get("quant_method") or ("modelopt" if "quant_algo" in self._config else None)
        if self._config and self.method not in METHODS:
            raise ConfigError(
                f"config.json: quant_method is {self.method!r}, expected {', '.join(METHODS)}; use another export"
            )
        self._rules: list[tuple[Patterns, Scheme]] = []
        self._by_name: dict[str, Scheme | None] = {}
        self._rest: Scheme | None = None
        self._linear = Patterns(["Linear"])
        ignored = [*(self._config.get("ignore") or ()), *(self._config.get("exclude_modules") or ())]
        if self.method == "fp8":
            self._read_fp8()
        elif self.method == "compressed-tensors":
            self._read_groups()
        elif self.method:
            ignored += beside.get("exclude_modules") or ()
            self._read_modelopt()
        self._ignored = Patterns(ignored)
        self._unconverted = Patterns(self._config.get("modules_to_not_convert") or (), anywhere=True)

    def scheme(self, module: str) -> Scheme | None:
        """How `module` is quantised by its own entry, None if it is left as it is."""
        if not self.method or self._ignored.strength(module) or self._unconverted.strength(module):
            return None
        parts = bare(module).split(".")
        for stop in range(len(parts), 0, -1) if self._by_name else ():
            if (name := ".".join(parts[:stop])) in self._by_name:
                return self._by_name[name]
        ranked = [(patterns.strength(module), -n, scheme) for n, (patterns, scheme) in enumerate(self._rules)]
        best = max(ranked, key=lambda rule: rule[:2], default=(0, 0, None))
        if best[0]:
            return best[2]
        return self._rest if self._rest and self._linear.strength(module) else None

    @property
    def kv_cache_dtype(self) -> Literal["fp8"] | None:
        """What the checkpoint asks the KV cache to be held in. Raises ConfigError if that is not known."""
        scheme = self._config.get("kv_cache_scheme")
        algorithm = self._config.get("kv_cache_quant_algo") or self._beside.get("kv_cache_quant_algo")
        if isinstance(scheme, str):
            algorithm, scheme = scheme, None
        if scheme and (scheme.get("num_bits"), scheme.get("type", "float")) != (8, "float"):
            raise ConfigError(f"config.json: kv_cache_scheme is {scheme}, expected 8-bit float; set --kv-cache-dtype")
        if algorithm and str(algorithm).upper() not in ("FP8", "NONE"):
            raise ConfigError(f"checkpoint: kv_cache_quant_algo is {algorithm!r}, expected FP8; set --kv-cache-dtype")
        return "fp8" if scheme or str(algorithm).upper() == "FP8" else None

    def _read_fp8(self) -> None:
        block = self._config.get("weight_block_size")
        self._rest = Scheme("fp8", "block", _pair(block)) if block else Scheme("fp8", "any")

    def _read_groups(self) -> None:
        groups = self._config.get("config_groups") or {}
        if not groups:
            raise ConfigError("config.json: quantization_config has no config_groups; expected at least one")
        for name, group in groups.items():
            if group.get("weights"):
                scheme = _group_scheme(name, group["weights"], self.method or "")
                self._rules.append((Patterns(group.get("targets") or ()), scheme))

    def _read_modelopt(self) -> None:
        algorithm = self._config.get("quant_algo") or self._beside.get("quant_algo")
        layers = self._config.get("quantized_layers") or self._beside.get("quantized_layers")
        if layers:
            size = self._config.get("group_size") or self._beside.get("group_size")
            for name, entry in layers.items():
                scheme = _algorithm(name, entry.get("quant_algo"), entry.get("group_size") or size)
                self._by_name[bare(name)] = scheme
        elif algorithm and algorithm != "MIXED_PRECISION":
            size = self._config.get("group_size") or self._beside.get("group_size")
            self._rest = _algorithm("quantization_config", algorithm, size)
        else:
            self._read_groups()


def _pair(block: Any) -> tuple[int, int]:
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise ConfigError(f"config.json: the block of weights is {block!r}, expected two sizes such as [128, 128]")
    return block[0], block[1]


def _algorithm(name: str, algorithm: str | None, group_size: int | None) -> Scheme | None:
    if not algorithm:
        return None
    if algorithm in NVFP4_ALGORITHMS:
        return Scheme("nvfp4", "block", (1, group_size or 16), "modelopt")
    if algorithm not in FP8_ALGORITHMS:
        known = ", ".join((*FP8_ALGORITHMS, *NVFP4_ALGORITHMS))
        raise ConfigError(f"checkpoint: quant_algo of {name} is {algorithm!r}, expected one of {known}")
    block = (128, 128) if algorithm == "FP8_PB_WO" else (1, 1)
    return Scheme("fp8", FP8_ALGORITHMS[algorithm], block, "modelopt")  # pyright: ignore[reportArgumentType]


def _group_scheme(name: str, weights: Mapping[str, Any], dialect: str) -> Scheme:
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
    if kind == "float" and bits == 4:
        return Scheme("nvfp4", "block", (1, weights.get("group_size") or 16), dialect)
    if kind == "float" and bits == 8 and strategy in ("tensor", "channel", None):
        return Scheme("fp8", strategy or "any", dialect=dialect)
    if kind == "float" and bits == 8 and strategy == "block":
        return Scheme("fp8", "block", _pair(weights.get("block_structure") or [128, 128]), dialect)
    raise ConfigError(
        f"config.json: weights of {name} are {bits}-bit {kind} by {strategy}; expected float, 4 bits in groups or 8 by "
        "tensor, channel or block"
    )
