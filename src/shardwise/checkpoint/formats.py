"""Which stored tensors make up each weight of a checkpoint, from its own entry of the config and its own headers.

A model declares a linear layer so:

    formats = Formats(config.raw, hf_quant_config, index, dtype="BF16")
    name = names.text("layers.3.self_attn.o_proj")
    ParamSpec((hidden, (head,)), formats.of(name), (name,), "attention", 1)

Several sources of one spec must be in one format; where `formats.same(q, k, v)` is false, declare them apart:

    ParamSpec(((q, k, v), hidden), formats.of(q_name, k_name, v_name), (q_name, k_name, v_name), "attention")

Experts: names with "{e}" and their number, or the stacked bank's name, whose suffixes have no ".weight":

    formats.of(names.text("layers.0.mlp.experts.{e}.gate_proj"), names.text("...{e}.up_proj"), experts=256)
    formats.of(names.text("layers.0.mlp.experts.gate_up_proj"))

A weight that is no linear layer's (norm, conv1d, router, embedding) is `plain(dtype)`, or `plain("F32", "")` for A_log
and dt_bias. With index None, for made-up weights, formats follow from the config alone. Static input scales are loaded
where the checkpoint has them (role "input_scale"), as its file has them: compressed-tensors' `input_global_scale` is
the reciprocal of modelopt's `input_scale`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from shardwise.checkpoint.index import Source
from shardwise.checkpoint.names import PLAIN_FLOATS
from shardwise.checkpoint.quantization import Quantization, Scheme
from shardwise.config import ConfigError
from shardwise.shard import Role, Stored

SCALES = ("F32", "BF16", "F16")
VALUES = {"fp8": "F8_E4M3", "nvfp4": "U8"}
Format = tuple[Stored, ...]
Block = tuple[int | None, ...]


class Suffixes(NamedTuple):
    """How the tensors of a module are called: its values, what its scales start with, its input scales."""

    values: str
    scale: str
    input: str


MODULE = (Suffixes(".weight", ".weight", ".input"), Suffixes(".weight_packed", ".weight", ".input"))
BANK = (Suffixes("", "", "_input"), Suffixes("_packed", "", "_input"))


def plain(dtype: str, suffix: str = ".weight") -> Format:
    """An unquantised weight held in `dtype` (by safetensors' name), whatever plain float the file has."""
    return (Stored(suffix, dtype),)


class Formats:
    """The formats of one checkpoint's modules.

    raw: config.json. hf_quant_config: hf_quant_config.json, if any. index: the headers, None if there are none.
    dtype: what plain weights are held in, by safetensors' name. Raises ConfigError for a config that is not known.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        hf_quant_config: Mapping[str, Any] | None = None,
        index: Source | None = None,
        dtype: str = "BF16",
    ) -> None:
        self._quantization = Quantization(raw, hf_quant_config)
        self._index = index
        self._dtype = dtype

    def of(self, *sources: str, experts: int = 0) -> Format:
        """The format that all `sources` are in, by their names without suffix; "{e}" in them runs over `experts`.

        Raises ConfigError if they differ, or for a tensor that is missing or not as the config says.
        """
        if not experts and any("{e}" in source for source in sources):
            raise ValueError(f"{sources[0]}: say how many experts there are")
        found = self._each(sources, experts)
        first_name, first = next(found)
        for name, format in found:
            if format != first:
                raise ConfigError(
                    f"checkpoint: {name} is {_describe(format)}, expected {_describe(first)} as in {first_name}, with "
                    "which it is fused; take an export that quantises them alike"
                )
        return first

    def same(self, *sources: str, experts: int = 0) -> bool:
        """Whether all `sources` are in one format, so that one spec can hold them."""
        return len({format for _, format in self._each(sources, experts)}) == 1

    @property
    def expert_by_expert(self) -> bool:
        """Whether experts are stored one by one, by the config alone: quantised ones are, wherever published."""
        return self._quantization.scheme("layers.0.mlp.experts.0.gate_proj") is not None

    @property
    def kv_cache_dtype(self) -> Literal["fp8"] | None:
        """What the checkpoint asks the KV cache to be held in. Raises ConfigError if that is not known."""
        return self._quantization.kv_cache_dtype

    def kv_scales(self, attention: str) -> tuple[str, str] | None:
        """The full names of the scales of K and V (scalars) under `attention`, "....self_attn", or None.

        Raises ConfigError if there is only one of them.
        """
        for pair in ((".k_scale", ".v_scale"), (".k_proj.k_scale", ".v_proj.v_scale")):
            there = [attention + end for end in pair if self._index is not None and attention + end in self._index]
            if len(there) == 1:
                raise ConfigError(f"checkpoint: {there[0]} is there without its pair, expected {pair}; download again")
            if there:
                return there[0], there[1]
        return None

    def _each(self, sources: tuple[str, ...], experts: int) -> Iterator[tuple[str, Format]]:
        for source in sources:
            if "{e}" not in source:
                yield source, self._module(source)
            elif self._index is None:
                yield source, self._module(source.replace("{e}", "0"))
            else:
                for e in range(experts):
                    name = source.replace("{e}", str(e))
                    yield name, self._module(name)

    def _module(self, module: str) -> Format:
        scheme = self._quantization.scheme(module)
        if self._index is None:
            return self._assumed(module, scheme)
        names = next((s for s in (*MODULE, *BANK) if module + s.values in self._index), None)
        if names is None:
            raise ConfigError(f"checkpoint: {module} has no weight, expected {module}.weight; download it again")
        info = self._index.info(module + names.values)
        if info.dtype in PLAIN_FLOATS:
            return plain(self._dtype, names.values)
        wanted = VALUES[scheme.values] if scheme else "a plain float"
        if scheme is None or info.dtype != wanted or len(info.shape) not in (2, 3):
            raise ConfigError(
                f"{info.file}: tensor {module + names.values!r} is {info.dtype} {list(info.shape)}, expected {wanted} "
                f"as quantization_config {'says' if scheme else 'leaves it out'}; do they belong together?"
            )
        if scheme.values == "fp8":
            return (Stored(names.values, info.dtype), *self._fp8(module, names, info.shape, scheme))
        shape = (*info.shape[:-1], 2 * info.shape[-1])
        values = Stored(names.values, info.dtype, (1, 2), packed=True)
        return (values, *self._nvfp4(module, names, shape, scheme))

    def _fp8(self, module: str, names: Suffixes, shape: tuple[int, ...], scheme: Scheme) -> Iterator[Stored]:
        kinds = ("tensor", "channel") if scheme.scale == "any" else (scheme.scale,)
        ends = (f"{names.scale}_scale_inv", f"{names.scale}_scale")
        yield self._companion(module, ends, shape, kinds, scheme, SCALES, "scale")
        yield from self._input(module, names, shape, scheme)

    def _nvfp4(self, module: str, names: Suffixes, shape: tuple[int, ...], scheme: Scheme) -> Iterator[Stored]:
        yield self._companion(module, (f"{names.scale}_scale",), shape, ("block",), scheme, ("F8_E4M3",), "scale")
        direct, inverse = f"{names.scale}_scale_2", f"{names.scale}_global_scale"
        role = "inverse_scale" if self._index is not None and module + inverse in self._index else "scale"
        yield self._companion(module, (direct, inverse), shape, ("tensor", "channel"), scheme, SCALES, role)
        yield from self._input(module, names, shape, scheme)

    def _input(self, module: str, names: Suffixes, shape: tuple[int, ...], scheme: Scheme) -> Iterator[Stored]:
        for end in (f"{names.input}_scale", f"{names.input}_global_scale"):
            if self._index is not None and module + end in self._index:
                yield self._companion(module, (end,), shape, ("tensor",), scheme, SCALES, "input_scale")

    def _companion(
        self,
        module: str,
        ends: tuple[str, ...],
        shape: tuple[int, ...],
        kinds: tuple[str, ...],
        scheme: Scheme,
        dtypes: tuple[str, ...],
        role: Role,
    ) -> Stored:
        """The one of `ends` that is there, as a stored tensor for a weight of `shape`."""
        assert self._index is not None
        there = [end for end in ends if module + end in self._index]
        if len(there) != 1:
            wanted = " or ".join(repr(module + end) for end in ends)
            raise ConfigError(
                f"checkpoint: scale {wanted} of an {scheme.values} weight is {'there twice' if there else 'missing'}, "
                "expected one; download or quantise it again"
            )
        info = self._index.info(module + there[0])
        shapes = [fit for kind in kinds for fit in blocks(kind, shape, scheme.block)]
        block = next((block for expected, block in shapes if expected == info.shape), None)
        if block is None or info.dtype not in dtypes:
            expected = " or ".join(str(list(expected)) for expected, _ in shapes)
            raise ConfigError(
                f"{info.file}: scale {module + there[0]!r} is {info.dtype} {list(info.shape)}, expected "
                f"{' or '.join(dtypes)} {expected} for a weight of {list(shape)}; quantise it again"
            )
        return Stored(there[0], info.dtype, block, role=role)

    def _assumed(self, module: str, scheme: Scheme | None) -> Format:
        """The usual tensors of `scheme`, where no file says."""
        bank = module.endswith((".experts.gate_up_proj", ".experts.down_proj"))
        if scheme is None:
            return plain(self._dtype, "" if bank else ".weight")
        stem, packed = ("", "_packed") if bank else (".weight", ".weight_packed")
        one: Block = (None, None)
        if scheme.values == "nvfp4":
            reciprocal = scheme.dialect == "compressed-tensors" or bank
            last = (
                Stored(f"{stem}_global_scale", "F32", one if bank else (None, 0), role="inverse_scale")
                if reciprocal
                else Stored(f"{stem}_scale_2", "F32", one, role="scale")
            )
            values = Stored(packed if reciprocal else stem, "U8", (1, 2), packed=True)
            return values, Stored(f"{stem}_scale", "F8_E4M3", scheme.block, role="scale"), last
        values = Stored(stem, "F8_E4M3")
        if scheme.scale == "block":
            end = "_scale_inv" if scheme.dialect == "fp8" else "_scale"
            return values, Stored(f"{stem}{end}", "BF16", scheme.block, role="scale")
        channel = scheme.scale == "channel"
        return values, Stored(f"{stem}_scale", "BF16" if channel else "F32", (1, 0) if channel else one, role="scale")


def blocks(kind: str, shape: tuple[int, ...], block: tuple[int, int]) -> list[tuple[tuple[int, ...], Block]]:
    """The shapes that scales of `kind` have for a weight of `shape`, [.., out, in], and what an element stands for.

    In a bank of experts, [experts, out, in], each has its own, and gate|up may have one for each half.
    """
    lead, rows, columns = shape[:-2], shape[-2], shape[-1]
    if kind == "block":
        return [((*lead, -(-rows // block[0]), -(-columns // block[1])), block)]
    if kind == "channel":
        return [((*lead, rows, 1), (1, 0)), ((*lead, rows), (1, None))]
    found: list[tuple[tuple[int, ...], Block]]
    found = [(lead, (None, None)), ((*lead, 1), (None, 0)), ((*lead, 1, 1), (0, 0))]
    if lead and rows % 2 == 0:
        found += [((*lead, 2), (rows // 2, None)), ((*lead, 2, 1), (rows // 2, 0))]
    return found + ([((), (None, None, None)), ((1,), (None, None, 0))] if lead else [])


def _describe(format: Format) -> str:
    return " + ".join(f"{stored.suffix or 'tensor'} {stored.dtype} by {list(stored.block)}" for stored in format)
