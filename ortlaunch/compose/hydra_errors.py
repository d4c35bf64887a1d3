"""Turns the errors of Hydra and OmegaConf into one message that names the key or option and the remedy."""

from __future__ import annotations

import dataclasses
import errno
import re
from traceback import walk_tb

import yaml
from omegaconf.errors import ConfigKeyError

from ortlaunch.base.nearest import nearest
from ortlaunch.base.yaml_files import fault_of
from ortlaunch.config.load import first_line, in_words
from ortlaunch.config.meant import unknown_key
from ortlaunch.config.paths import ready_jobs
from ortlaunch.config.schema import GROUPS, GroupConfig
from ortlaunch.config.synonyms import KEYS

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def explain(error: Exception) -> str:
    """Returns one message for an error of Hydra or OmegaConf: the key or option, and the nearest right one."""
    from hydra.errors import OverrideParseException

    text = str(error)
    if "launcher/slurm_profile" in text and "No match in the defaults list" in text:
        return "launcher/slurm_profile: profiles belong to launcher=slurm: give that too"
    if re.search("In '(schema/)?tracking/", text) and "is not a subclass of" in text:
        return "tracking: none means no tracker, so it is not combined with mlflow: leave it out of the list"
    if missing := re.search(r"^In '(jobs/.+)': Could not (?:find|load) '([^']+)'", text):
        where = missing[1].rpartition("/")[0]
        hint = f"a name that does not begin with / is looked for in {where}/"
        return f"{_place(missing[1])}: its defaults name {missing[2]}, which is not there: {hint}"
    if option := re.search(r"Could not (?:find|load) '([^']+)/([^/']*)'", text):
        return _unknown_option(option[1], option[2], text)
    if key := re.search(r"Key '[^']+' (?:is )?not in .*?full_key: (\S+)", text, re.DOTALL):
        return _unknown_key(key[1])
    if key := re.search(r"^Could not override '([^'@]+)'", text):
        cause = error.__cause__
        if isinstance(cause, ConfigKeyError) and cause.object_type is GroupConfig:
            known = ", ".join(one.name for one in dataclasses.fields(GroupConfig))
            return f"{key[1]}: a group has no {cause.key}: it has {known}"
        return _unknown_key(key[1])
    if isinstance(error, OverrideParseException):
        if "=" not in error.override:
            return f"{error.override}: keys are given as KEY=VALUE (ortlaunch --help)"
        return (
            f"{error.override}: not understood. A value with special characters needs quotes that reach ortlaunch: "
            "KEY='\"VALUE\"'"
        )
    if several := re.search(r"^Ambiguous value for argument '([^=]+)=(.*?)'$", text, re.MULTILINE):
        name, values = several[1], several[2]
        return (
            f"{name}={values}: several values: ortlaunch run --multirun runs them one after the other, ortlaunch bench "
            f"compares them; a list that is one value is written '{name}=[{values}]'"
        )
    if there := re.search(r"Either remove \+ prefix: '(.*?)=", text):
        return f"+{there[1]}: the key is there already: write {there[1]}=VALUE"
    if file := re.search(r"^In '(.+?)': \w+ raised while composing config:\n(.+)\n\s*full_key: (\S+)", text):
        return f"{file[1]}: {file[3]}: {in_words(file[2])}"
    if override := re.search(r"Error merging override (\S+)", text):
        return f"{override[1]}: {_cause(error)}"
    if isinstance(error, OSError) and error.errno in _FULL:
        # Hydra writes one file, that of a sweep, before anything of ours.
        from ortlaunch.compose.sweep_folder import sweep_folder

        sweep = sweep_folder()
        place = error.filename or (sweep.path if sweep is not None else "the folder of the sweep")
        return f"{place} cannot be written: {error.strerror}: make room, or choose another place by run_root=FOLDER"
    if isinstance(error, RecursionError) and (circle := _circle(error)):
        return f"{_place(circle[0])}: its defaults lead back to it ({' > '.join(circle)}): take one of these out"
    if isinstance(error, yaml.YAMLError | UnicodeDecodeError | OSError | RecursionError):
        return f"{_file_of(error) or 'configuration'}: cannot be used: {fault_of(error)}"
    return "configuration: " + (" ".join(line.strip() for line in text.strip().splitlines()[:2]) or repr(error))


def _file_of(error: Exception) -> str | None:
    """The file that an error is about, as far as the error or the frames in which it arose say."""
    if isinstance(error, OSError) and error.filename is not None:
        return str(error.filename)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return str(error.problem_mark.name)
    # Hydra's name for the file that it loads. A UnicodeDecodeError does not hold the file.
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return next((str(frame.f_locals["full_path"]) for frame in frames if "full_path" in frame.f_locals), None)


def _circle(error: RecursionError) -> list[str]:
    """The configurations whose defaults name each other in a circle, the first one at both ends; none without one."""
    found: list[str] = []
    for frame, _ in walk_tb(error.__traceback__):
        # Hydra's function that calls itself for each configuration that another one's defaults name.
        if frame.f_code.co_name == "_create_defaults_tree_impl":
            path = frame.f_locals["root"].node.get_config_path()
            if path in found:
                return [*found[found.index(path) :], path]
            found.append(path)
    return []


def _place(config: str) -> str:
    """The file of a configuration that is a ready job; of another one its group and name."""
    group, _, name = config.rpartition("/")
    jobs = ready_jobs() if group == "jobs" else {}
    return str(jobs.get(name, config))


def _unknown_option(group: str, name: str, text: str) -> str:
    # Imported here, because every command imports this module and few have such an error.
    from ortlaunch.models.registry import unknown_model_message
    from ortlaunch.tracking import trackers

    if group == "model" and name:
        return unknown_model_message(name)
    available = re.findall(r"^\t(\S+)$", text, re.MULTILINE) or sorted(GROUPS.get(group, {}))
    if group == "tracking":
        if (reason := trackers.why_missing(name)) is not None:
            return reason
        available = sorted({*trackers.names(), trackers.NONE})
    if not name:
        return f"{group}=: no option is named (there are {', '.join(available)})"
    elsewhere = [option for option in KEYS.get(name.lower(), ()) if option.startswith(f"{group}=")]
    if not elsewhere and (alike := nearest(name, available)):
        elsewhere = [f"{group}={alike}"]
    hint = f". Did you mean {elsewhere[0]}?" if elsewhere else ""
    return f"{group}={name}: no such option{hint} (there are {', '.join(available)})"


def _unknown_key(key: str) -> str:
    from ortlaunch.tracking import trackers

    group, _, rest = key.partition(".")
    if group == "trackers" and (name := rest.partition(".")[0]) in trackers.names():
        return f"{key}: no such key of a chosen tracker; {name} is chosen by tracking=[mlflow,{name}]"
    return unknown_key(key)


def _cause(error: Exception) -> str:
    return first_line(error.__cause__) if error.__cause__ is not None else first_line(error)
