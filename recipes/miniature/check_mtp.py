"""How often does the MTP layer of a checkpoint guess the model's own next-but-one token?

    python -m recipes.miniature.check_mtp [--model FOLDER] [--limit 40]

transformers ignores the layer; this is what an engine's acceptance rate for one speculative token should come to, on
the same prompts.
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from recipes.miniature import fast_model
from recipes.miniature.check import Prompts, load, ordered
from tests.golden import eval as evaluation
from tests.golden.eval import Case


def load_mtp(folder: Path, model: Any) -> fast_model.MTP:
    """The MTP layer of the checkpoint, in bf16."""
    mtp = fast_model.MTP(model).to(torch.bfloat16).eval()
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            names = [name for name in tensors.keys() if name.startswith("mtp.")]  # noqa: SIM118 (not a dict)
            weights |= {name.removeprefix("mtp."): tensors.get_tensor(name) for name in names}
    mtp.load_state_dict(weights)
    return mtp


def guessed(model: Any, mtp: fast_model.MTP, inputs: dict[str, Any], case: Case) -> torch.Tensor:
    """For each token of the answer from the second on, whether the layer had guessed it."""
    start = inputs["input_ids"].shape[1]
    with torch.no_grad():
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=case.max_tokens)
        text = model.model.language_model
        hidden, embeds = text(input_ids=ids, use_cache=False).last_hidden_state, text.embed_tokens(ids)
        positions = torch.arange(ids.shape[1])[None]
        cos_sin = text.rotary_emb(hidden, positions.expand(3, 1, -1))
        guess = model.lm_head(mtp(embeds.roll(-1, dims=1), hidden, cos_sin, fast_model.document_mask(positions)))
    # At t the layer sees the hidden state of t and the token t + 1, and guesses the token t + 2.
    return guess[0, start - 1 : -2].argmax(-1) == ids[0, start + 1 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=evaluation.miniature())
    parser.add_argument("--limit", type=int, default=40)
    args = parser.parse_args()

    prompts = Prompts(args.model)
    model = load(args.model, "cpu")
    mtp = load_mtp(args.model, model)
    hits: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for case in ordered(evaluation.load_cases(args.model, args.limit)):
        right = guessed(model, mtp, prompts.batch([case]), case)
        hits[case.skill] += int(right.sum())
        count[case.skill] += len(right)
    print(evaluation.table({skill: (hits[skill], count[skill]) for skill in count}))
    print(f"{100 * hits.total() / count.total():.1f} % of {count.total()} tokens guessed")


if __name__ == "__main__":
    main()
