"""`shardwise launch`: what it writes for each agent, and that --undo leaves nothing behind."""

import json
import tomllib
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.commands.launch import agents

FLAGS = ["--url", "http://host:9/v1/", "--model", "some/model", "--api-key", "sec ret"]
BEFORE = {
    "claude": '{"env": {"OTHER": "1"}, "theme": "dark"}',
    "codex": 'model = "gpt"\n\n[profiles.mine]\nmodel = "é"',
    "opencode": '{"provider": {"mine": {}}, "model": "mine/x"}\n',
    "qwen": '{\n  "security": {"auth": {"selectedType": "oauth", "x": 1}}\n}\n',
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def files(home: Path) -> list[Path]:
    return sorted(path for path in home.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", sorted(agents()))
@pytest.mark.parametrize("existing", [False, True])
def test_written_and_undone(home: Path, name: str, existing: bool, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / agents()[name].file
    if existing:
        path.parent.mkdir(parents=True)
        path.write_text(BEFORE[name], encoding="utf-8")
    assert main(["launch", name, *FLAGS, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert files(home) == ([path] if existing else [])
    for _ in range(2):  # again: the same
        assert main(["launch", name, *FLAGS]) == 0
        text = path.read_text(encoding="utf-8")
        assert printed == f"# {path}\n{text}"
    assert path.stat().st_mode & 0o077 == 0
    for part in ("http://host:9", "some/model", "sec ret"):
        assert part in text
    assert "/v1/v1" not in text
    if existing:
        kept = {"claude": "OTHER", "codex": "profiles.mine", "opencode": "mine", "qwen": '"x"'}[name]
        assert kept in text
    assert main(["launch", name, "--undo"]) == 0
    assert files(home) == ([path] if existing else [])
    if existing:
        assert path.read_text(encoding="utf-8") == BEFORE[name]
    assert main(["launch", name, "--undo"]) == 2
    assert "nothing of ours" in capsys.readouterr().err


def test_what_is_written_is_what_the_agents_read(home: Path) -> None:
    for name in agents():
        assert main(["launch", name, *FLAGS]) == 0
    claude = json.loads((home / ".claude/settings.json").read_text())["env"]
    assert (claude["ANTHROPIC_BASE_URL"], claude["ANTHROPIC_AUTH_TOKEN"]) == ("http://host:9", "sec ret")
    codex = tomllib.loads((home / ".codex/config.toml").read_text())
    assert codex["profiles"]["shardwise"] == {"model_provider": "shardwise", "model": "some/model"}
    assert codex["model_providers"]["shardwise"]["wire_api"] == "responses"
    opencode = json.loads((home / ".config/opencode/opencode.json").read_text())
    assert opencode["model"] == "shardwise/some/model"
    assert opencode["provider"]["shardwise"]["options"]["baseURL"] == "http://host:9/v1"
    assert json.loads((home / ".qwen/settings.json").read_text())["security"]["auth"]["selectedType"] == "openai"


def test_a_file_that_was_changed_since_is_not_lost(home: Path) -> None:
    path = home / ".claude/settings.json"
    path.parent.mkdir()
    path.write_text("{}")
    assert main(["launch", "claude", *FLAGS]) == 0
    path.write_text('{"mine": 1}')
    assert main(["launch", "claude", "--undo"]) == 0
    assert path.read_text() == "{}"
    assert path.with_name("settings.json.shardwise-changed").read_text() == '{"mine": 1}'


@pytest.mark.parametrize(
    ("name", "text"),
    [("claude", "{"), ("claude", "[]"), ("codex", "a ="), ("codex", "[profiles.shardwise]"), ("qwen", '"x"')],
)
def test_files_that_cannot_be_read_are_left_alone(home: Path, name: str, text: str) -> None:
    path = home / agents()[name].file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert main(["launch", name, *FLAGS]) == 2
    assert path.read_text() == text
    assert files(home) == [path]


def test_without_a_server_a_model_is_needed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "claude", "--url", "http://127.0.0.1:9"]) == 2
    assert "--model" in capsys.readouterr().err
