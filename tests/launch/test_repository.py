"""What is kept of the repository that a run was started in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ortlaunch.launch import repository as module
from ortlaunch.launch.repository import repository


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(autouse=True)
def no_settings_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may sign every commit."""
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, "/dev/null")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "mein Repo"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "x.py").write_text("one\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "x")
    return folder


def applied(repo: Path, patch: bytes) -> Path:
    """A fresh clone with the patch on it."""
    clone = repo.parent / "clone"
    git(repo.parent, "clone", "-q", str(repo), str(clone))
    (repo.parent / "p.patch").write_bytes(patch)
    git(clone, "apply", str(repo.parent / "p.patch"))
    return clone


def test_outside_of_a_repository_there_is_none(tmp_path: Path) -> None:
    assert repository(tmp_path) is None


def test_before_the_first_commit_there_is_none(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert repository(tmp_path) is None


def test_without_git_there_is_none(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert repository(repo) is None


def test_a_clean_tree_is_not_dirty(repo: Path) -> None:
    found = repository(repo)
    assert found is not None
    assert found.facts() == {
        "commit": git(repo, "rev-parse", "HEAD"),
        "dirty": False,
        "branch": "main",
        "root": str(repo),
    }


def test_a_detached_head_has_a_commit_and_no_branch(repo: Path) -> None:
    git(repo, "checkout", "-q", "--detach")
    found = repository(repo)
    assert found is not None
    assert found.branch is None
    assert found.commit == git(repo, "rev-parse", "HEAD")


def test_the_patch_makes_staged_binary_and_strange_changes_again(repo: Path) -> None:
    folder = repo / "sub"
    folder.mkdir()
    (repo / "x.py").write_bytes(b"caf\xe9 is no UTF-8\n")
    (repo / "weights.bin").write_bytes(bytes(range(256)))
    (repo / "ümläut.txt").write_text("x\n")
    git(repo, "add", "weights.bin", "ümläut.txt")
    # A user's settings would write another kind of patch.
    git(repo, "config", "diff.noprefix", "true")
    git(repo, "config", "diff.relative", "true")
    git(repo, "config", "color.ui", "always")
    found = repository(folder)
    assert found is not None
    assert found.dirty
    clone = applied(repo, found.patch())
    for name in ("x.py", "weights.bin", "ümläut.txt"):
        assert (clone / name).read_bytes() == (repo / name).read_bytes()


def test_untracked_files_are_listed_only(repo: Path) -> None:
    (repo / "secret\nnotes.txt").write_text("hunter2")
    found = repository(repo)
    assert found is not None
    assert not found.dirty
    text = found.patch()
    assert b"# untracked: secret\\nnotes.txt\n" in text
    assert b"hunter2" not in text
    assert all(line.startswith(b"#") for line in text.splitlines())


def test_what_ortlaunch_writes_is_no_change_of_the_users(repo: Path) -> None:
    (repo / "runs" / "default").mkdir(parents=True)
    (repo / "runs" / "default" / "config.yaml").write_text("x")
    # Even where somebody has committed the store.
    (repo / "mlruns.db").write_text("1")
    git(repo, "add", "mlruns.db")
    git(repo, "commit", "-qm", "y")
    (repo / "mlruns.db").write_text("2")
    found = repository(repo, [repo / "runs", repo / "mlruns.db"])
    assert found is not None
    assert not found.dirty
    assert found.untracked == []
    assert b"diff" not in found.patch()


def test_a_large_binary_file_is_left_out_before_text_is(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATCH_LIMIT", 2000)
    (repo / "big.bin").write_bytes(bytes(hash((i, "x")) % 256 for i in range(5000)))
    (repo / "x.py").write_text("two\n")
    git(repo, "add", "big.bin")
    text = repository(repo).patch()  # type: ignore[union-attr]
    assert b"their contents are left out" in text
    assert b"+two" in text
    assert b"cut off" not in text


def test_a_huge_patch_is_cut_off_and_says_so(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATCH_LIMIT", 2000)
    (repo / "x.py").write_text("line\n" * 100_000)
    text = repository(repo).patch()  # type: ignore[union-attr]
    assert b"# cut off after 2000 bytes: it cannot be applied as it is\n" in text
    assert len(text) < 3000


def test_a_submodule_with_changes_makes_the_tree_dirty(repo: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    git(tmp_path, "clone", "-q", str(repo), str(other))
    git(repo, "submodule", "add", "-q", str(other), "lib")
    git(repo, "commit", "-qm", "lib")
    assert not repository(repo).dirty  # type: ignore[union-attr]
    (repo / "lib" / "x.py").write_text("changed\n")
    found = repository(repo)
    assert found is not None
    assert found.dirty
    assert b"-dirty" in found.patch()


def test_many_untracked_files_are_counted(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_UNTRACKED_LIMIT", 2)
    for name in "abcde":
        (repo / name).write_text("")
    text = repository(repo).patch().decode()  # type: ignore[union-attr]
    assert text.count("# untracked: ") == 2
    assert "# and 3 more untracked" in text


def test_where_git_does_not_answer_in_time_nothing_is_claimed(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def slow(root: Path, untracked: str, excluded: tuple[str, ...]) -> list[str] | None:
        asked.append(untracked)
        return None if len(asked) == 1 else answer

    monkeypatch.setattr(module, "_status", slow)
    answer: list[str] | None = [" M x.py"]
    found = repository(repo)
    assert asked == ["normal", "no"]
    assert found is not None
    assert found.dirty
    asked.clear()
    answer = None
    assert repository(repo) is None
