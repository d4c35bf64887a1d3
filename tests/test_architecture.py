"""Who may import whom: read from the sources, and seen in real processes."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ortlaunch

PACKAGE = Path(ortlaunch.__file__).parent
HEAVY = ("torch", "transformers", "deepspeed", "mlflow", "onnxruntime", "pandas")
LAUNCHER = ("ortlaunch.cli", "ortlaunch.usage", "ortlaunch.registry", "ortlaunch.config", "ortlaunch.launch")
_ON_NODES = ("ortlaunch.launch.slurm.preflight",)
"""Runs on a cluster's nodes, to find out whether torch works there."""


def modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path, *, lazy: bool) -> set[str]:
    """What a file imports by full name: when it is imported itself, with `lazy` also when its functions are called."""
    found: set[str] = set()
    for node in _walk(ast.parse(path.read_text()), lazy=lazy):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from package import module` imports the module; `from module import name` the module alone.
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else str(node.module))
    return found


def _walk(tree: ast.AST, *, lazy: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not lazy:
            continue
        yield node
        yield from _walk(node, lazy=lazy)


def below(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def users_of(library: str) -> set[str]:
    return {name for name, path in MODULES.items() if any(below(one, (library,)) for one in imports(path, lazy=True))}


def test_only_the_ort_package_imports_onnxruntime() -> None:
    users = users_of("onnxruntime")
    assert users, "the search finds nothing any more"
    assert {name for name in users if not below(name, ("ortlaunch.ort",))} == set()


def test_only_the_relay_and_compare_import_mlflow() -> None:
    users = users_of("mlflow")
    assert users, "the search finds nothing any more"
    assert {name for name in users if not below(name, ("ortlaunch.tracking", "ortlaunch.compare"))} == set()


def test_the_launcher_reads_no_heavy_library_when_it_is_imported() -> None:
    graph = {name: imports(path, lazy=False) for name, path in MODULES.items()}
    for start in MODULES:
        if below(start, LAUNCHER) and start not in _ON_NODES:
            seen, left = set(), [start]
            while left:
                module = left.pop()
                heavy = {name for name in graph.get(module, set()) if below(name, HEAVY)}
                assert not heavy, f"{start} imports {heavy} by way of {module}"
                new = {name for name in graph.get(module, set()) if name in MODULES} - seen
                seen |= new
                left += new


@pytest.mark.parametrize("lazy", [False, True], ids=["imported", "called"])
def test_no_modules_import_each_other_in_a_circle(lazy: bool) -> None:
    graph = {name: imports(path, lazy=lazy) & set(MODULES) - {name} for name, path in MODULES.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"{'a function imports' if lazy else 'imported'} in a circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["launcher.dry_run=true", "device=cpu"],
        ["+jobs=gpt2_slurm", "device=cpu", "launcher.dry_run=true"],
        ["model=gpt2", "--cfg", "job"],
        ["models"],
        ["jobs"],
        ["jobs", "--available"],
    ],
    ids=" ".join,
)
def test_a_launcher_has_none_of_them_in_memory(tmp_path: Path, arguments: list[str]) -> None:
    code = (
        "import sys; from ortlaunch.cli import dispatch\n"
        f"sys.argv = ['ortlaunch', *{arguments!r}]\n"
        f"code = dispatch({arguments!r})\n"
        f"print('loaded:', *sorted(set(sys.modules) & set({HEAVY!r})))\n"
        "sys.exit(code)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "loaded:"
