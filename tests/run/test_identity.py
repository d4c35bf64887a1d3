"""Whether a process still runs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

from ortlaunch.run.identity import Process, has_ended, is_alive, start_ticks
from tests.support.waiting import until

WITHOUT_MAIN_THREAD = """
import ctypes, os, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("up", flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
"""
"""The main thread ends by itself, as it does first when a process of several threads exits."""


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_a_process_lives_until_its_last_thread_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", WITHOUT_MAIN_THREAD], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        ticks = start_ticks(process.pid)
        until(lambda: state_of(process.pid) == "Z")
        assert is_alive(process.pid, ticks) and not has_ended(process.pid)
        assert process.poll() is None, "its parent sees the same"
        process.kill()
        until(lambda: not is_alive(process.pid, ticks))
        assert process.poll() is not None
    finally:
        process.kill()
        process.communicate()
    assert has_ended(process.pid)


def test_a_process_is_here_in_this_container_and_since_this_boot_alone() -> None:
    this = Process.this()
    assert this.is_here and this.lives
    assert not replace(this, machine="another boot").is_here
    assert not replace(this, host="elsewhere").is_here
    assert replace(this, machine="").is_here, "a file of an older release does not say"
    assert Process.stored({"host": this.host, "pid": os.getpid(), "start_ticks": this.start_ticks}) == replace(
        this, machine=""
    )
