"""Changes keys of a configuration that a run folder holds, by the words of a command line."""

from __future__ import annotations

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_errors import explain
from ortlaunch.compose.overrides import parsed
from ortlaunch.config.load import first_line, to_run_config
from ortlaunch.config.schema import AnyRun


def changed(config: AnyRun, words: list[str], verb: str) -> AnyRun:
    """Returns a configuration with single keys changed.

    Hydra's grammar is used, as for a run. YAML would read launcher.time=4:00:00 as the number 14400.

    Args:
        config: the stored configuration.
        words: KEY=VALUE; a ``+`` before the key is allowed, and means the same.
        verb: the verb, for messages.

    Raises:
        RequestError: a word cannot be read, its key does not exist, or its value does not fit.
    """
    tree = OmegaConf.structured(config)
    for word in words:
        if "=" not in word or word.startswith("~"):
            raise RequestError(f"{verb}: {word} is not of the form KEY=VALUE")
        try:
            change = parsed(word)
        except RequestError as error:
            raise RequestError(f"{verb}: {error}") from error
        if change.is_sweep_override():
            raise RequestError(f"{verb}: {word}: a run has one value of a key")
        try:
            OmegaConf.update(tree, change.key_or_group, change.value(), merge=True)
        except ValidationError as error:
            raise RequestError(f"{verb}: {word}: {first_line(error)}") from error
        except OmegaConfBaseException as error:
            raise RequestError(f"{verb}: {explain(error)}") from error
        except Exception as error:
            # OmegaConf fails in several ways for a key below a plain value: train.steps.x=1.
            raise RequestError(f"{verb}: {word}: there is no such key (all keys: ortlaunch --cfg job)") from error
    new = to_run_config(tree)
    assert isinstance(new, type(config))
    return new
