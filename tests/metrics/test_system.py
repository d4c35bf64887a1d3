"""Samples of machines and GPUs, against counters and drivers of our own making."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import psutil
import pytest
import torch

from ortlaunch.base.processes import _children_by_walking, tree
from ortlaunch.metrics import gpu, system
from ortlaunch.metrics.gpu import Gpu, find_gpu
from ortlaunch.metrics.nodes import MOST_NODES, Nodes, WorkerLocation
from ortlaunch.metrics.processes import Usage, read_usage
from ortlaunch.metrics.system import NODE_FIELDS, WIDTH, Sampler
from ortlaunch.metrics.worker.memory import memory_metrics
from tests.support.waiting import PATIENCE, until

TICKS = os.sysconf("SC_CLK_TCK")
NAN = float("nan")


def fake_proc(root: Path, cores: list[tuple[int, int]], used: dict[int, tuple[int, list[int]]]) -> Path:
    """A /proc: of each core its busy and idle ticks, of each process its ticks and children."""

    def line(name: str, busy: int, idle: int) -> str:
        # user nice system idle iowait irq softirq steal guest guest_nice: guest is part of user.
        return f"{name} {busy - 3} 0 1 {idle - 5} 5 1 1 0 {busy - 3} 0\n"

    lines = [line(f"cpu{number}", *core) for number, core in enumerate(cores)]
    whole = line("cpu", sum(busy for busy, _ in cores), sum(idle for _, idle in cores))
    root.mkdir(exist_ok=True)
    (root / "stat").write_text("".join([whole, *lines, "intr 1 2 3\n"]))
    for pid, (ticks, children) in used.items():
        task = root / str(pid) / "task" / str(pid)
        task.mkdir(parents=True, exist_ok=True)
        (task / "children").write_text(" ".join(map(str, children)))
        # A name with spaces and parentheses; user, system, and both of its children that have ended.
        fields = ["S", *["0"] * 10, str(ticks - 3), "1", "1", "1", *["0"] * 20]
        (root / str(pid) / "stat").write_text(f"{pid} (a ) name) {' '.join(fields)}")
    return root


def test_usage_counts_the_cores_that_the_run_may_use_and_its_own_processes(tmp_path: Path) -> None:
    used = {10: (100, [11, 12]), 11: (200, []), 12: (300, [13]), 13: (50, []), 99: (5000, [])}
    proc = fake_proc(tmp_path, [(400, 600), (900, 100), (5000, 0)], used)
    usage = read_usage([10], {0, 1}, proc)
    assert usage.total * TICKS == pytest.approx(2000)
    assert usage.busy * TICKS == pytest.approx(1300)
    assert usage.own * TICKS == pytest.approx(650)
    assert usage.other * TICKS == pytest.approx(650)


def test_where_the_kernel_shows_other_cores_all_of_them_count(tmp_path: Path) -> None:
    """A container may see two cores, numbered from 0, and be allowed to run on number 40."""
    proc = fake_proc(tmp_path, [(400, 600), (900, 100)], {})
    assert read_usage([], {40}, proc).total * TICKS == pytest.approx(2000)


def test_processes_that_are_gone_or_hidden_are_passed_over(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, [(400, 600)], {10: (100, [11, 12]), 12: (7, [])})
    (proc / "12" / "stat").unlink()
    assert tree([10, 500], proc) == {10, 11, 12}
    assert read_usage([10], {0}, proc).own * TICKS == pytest.approx(100)


def test_own_processes_are_found_on_this_machine() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert {os.getpid(), child.pid} <= tree([os.getpid()])
        assert child.pid in _children_by_walking(os.getpid())
    finally:
        child.kill()
        child.wait()


def test_a_long_list_of_children_is_read_whole(tmp_path: Path) -> None:
    """The kernel gives it in parts."""
    children = list(range(100_000, 120_000))
    proc = fake_proc(tmp_path, [(400, 600)], {10: (100, children)})
    assert tree([10], proc) == {10, *children}


def test_a_workers_memory_is_what_psutil_says() -> None:
    own = psutil.Process().memory_info().rss / 1024**3
    assert memory_metrics(torch.device("cpu"))["memory/rss_gib"] == pytest.approx(own, rel=0.02)


def test_work_of_others_is_told_from_the_runs_own() -> None:
    """The same loop, in a process of the run and in one that is not."""
    loop = [sys.executable, "-c", "while True: pass"]
    mine, other = subprocess.Popen(loop), subprocess.Popen(loop)
    try:
        before = read_usage([mine.pid])
        spent = before.since(before)
        deadline = time.monotonic() + PATIENCE
        # However busy the machine is with other tests, some time both of them get their turn.
        while min(spent.own, spent.other) < 0.05:
            assert time.monotonic() < deadline, spent
            time.sleep(0.1)
            spent = read_usage([mine.pid]).since(before)
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()
    assert spent.busy <= spent.total * 1.05


class Machine:
    """A clock and counters that the test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.usage = Usage(0.0, 0.0, 0.0)

    def now(self) -> float:
        return self.seconds

    def read(self, roots: list[int]) -> Usage:
        assert roots == [7]
        return self.usage

    def passes(self, seconds: float, own: float, other: float) -> None:
        """Time on a machine of four cores."""
        before = self.usage
        self.seconds += seconds
        self.usage = Usage(before.total + 4 * seconds, before.busy + own + other, before.own + own)


