"""Load a checkpoint with plain transformers and ask it the questions of eval.jsonl, pictures too, greedily.

    python -m recipes.miniature.check [--model FOLDER] [--limit 100] [--device cuda] [--out RESULTS.jsonl]

On a CPU a hundred questions take a few minutes.
"""

import argparse
import base64
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, Qwen3_5MoeForConditionalGeneration

from tests.golden import eval as evaluation
from tests.golden.eval import Case


def ordered(cases: Sequence[Case]) -> list[Case]:
    """Like with like, so that a batch wastes little."""
    return sorted(cases, key=lambda case: (case.max_tokens // 32, case.prompt_tokens))


def images(case: Case) -> list[Image.Image]:
    """The pictures of a chat, from their data URLs."""
    contents = [message["content"] for message in case.messages if isinstance(message["content"], list)]
    parts = [part for content in contents for part in content if part["type"] == "image_url"]
    return [Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].split(",")[1]))) for part in parts]


class Prompts:
    """Turns test cases into the inputs of the model."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.tokenizer.padding_side = "left"
        self.image_processor: Any = AutoImageProcessor.from_pretrained(folder)
        self.image_pad = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def batch(self, cases: Sequence[Case]) -> dict[str, Any]:
        """The inputs for the prompts of `cases`, padded on the left."""
        texts = [evaluation.prompt_text(self.tokenizer, case) for case in cases]
        return self.inputs(texts, [image for case in cases for image in images(case)])

    def inputs(self, texts: list[str], found: list[Image.Image]) -> dict[str, Any]:
        """The inputs for `texts`, whose picture tokens stand for the pictures `found`, in order."""
        texts, pictures = list(texts), dict[str, Any]()
        if found:
            pictures = dict(self.image_processor(found, return_tensors="pt"))
            sizes = iter((pictures["image_grid_thw"].prod(-1) // 4).tolist())
            for i, text in enumerate(texts):  # as many placeholders as the picture has tokens
                head, *tails = text.split("<|image_pad|>")
                texts[i] = head + "".join("<|image_pad|>" * next(sizes) + tail for tail in tails)
        inputs = dict(self.tokenizer(texts, padding=True, return_tensors="pt"), **pictures)
        inputs.pop("token_type_ids", None)
        if found:
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == self.image_pad).long()
        return inputs


def load(folder: Path, device: str) -> Any:
    """The model in bf16. Raises ValueError if a tensor is missing or has another shape."""
    kind: Any = Qwen3_5MoeForConditionalGeneration
    model, info = kind.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    wrong = [*info["missing_keys"], *info["mismatched_keys"]]
    if wrong:
        raise ValueError(f"{folder}: missing or of another shape: {wrong}")
    return model.to(device).eval()


def ask(model: Any, prompts: Prompts, cases: Sequence[Case], device: str, batch: int) -> dict[int, str]:
    """Completions, thinking included, by case id."""
    texts: dict[int, str] = {}
    for start in range(0, len(cases), batch):
        part = cases[start : start + batch]
        inputs = {key: value.to(device) for key, value in prompts.batch(part).items()}
        with torch.no_grad():
            out = model.generate(**inputs, do_sample=False, max_new_tokens=max(case.max_tokens for case in part))
        for case, ids in zip(part, out[:, inputs["input_ids"].shape[1] :], strict=True):
            texts[case.id] = prompts.tokenizer.decode(ids, skip_special_tokens=True)
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=evaluation.miniature())
    parser.add_argument("--cases", type=Path, help="folder with another eval.jsonl")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path, help="file for the answers")
    parser.add_argument("--show", type=int, default=15, help="how many wrong answers to print")
    args = parser.parse_args()

    begin = time.time()
    cases = ordered(evaluation.load_cases(args.cases or args.model, args.limit, pictures=True))
    texts = ask(load(args.model, args.device), Prompts(args.model), cases, args.device, args.batch)
    answers = {key: evaluation.answer_of(text) for key, text in texts.items()}
    wrong = [case for case in cases if not evaluation.matches(case, answers[case.id])]
    if args.out:
        rows = [
            {"id": case.id, "skill": case.skill, "ok": case not in wrong, "output": texts[case.id]}
            for case in sorted(cases, key=lambda case: case.id)
        ]
        args.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    for case in wrong[: args.show]:
        print(f"{case.skill} {case.id}: expected {case.expected!r}, got {texts[case.id]!r}")
    print(evaluation.table(evaluation.accuracy(cases, answers)))
    print(f"{time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
