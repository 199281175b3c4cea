"""tests/gpu/agreement.py on a CPU, with the reference operations in the place of fast ones."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.config import ServeConfig
from shardwise.kernels.ops import Ops, select
from tests.gpu import agreement
from tests.gpu.divergence import Report

PLAIN = select("reference", torch.device("cpu"))
SMALL = {
    "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "full_attention_interval": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip


def compared(folder: Path, monkeypatch: pytest.MonkeyPatch, fast: Ops) -> dict[str, Any]:
    """What is found of a small model whose fast operations are `fast`."""
    raw = json.loads(Path(f"{agreement.GEOMETRY}/config.json").read_text())
    raw["text_config"] |= SMALL
    raw["text_config"]["rope_parameters"]["mrope_section"] = [2, 1, 1]
    (folder / "config.json").write_text(json.dumps(raw))
    monkeypatch.setenv("OUT", str(folder))
    args = argparse.Namespace(prompt=20, batches=[1, 3], steps=[3, 2], limit_s=1000.0)
    serve = ServeConfig(model=str(folder), load_format="dummy", vision="off", device="cpu", dtype="float32")
    monkeypatch.setattr(agreement, "select", lambda kind, *_: PLAIN if kind == "reference" else fast)
    report = Report(args, "small")
    agreement.run(agreement.Case(serve, args), report)
    return report.found


def test_steps_are_whole_prompts_and_every_position_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = compared(tmp_path, monkeypatch, PLAIN)
    lines = found["compared"]
    assert set(lines) == {"exact | fast", "exact | reference", "reference | fast", "exact, routed | fast"}
    for parts in lines.values():
        assert parts["all"]["positions"] == 20 + (38 + 20) + 3 + 3 * 2
        assert parts["all"]["kl_max"] < 1e-9, parts
        assert parts["all"]["top1"] == 1.0, parts
    assert found["experts"]["largest logit passed over"] < 1e-5


def test_a_wrong_kernel_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Experts that are a tenth too large, in decode steps alone."""

    def moe_shared(x_TH: torch.Tensor, *rest: Any) -> Any:
        found, factor = PLAIN.moe_shared(x_TH, *rest), 1.1 if len(x_TH) < 4 else 1.0
        return (found[0] * factor, found[1]) if isinstance(found, tuple) else found * factor

    parts = compared(tmp_path, monkeypatch, replace(PLAIN, moe_shared=moe_shared))["compared"]["exact | fast"]
    assert parts["prompt in two chunks"]["kl_max"] < 1e-9
    assert parts["decode 3"]["kl_mean"] > 1e-6
