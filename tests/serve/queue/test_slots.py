"""The slots of a machine, as a program that stands in for nvidia-smi tells them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortlaunch.serve.queue import slots
from ortlaunch.serve.queue.slots import Slots

GPUS = "case $1 in *gpu=*) echo 0, GPU-aa11; echo 1, GPU-bb22; echo 2, GPU-bb33;; *) echo GPU-bb22, 4242;; esac"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "bin" / "nvidia-smi"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(slots, "_FRESH_SECONDS", -1.0)
    return path


def says(program: Path, script: str) -> None:
    program.write_text(f"#!/bin/sh\n{script}\n")


def test_a_failure_is_not_taken_for_a_machine_without_gpus(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Slots()
    says(program, "echo Unable to determine the device handle >&2; exit 255")
    assert found.names() == ()
    assert found.trouble == "nvidia-smi fails with exit code 255: Unable to determine the device handle"
    says(program, "exec sleep 20")
    with monkeypatch.context() as patch:
        patch.setattr(slots, "_SECONDS", 0.05)
        assert found.names() == ()
    assert found.trouble == "nvidia-smi gives no answer within 0.05 s"
    says(program, GPUS)
    assert found.names() == ("gpu0", "gpu1", "gpu2")
    assert found.trouble == ""


def test_what_was_used_counts_until_there_is_another_answer(program: Path) -> None:
    says(program, GPUS.replace("echo GPU-bb22", "exit 255; echo GPU-bb22"))
    found = Slots()
    assert set(found.withheld()) == {"gpu0", "gpu1", "gpu2"}, "nobody knows"
    says(program, GPUS)
    assert set(found.withheld()) == {"gpu1"}
    says(program, "exit 255")
    assert set(found.withheld()) == {"gpu1"}
    says(program, GPUS.replace("bb22, 4", "bb33, 4"))
    assert set(found.withheld()) == {"gpu2"}


def test_a_gpu_is_given_out_by_one_service_of_the_machine(program: Path) -> None:
    says(program, GPUS.replace("echo GPU-bb22, 4242", "true"))
    first, second = Slots(2), Slots()
    assert first.withheld() == {}
    assert second.withheld() == dict.fromkeys(["gpu0", "gpu1"], slots._TAKEN)
    first._held.clear()
    assert second.withheld() == {}, "its service has ended"


@pytest.mark.parametrize("code", [6, 9, 12])
def test_a_machine_without_gpus_has_slots_on_the_cpu(program: Path, code: int) -> None:
    says(program, f"exit {code}")
    assert Slots(2).names() == ("cpu0", "cpu1")
    assert Slots().trouble == ""


def test_gpus_whose_driver_comes_after_the_service_are_found(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_DRIVER_SECONDS", -1.0)
    found = Slots()
    says(program, "exit 9")
    assert found.names() == ("cpu0",)
    says(program, "exit 255")
    assert found.names() == ("cpu0",), "what it said last counts"
    says(program, GPUS)
    assert found.names() == ("gpu0", "gpu1", "gpu2")
    assert set(found.withheld()) == {"gpu1"}
    says(program, "exit 9")
    assert found.names() == ("gpu0", "gpu1", "gpu2"), "GPUs stay"
    assert set(found.withheld()) == {"gpu0", "gpu1", "gpu2"}


def test_the_first_answer_is_waited_for_by_nobody(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_FRESH_SECONDS", 5.0)
    says(program, GPUS)
    assert set(Slots().withheld()) == {"gpu1"}


def test_a_failing_program_is_not_asked_each_time(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_FRESH_SECONDS", 5.0)
    says(program, f"echo >> {program}.calls; exit 255")
    found = Slots()
    for _ in range(5):
        assert found.names() == ()
    assert Path(f"{program}.calls").read_text() == "\n"


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1", ("gpu1",)),
        ("GPU-aa11,GPU-bb3", ("gpu0", "gpu2")),
        ("2, 0", ("gpu0", "gpu2")),
        ("", ("cpu0",)),
        ("-1", ("cpu0",)),
    ],
)
def test_the_gpus_that_the_service_may_give_away(
    program: Path, visible: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    says(program, GPUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Slots().names() == names


@pytest.mark.parametrize(
    "listing", ["echo 0, GPU-aa11; echo 2, GPU-bb33", "echo No devices were found; exit 6", "exit 9"]
)
def test_a_gpu_that_is_not_found_any_more_is_withheld(program: Path, listing: str) -> None:
    says(program, GPUS.replace("echo GPU-bb22, 4242", ":"))
    found = Slots()
    assert found.withheld() == {}
    says(program, f"case $1 in *gpu=*) {listing};; esac")
    gone = found.withheld()
    assert "gpu1" in gone
    assert set(gone.values()) == {"nvidia-smi does not find it"}
    assert found.names() == ("gpu0", "gpu1", "gpu2")


@pytest.mark.parametrize(
    "answer", ["Segmentation fault", "0, GPU-aa11, more", "[Unknown Error], [Unknown Error]", "\377"]
)
def test_what_cannot_be_read_is_no_answer(program: Path, answer: str) -> None:
    says(program, f"printf '{answer}\\n'")
    found = Slots()
    assert found.names() == ()
    assert found.trouble.startswith("the output of nvidia-smi cannot be read: ")
    says(program, GPUS)
    assert set(found.withheld()) == {"gpu1"}
    says(program, GPUS.replace("echo GPU-bb22, 4242", f"printf '{answer}\\n'"))
    assert set(found.withheld()) == {"gpu1"}, "what it said last counts"


def test_no_devices_found_is_an_answer(program: Path) -> None:
    says(program, "echo No devices were found")
    assert Slots().names() == ("cpu0",)


def test_a_driver_that_hangs_is_waited_for_by_nobody(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "_PATIENCE_SECONDS", 0.05)
    gate, calls = tmp_path / "gate", tmp_path / "calls"
    waits = f"case $1 in *gpu=*) echo >> {calls};; esac; until [ -e {gate} ]; do sleep 0.05; done"
    says(program, f"{waits}; {GPUS}")
    found = Slots()
    try:
        for _ in range(3):
            assert found.names() == ()
        assert found.trouble == "nvidia-smi has given no answer for more than 0.05 s"
        assert calls.read_text() == "\n", "one program waits, and no second one is started"
    finally:
        gate.touch()
    monkeypatch.setattr(slots, "_PATIENCE_SECONDS", 20.0)
    assert found.names() == ("gpu0", "gpu1", "gpu2")
    assert found.trouble == ""
