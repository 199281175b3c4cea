"""Decode steps of a whole engine by configurations of its kernels, as kernels/tuned has them.

    python -m torch.distributed.run --nproc-per-node 1 -m tests.gpu.choices --model GEOMETRY --choices FILE --layers 8

FILE: JSON, a list of [requests, keys, configurations]: keys is a key of tuned/NAME.json or several, and a configuration
is one, or one for each key. Prints, for the choices as they are and for each configuration, what kernels add to a step,
and by how much that differs. What a kernel takes alone says little: in a step it waits for the one before it, and has
what caches and processors those around it leave. Half the heads, experts' width and vocabulary (`--half`) are what one
of two even ranks has.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from shardwise.config import ServeConfig, rank_environment
from shardwise.engine.build import Leader, build_rank
from shardwise.engine.graphs import DecodeGraphs
from shardwise.engine.runner import Runner
from shardwise.kernels import tuning
from tests.gpu.alike import alike
from tests.gpu.engine_case import generate, profile

HALVED = (
    "vocab_size", "num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads",
    "moe_intermediate_size", "shared_expert_intermediate_size",
)  # fmt: skip
TOLD_US = 3.0  # differences below are noise


def geometry(model: Path, layers: int, half: bool, folder: Path) -> Path:
    """`model` with so many layers, and with half of what ranks share, in `folder`."""
    config = json.loads((model / "config.json").read_text())
    text = config["text_config"]
    text["num_hidden_layers"] = layers
    text.pop("layer_types", None)
    if half:
        text |= {name: text[name] // 2 for name in HALVED}
        ids = "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"
        config |= {name: n for n, name in enumerate(ids, 1)}  # within half the vocabulary
        text["eos_token_id"] = len(ids) + 1
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def capture(runner: Runner, step_tokens: int = 0) -> None:
    """Graphs of decode steps alone, each on first use."""
    runner.graphs = DecodeGraphs(runner.model, runner.caches, runner.tables, runner.last_tokens, runner.ctx)


def measure(leader: Leader, requests: int) -> dict[str, float]:
    """What each kernel adds to a step in us, by the choices of this moment."""
    graphs = leader.rank.runner.graphs
    assert graphs is not None
    graphs.captured.clear()
    generate(leader, [([n] * 16, 4) for n in range(5, 5 + requests)])
    return {name: us for name, (us, _) in profile(leader, requests).added.items()}


def told(added: Mapping[str, float], before: Mapping[str, float]) -> str:
    changed = {name: added.get(name, 0.0) - before.get(name, 0.0) for name in {**before, **added} if counts(name)}
    parts = [f"{name[:28]} {us:+.1f}" for name, us in changed.items() if abs(us) >= TOLD_US]
    return f"all {sum(changed.values()):+.1f}" + "".join(f", {part}" for part in parts)


def counts(name: str) -> bool:
    """Whether a kernel counts: copies, and torch's beside the graphs, have waits for the host in their times."""
    return "Memcpy" not in name and "at::native" not in name


def compare(leader: Leader, requests: int, keys: Sequence[str], configurations: Sequence[Any]) -> None:
    """Print a line for the choices as they are, and one for each configuration of `keys`."""
    before = measure(leader, requests)
    total = sum(us for name, us in before.items() if counts(name))
    largest = sorted(before.items(), key=lambda pair: -pair[1])[:6]
    print(
        requests, " ".join(keys), f"{total:.1f}", ", ".join(f"{name[:28]} {us:.1f}" for name, us in largest), flush=True
    )
    known = tuning.choice
    for configuration in configurations:
        chosen = dict(zip(keys, configuration if len(keys) > 1 else [configuration], strict=True))
        asked = set[str]()

        def choice(
            name: str, what: str, layouts: Any, tokens: int, chosen: Mapping[str, Any] = chosen, asked: set[str] = asked
        ) -> Any:
            key = tuning.key(what, layouts, tokens) if tuning.bucket(tokens) else ""
            asked.add(key)
            return chosen.get(key) or known(name, what, layouts, tokens)

        with mock.patch.object(tuning, "choice", choice):
            try:
                line = told(measure(leader, requests), before)
                if not asked.issuperset(keys):  # a key for another format, say: that compares nothing
                    line = f"not asked for: {', '.join(sorted({*keys} - asked))}"
            except Exception as error:  # one that the card cannot do ends nothing
                torch.cuda.synchronize()
                line = f"{type(error).__name__}: {str(error)[:99]}"
        print(f"  {configuration}: {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--choices", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--half", action="store_true")
    args = parser.parse_args()
    env = rank_environment()
    if env is None:
        sys.exit("start it with torch.distributed.run")
    with tempfile.TemporaryDirectory() as folder:
        model = geometry(args.model, args.layers, args.half, Path(folder))
        serve = ServeConfig(
            model=str(model), ranks=1, load_format="dummy", max_model_len=8192, kv_tokens=100_000,
            max_num_batched_tokens=8192,
        )  # fmt: skip
        with alike(), mock.patch.object(Runner, "capture", capture):
            leader = Leader(build_rank(serve, env), serve)
    for requests, keys, configurations in json.loads(args.choices.read_text()):
        compare(leader, requests, [keys] if isinstance(keys, str) else keys, configurations)
    leader.stop()


if __name__ == "__main__":
    main()
