"""A model is a folder, nothing at all, or an id of the hub; what goes wrong is one line with a way out."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from shardwise.checkpoint import hub
from shardwise.checkpoint.hub import PATTERNS, resolve
from shardwise.config import ConfigError


def refuse(*_: Any, **__: Any) -> str:
    raise AssertionError("the hub was asked")


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "owner" / "model"
    folder.mkdir(parents=True)
    assert resolve(str(folder), download=refuse) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/model", download=refuse) == folder.resolve()


def test_an_id_is_downloaded_without_what_is_not_needed(tmp_path: Path) -> None:
    asked: list[Any] = []

    def download(model: str, *, allow_patterns: list[str]) -> str:
        asked.append((model, allow_patterns))
        return str(tmp_path)

    assert resolve("Qwen/Qwen3.5-35B-A3B", download=download) == tmp_path
    assert asked == [("Qwen/Qwen3.5-35B-A3B", PATTERNS)]


def test_without_a_model_it_is_the_packaged_miniature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "files", lambda _: tmp_path)
    with pytest.raises(ConfigError, match="packaged miniature is missing"):
        resolve(None, download=refuse)
    (tmp_path / "miniature").mkdir()
    (tmp_path / "miniature" / "config.json").write_text("{}")
    assert resolve("", download=refuse) == tmp_path / "miniature"


def response() -> Any:
    return httpx.Response(500, request=httpx.Request("GET", "https://huggingface.co"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("offline"), "cannot be reached; go online, or name a local folder"),
        (RepositoryNotFoundError("404\nlong", response=response()), "neither a folder here nor a model on the hub"),
        (GatedRepoError("403", response=response()), "access is gated; .* `hf auth login`"),
        (HfHubHTTPError("500 first\nsecond", response=response()), r"download failed \(500 first\); try again"),
        (OSError(28, "No space left on device"), r"download failed \(\[Errno 28\] No space left on device\)"),
    ],
)
def test_errors_of_the_hub(error: Exception, message: str) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    with pytest.raises(ConfigError, match=rf"^owner/model: .*{message}") as caught:
        resolve("owner/model", download=fail)
    assert "\n" not in str(caught.value)


def test_neither_a_folder_nor_an_id(tmp_path: Path) -> None:
    for name in ("gpt2", "/no/such/folder", "https://huggingface.co/a/b", "a/b/c"):
        with pytest.raises(ConfigError, match="no such folder, and not an id of the hub"):
            resolve(name, download=refuse)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match="a file, expected the folder"):
        resolve(str(tmp_path / "model.gguf"), download=refuse)
