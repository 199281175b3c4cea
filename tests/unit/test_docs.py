"""What the documents say is so: the generated page is up to date, and the files and flags that they name are there."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))


@pytest.fixture(scope="module")
def sharding() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "sharding.py"))


def test_the_sharding_page_is_what_the_specs_say(sharding: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "sharding.md").read_text(encoding="utf-8")
    assert text == sharding["page"](), "run `python docs/sharding.py`"


def test_the_sharding_page_counts_every_weight(sharding: dict[str, Any]) -> None:
    """Of text: 10 attention layers with 4 specs, 30 delta layers with 8, 40 of experts and norms with 7, and three."""
    table = sharding["page"]().split("## KV cache")[0]
    counts = re.findall(r"^\| `(?!visual)[^`]+` \| (\d+) \|", table, re.MULTILINE)
    assert sum(map(int, counts)) == 10 * 4 + 30 * 8 + 40 * 7 + 3


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_links_to_or_names_are_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []
    named = re.findall(r"`([a-z_]+/[a-z_0-9/]+\.py)(?::[A-Za-z_.]+)?`", text)
    places = (ROOT, ROOT / "src" / "shardwise")
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


@pytest.mark.parametrize("page", PAGES)
def test_functions_that_a_page_names_are_in_their_files(page: str) -> None:
    """`engine/scheduler.py:Scheduler.plan` names a definition, so that pages follow when code moves."""
    missing = []
    for file, name in re.findall(r"`([a-z_0-9/]+\.py):([A-Za-z_.]+)`", (ROOT / page).read_text(encoding="utf-8")):
        source = (ROOT / "src" / "shardwise" / file).read_text(encoding="utf-8")
        if not all(re.search(rf"^\s*(async )?(def|class) {part}\b", source, re.MULTILINE) for part in name.split(".")):
            missing.append(f"{file}:{name}")
    assert missing == []