def sampler_of(machine: Machine) -> Sampler:
    return Sampler([7], now=machine.now, usage=machine.read)


def test_a_window_has_the_mean_of_its_samples() -> None:
    machine = Machine()
    sampler = sampler_of(machine)
    machine.passes(5, own=10, other=0)
    sampler.sample()
    machine.passes(5, own=10, other=10)
    sampler.sample()
    row = dict(zip(NODE_FIELDS, sampler.window(steady=True, now=False), strict=False))
    assert row["cpu_utilization_percentage"] == pytest.approx((50 + 100) / 2)
    memory = psutil.virtual_memory()
    assert row["system_memory_usage_percentage"] == pytest.approx(memory.percent, abs=20)
    assert row["system_memory_usage_megabytes"] == pytest.approx(memory.used / 1e6, rel=0.5)
    assert 0 <= row["disk_usage_percentage"] <= 100


def test_a_window_without_a_sample_says_nothing() -> None:
    machine = Machine()
    assert all(math.isnan(value) for value in sampler_of(machine).window(steady=True, now=False))
    idle = Sampler(None)
    assert len(idle.window(steady=True, now=True)) == WIDTH
    assert idle.other_seconds() == (0.0, 0.0)


class Pauses(threading.Event):
    """Ends a sampler's thread after some pauses, and keeps their lengths."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.left = count
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.seconds.append(timeout)
        self.left -= 1
        return self.left < 0


def test_samples_that_take_long_come_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of 0.1 s of processor time every five seconds would be 2 % of a core."""
    times = iter([0.0, 0.001, 1.0, 1.1, 2.0, 2.001])
    monkeypatch.setattr(time, "thread_time", lambda: next(times))
    sampler = sampler_of(Machine())
    monkeypatch.setattr(sampler, "_done", pauses := Pauses(3))
    sampler._work()
    assert pauses.seconds == [5.0, 5.0, pytest.approx(20.0), 5.0]


def test_others_work_counts_in_steady_windows_only() -> None:
    machine = Machine()
    sampler = sampler_of(machine)
    machine.passes(10, own=10, other=30)  # Warm-up.
    sampler.window(steady=False, now=False)
    machine.passes(5, own=10, other=2)
    sampler.sample()
    machine.passes(5, own=10, other=4)
    sampler.window(steady=True, now=True)
    machine.passes(10, own=0, other=40)  # A window that was disturbed, sampled within.
    sampler.sample()
    machine.passes(1, own=0, other=4)
    sampler.window(steady=False, now=False)
    machine.passes(10, own=10, other=6)
    sampler.window(steady=True, now=True)
    other, total = sampler.other_seconds()
    assert other == pytest.approx(2 + 4 + 6)
    assert total == pytest.approx(4 * 20)


