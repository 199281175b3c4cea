"""Scripts that only run on GPUs are at least imported here, so that a name that moved is noticed."""

from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("tests/gpu/*.py")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_it_imports(script: Path) -> None:
    """All of them import torch and the package, and do nothing else until their main runs."""
    module = import_module(".".join(script.relative_to(ROOT).with_suffix("").parts))
    assert module.__doc__ or script.stem == "__init__"
