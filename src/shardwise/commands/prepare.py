"""From a model's name to a config that every process can use, with all that can be wrong found before a rank starts."""

import logging
from importlib.util import find_spec
from pathlib import Path

import msgspec

from shardwise.config import ConfigError, ModelConfig, ServeConfig, VisionConfig, load_model_config, read_json

logger = logging.getLogger(__name__)


def set_up_logging(config: ServeConfig) -> None:
    """Logs of a command, on stderr."""
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)


def resolve_model(config: ServeConfig) -> ServeConfig:
    """`config` with a local folder for its model, downloaded if need be, and the user's name for it as served name.

    Raises ConfigError, for config.json too.
    """
    from shardwise.checkpoint.hub import resolve

    folder = resolve(config.model or None)
    load_model_config(folder)
    names = config.served_model_name or (config.model or "miniature",)
    return msgspec.structs.replace(config, model=str(folder), served_model_name=names)


def settle_split(config: ServeConfig) -> ServeConfig:
    """`config` with the GPUs, ranks and ratios that are to be used, chosen if they are ours to choose; says why.

    Raises ConfigError for GPUs that are not there or busy, and if the model fits on no split of them.
    """
    named = config.gpu or config.gpu_spec or config.device_profile or not config.ranks
    if not named and (config.device == "cpu" or config.ranks == 1):
        return config  # nothing to choose
    from shardwise.engine.decide import decide, reasons
    from shardwise.parallel.probe import ProbeError

    try:
        settled, decision = decide(config)
    except ProbeError as error:
        if named:
            raise
        logger.warning("%s; the ranks get equal shares", error)
        return config
    for line in reasons(decision) if decision else ():
        logger.info("%s", line)
    return settled


def check_split(config: ServeConfig) -> ModelConfig:
    """Read headers and scales, and cut on paper. Raises ConfigError for whatever the ranks would fail of later."""
    from shardwise.checkpoint.scales import check_scales
    from shardwise.engine.build import blueprint

    made = blueprint(config)
    if made.source is not None:
        check_scales(made.source, made.specs.values())
    return made.model


def check_grammar_backend(config: ServeConfig) -> None:
    """Raises ConfigError if the package is not here."""
    if find_spec(config.grammar_backend) is None:
        raise ConfigError(
            f"--grammar-backend {config.grammar_backend}: the package is not installed; pip install "
            f"{config.grammar_backend}, or leave the option out"
        )


def check_pictures(config: ServeConfig) -> VisionConfig | None:
    """The vision tower that the ranks of `config` will have. Raises ConfigError."""
    from shardwise.engine.build import blueprint

    vision = blueprint(config).vision
    return vision.config if vision else None


def generation_settings(config: ServeConfig) -> dict:
    """The contents of generation_config.json; empty if there is none."""
    path = Path(config.model) / "generation_config.json"
    return read_json(path) if path.exists() else {}
