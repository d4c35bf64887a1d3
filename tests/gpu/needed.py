"""Which packages ortlaunch needs on a machine beyond those that are there, found from the packages' own metadata."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
MACHINE = Path(__file__).with_name("machine.txt")
PYTHON = "3.12"
FOR_TESTS = ("pytest", "pytest-timeout")
"""What tests/gpu needs beside ortlaunch itself."""
_MARKERS = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "extra": "",
}

Requirements = Callable[[dict[str, str]], dict[str, list[str]]]
"""The requirements (PEP 508) of packages by name, asked for by name and version."""


@dataclass(frozen=True)
class Needed:
    """What a machine lacks, and what does not fit together."""

    wheels: dict[str, str]
    """Version by name of the packages that have to be brought."""
    conflicts: list[str]
    """A line for each requirement that neither the machine nor the pinned versions meet."""


def read_machine(path: Path = MACHINE) -> dict[str, str | None]:
    """The packages of a machine by name; None stands for a version that is not known."""
    found: dict[str, str | None] = {}
    for line in path.read_text().splitlines():
        words = line.partition("#")[0].strip()
        if words:
            name, _, version = words.partition("==")
            found[canonicalize_name(name)] = version or None
    return found


def read_pins(path: Path = ROOT / "constraints.txt") -> dict[str, str]:
    """The tested versions by name."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {canonicalize_name(name): version for name, version in pairs}


def read_roots(path: Path = ROOT / "pyproject.toml") -> list[str]:
    """The requirements of ortlaunch itself and of its tests on a GPU."""
    project = tomllib.loads(path.read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["deepspeed"], *FOR_TESTS]


def needed(
    roots: list[str], machine: dict[str, str | None], pins: dict[str, str], requirements_of: Requirements
) -> Needed:
    """Follows requirements from `roots` on, and stops at packages that the machine has.

    Args:
        roots: where to begin (PEP 508).
        machine: `read_machine`.
        pins: the version that is brought of each package.
        requirements_of: called once for each package that is brought.
    """
    wheels: dict[str, str] = {}
    conflicts: list[str] = []
    found = {"ortlaunch": roots}
    while found:
        new: dict[str, str] = {}
        for user, texts in found.items():
            for text in texts:
                name, version, problem = _settled(text, machine, pins)
                if problem:
                    conflicts.append(f"{user} needs {text}{problem}")
                elif version is not None and name not in machine and name not in wheels:
                    new[name] = version
        wheels |= new
        found = requirements_of(new) if new else {}
    return Needed(dict(sorted(wheels.items())), conflicts)


def _settled(text: str, machine: dict[str, str | None], pins: dict[str, str]) -> tuple[str, str | None, str]:
    """Name and version that a requirement gets, and what is wrong with them; no version where none is needed."""
    requirement = Requirement(text)
    name = canonicalize_name(requirement.name)
    if requirement.marker is not None and not requirement.marker.evaluate(_MARKERS):
        return name, None, ""
    version = machine[name] if name in machine else pins.get(name)
    if version is None:
        return name, None, "" if name in machine else ", which constraints.txt does not pin"
    if not requirement.specifier.contains(version, prereleases=True):
        return name, None, f", and there is {name} {version}"
    return name, version, ""


def requirements_in(metadata: str) -> list[str]:
    """The requirements that a wheel's METADATA lists."""
    return re.findall(r"^Requires-Dist: (.*?)\r?$", metadata.partition("\n\n")[0], re.MULTILINE)
