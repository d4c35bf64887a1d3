"""How much memory is free in control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortlaunch.base.free_memory import available

MIB = 2**20
SECOND = ("memory.max", "memory.current", "inactive_file")
FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def group(folder: Path, names: tuple[str, str, str], limit: str, used: int, unused: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {unused}\n")


def free(root: Path, own: str) -> int:
    file = root / "own"
    file.write_text(own)
    return available(root, file)


@pytest.mark.parametrize(
    ("names", "top", "line"), [(SECOND, "", "0::/job/step\n"), (FIRST, "memory", "4:memory:/job/step\n")]
)
def test_the_tightest_group_that_the_process_is_in_counts(
    tmp_path: Path, names: tuple[str, str, str], top: str, line: str
) -> None:
    group(tmp_path / top / "job" / "step", names, str(9 * MIB), 2 * MIB)
    group(tmp_path / top / "job", names, str(8 * MIB), 5 * MIB, 1 * MIB)
    group(tmp_path / top / "other", names, str(MIB), 0)
    assert free(tmp_path, f"9:name=systemd:/\n{line}") == 4 * MIB


def test_the_root_of_a_container_is_a_group(tmp_path: Path) -> None:
    group(tmp_path, SECOND, str(MIB), 24)
    assert free(tmp_path, "0::/\n") == MIB - 24


def test_a_group_without_a_limit_leaves_what_the_machine_has(tmp_path: Path) -> None:
    group(tmp_path / "job", SECOND, "max", 5)
    group(tmp_path / "memory" / "job", FIRST, str(2**63 - 4096), 5)
    assert 2**26 < free(tmp_path, "0::/job\n4:memory:/job\n") < 2**50


def test_a_group_that_is_full_has_nothing(tmp_path: Path) -> None:
    group(tmp_path / "job", SECOND, str(MIB), 2 * MIB)
    assert free(tmp_path, "0::/job\n") == 0


@pytest.mark.parametrize("own", ["", "nonsense", "0::/gone\n", "0::/../..\n"])
def test_without_groups_it_is_what_the_machine_has(tmp_path: Path, own: str) -> None:
    assert 2**26 < free(tmp_path, own) < 2**50