def test_a_sample_that_reaches_back_into_a_disturbed_window_does_not_count() -> None:
    machine = Machine()
    sampler = sampler_of(machine)
    machine.passes(1, own=0, other=4)
    sampler.sample()
    machine.passes(0.1, own=0, other=0.4)
    # Too soon after the last sample for another one.
    sampler.window(steady=False, now=False)
    machine.passes(5, own=0, other=20)
    sampler.sample()
    machine.passes(5, own=0, other=1)
    sampler.window(steady=True, now=True)
    assert sampler.other_seconds() == pytest.approx((1, 20))


def test_without_a_proc_there_is_memory_and_no_cpu() -> None:
    def refused(_roots: list[int]) -> Usage:
        raise PermissionError("/proc/stat")

    sampler = Sampler([7], usage=refused, now=iter([0.0, 1.0, 2.0]).__next__)
    sampler.sample()
    row = dict(zip(NODE_FIELDS, sampler.window(steady=True, now=False), strict=False))
    assert math.isnan(row["cpu_utilization_percentage"])
    assert row["system_memory_usage_percentage"] > 0
    assert sampler.other_seconds() == (0.0, 0.0)


def test_the_thread_samples_by_itself_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "SAMPLE_SECONDS", 0.05)
    monkeypatch.setattr(system, "_LEAST_SECONDS", 0.0)
    sampler = Sampler([os.getpid()])
    sampler.start()
    until(lambda: not math.isnan(sampler.window(steady=True, now=False)[1]))
    sampler.stop()
    assert sampler._thread is not None
    assert not sampler._thread.is_alive()


class Nvml(types.ModuleType):
    """A driver with one GPU, the third of its machine."""

    def __init__(self, **missing: bool) -> None:
        super().__init__("pynvml")
        self.reasons = 0x4
        self.missing = missing

    def nvmlInit(self) -> None:
        if "driver" in self.missing:
            raise OSError("no driver")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-1234"
        return "handle"

    def nvmlDeviceGetHandleByIndex(self, number: int) -> str:
        assert number in (0, 2)
        return "handle"

    def nvmlDeviceGetIndex(self, _handle: str) -> int:
        return 2

    def nvmlDeviceGetMemoryInfo(self, _handle: str) -> object:
        return types.SimpleNamespace(used=2 * 1024**3, total=8 * 1024**3)

    def nvmlDeviceGetUtilizationRates(self, _handle: str) -> object:
        if "load" in self.missing:
            raise RuntimeError("Not Supported")
        return types.SimpleNamespace(gpu=73, memory=10)

    def nvmlDeviceGetPowerUsage(self, _handle: str) -> int:
        return 305_500

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _handle: str) -> int:
        return self.reasons

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"550.54"


def found(monkeypatch: pytest.MonkeyPatch, nvml: Nvml) -> Gpu | None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return find_gpu("1234")


def test_a_gpu_tells_its_load_memory_and_power(monkeypatch: pytest.MonkeyPatch) -> None:
    device = found(monkeypatch, Nvml())
    assert device is not None
    assert device.index == 2
    assert device.driver == "550.54"
    assert dict(zip(gpu.FIELDS, device.read(), strict=True)) == {
        "utilization_percentage": 73.0,
        "memory_usage_percentage": 25.0,
        "memory_usage_megabytes": 2048.0,
        "power_usage_watts": 305.5,
    }


def test_what_a_gpu_does_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    device = found(monkeypatch, Nvml(load=True))
    assert device is not None
    assert math.isnan(device.read()[0])
    assert device.read()[3] == 305.5


