"""Which names a checkpoint uses for the family's tensors, and the account of all of them.

Three prefixes are in use for the text model, and experts are stored stacked or one by one; both are read from the
names that are there, per layer, never assumed.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardwise.checkpoint.index import Source, TensorInfo
from shardwise.config import ConfigError
from shardwise.shard import ParamSpec, Stored, copies

PREFIXES = ("model.language_model.", "language_model.model.", "model.")
HEADS = ("lm_head", "language_model.lm_head", "model.lm_head", "model.language_model.lm_head")
ROOTS = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
LEFT_OUT = ("visual", "mtp")  # by the module right under a root
KV_SCALES = (".k_scale", ".v_scale", ".k_proj.k_scale", ".v_proj.v_scale")  # under self_attn
PLAIN_FLOATS = ("F64", "F32", "BF16", "F16")
SHOWN = 3


def bare(name: str) -> str:
    """`name` without the prefix of the text model: "layers.0.mlp", "embed_tokens", "lm_head", "visual.blocks.0"."""
    for root in (*PREFIXES, "language_model."):
        if name.startswith(root):
            return name.removeprefix(root)
    return name


@dataclass(frozen=True)
class Names:
    """The names of one checkpoint.

    prefix: of the text model. head: the output layer's name without suffix, None if there is none (tied).
    modules: every name, and everything that a name starts with up to a dot. Empty for made-up weights; then `stacks`
    says whether experts are stacked.
    """

    prefix: str
    head: str | None
    modules: frozenset[str] = frozenset()
    stacks: bool = True

    @classmethod
    def of(cls, names: Iterable[str]) -> "Names":
        """Read the layout from the `names` of a checkpoint. Raises ConfigError if it is not of the family."""
        modules = set[str]()
        for name in names:
            modules.add(name)
            while "." in name and (name := name.rpartition(".")[0]) not in modules:
                modules.add(name)
        prefixes = [prefix for prefix in PREFIXES if prefix + "layers" in modules]
        if len(prefixes) != 1:
            raise ConfigError(
                f"checkpoint: text layers are under {prefixes or 'none'} of {', '.join(PREFIXES)}; expected one of them"
            )
        heads = [head for head in HEADS if head in modules]
        if len(heads) > 1:
            raise ConfigError(f"checkpoint: holds {' and '.join(heads)}; expected one output layer")
        return cls(prefixes[0], heads[0] if heads else None, frozenset(modules))

    @classmethod
    def published(cls, tied: bool, stacks: bool = True) -> "Names":
        """The names that the family's makers use, for made-up weights: experts are stacked unless quantised."""
        return cls(PREFIXES[0], None if tied else HEADS[0], stacks=stacks)

    def text(self, name: str) -> str:
        """The checkpoint's name of `name`, as in "layers.0.input_layernorm.weight"."""
        return self.prefix + name

    @property
    def visual(self) -> str | None:
        """The checkpoint's name of the vision tower, None if it has none."""
        if not self.modules:
            return "model.visual"
        return next((f"{root}visual" for root in ROOTS if f"{root}visual" in self.modules), None)

    def stacked(self, layer: int) -> bool:
        """Whether the experts of `layer` are stacked in one tensor. Raises ConfigError if they are both or neither."""
        experts = self.text(f"layers.{layer}.mlp.experts")
        if not self.modules:
            return self.stacks
        single = f"{experts}.0" in self.modules
        bank = any(f"{experts}.gate_up_proj{suffix}" in self.modules for suffix in ("", "_packed"))
        if single == bank:
            raise ConfigError(
                f"{experts}: found {'both' if bank else 'neither'} gate_up_proj {'and' if bank else 'nor'} "
                "0.gate_proj; expected the experts stacked or one by one"
            )
        return bank

    def left_out(self, names: Iterable[str], tied: bool = False) -> dict[str, tuple[str, ...]]:
        """Those of `names` that the text model may leave out: "visual", "mtp", "kv_scale", the "head" of a tied one."""
        roots = {kind: tuple(f"{root}{kind}." for root in ROOTS) for kind in LEFT_OUT}
        if tied and self.head:
            roots["head"] = (f"{self.head}.",)
        names = sorted(names)
        found = {kind: tuple(name for name in names if name.startswith(starts)) for kind, starts in roots.items()}
        found["kv_scale"] = tuple(
            name
            for name in names
            if name.startswith(self.prefix) and name.endswith(tuple(f".self_attn{end}" for end in KV_SCALES))
        )
        return {kind: those for kind, those in found.items() if those}


class Needed(NamedTuple):
    """A tensor that a spec reads, and the shape that it must have there."""

    name: str
    stored: Stored
    shape: tuple[int, ...]


def needed(spec: ParamSpec) -> Iterator[Needed]:
    """Every tensor of the checkpoint behind `spec`, however it is cut."""
    axes, experts = spec.axes, range(1)
    if spec.per_expert:
        experts = range(sum(segment.size for segment in spec.segments(0)))
        axes = (1, *axes[1:])
    # One expert stands for all: `copies` makes "{0}" of "{{e}}", and the others' numbers go in its place.
    whole = replace(spec, axes=axes, group=None, sources=tuple(s.replace("{e}", "{{e}}") for s in spec.sources))
    found: dict[str, tuple[Stored, tuple[int, ...]]] = {}
    for name, src, stored, _ in copies(whole, {}, 0):
        stops = tuple(axis.stop for axis in src)
        if name in found:
            stops = tuple(map(max, stops, found[name][1]))
        found[name] = stored, stops
    for name, (stored, shape) in found.items():
        for expert in experts:
            yield Needed(name.replace("{0}", str(expert)) if spec.per_expert else name, stored, shape)


def mismatch(need: Needed, info: TensorInfo) -> str | None:
    """Why `info` cannot serve `need`, or None."""
    castable = info.dtype in PLAIN_FLOATS and need.stored.dtype in PLAIN_FLOATS
    if info.shape == need.shape and (info.dtype == need.stored.dtype or castable):
        return None
    return (
        f"{info.file}: tensor {need.name!r} is {info.dtype} {list(info.shape)}, expected {need.stored.dtype} "
        f"{list(need.shape)}; do config.json and the weights belong together?"
    )


def check(source: Source, specs: Iterable[ParamSpec]) -> set[str]:
    """The names of all tensors that `specs` need. Raises ConfigError for one that is missing or of another form."""
    consumed, missing = set[str](), list[str]()
    for spec in specs:
        for need in needed(spec):
            consumed.add(need.name)
            if need.name not in source:
                missing.append(need.name)
            elif problem := mismatch(need, source.info(need.name)):
                raise ConfigError(problem)
    if missing:
        raise ConfigError(f"checkpoint: {_some(missing)} missing; is the download complete?")
    return consumed


def account(source: Source, names: Iterable[str], specs: Iterable[ParamSpec], left_out: Collection[str]) -> None:
    """Every one of `names`, all that `source` has, must be needed by `specs` or be `left_out`, and none be missing.

    Raises ConfigError naming the first few and their number.
    """
    spare = sorted(set(names) - check(source, specs) - set(left_out))
    if spare:
        raise ConfigError(
            f"checkpoint: {_some(spare)} not used by this model; does config.json belong to these weights?"
        )


def _some(names: Collection[str]) -> str:
    shown = ", ".join(repr(name) for name in list(names)[:SHOWN])
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{shown}{more} ({len(names)} tensor{'s'[: len(names) > 1]}) {'are' if len(names) > 1 else 'is'}"
