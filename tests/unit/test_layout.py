"""House rules that can be read off the source: who imports whom, and what must not be written where."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shardwise"
# A part imports its own level and those above it here; shard imports nothing of ours.
LEVELS = (
    ("shard", "config"),
    ("kernels", "parallel", "checkpoint"),
    ("layers",),
    ("models",),
    ("cache", "experts"),
    ("engine",),
    ("server",),
    ("cli", "commands", "__main__", "__init__"),
)
MAX_LINES, MAX_FUNCTION_LINES = 400, 70
RANK_COUNT = re.compile(r"(^|_)(world|ranks|tp)(_|$)", re.IGNORECASE)
# A host's memory and cores are divided evenly among its ranks: no size of the model.
HOST_SHARES = frozenset(
    {
        "config.py:rank_threads",
        "engine/place.py:place",
        "engine/build.py:free_bytes",
    }
)

Check = Callable[[str, ast.Module], Iterator[str]]


def level(part: str) -> int:
    for number, parts in enumerate(LEVELS):
        if part in parts:
            return number
    raise AssertionError(f"shardwise.{part} has no place in the import order; give it one in LEVELS")


def imported(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the part of shardwise ("engine") of each import; `name` is the file's, from the package's folder."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = ["shardwise", *Path(name).parts[:-1]][: -(node.level - 1) or None] if node.level else []
            module = ".".join([*start, *filter(None, [node.module])])
            modules = [f"{module}.{alias.name}" for alias in node.names] if module == "shardwise" else [module]
        else:
            continue
        for module in modules:
            if module.startswith("shardwise."):
                yield node.lineno, module.split(".")[1]


def import_order(name: str, tree: ast.Module) -> Iterator[str]:
    part = Path(name).parts[0].removesuffix(".py")
    for line, other in imported(name, tree):
        if level(other) > level(part) or part == "shard":
            yield f"{name}:{line}: {part} must not import {other}"


def no_global(name: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"{name}:{node.lineno}: global {', '.join(node.names)}"


def no_division_by_ranks(name: str, tree: ast.Module) -> Iterator[str]:
    """Sizes of a rank come from shard.py: nobody else divides by a number of ranks."""
    if name == "shard.py":
        return
    for node in _outside(name, tree):
        divisor = None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.FloorDiv):
            divisor = node.right
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div | ast.FloorDiv):
            divisor = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "divmod":
            divisor = node.args[-1]
        names = [n.id if isinstance(n, ast.Name) else n.attr for n in _names(divisor)]
        if divisor is not None and any(RANK_COUNT.search(n) for n in names):
            yield f"{name}:{divisor.lineno}: divides by {ast.unparse(divisor)}; ask shard.py"


def _outside(name: str, node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those of functions that HOST_SHARES lists."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.FunctionDef) and f"{name}:{child.name}" in HOST_SHARES):
            yield from _outside(name, child)


def _names(node: ast.AST | None) -> list[ast.Name | ast.Attribute]:
    return [n for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)] if node is not None else []


def no_environment(name: str, tree: ast.Module) -> Iterator[str]:
    """Environment variables are read in config.py."""
    if name == "config.py":
        return
    for node in ast.walk(tree):
        found = node.attr if isinstance(node, ast.Attribute) else None
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            found = next((alias.name for alias in node.names if alias.name in ("environ", "getenv")), None)
        if found in ("environ", "environb", "getenv", "putenv"):
            yield f"{name}:{getattr(node, 'lineno', 0)}: {found}"


def no_print(name: str, tree: ast.Module) -> Iterator[str]:
    """Only the command line talks to a terminal."""
    if Path(name).parts[0] in ("cli", "cli.py", "commands"):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{name}:{node.lineno}: print"


def short_functions(name: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines >= MAX_FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {lines} lines, of fewer than {MAX_FUNCTION_LINES}"


CHECKS: tuple[Check, ...] = (
    import_order,
    no_global,
    no_division_by_ranks,
    no_environment,
    no_print,
    short_functions,
)


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_package_keeps_the_rule(check: Check) -> None:
    files = sources(PACKAGE)
    assert files
    faults = [
        fault
        for path in files
        for fault in check(path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("folder", ["src", "recipes"])
def test_files_are_short(folder: str) -> None:
    counts = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(ROOT / folder)}
    faults = [f"{path.relative_to(ROOT)}: {lines} lines" for path, lines in counts.items() if lines >= MAX_LINES]
    assert not faults, f"fewer than {MAX_LINES} lines a file: " + "; ".join(faults)


@pytest.mark.parametrize(
    ("check", "name", "text"),
    [
        (import_order, "kernels/norm/triton.py", "from shardwise.engine import plan"),
        (import_order, "layers/moe.py", "import shardwise.models.qwen3_5"),
        (import_order, "layers/moe.py", "from ..models import qwen3_5"),
        (import_order, "layers/moe.py", "from .. import models"),
        (import_order, "layers/moe.py", "def late():\n    from shardwise import server"),
        (import_order, "shard.py", "from shardwise.config import ConfigError"),
        (no_global, "engine/engine.py", "def f():\n    global state\n    state = 1"),
        (no_division_by_ranks, "layers/linear.py", "rows = size // world"),
        (no_division_by_ranks, "layers/linear.py", "rows = -(-size // self.context.world_size)"),
        (no_division_by_ranks, "cache/pages.py", "share = total / len(ranks)"),
        (no_division_by_ranks, "cache/pages.py", "heads //= tp_size"),
        (no_division_by_ranks, "cache/pages.py", "heads, left = divmod(heads, config.tp)"),
        (no_division_by_ranks, "engine/build.py", "def rows(ranks):\n    return size // ranks"),
        (no_environment, "engine/worker.py", "import os\nrank = os.environ['RANK']"),
        (no_environment, "engine/worker.py", "from os import getenv"),
        (no_print, "engine/worker.py", "print('hello')"),
        (short_functions, "engine/engine.py", "def f():\n" + "    pass\n" * 69),
    ],
)
def test_a_breach_is_found(check: Check, name: str, text: str) -> None:
    assert len(list(check(name, ast.parse(text)))) == 1


@pytest.mark.parametrize(
    ("check", "name", "text"),
    [
        (import_order, "engine/runner.py", "from shardwise.models import qwen3_5\nfrom . import plan\nimport torch"),
        (import_order, "kernels/moe/reference.py", "from shardwise.checkpoint.weight import Weight"),
        (no_division_by_ranks, "shard.py", "rows = size // world"),
        (no_division_by_ranks, "config.py", "def rank_threads(ranks):\n    return cores // ranks"),
        (no_division_by_ranks, "server/http.py", "rate = tokens / http_seconds"),
        (no_environment, "config.py", "import os\nenv = os.environ"),
        (no_print, "commands/plan.py", "print('a plan')"),
        (short_functions, "engine/engine.py", "def f():\n" + "    pass\n" * 68),
    ],
)
def test_what_is_allowed_passes(check: Check, name: str, text: str) -> None:
    assert not list(check(name, ast.parse(text)))


def test_a_part_without_a_place_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no place in the import order"):
        list(import_order("extras/thing.py", ast.parse("import shardwise.shard")))
