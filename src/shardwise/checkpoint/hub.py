"""From the model that a user names to a local folder: a path, the packaged miniature, or an id of the Hub."""

import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from shardwise.config import ConfigError

PATTERNS = ["*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model"]
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve(model: str | None, *, download: Callable[..., str] = snapshot_download) -> Path:
    """The folder of `model`; without one, the miniature's. A hub id is downloaded, with progress bars on the terminal.

    Raises ConfigError, in one line, if there is no such folder or id, or the hub cannot be reached.
    """
    if not model:
        return miniature()
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.exists():
        raise ConfigError(f"{model}: a file, expected the folder that holds config.json; name its folder")
    if not HUB_ID.fullmatch(model):
        raise ConfigError(f"{model}: no such folder, and not an id of the hub such as Qwen/Qwen3.5-35B-A3B; correct it")
    try:
        return Path(download(model, allow_patterns=PATTERNS))
    except GatedRepoError:
        reason = "access is gated; ask for it on the hub and log in with `hf auth login`"
    except RepositoryNotFoundError:
        reason = "neither a folder here nor a model on the hub; correct the name, or `hf auth login` if it is private"
    except LocalEntryNotFoundError:
        reason = "not in the local cache, and the hub cannot be reached; go online, or name a local folder"
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        reason = f"download failed ({_first_line(error)}); try again, or name a local folder"
    raise ConfigError(f"{model}: {reason}")


def miniature() -> Path:
    """The folder of the small real checkpoint that comes with the package. Raises ConfigError if it was left out."""
    folder = Path(str(files("shardwise") / "miniature"))
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder}: the packaged miniature is missing; install shardwise again, or name a model")
    return folder


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
