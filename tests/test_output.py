"""Where a worker's output goes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

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
        [sys.executable, "-c", CODE, str(log), which], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == terminal
    assert result.stderr == ""
    assert set(log.read_text().splitlines()) == {"printed", "to stderr", "native", "from a child"}


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
    result = subprocess.run([sys.executable, "-c", code, str(log)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, log.read_text()
    assert result.stdout == ""
    assert "a banner" in log.read_text()
