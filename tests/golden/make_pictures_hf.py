"""Write pictures_hf.json: transformers' greedy answers to the miniature's cases with pictures, in fp32 on a CPU.

    OMP_NUM_THREADS=2 PYTHONPATH=src:. python -m tests.golden.make_pictures_hf

Run again when the miniature or its evaluation set changes; takes a minute. Prints the accuracy table.
"""

import json
from typing import Any

import torch
import transformers
from transformers import AutoModelForImageTextToText

from recipes.miniature.check import Prompts
from tests.golden import eval as evaluation
from tests.golden.make_miniature_hf import measured


def main() -> None:
    folder = evaluation.miniature()
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = Prompts(folder)
    cases = [case for case in evaluation.load_cases(pictures=True) if case.skill.startswith(evaluation.PICTURES)]
    found: dict[int, tuple[list[int], float]] = {}
    for case in cases:
        model.model.rope_deltas = None
        found[case.id] = measured(model, prompts.batch([case]), [case.max_tokens])[0]
    answers = {
        key: evaluation.answer_of(prompts.tokenizer.decode(ids, skip_special_tokens=True))
        for key, (ids, _) in found.items()
    }
    print(evaluation.table(evaluation.accuracy(cases, answers)))
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    lines = ",\n".join(
        f'"{key}": {json.dumps({"ids": ids, "margin": margin})}' for key, (ids, margin) in sorted(found.items())
    )
    head = json.dumps({**versions, "dtype": "float32", "device": "cpu"})[:-1]
    evaluation.GOLDEN_PICTURES.write_text(f'{head}, "answers": {{\n{lines}\n}}}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
