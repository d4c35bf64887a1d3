"""Checks the options of a run's command line, which are Hydra's, so that an error is one line and not Hydra's usage."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from typing import NoReturn

from ortlaunch.base.errors import RequestError
from ortlaunch.base.nearest import nearest
from ortlaunch.compose.overrides import check_overrides
from ortlaunch.config.keys import is_switch
from ortlaunch.config.meant import meant_key

_COMPLETION = r"(install|uninstall|query)=(bash|zsh|fish)"


def hydra_words(arguments: list[str]) -> tuple[list[str], argparse.Namespace]:
    """Returns the words of a command line in the order that Hydra needs, and what Hydra reads from them.

    Raises:
        RequestError: Hydra has no such option, or does not take its value.
    """
    from hydra._internal.utils import get_args_parser

    if "--" in arguments:
        raise RequestError(
            "--: this command takes no script: ortlaunch [KEY=VALUE ...] -- SCRIPT runs one, --multirun sweeps it"
        )
    words = _keys_first(arguments)
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    options, unknown = parser.parse_known_args(words)
    if unknown:
        option = next((word for word in unknown if word.startswith("-")), None)
        if option is None:
            raise RequestError(f"{unknown[0]}: keys are given as KEY=VALUE (ortlaunch --help)")
        raise RequestError(_unknown_option(option, arguments, parser))
    _check_together(options)
    _check_completion(options)
    check_overrides(options.overrides if not options.shell_completion else [], [options.config_dir or ""])
    return words, options


def _keys_first(arguments: list[str]) -> list[str]:
    """Returns the words with the keys first. Hydra's argparse does not take keys that options separate."""
    keys = [word for word in arguments if word.startswith("~") or ("=" in word and not word.startswith("-"))]
    return keys + [word for word in arguments if word not in keys]


def _refuse(message: str) -> NoReturn:
    raise RequestError(f"{message.removeprefix('argument ')} (ortlaunch --help)")


def _unknown_option(option: str, arguments: list[str], parser: argparse.ArgumentParser) -> str:
    name, equals, value = option.partition("=")
    known = [text for action in parser._actions for text in action.option_strings]
    if meant := nearest(name, known):
        return f"{name}: no such option: did you mean {meant}? (ortlaunch --help)"
    text = f"{name}: no such option; keys are given as KEY=VALUE"
    key = meant_key(name.lstrip("-"))
    if key is None:
        return f"{text} (ortlaunch --help)"
    key, has_value, own_value = key.partition("=")
    if has_value:
        value = own_value
    elif not equals:
        value = _value_behind(option, arguments) or ("true" if is_switch(key) else "VALUE")
    return f"{text}: did you mean {shlex.quote(f'{key}={value}')}?"


def _value_behind(option: str, arguments: list[str]) -> str:
    """Returns the word after an option, if it can be the option's value."""
    following = arguments[arguments.index(option) + 1 :][:1]
    return "".join(word for word in following if "=" not in word and not word.startswith("-"))


def _check_completion(options: argparse.Namespace) -> None:
    """Refuses a request for shell completion that Hydra would answer with a traceback."""
    if not options.shell_completion:
        return
    asked = [word for word in options.overrides if re.fullmatch(_COMPLETION, word)]
    if len(asked) != 1:
        raise RequestError(
            "--shell-completion takes one of install=SHELL, uninstall=SHELL and query=SHELL (SHELL: bash, fish, zsh)"
        )
    if asked[0].startswith("query=") and "COMP_LINE" not in os.environ:
        raise RequestError(f"--shell-completion {asked[0]} is for the shell, which sets COMP_LINE")


def _check_together(options: argparse.Namespace) -> None:
    """Refuses options that do not go together. Hydra itself would answer with a traceback."""
    names = ("run", "cfg", "multirun", "shell_completion", "info")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name)]
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)}: give one of them")
    if options.resolve and options.cfg is None:
        raise RequestError("--resolve goes with --cfg job")
    if options.package is not None and options.cfg is None:
        raise RequestError("--package goes with --cfg job")
