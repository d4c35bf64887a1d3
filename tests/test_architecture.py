"""Who may import whom: read from the sources, and seen in real processes."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ortlaunch
from ortlaunch.cli import VERBS
from ortlaunch.run.run import Run

PACKAGE = Path(ortlaunch.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
HEAVY = ("torch", "transformers", "deepspeed", "mlflow", "onnxruntime", "pandas", "tensorboard")
LAYERS = (
    ("ortlaunch", "ortlaunch.cli", "ortlaunch.__main__", "ortlaunch.attaching"),
    ("ortlaunch.doctor",),
    ("ortlaunch.serve",),
    ("ortlaunch.tune",),
    ("ortlaunch.verbs",),
    ("ortlaunch.export",),
    ("ortlaunch.check",),
    ("ortlaunch.estimate",),
    ("ortlaunch.compare",),
    ("ortlaunch.follow",),
    ("ortlaunch.compose",),
    ("ortlaunch.launch",),
    ("ortlaunch.worker",),
    ("ortlaunch.trainer", "ortlaunch.hooks"),
    ("ortlaunch.tracking",),
    ("ortlaunch.ort",),
    ("ortlaunch.metrics",),
    ("ortlaunch.models",),
    ("ortlaunch.data",),
    ("ortlaunch.config",),
    ("ortlaunch.run",),
    ("ortlaunch.base",),
)
"""From the top: a module imports from its own line and from those below it."""
PUBLIC_NAMES = {
    "ortlaunch.registry": "ortlaunch.models.registry",
    "ortlaunch.wrapping": "ortlaunch.trainer.wrapping",
    "ortlaunch.errors": "ortlaunch.base.errors",
    "ortlaunch.config.compose": "ortlaunch.compose.hydra_tree",
}
"""Modules that only pass on what stands elsewhere, for programs that import it from there; nothing here does."""
LAUNCHER = (
    *("ortlaunch.cli", "ortlaunch.verbs", "ortlaunch.doctor", "ortlaunch.check.command", "ortlaunch.export.command"),
    *("ortlaunch.estimate.command", "ortlaunch.tune"),
    "ortlaunch.serve",
    *("ortlaunch.compare", "ortlaunch.follow", "ortlaunch.compose", "ortlaunch.launch", "ortlaunch.tracking"),
    *("ortlaunch.models.registry", "ortlaunch.data.sources", "ortlaunch.config", "ortlaunch.run", "ortlaunch.base"),
    *("ortlaunch.trainer.optimizers", "ortlaunch.trainer.schedules"),
)
"""What the launcher and the readers import."""
IN_SCRIPTS = "ortlaunch.tracking.script_run"
"""MLflow imports it in the process of a user's script."""


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


def test_symbolics_of_the_exporter_come_from_its_registry_alone() -> None:
    """torch's modules with the old names give others of them, by who imported them first."""
    assert [name for name, path in MODULES.items() if "symbolic_opset" in path.read_text()] == []


def test_the_package_uses_nothing_of_a_test() -> None:
    assert users_of("unittest") | users_of("pytest") == set()


def test_one_function_ends_a_run() -> None:
    """Whoever ends it, its account, its claim and its sweep are dealt with. `run/run.py` journals an end of before."""
    users = {name for name, path in MODULES.items() if "journal.end(" in path.read_text()}
    assert users == {f"ortlaunch.run.{name}" for name in ("ending", "run", "sweep")}


def test_the_launcher_reads_no_heavy_library_when_it_is_imported() -> None:
    graph = {name: imports(path, lazy=False) for name, path in MODULES.items()}
    for start in MODULES:
        if below(start, LAUNCHER) and start != IN_SCRIPTS:
            seen, left = set(), [start]
            while left:
                module = left.pop()
                heavy = {name for name in graph.get(module, set()) if below(name, HEAVY)}
                assert not heavy, f"{start} imports {heavy} by way of {module}"
                new = {name for name in graph.get(module, set()) if name in MODULES} - seen
                seen |= new
                left += new


def test_no_module_puts_the_working_folder_before_the_libraries() -> None:
    words = re.compile(r'sys\.executable, "-m"|sys\.path\.insert')
    found = [name for name, path in MODULES.items() if words.search(path.read_text())]
    assert found == []


@pytest.mark.parametrize("lazy", [False, True], ids=["imported", "called"])
def test_no_modules_import_each_other_in_a_circle(lazy: bool) -> None:
    graph = {name: imports(path, lazy=lazy) & set(MODULES) - {name} for name, path in MODULES.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"{'a function imports' if lazy else 'imported'} in a circle: {' -> '.join(error.args[1])}")