@pytest.mark.parametrize(("reasons", "slowed"), [(0, False), (0x4, False), (0x20, True), (0x44, True), (0x80, True)])
def test_heat_slows_a_gpu_and_its_power_limit_does_not(
    monkeypatch: pytest.MonkeyPatch, reasons: int, slowed: bool
) -> None:
    nvml = Nvml()
    nvml.reasons = reasons
    device = found(monkeypatch, nvml)
    assert device is not None
    sampler = Sampler(None, device, now=iter([0.0, 1.0, 2.0]).__next__)
    assert sampler.throttled is None
    sampler.sample()
    assert sampler.throttled is slowed


@pytest.mark.parametrize(
    ("seen", "rank", "has_one"),
    [(None, "2", True), ("1,GPU-1234", "1", True), ("2, 3", "0", True), ("2", "1", False), ("", "0", False)],
)
def test_the_gpu_of_a_worker_is_that_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, seen: str | None, rank: str, has_one: bool
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    variables = {"LOCAL_RANK": rank} | ({} if seen is None else {"CUDA_VISIBLE_DEVICES": seen})
    assert (gpu.gpu_of_worker(variables) is not None) is has_one


def test_without_nvml_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, Nvml(driver=True)) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert find_gpu("1234") is None


def row(cpu: float = NAN, *device: float) -> list[float]:
    return [cpu, *[NAN] * (len(NODE_FIELDS) - 1), *(device or [NAN] * len(gpu.FIELDS))]


def test_each_machine_has_its_own_keys() -> None:
    """Two machines with two workers each; only the first worker of a machine looks at it."""
    places = [
        WorkerLocation(0, "a", 4),
        WorkerLocation(0, "a", 5),
        WorkerLocation(1, "b/c", 4),
        WorkerLocation(1, "b/c", 5),
    ]
    rows = [row(10.0, 50, 1, 2, 3), row(NAN, 60, 1, 2, 3), row(20.0, 70, NAN, 2, 3), row(NAN, 80, 1, 2, 3)]
    metrics = Nodes(places).metrics(rows, [1.0, 2.0, 3.0, 4.0])
    assert metrics["system/a/cpu_utilization_percentage"] == 10
    assert metrics["system/b_c/cpu_utilization_percentage"] == 20
    assert metrics["system/a/gpu_5_utilization_percentage"] == 60
    assert metrics["system/b_c/gpu_4_power_usage_watts"] == 3
    assert "system/b_c/gpu_4_memory_usage_percentage" not in metrics
    assert metrics["system/a/workers_rss_megabytes"] == pytest.approx(3 * 1024**3 / 1e6)
    assert metrics["system/b_c/workers_rss_megabytes"] == pytest.approx(7 * 1024**3 / 1e6)
    assert not any("disk" in name for name in metrics)


def test_a_machine_that_was_not_sampled_is_left_out() -> None:
    metrics = Nodes([WorkerLocation(0, "a"), WorkerLocation(1, "b")]).metrics([row(), row(5.0)], [1.0, 1.0])
    assert {name.split("/")[1] for name in metrics} == {"b"}


def test_machines_of_one_name_are_told_apart() -> None:
    nodes = Nodes([WorkerLocation(1, "localhost"), WorkerLocation(0, "localhost"), WorkerLocation(2, "c")])
    assert nodes.keys == ["localhost-0", "localhost-1", "c"]
    assert nodes.hosts == ["localhost", "localhost", "c"]
    assert nodes.host_of(2) == "c"


def test_many_machines_give_a_spread_instead_of_a_key_each() -> None:
    count = MOST_NODES + 1
    nodes = Nodes([WorkerLocation(number, f"n{number}", 0) for number in range(count)])
    rows = [row(float(number), float(number), 1, 1, 1) for number in range(count)]
    metrics = nodes.metrics(rows, [1.0] * count)
    assert metrics["system/min/cpu_utilization_percentage"] == 0
    assert metrics["system/mean/cpu_utilization_percentage"] == pytest.approx((count - 1) / 2)
    assert metrics["system/max/gpu_utilization_percentage"] == count - 1
    assert not any("n0" in name for name in metrics)
