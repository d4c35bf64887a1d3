"""An export's folder is complete or not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.export.folder import written
from ortlaunch.export.record import RECORD, ExportRecord, load_record


def leave(out: Path, text: str, *, force: bool = False) -> None:
    with written(out, force=force) as folder:
        (folder / RECORD).write_text(text)


def test_a_folder_that_exists_is_not_overwritten_without_force(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    leave(out, "first")
    with pytest.raises(RequestError, match="--force"):
        leave(out, "second")
    assert (out / RECORD).read_text() == "first"
    leave(out, "third", force=True)
    assert (out / RECORD).read_text() == "third"
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_force_leaves_a_folder_that_is_no_export(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(RequestError, match="was not written by an export"):
        leave(tmp_path, "x", force=True)
    assert (tmp_path / "photo.jpg").exists()


def test_an_empty_folder_is_free(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    leave(tmp_path / "out", "x")
    assert (tmp_path / "out" / RECORD).exists()


def test_what_was_half_written_is_removed_and_what_was_there_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    leave(out, "first")
    with pytest.raises(ValueError, match="boom"), written(out, force=True) as folder:
        (folder / "half").touch()
        raise ValueError("boom")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == [RECORD]


def test_no_folder_above_is_left_of_an_export_that_failed(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "deeper" / "out"
    with pytest.raises(ValueError, match="boom"), written(out, force=False):
        raise ValueError("boom")
    with pytest.raises(RequestError, match="File name too long"):
        leave(tmp_path / "deep" / ("x" * 300), "x")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="cannot be written"):
        leave(tmp_path / "file" / "out", "x")


def test_a_request_to_end_removes_it_too(tmp_path: Path) -> None:
    code = """
        import sys, time
        from pathlib import Path
        from ortlaunch.export.folder import written
        with written(Path(sys.argv[1]), force=False) as folder:
            (folder / "half").touch()
            print("written", flush=True)
            time.sleep(600)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(150) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("inputs", ["[3]", '[{"name": "x"}]', "null"])
def test_a_damaged_record_is_one_message(tmp_path: Path, inputs: str) -> None:
    ExportRecord("onnx", "model.onnx", [], [], None, "0.1.0", 9, 17, "step 3").save(tmp_path)
    assert load_record(tmp_path, "onnx").inputs == []
    record = tmp_path / RECORD
    record.write_text(record.read_text().replace('"inputs": []', f'"inputs": {inputs}'))
    with pytest.raises(RequestError, match=f"^{record} cannot be read: ") as caught:
        load_record(tmp_path, "onnx")
    assert len(str(caught.value).splitlines()) == 1
