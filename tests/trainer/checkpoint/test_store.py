"""Checkpoints are complete or absent, and nothing good is lost."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.run import manifest
from ortlaunch.run.checkpoints import Store, newest, read_meta, set_aside, steps_in


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def save(store: Store, step: int, **meta) -> Path:
    partial = store.begin(step)
    (partial / "inner").mkdir()
    (partial / "inner" / "weights.bin").write_bytes(bytes([step % 256]) * 5000)
    (partial / "state.pt").write_bytes(b"state of %d" % step)
    made = store.commit(step, {"step": step, **meta})
    store.tidy(made)
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_a_checkpoint_is_whole_and_latest_names_it(folder):
    path = save(Store(folder, 2), 100)
    assert path.name == "step-00000100"
    assert manifest.problems(path) == []
    assert (folder / "latest").resolve() == path
    assert newest(folder).path == path
    assert read_meta(path)["step"] == 100
    listed = json.loads((path / "manifest.json").read_text())["files"]
    assert set(listed) == {"inner/weights.bin", "state.pt", "run.json"}
    assert listed["inner/weights.bin"]["size"] == 5000


@pytest.mark.parametrize("harm", ["byte", "cut", "gone", "manifest"])
def test_a_damaged_one_is_named_skipped_and_left(folder, harm):
    store = Store(folder, 2)
    good, bad = save(store, 10), save(store, 20)
    target = bad / "inner" / "weights.bin"
    if harm == "byte":
        corrupt(target)
    elif harm == "cut":
        target.write_bytes(target.read_bytes()[:-1])
    elif harm == "gone":
        target.unlink()
    else:
        (bad / "manifest.json").write_text("{")
    found = newest(folder)
    assert found.path == good
    assert len(found.skipped) == 1
    assert str(bad) in found.skipped[0]
    assert ("manifest.json" if harm == "manifest" else "inner/weights.bin") in found.skipped[0]
    save(store, 30)
    save(store, 40)
    store.prune()
    assert bad.is_dir()
    assert not good.exists()


def test_a_half_written_one_is_named_skipped_and_left(folder):
    store = Store(folder, 2)
    good = save(store, 10)
    partial = store.begin(20)
    (partial / "half").write_text("half")
    found = newest(folder)
    assert found.path == good
    assert str(partial) in found.skipped[0]
    save(store, 20)
    assert (folder / "step-00000020.partial.1" / "half").read_text() == "half"
    assert newest(folder).path == folder / "step-00000020"


def test_only_ours_complete_and_untouched_ones_are_pruned(folder):
    store = Store(folder, 2)
    paths = {step: save(store, step) for step in (10, 20)}
    (paths[20] / "notes.txt").write_text("the good one")
    (folder / "step-00000005-mine").mkdir()
    (folder / "step-00000007").mkdir()
    (folder / "keep.txt").write_text("mine")
    for step in (30, 40, 50):
        paths[step] = save(store, step)
    kept = ["keep.txt", "latest", "step-00000005-mine", "step-00000007", "step-00000020", "step-00000040"]
    assert names(folder) == [*kept, "step-00000050"]


def test_a_complete_one_with_a_flipped_byte_is_not_pruned(folder):
    store = Store(folder, 2)
    first = save(store, 10)
    corrupt(first / "inner" / "weights.bin")
    for step in (20, 30, 40):
        save(store, step)
    assert first.is_dir()


def test_best_follows_the_lowest_evaluation_loss_and_is_kept(folder):
    store = Store(folder, 2)
    for step, loss in ((10, 3.0), (20, 2.0), (30, 2.5), (40, 2.6), (50, None)):
        save(store, step, eval_loss=loss)
    assert (folder / "best").resolve().name == "step-00000020"
    assert [path.name for path in steps_in(folder)] == ["step-00000050", "step-00000040", "step-00000020"]


def test_a_loss_that_is_no_number_is_never_the_best(folder):
    """Nothing would be lower than the first of them."""
    store = Store(folder, 2)
    for step, loss in ((10, float("nan")), (20, 3.0), (30, float("nan")), (40, 2.0)):
        save(store, step, eval_loss=loss)
        assert (folder / "best").exists() is (step > 10)
    assert (folder / "best").resolve().name == "step-00000040"


def test_one_that_is_in_the_way_is_set_aside(folder):
    store = Store(folder, 2)
    old = save(store, 10)
    corrupt(old / "state.pt")
    damaged = (old / "state.pt").read_bytes()
    new = save(store, 10)
    assert manifest.problems(new) == []
    assert (folder / "step-00000010.aside-1" / "state.pt").read_bytes() == damaged
    assert set_aside(folder / "nothing") is None


def test_what_cannot_be_finished_is_removed(folder):
    store = Store(folder, 2)
    partial = store.begin(10)
    (partial / "big").write_text("big")
    store.abandon(10)
    assert names(folder) == []


def test_an_interrupted_removal_is_finished_by_the_next(folder):
    store = Store(folder, 2)
    doomed = save(store, 10)
    doomed = doomed.rename(folder / "step-00000010.deleting")
    (doomed / "state.pt").unlink()
    save(store, 20)
    assert names(folder) == ["latest", "step-00000020"]


class KilledError(BaseException):
    """Takes the place of kill -9."""


@contextmanager
def killed_at(moment: int) -> Iterator[None]:
    """Ends what is done inside before it changes a folder for the `moment`-th time."""
    count = itertools.count(1)

    def changing(change: Any) -> Any:
        def changed(*words: Any, **options: Any) -> Any:
            if next(count) == moment:
                raise KilledError
            return change(*words, **options)

        return changed

    with pytest.MonkeyPatch.context() as patch:
        for name in ("unlink", "rmdir", "rename", "replace", "symlink_to"):
            patch.setattr(Path, name, changing(getattr(Path, name)))
        yield


def test_a_kill_at_any_moment_of_tidying_leaves_nothing_behind_and_the_best_is_kept(folder):
    was_killed = True
    # The first change makes the checkpoint: before it, there is only a half-written one.
    for moment in itertools.count(2):
        shutil.rmtree(folder, ignore_errors=True)
        store = Store(folder, 2)
        for step in (10, 20):
            save(store, step, eval_loss=100.0 - step)
        try:
            with killed_at(moment):
                save(store, 30, eval_loss=1.0)
            was_killed = False
        except KilledError:
            pass
        for step in (40, 50):
            save(Store(folder, 2), step)
        assert names(folder) == ["best", "latest", "step-00000030", "step-00000040", "step-00000050"], moment
        assert (folder / "best").resolve().name == "step-00000030"
        if not was_killed:
            break
    assert moment > 10


def test_what_cannot_be_removed_keeps_no_other_from_being_removed(folder):
    store = Store(folder, 2)
    doomed = save(store, 10).rename(folder / "step-00000010.deleting")
    # A file became a folder, which nobody can unlink.
    (doomed / "state.pt").unlink()
    (doomed / "state.pt").mkdir()
    for step in (20, 30):
        with pytest.raises(OSError):
            save(store, step)
    with pytest.raises(OSError):
        save(store, 40)
    assert not (folder / "step-00000020").exists()


def test_a_file_put_into_what_is_removed_stays_and_keeps_nothing_from_being_removed(folder):
    store = Store(folder, 1)
    (folder / "step-00000010.deleting").mkdir(parents=True)
    (folder / "step-00000010.deleting" / "notes.txt").write_text("mine")
    for step in (10, 20):
        save(store, step)
    assert names(folder) == ["latest", "step-00000010.deleting", "step-00000020"]
    assert names(folder / "step-00000010.deleting") == ["notes.txt"]


WRITER = """
    import sys
    from pathlib import Path
    from ortlaunch.run.checkpoints import Store
    store = Store(Path(sys.argv[1]), 2)
    for step in range(1, 100000):
        partial = store.begin(step)
        for part in range(4):
            (partial / f"part-{part}").write_bytes(bytes([step % 256]) * 300_000)
        store.tidy(store.commit(step, {"step": step}))
        print(step, flush=True)
"""


@pytest.mark.parametrize("after", [0.05, 0.13, 0.21])
def test_killed_while_writing_leaves_complete_ones_and_at_most_one_half(folder, after):
    """kill -9: all that has a checkpoint's name is whole, and the last one that was said to be there is."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder)]
    root = Path(manifest.__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": str(root)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as one:
        said = [int(one.stdout.readline()) for _ in range(3)]
        time.sleep(after)
        one.send_signal(signal.SIGKILL)
        said += [int(line) for line in one.stdout.read().splitlines()]
    assert all(manifest.problems(path) == [] for path in steps_in(folder))
    found = newest(folder)
    assert found.path is not None
    assert read_meta(found.path)["step"] in (said[-1], said[-1] + 1)
    assert len(list(folder.glob("*.partial*"))) <= 1
