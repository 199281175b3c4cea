"""A decode step of the text model as stages between collectives, for forecasts of its speed (parallel/cost.py)."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwise.config import ModelConfig
from shardwise.layers.embedding import EMBED, HEAD
from shardwise.models.qwen3_5 import layer_name
from shardwise.parallel.cost import Anatomy, Stage
from shardwise.shard import ParamSpec

Specs = Mapping[str, ParamSpec]


@dataclass(frozen=True)
class Kernels:
    """Kernels that a captured step launches, by stage, the norm and the addition after each included."""

    attention: int = 7
    delta: int = 4
    moe: int = 4
    mlp: int = 3
    head: int = 6  # with the sampler's
    embedding: int = 1


def stages(
    config: ModelConfig, specs: Specs, page: Specs, row: Specs, page_tokens: int, experts_held: bool = True
) -> Anatomy:
    """The stages of one step of a model with weights `specs` and caches of `page` and `row`.

    experts_held: whether routed experts are all in the devices' memory.
    """
    kernels, found = Kernels(), Counter[Stage]()
    for i, kind in enumerate(config.layer_types):
        mixer = "attention" if kind == "full_attention" else "delta"
        found[
            replace(
                _stage(mixer, specs, f"{layer_name(i)}.{mixer}.", getattr(kernels, mixer)),
                page=_plain(page, f"{layer_name(i)}.{mixer}."),
                row=_plain(row, f"{layer_name(i)}.{mixer}."),
                page_tokens=page_tokens,
                summed=config.hidden_size,
            )
        ] += 1
        stage = _stage("feed-forward", specs, f"{layer_name(i)}.mlp.", kernels.moe if config.experts else kernels.mlp)
        experts = _plain(specs, f"{layer_name(i)}.mlp.experts.")
        read = tuple(spec for spec in stage.read if spec not in experts)
        held = stage.held if experts_held else read
        norms = tuple(
            spec for norm in ("input", "post_attention") for spec in _plain(specs, f"{layer_name(i)}.{norm}_")
        )
        found[
            replace(
                stage,
                held=held + norms,
                read=read,
                sparse=experts,
                experts=config.experts,
                chosen=config.experts_per_token,
                summed=config.hidden_size,
            )
        ] += 1
    head = _plain(specs, HEAD)
    known = (EMBED, HEAD, "norm", "layers.")
    beside = {name: spec for name, spec in specs.items() if not name.startswith(known)}
    ends = (
        Stage("embedding", held=_plain(specs, EMBED), kernels=kernels.embedding, summed=config.hidden_size),
        Stage(
            "head", held=head + _plain(specs, "norm"), read=head or _plain(specs, EMBED), kernels=kernels.head,
            gathered=config.vocab_size,
        ),
        Stage("beside the step", held=_plain(beside, ""), kernels=0),  # a vision tower takes memory only
    )  # fmt: skip
    return Anatomy((*ends, *(replace(stage, count=count) for stage, count in found.items())))


def _plain(specs: Specs, prefix: str) -> tuple[ParamSpec, ...]:
    """Specs under `prefix` without their names, so that layers alike are equal."""
    return tuple(replace(spec, sources=_unnamed(spec)) for name, spec in specs.items() if name.startswith(prefix))


def _unnamed(spec: ParamSpec) -> tuple[str, ...]:
    return tuple(f"{'{e}' if spec.per_expert else ''}{n}" for n in range(len(spec.sources)))


def _stage(name: str, specs: Specs, prefix: str, kernels: int) -> Stage:
    held = _plain(specs, prefix)
    return Stage(name, held=held, read=held, kernels=kernels)
