"""The service of compose.yaml and the systemd unit, against the command that they start."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ortlaunch.serve.settings import DEFAULT_PORT, LOOPBACK
from tests.docker.test_files import COMPOSE, ROOT, instructions
from tests.support.cli import answer
from tests.support.service import Server, start

SERVE = COMPOSE["services"]["serve"]
UNIT = ROOT / "docker" / "ortlaunch-serve.service"
DOCS = (ROOT / "docs" / "serve.md").read_text()


def check_of(port: int) -> int:
    """Runs the health check of the container against a service on another port; returns the exit code."""
    kind, command, *words = SERVE["healthcheck"]["test"]
    assert (kind, command) == ("CMD", "python3")
    address = f"http://{LOOPBACK}:{DEFAULT_PORT}/health"
    assert sum(address in word for word in words) == 1
    words = [word.replace(address, f"http://{LOOPBACK}:{port}/health") for word in words]
    return subprocess.run([sys.executable, *words], capture_output=True, timeout=200, check=False).returncode


def test_the_container_starts_the_service_and_its_check_tells_whether_it_answers(tmp_path: Path) -> None:
    verb, *options = SERVE["command"]
    assert verb == "serve" and "--shared-account" in options
    server: Server = start(tmp_path, *options)
    try:
        assert server.link, "the first administrator's link is in the container's log"
        assert check_of(server.port) == 0
        # All that it keeps is below its working folder, which is on a volume.
        assert (tmp_path / "runs" / ".serve" / "serve.db").is_file()
    finally:
        server.kill()
    assert check_of(server.port) != 0
    image = ROOT / "docker" / SERVE["build"]["context"] / SERVE["build"]["dockerfile"]
    folder = [one.value for one in instructions(image) if one.name == "WORKDIR"][-1]
    assert [volume.partition(":")[2] for volume in SERVE["volumes"]] == [folder]


def test_the_container_is_reached_from_its_machine_alone() -> None:
    """The service listens on the loopback address, so a published port would lead nowhere."""
    assert SERVE["network_mode"] == "host" and "ports" not in SERVE
    assert SERVE["environment"]["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:5000"
    assert "127.0.0.1:5000" in COMPOSE["services"]["mlflow"]["environment"]["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")


def test_each_documented_command_of_compose_names_the_profile() -> None:
    """A service of a profile is none for a command that does not name it."""
    lines = re.findall(r"^docker compose .*\bserve$", DOCS, re.MULTILINE)
    assert lines
    for line in lines:
        assert "--file docker/compose.yaml --profile serve " in line
    assert "docker/secrets.sh\n" in DOCS


def test_the_options_of_the_unit_are_those_of_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = re.findall(r"^ExecStart=\S+ serve (.*)$", UNIT.read_text(), re.MULTILINE)
    assert len(words) == 1
    options = [word.replace("=/", f"={tmp_path}/") for word in shlex.split(words[0])]
    result = answer(tmp_path, capfd, "serve", *options, "--link=ada")
    assert "there is no database" in result.stderr
    assert f"{tmp_path}/var/lib/ortlaunch/serve.db" in result.stderr


def test_the_cache_of_the_unit_is_its_accounts_alone() -> None:
    """install.sh lets every user write it, as in an image, where there is one."""
    unit = UNIT.read_text()
    (cache,) = re.findall(r"^Environment=ORTLAUNCH_CACHE=(\S+)$", unit, re.MULTILINE)
    (account,) = re.findall(r"^User=(.+)$", unit, re.MULTILINE)
    assert re.search(rf"^#   chown -R {account}: {cache} ", unit, re.MULTILINE)
    assert re.search(rf"^#   chmod 755 {cache} ", unit, re.MULTILINE)


def test_the_unit_is_started_again_however_often_it_has_failed() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.read(UNIT)
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"
    assert unit["Service"]["Restart"] == "on-failure"


def test_the_unit_names_what_was_compiled_for_its_machine() -> None:
    """install.sh compiles our kernels for many processors, which would not be as fast as this one is."""
    unit, install = UNIT.read_text(), (ROOT / "docker" / "install.sh").read_text()
    (folder,) = re.findall(r"^ExecStart=(\S+)/bin/ortlaunch ", unit, re.MULTILINE)
    (words,) = re.findall(r"^Environment=(.*)$", unit, re.MULTILINE)
    (cache,) = re.findall(r"\$\{ORTLAUNCH_CACHE:-([^}]+)\}", install)
    assert words == f"ORTLAUNCH_CACHE={cache.replace('$folder', folder)}"
    assert f"#   {words} {folder}/bin/python -P -m ortlaunch.ort.extension\n" in unit
    assert '"$folder/bin/python" -P -m ortlaunch.ort.extension\n' in install


def test_the_documented_sudo_rule_names_the_python_of_the_unit() -> None:
    """pip writes the Python that it runs with into the first line of the command; sudo compares the name, too."""
    (python,) = re.findall(r" NOPASSWD: (\S+) -P -m ortlaunch.serve.act ", DOCS)
    (folder,) = re.findall(r"^ExecStart=(\S+)/bin/ortlaunch ", UNIT.read_text(), re.MULTILINE)
    (name,) = re.findall(
        r'^pip\(\) \{ "\$folder/bin/(\w+)" -m pip ', (ROOT / "docker/install.sh").read_text(), re.MULTILINE
    )
    assert python == f"{folder}/bin/{name}"


def test_the_folders_of_the_unit_belong_to_its_account_and_let_others_in() -> None:
    """A home may be closed to others, and `install -d` for a user's folder would make the run root root's."""
    text = UNIT.read_text()
    (account,) = re.findall(r"^User=(.+)$", text, re.MULTILINE)
    (home,) = re.findall(r"^WorkingDirectory=(.+)$", text, re.MULTILINE)
    (root,) = re.findall(r" --root=(\S+)", text)
    assert f"#   install -d -o {account} -g {account} -m 755 {home} {root}\n" in text
    assert f"--home-dir {home} {account}\n" in text and "--create-home" not in text


@pytest.mark.parametrize("is_whole", [True, False], ids=["as it is", "with a misspelt key"])
def test_systemd_takes_the_unit(tmp_path: Path, is_whole: bool) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("there is no systemd-analyze")
    text = UNIT.read_text().replace("/opt/ortlaunch/bin/ortlaunch", sys.executable)
    unit = tmp_path / UNIT.name
    unit.write_text(text if is_whole else text.replace("KillMode=", "KillMoode="))
    result = subprocess.run([program, "verify", str(unit)], capture_output=True, text=True, timeout=200, check=False)
    said = [line for line in result.stderr.splitlines() if UNIT.name in line]
    assert (said == []) is is_whole, result.stderr
