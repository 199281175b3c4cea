"""Logits of the miniature on a GPU, by our kernels and by transformers: python -m tests.gpu.parity."""

import torch
from transformers import Qwen3_5MoeForConditionalGeneration

from shardwise.config import RankEnvironment, ServeConfig
from shardwise.engine.build import build_rank
from shardwise.engine.plan import Chunk
from tests.golden import eval as evaluation


def main() -> None:
    ids = [(i * 37 + 11) % 2000 for i in range(300)]
    pages = list(range(1, -(-len(ids) // 64) + 1))
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype in ("float32", "bfloat16"):
        model = Qwen3_5MoeForConditionalGeneration.from_pretrained(evaluation.miniature(), dtype=getattr(torch, dtype))
        with torch.no_grad():
            expected = model.cuda().eval()(input_ids=torch.tensor([ids], device="cuda")).logits[0].float()
        for kernels in ("triton", "reference"):
            serve = ServeConfig(model=str(evaluation.miniature()), dtype=dtype, kernels=kernels, max_model_len=1024)
            one = build_rank(serve, RankEnvironment(0, 1, 0, 1, 0))
            whole = one.runner.forward([Chunk(1, 0, len(ids), ids, pages, True, True)])
            steps = [one.runner.forward([Chunk(2, 0, 200, ids[:200], [6, 7, 8, 9], True, True)])]
            for at in range(200, len(ids)):
                new = [10] if at == 256 else []
                steps.append(one.runner.forward([Chunk(2, at, 1, ids[at : at + 1], new, True, True)]))
            for name, found in (("prefill", whole), ("prefill + decode", torch.cat(steps))):
                error = (found - expected).abs().max().item()
                agree = (found.argmax(-1) == expected.argmax(-1)).float().mean().item()
                print(f"{dtype:9} {kernels:9} {name:16} max |difference| {error:.2e}, same top token {agree:.4f}")


if __name__ == "__main__":
    main()
