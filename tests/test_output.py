"""Where a worker's output goes, and what output that cannot be written does to a command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.environment import environment

CODE = """
import logging, os, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from pathlib import Path
from ortlaunch.base import output
output.redirect(Path(sys.argv[1]), to_terminal=sys.argv[2] == "first")
print("printed")
print("to stderr", file=sys.stderr)
os.write(1, b"native\\n")
subprocess_output = os.system("echo from a child")
output.quiet_library_logs()
"""


@pytest.mark.parametrize(("which", "terminal"), [("first", "printed\n"), ("other", "")])
def test_only_what_rank_0_prints_reaches_the_terminal(tmp_path: Path, which: str, terminal: str) -> None:
    log = tmp_path / "rank.log"
    result = subprocess.run(
        [sys.executable, "-c", CODE, str(log), which], capture_output=True, text=True, timeout=200, check=True
    )
    assert result.stdout == terminal
    assert result.stderr == ""
    assert set(log.read_text().splitlines()) == {"printed", "to stderr", "native", "from a child"}


@pytest.mark.parametrize(("which", "terminal"), [("first", True), ("other", False)])
def test_the_output_of_a_worker_is_a_text_stream_like_any_other(tmp_path: Path, which: str, terminal: bool) -> None:
    code = """
    sys.stdout.reconfigure(errors="replace", line_buffering=False)
    missing = [name for name in dir(sys.__stdout__) if not hasattr(sys.stdout, name)]
    assert missing == [], missing
    assert (sys.stdout.name, sys.stdout.mode, sys.stdout.errors) == ("<stdout>", "w", "replace")
    assert isinstance(sys.stdout.encoding, str) and not sys.stdout.closed and not sys.stdout.isatty()
    sys.stdout.buffer.write(b"bytes\\n")
    sys.stdout.buffer.flush()
    """
    log = tmp_path / "rank.log"
    words = [sys.executable, "-c", CODE + textwrap.dedent(code), str(log), which]
    result = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, log.read_text()
    assert ("bytes\n" in result.stdout) is terminal
    assert "bytes\n" in log.read_text()


def test_libraries_that_log_to_standard_output_are_moved(tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import logging, sys
        from pathlib import Path
        from ortlaunch.base import output
        output.redirect(Path(sys.argv[1]), to_terminal=True)
        handler = logging.StreamHandler(sys.stdout)
        logging.getLogger("library").addHandler(handler)
        output.quiet_library_logs()
        logging.getLogger("library").warning("a banner")
        """
    )
    log = tmp_path / "rank.log"
    result = subprocess.run([sys.executable, "-c", code, str(log)], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, log.read_text()
    assert result.stdout == ""
    assert "a banner" in log.read_text()


def command(redirection: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A command whose standard output the shell redirects."""
    line = [sys.executable, "-m", "ortlaunch", *words]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *line],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize(("words", "code"), [(["models"], 128 + signal.SIGPIPE), (["--help"], 0)])
def test_a_pipe_that_nobody_reads_ends_what_only_shows_something(words: list[str], code: int) -> None:
    """As `git log | head` does it; a command that acts goes on."""
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        [sys.executable, "-m", "ortlaunch", *words],
        env=environment(),
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=200,
    )
    os.close(write)
    assert (process.returncode, process.stderr) == (code, "")


@pytest.mark.parametrize("words", [["models"], ["compare", "--help"]])
def test_a_full_disk_for_what_is_shown_is_one_line(words: list[str]) -> None:
    result = command(">/dev/full", *words)
    assert result.returncode == 1
    assert result.stderr == "ortlaunch: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("redirection", [">&-", ">&- 2>&- <&-"])
def test_closed_streams_are_no_error(redirection: str) -> None:
    result = command(redirection, "models")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_an_exit_code_survives_output_that_cannot_be_written() -> None:
    assert command(">/dev/full", "status", "no-such-run").returncode == 2
    assert command(">/dev/full 2>&1", "status", "no-such-run").returncode == 2


@pytest.mark.parametrize("which", ["first", "other"])
def test_a_worker_goes_on_when_log_and_terminal_cannot_be_written(tmp_path: Path, which: str) -> None:
    code = """
import os, resource, sys
from pathlib import Path
from ortlaunch.base import output
output.redirect(Path(sys.argv[1]), to_terminal=sys.argv[2] == "first")
print("before")
# As on a full disk: no file may become longer than the log is now.
resource.setrlimit(resource.RLIMIT_FSIZE, (os.fstat(1).st_size, resource.RLIM_INFINITY))
for number in range(10000):
    print("printed", number)
    print("to stderr", number, file=sys.stderr)
os._exit(7)
"""
    read, write = os.pipe()
    os.close(read)
    log = tmp_path / "rank.log"
    process = subprocess.run([sys.executable, "-c", code, str(log), which], stdout=write, timeout=200)
    os.close(write)
    assert (process.returncode, log.read_text()) == (7, "before\n")
