"""What Triton compiles a kernel for: not for how many tokens and sequences a step happens to have, or a user waits for
the compiler in the middle of an answer."""

import inspect
from collections import defaultdict
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from shardwise.config import RankEnvironment, ServeConfig
from shardwise.engine.build import build_rank
from shardwise.engine.plan import Chunk
from shardwise.kernels.draw import triton as draw
from shardwise.kernels.linear import triton as linear
from shardwise.kernels.linear.tiles import operand
from shardwise.kernels.moe import sort
from shardwise.parallel.comm import Alone
from tests.golden.eval import miniature
from tests.kernels.weights import make_weight

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="what is launched is seen in Triton's interpreter")
Variants = dict[tuple[Any, ...], set[tuple[Any, ...]]]
# Two prompts behind an answer: sequences and their rows begin elsewhere in memory than where one prompt is alone.
STEP = Chunk(1, 2, 1, [9], []), Chunk(2, 0, 3, [7, 8, 9], [1]), Chunk(3, 0, 2, [7, 8], [2])


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Variants:
    """By kernel, constants and types: what else Triton tells apart, as it does where it compiles."""
    found: Variants = defaultdict(set)
    launch = InterpretedFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        parameters = inspect.signature(self.fn).parameters
        given = dict(zip(parameters, args, strict=False)) | {k: v for k, v in kwargs.items() if k in parameters}
        fixed, told = [self.fn.__module__, self.fn.__name__], []
        loose = self.kwargs.get("do_not_specialize") or ()
        unaligned = (*loose, *(self.kwargs.get("do_not_specialize_on_alignment") or ()))
        for name, value in given.items():
            if "constexpr" in str(parameters[name].annotation) or not isinstance(value, int | torch.Tensor):
                fixed.append(str(value))
            elif isinstance(value, torch.Tensor):
                fixed.append(str(value.dtype))
                told.append((name, name in unaligned or value.data_ptr() % 16 == 0))
            elif name not in loose:
                told.append((name, value == 1, name in unaligned or value % 16 == 0))
        found[tuple(fixed)].add(tuple(told))
        return launch(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    return found


def several(variants: Variants) -> dict[tuple[Any, ...], Any]:
    """What differs, by kernel."""
    return {
        key[:2]: [sorted(set(one) - set(other)) for one in told for other in told if one != other]
        for key, told in variants.items()
        if len(told) > 1
    }


def test_no_kernel_is_compiled_for_the_sizes_of_a_step(variants: Variants) -> None:
    """At start-up one prompt goes through the model; then a step comes."""
    serve = ServeConfig(
        model=str(miniature()), ranks=1, device="cpu", dtype="float32", kernels="triton", max_model_len=64,
        max_num_seqs=4, max_num_batched_tokens=16,
    )  # fmt: skip
    runner = build_rank(serve, RankEnvironment(0, 1, 0, 1, 0), Alone()).runner
    assert len(variants) > 10
    for chunk in STEP:
        runner.tables.update(chunk)
    runner.forward(list(STEP))
    assert not several(variants)


def test_nor_for_the_sizes_of_larger_ones(variants: Variants, device: torch.device) -> None:
    """By single operations, for sizes that 16 divides and others."""
    weight = make_weight((64, 96), "fp16", device=str(device))
    for tokens in (17, 32, 33):
        x_TK = torch.randn(tokens, 96).half().to(device)
        linear.tiled(x_TK, operand(weight, True), torch.float32, linear.Tiled(32, 16, 32, 4, 2, 1))
    for tokens in (20, 33, 700, 1024):
        sort.sort_pairs(torch.randint(0, 5, (tokens, 3), dtype=torch.int32, device=device), 0, 5)
    last, told = (torch.zeros(n, dtype=torch.int64, device=device) for n in (40, 80))
    for count in (1, 3, 16):
        rows = torch.arange(count, dtype=torch.int32, device=device)
        draw.keep_tokens(last[:count].clone(), rows, last, told, torch.zeros(1, dtype=torch.int32, device=device))
    assert len(variants) == 6
    assert not several(variants)
