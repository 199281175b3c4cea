"""Write miniature_hf.json: transformers' greedy answers to the miniature's text cases, in fp32 on a CPU.

    OMP_NUM_THREADS=2 PYTHONPATH=src:. python -m tests.golden.make_miniature_hf

Run again when the miniature or its evaluation set changes; takes some minutes. Prints the accuracy table.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForImageTextToText, AutoTokenizer

from tests.golden import eval as evaluation


def complete(
    model: Any, pad: int, prompts: Sequence[list[int]], limits: Sequence[int]
) -> list[tuple[list[int], float]]:
    """Greedy completions of a batch, padded on the left: token ids and the smallest lead of each."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return measured(model, {"input_ids": ids, "attention_mask": mask}, limits)


def measured(model: Any, inputs: Mapping[str, torch.Tensor], limits: Sequence[int]) -> list[tuple[list[int], float]]:
    """Greedy completions of `inputs`: token ids and the smallest lead of each."""
    stops, width = set(model.generation_config.eos_token_id), inputs["input_ids"].shape[1]
    with torch.inference_mode():
        out = model.generate(
            **inputs, do_sample=False, max_new_tokens=max(limits), return_dict_in_generate=True, output_logits=True
        )
    best = torch.stack(out.logits, 1).topk(2, dim=-1).values
    leads = best[..., 0] - best[..., 1]
    results = []
    for row, limit in enumerate(limits):
        tokens = out.sequences[row, width:].tolist()[:limit]
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
        results.append((tokens[:end], round(leads[row, :end].min().item(), 4)))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--limit", type=int, default=0, help="a sample, printed but not written")
    args = parser.parse_args()
    folder = evaluation.miniature()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    cases = evaluation.load_cases(limit=args.limit)
    alike = sorted(cases, key=lambda case: (case.prompt_tokens, case.max_tokens))
    found: dict[int, tuple[list[int], float]] = {}
    for start in range(0, len(alike), args.batch):
        part = alike[start : start + args.batch]
        prompts = [evaluation.prompt_ids(tokenizer, case) for case in part]
        results = complete(model, tokenizer.pad_token_id, prompts, [case.max_tokens for case in part])
        found |= {case.id: result for case, result in zip(part, results, strict=True)}
        print(f"{len(found)} of {len(alike)}", flush=True)
    answers = {
        key: evaluation.answer_of(tokenizer.decode(ids, skip_special_tokens=True)) for key, (ids, _) in found.items()
    }
    print(evaluation.table(evaluation.accuracy(cases, answers), evaluation.skipped()))
    print("smallest leads:", sorted(margin for _, margin in found.values())[:10])
    if not args.limit:
        versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
        lines = ",\n".join(
            f'"{key}": {json.dumps({"ids": found[key][0], "margin": found[key][1]})}' for key in sorted(found)
        )
        head = json.dumps({**versions, "dtype": "float32", "device": "cpu"})[:-1]
        evaluation.GOLDEN.write_text(f'{head}, "answers": {{\n{lines}\n}}}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