def layer_of(name: str) -> int:
    """The line of `LAYERS` that a module stands on."""
    found = [
        number
        for number, packages in enumerate(LAYERS)
        if any(name == package or (package != "ortlaunch" and name.startswith(f"{package}.")) for package in packages)
    ]
    assert len(found) == 1, f"{name} needs a line of LAYERS, and of the table of layers in docs/architecture.md"
    return found[0]


def test_imports_point_down_the_layers_only() -> None:
    layers = {name: layer_of(name) for name in MODULES if name not in PUBLIC_NAMES}
    above = [
        f"{name} imports {other}"
        for name, layer in layers.items()
        for other in imports(MODULES[name], lazy=True) & set(MODULES)
        if other != "ortlaunch" and layer_of(other) < layer
    ]
    assert above == []


def test_the_page_shows_the_layers_in_their_order() -> None:
    _, _, text = PAGE.read_text().partition("| layer | what it holds |")
    rows = [line.split(" | ")[0] for line in text.partition("\n\n")[0].splitlines()[2:]]
    shown = [tuple(f"ortlaunch.{name}" for name in re.findall(r"`(\w+)(?:/|\.py)`", row)) for row in rows]
    assert shown == [("ortlaunch.cli",), *LAYERS[1:]]


def test_public_names_are_what_they_pass_on_and_nothing_here_uses_them() -> None:
    for name, home in PUBLIC_NAMES.items():
        face, source = importlib.import_module(name), importlib.import_module(home)
        assert all(getattr(face, one) is getattr(source, one) for one in face.__all__)
    users = {other: name for name, path in MODULES.items() for other in imports(path, lazy=True) & set(PUBLIC_NAMES)}
    assert users == {}


def test_only_the_run_package_names_the_files_of_a_run_folder() -> None:
    run = Run(Path("folder"))
    paths = [
        getattr(run, name)
        for name, value in vars(Run).items()
        if not name.startswith("_") and hasattr(value, "__get__")
    ]
    names = {path.name for path in paths if isinstance(path, Path) and path.parent == run.path}
    # These are words elsewhere too: a verb, an option, a label. The configuration tree and exports have a config.yaml.
    names -= {"logs", "weights", "onnx", "profile", "preflight", "failures", "checkpoints", "config.yaml"}
    names -= {"artifacts", "sources"}
    assert len(names) > 12
    named = [
        f"{module}: {node.value}"
        for module, path in MODULES.items()
        if not below(module, ("ortlaunch.run",))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert named == []


LIGHT = f"""
import sys
from ortlaunch.cli import main
sys.argv[0] = "ortlaunch"
try:
    main()
except SystemExit as end:
    print("ended:", end.code, *sorted(set(sys.modules) & set({HEAVY!r})))
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        *(([verb, "--help"], 0) for verb in VERBS),
        (["--version"], 0),
        (["model=gpt2", "--cfg", "job"], 0),
        (["models"], 0),
        (["jobs"], 0),
        (["jobs", "--available"], 0),
        (["status", "nothing"], 2),
        (["logs", "nothing"], 2),
        (["cancel", "nothing"], 2),
        (["resume", "nothing"], 2),
        (["compare"], 2),
        (["serve", "--host=0.0.0.0"], 2),
        (["--server=http://127.0.0.1:1", "jobs"], 2),
        (["export", "artifacts", "--help"], 0),
        (["export", "verify", "--help"], 0),
        (["export", "onnx"], 2),
        (["bench", "backend=eager,ort", "launcher.dry_run=true"], 0),
        (["launcher.dry_run=true", "device=cpu"], 0),
        (["estimate", "train.stepz=3"], 2),
        (["tune", "model=mlp", "launcher.dry_run=true", "device=cpu"], 0),
        (["launcher=slurm", "launcher.nodes=2", "launcher.dry_run=true"], 0),
        (["+jobs=gpt2_slurm", "device=cpu", "launcher.dry_run=true"], 0),
        (["trainer=ddp,single", "launcher.dry_run=true", "--multirun"], 0),
        (["launcher=slurm", "optimizer.lr=0.1,0.2", "launcher.dry_run=true", "--multirun"], 0),
        (["launcher.dry_run=true", "+after=nothing"], 0),
        (["launcher=slurm", "launcher.dry_run=true", "+after=nothing"], 2),
        (["trainer=deepspeed", "trainer.zero_stage=2", "backend.zero3=hold"], 2),
        (["tracking=[mlflow,tensorboard]", "launcher.dry_run=true", "device=cpu"], 0),
        (["train.steps=0"], 2),
        (["train.stepz=3"], 2),
        (["model=nothing"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_launcher_has_none_of_them_in_memory(tmp_path: Path, arguments: list[str], code: int) -> None:
    # A command that another test has run in this process may have set HYDRA_FULL_ERROR.
    inherited = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}
    environment = {**inherited, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", LIGHT, *arguments]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert result.stdout.splitlines()[-1:] == [f"ended: {code}"], result.stdout + result.stderr
