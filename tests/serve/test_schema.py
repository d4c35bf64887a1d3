"""Every route of the OpenAPI schema is called with what the schema allows and with what it does not: no 5xx."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ortlaunch.serve.access import COOKIE
from ortlaunch.serve.secret import csrf_of
from tests.support.service import Server, start

LEFT_OUT = (
    "/api/events",  # A stream does not end.
    "/api/session",  # DELETE ends the session of the calls that follow.
    "/api/queue/continue",  # The queue is paused, so that no run starts.
)
EXAMPLES = 40 if os.environ.get("ORTLAUNCH_NIGHTLY") else 1


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    started = start(tmp_path)
    started.first_administrator()
    assert started.ask("POST", "/api/queue/pause").status < 300
    yield started
    started.kill()


@pytest.mark.timeout(900)
def test_no_request_makes_the_service_fail(server: Server, tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("schemathesis")
    command = [str(program), "run", f"{server.url}/api/openapi.json"]
    command += ["--checks=not_a_server_error", f"--max-examples={EXAMPLES}", "--seed=1", "--no-color", "--workers=1"]
    command += ["--phases=examples,coverage,fuzzing", "--generation-database=none", "--request-timeout=120"]
    command += [f"--header=Cookie: {COOKIE}={server.cookie}", f"--header=X-CSRF-Token: {csrf_of(server.cookie)}"]
    command += [f"--header=Origin: {server.url}", *(f"--exclude-path={path}" for path in LEFT_OUT)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert "Tested" in result.stdout or "passed" in result.stdout, result.stdout
    assert server.ask("GET", "/api/session").status == 200
    assert "Traceback" not in server.output.read_text()
