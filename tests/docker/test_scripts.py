"""The scripts of the images, each beside stand-ins for what it starts; the whole of install.sh is in tests/wheel."""

from __future__ import annotations

import configparser
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

DOCKER = Path(__file__).parents[2] / "docker"
SERVER = {
    "MLFLOW_BACKEND_STORE_URI": "postgresql://m:a%2Fb@db:5432/mlflow",
    "MLFLOW_ARTIFACTS_DESTINATION": "/artifacts",
}


def run(script: str, *arguments: str, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    folders = [str(path)] if path else []
    environment = {"PATH": ":".join([*folders, "/usr/bin", "/bin"]), **variables}
    command = [str(DOCKER / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with programs mlflow and ortlaunch that say how they were called, and with what around them."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("mlflow", "ortlaunch"):
        (folder / name).write_text('#!/bin/sh\necho "arguments $*"\nenv\n')
        (folder / name).chmod(0o755)
    return folder


def said(result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert result.returncode == 0, result.stderr
    return dict(line.split("=", 1) for line in result.stdout.splitlines() if "=" in line)


def test_the_server_is_started_with_auth_and_no_secret_on_its_command_line(stand_in: Path, tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("correct horse battery\n")
    (tmp_path / "database").write_text("se'cr%t\n")
    files = {"MLFLOW_ADMIN_PASSWORD_FILE": str(tmp_path / "admin")}
    files["MLFLOW_DATABASE_PASSWORD_FILE"] = str(tmp_path / "database")
    result = run("mlflow-server.sh", path=stand_in, TMPDIR=str(tmp_path), **SERVER, **files)
    variables = said(result)
    assert result.stdout.splitlines()[0] == "arguments server --app-name basic-auth --serve-artifacts"
    assert variables["MLFLOW_AUTH_ADMIN_PASSWORD"] == "correct horse battery"
    assert variables["PGPASSWORD"] == "se'cr%t"
    assert (variables["MLFLOW_HOST"], variables["MLFLOW_PORT"], variables["MLFLOW_WORKERS"]) == (
        "127.0.0.1",
        "5000",
        "1",
    )
    assert variables["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    assert variables["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert len(variables["MLFLOW_FLASK_SERVER_SECRET_KEY"]) == 64
    file = Path(variables["MLFLOW_AUTH_CONFIG_PATH"])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    settings = configparser.ConfigParser()
    settings.read(file)
    assert settings["mlflow"]["database_uri"] == SERVER["MLFLOW_BACKEND_STORE_URI"]
    assert settings["mlflow"]["auth_cache_ttl_seconds"] == "300"
    assert "correct horse" not in file.read_text()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "MLFLOW_BACKEND_STORE_URI is not set"),
        ({"MLFLOW_BACKEND_STORE_URI": "sqlite:////x.db"}, "MLFLOW_ARTIFACTS_DESTINATION is not set"),
        ({**SERVER, "MLFLOW_ADMIN_PASSWORD_FILE": "/nowhere"}, "MLFLOW_ADMIN_PASSWORD_FILE=/nowhere: cannot be read"),
        ({**SERVER, "MLFLOW_ADMIN_PASSWORD_FILE": "/dev/null"}, "is empty"),
    ],
)
def test_the_server_says_what_it_lacks(stand_in: Path, variables: dict[str, str], words: str) -> None:
    result = run("mlflow-server.sh", path=stand_in, **variables)
    assert result.returncode == 2
    assert words in result.stderr and result.stdout == ""


def test_the_entrypoint_takes_the_password_from_its_file(stand_in: Path, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("p w")
    result = run(
        "entrypoint.sh", "model=mlp", "a b", path=stand_in, MLFLOW_TRACKING_PASSWORD_FILE=str(tmp_path / "password")
    )
    assert result.stdout.splitlines()[0] == "arguments model=mlp a b"
    assert said(result)["MLFLOW_TRACKING_PASSWORD"] == "p w"
    assert "MLFLOW_TRACKING_PASSWORD" not in said(run("entrypoint.sh", path=stand_in))


def test_server_and_entrypoint_read_a_password_alike(stand_in: Path, tmp_path: Path) -> None:
    (tmp_path / "password").write_bytes(b"from windows\r\n")
    file = str(tmp_path / "password")
    for name, variable in (("mlflow", "MLFLOW_AUTH_ADMIN_PASSWORD"), ("ortlaunch", "MLFLOW_TRACKING_PASSWORD")):
        (stand_in / name).write_text(f'#!/bin/sh\nprintf %s "${variable}" | wc -c\n')
    server = run("mlflow-server.sh", path=stand_in, TMPDIR=str(tmp_path), MLFLOW_ADMIN_PASSWORD_FILE=file, **SERVER)
    client = run("entrypoint.sh", path=stand_in, MLFLOW_TRACKING_PASSWORD_FILE=file)
    assert int(server.stdout) == int(client.stdout) == len("from windows")


@pytest.mark.parametrize(("file", "words"), [("/nowhere", "cannot be read"), ("/dev/null", "is empty")])
def test_the_entrypoint_says_what_is_wrong_with_the_file(stand_in: Path, file: str, words: str) -> None:
    result = run("entrypoint.sh", path=stand_in, MLFLOW_TRACKING_PASSWORD_FILE=file)
    assert result.returncode == 2 and result.stdout == ""
    assert f"MLFLOW_TRACKING_PASSWORD_FILE={file}: {words}" in result.stderr


def test_secrets_are_made_once_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    assert run("secrets.sh", str(folder)).returncode == 0
    first = {path.name: path.read_text() for path in folder.iterdir()}
    assert set(first) == {"database_password", "admin_password"}
    assert all(len(text) == 48 for text in first.values()) and len(set(first.values())) == 2
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    run("secrets.sh", str(folder))
    assert {path.name: path.read_text() for path in folder.iterdir()} == first


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "needs EXTRAS FOLDER SOURCE"),
        (["cpu", "/tmp", "."], "/tmp exists already"),
        (["cpu", "/nowhere/venv", "/nowhere/wheel"], "there is no such wheel"),
    ],
)
def test_the_installation_says_what_is_wrong_before_it_begins(arguments: list[str], words: str) -> None:
    result = run("install.sh", *arguments, PYTHON=sys.executable)
    assert result.returncode == 2 and words in result.stderr
    assert not Path("/nowhere").exists()


def test_the_installation_needs_a_compiler(tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    wheel.touch()
    result = run("install.sh", "cpu", str(tmp_path / "venv"), str(wheel), PYTHON=sys.executable, CXX="no-such-compiler")
    assert result.returncode == 2 and "no C++ compiler" in result.stderr
    assert not (tmp_path / "venv").exists()


@pytest.fixture
def pretended_python(tmp_path: Path) -> Path:
    """A Python whose virtual environments note in the file `calls` what they are told, and fail at what FAILS names."""
    noting = f'#!/bin/sh\necho "$*" >>"{tmp_path}/calls"\ncase "$*" in *"${{FAILS:-nothing}}"*) exit 1 ;; esac\n'
    program = tmp_path / "python"
    # Called as `python -m venv FOLDER`.
    program.write_text(
        f'#!/bin/sh\nmkdir -p "$3/bin"\nfor name in python ortlaunch; do\n'
        f'cat >"$3/bin/$name" <<\'END\'\n{noting}END\nchmod +x "$3/bin/$name"\ndone\n'
    )
    program.chmod(0o755)
    return program


def install(tmp_path: Path, python: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """install.sh of a wheel in a folder with a space in its name."""
    wheel = tmp_path / "my wheels" / "x.whl"
    wheel.parent.mkdir()
    wheel.touch()
    return run("install.sh", "cpu,hf", str(tmp_path / "venv"), str(wheel), PYTHON=str(python), CXX="sh", **variables)


def test_torch_is_installed_first_and_alone_from_its_index(tmp_path: Path, pretended_python: Path) -> None:
    """An index of torch's builds lacks the tested versions of what torch needs: that comes with the rest."""
    result = install(tmp_path, pretended_python, TORCH_INDEX="https://torch.example/cpu")
    assert result.returncode == 0, result.stderr
    torch, rest, *_ = [line for line in (tmp_path / "calls").read_text().splitlines() if " install " in line]
    assert torch.endswith(" torch") and "--no-deps" in torch and "--index-url https://torch.example/cpu" in torch
    assert rest.endswith(f" {tmp_path}/my wheels/x.whl[cpu,hf]")
    assert "--no-deps" not in rest and "--index-url" not in rest
    for line in (torch, rest):
        assert f"--constraint {DOCKER.parent}/constraints.txt" in line


@pytest.mark.parametrize("fails", ["--no-deps", "[cpu,hf]", "-dir check", "ortlaunch.ort.extension"])
def test_an_installation_that_fails_leaves_nothing_in_the_way_of_the_next(
    tmp_path: Path, pretended_python: Path, fails: str
) -> None:
    assert install(tmp_path, pretended_python, FAILS=fails).returncode == 1
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(("fails", "code"), [("nothing", 0), ("run --rm train", 3)])
def test_what_try_starts_it_ends(tmp_path: Path, fails: str, code: int) -> None:
    """With an engine that only notes how it was called; docs/docker.md says where a real one did it."""
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "secrets.sh").symlink_to("/bin/true")
    engine = tmp_path / "engine"
    engine.write_text(f'#!/bin/sh\necho "$*"\ncase "$*" in *"{fails}"*) exit 3 ;; esac\n')
    engine.chmod(0o755)
    command = [str(DOCKER / "try.sh"), "--build-arg", "A=b"]
    environment = {"PATH": "/usr/bin:/bin", "ENGINE": str(engine)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == code, result.stderr
    first, *_, last = result.stdout.splitlines()
    assert first == "build --file docker/Dockerfile.cpu --tag ortlaunch:cpu --build-arg A=b ."
    assert last == "compose --project-name ortlaunch-try --file docker/compose.yaml down --volumes"
    assert ("run --rm train compare" in result.stdout) is (code == 0)


def test_all_scripts_are_executable_and_correct_bash() -> None:
    for script in [*DOCKER.glob("*.sh"), DOCKER.parent / ".ci" / "run"]:
        assert os.access(script, os.X_OK), script
        subprocess.run(["bash", "-n", str(script)], check=True)
