"""Which runs are repeats of each other, what is said of them, and what makes a comparison unfair."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ortlaunch.compare.comparison import Comparison, compared
from ortlaunch.compare.curves import thinned
from ortlaunch.compare.figures import Figure, of_scripts
from ortlaunch.compare.runs import MEMORY, RATES, RunRow
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config, to_dict
from ortlaunch.run.journal import flatten

PARAMS = {"model.name": "gpt2", "train.batch_size": "4", "seed": "0", "data.name": "pysource"}
TAGS = {"ortlaunch.backend": "eager", "ortlaunch.world_size": "2", "ortlaunch.git_commit": "a" * 40}
TAGS["ortlaunch.code"] = "c" * 16


METRICS = {
    "peak_memory_gib": MEMORY,
    "last_loss": "train/loss",
    "other_cpu_percent": "summary/other_cpu_percent",
    "steady_windows": "summary/steady_windows",
    "accuracy": "eval/accuracy",
}


def row(number: int, tokens: float | None = 100.0, **changes: object) -> RunRow:
    params = PARAMS | changes.pop("params", {})  # type: ignore[operator]
    tags = TAGS | changes.pop("tags", {})  # type: ignore[operator]
    tags |= {f"ortlaunch.{key}": str(changes.pop(key)).lower() for key in ("backend", "ort_active") if key in changes}
    metrics = {METRICS[key]: changes.pop(key) for key in METRICS if key in changes} | {RATES[0]: tokens}
    metrics = {key: value for key, value in metrics.items() if value is not None}
    name = str(changes.pop("name", f"run-{number}"))
    made = RunRow(name, f"{number:08x}" + "0" * 24, "FINISHED", params, tags, metrics)  # type: ignore[arg-type]
    return replace(made, experiment_id="7", **changes)  # type: ignore[arg-type]


def of(*rows: RunRow) -> Comparison:
    return compared(list(rows), rows[0].run_id, "sqlite:////x.db")


def test_runs_that_differ_in_the_seed_are_one_group() -> None:
    values = (1180.0, 1205.0, 1215.0)
    rows = [row(n, tokens, params={"seed": str(n)}, name=f"gpt2-seed={n}") for n, tokens in enumerate(values)]
    comparison = of(*rows, row(9, 2400.0, params={"train.batch_size": "8"}))
    first, second = comparison.groups
    assert (first.label, len(first.rows), first.seeds) == ("gpt2", 3, ["0", "1", "2"])
    assert (mean := first.mean(RATES[0])) is not None and mean.mean == 1200.0
    assert mean.interval == pytest.approx((1155.2166, 1244.7834), abs=1e-3)
    assert second.speedup is not None
    assert (second.speedup.ratio, second.speedup.value, second.speedup.baseline_value) == (2.0, 2400.0, 1200.0)
    assert second.speedup.interval is None, "a single run has no interval"


@pytest.mark.parametrize("key", ["name", "run_root", "experiment", "launcher.dry_run", "tracking.uri", "train.resume"])
def test_what_does_not_change_the_work_splits_no_group(key: str) -> None:
    assert len(of(row(0, params={key: "x"}), row(1, params={key: "y"})).groups) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"params": {"optimizer.lr": "0.1"}},
        {"tags": {"ortlaunch.git_commit": "b" * 40}},
        {"tags": {"ortlaunch.code": "d" * 16}},
        {"tags": {"ortlaunch.git_dirty": "true"}},
        {"tags": {"ortlaunch.torch": "2.6.0"}},
        {"tags": {"ortlaunch.device_name": "H100"}},
        {"tags": {"ortlaunch.world_size": "4"}},
        {"tags": {"ortlaunch.ort_active": "true"}},
        {"tags": {"ortlaunch.data_fingerprint": "f"}},
    ],
)
def test_what_changes_the_work_or_the_machine_does(change: dict[str, dict[str, str]]) -> None:
    assert len(of(row(0), row(1, **change)).groups) == 2


def test_repeats_that_broke_off_stand_with_the_others_and_count_for_nothing() -> None:
    ended, steps = {"steps taken": "100"}, {"train.steps": "100"}
    rows = [
        row(0, None, params={"seed": "0", **steps}, status="FAILED", step=3, last_loss=9.0),
        row(1, 100.0, params={"seed": "1", **steps, **ended}, last_loss=2.0),
        row(2, 120.0, params={"seed": "2", **steps, **ended}, last_loss=3.0),
        row(3, 50.0, params={"optimizer.lr": "1", **steps, **ended}, last_loss=4.0),
    ]
    comparison = of(*rows)
    base, other = comparison.groups
    assert (base.status, base.first.name, len(other.rows)) == ("2 FINISHED 1 FAILED", "run-1", 1)
    assert (mean := base.mean(RATES[0])) is not None and (mean.count, mean.mean) == (2, 110.0)
    assert base.loss == 2.5, "that of step 3 is no last loss"
    assert comparison.warnings == ["not finished: run-0 (00000000) FAILED at step 3 of 100"]
    assert [one.key for one in comparison.differences] == ["optimizer.lr", "seed"]


def test_what_broke_off_is_nobodys_repeat_where_it_may_be_of_two_lengths() -> None:
    steps = {"train.steps": "60"}
    rows = [row(number, params={"steps taken": taken, **steps}) for number, taken in enumerate(("60", "300"))]
    comparison = of(*rows, row(2, None, status="FAILED", step=200, params=steps))
    assert [len(group.rows) for group in comparison.groups] == [1, 1, 1]
    assert "run-2 (00000002) FAILED at step 200" in comparison.warnings[-1] and " of " not in comparison.warnings[-1]
    found = {one.key: one.values for one in comparison.differences}
    assert found["steps taken"] == ["60", "300", None]
    assert len(of(rows[0], row(3, params=steps)).groups) == 2, "an older version's, of whatever length"


def test_a_run_that_died_at_its_start_is_one_warning() -> None:
    """It has no figures that anything could be unfair to, and what it did not say is no difference."""
    tags = {"ortlaunch.data_fingerprint": "f", "ortlaunch.torch": "2.13.0"}
    died = row(1, None, status="FAILED", backend="ort", params={"train.batch_size": "8"}, tags={"ortlaunch.hosts": "b"})
    comparison = of(row(0, tags=tags), died, row(2, None, status="KILLED", tags=tags, params={"optimizer.lr": "1"}))
    assert comparison.warnings == [
        "not finished: run-1 (00000001) FAILED, no step logged, run-2 (00000002) KILLED, no step logged"
    ]
    assert {one.key for one in comparison.differences} == {"train.batch_size", "optimizer.lr", "ortlaunch.hosts"}


def test_random_data_of_another_seed_are_the_same_data() -> None:
    synthetic = {"data.name": "synthetic"}
    rows = [row(n, params=synthetic, tags={"ortlaunch.data_fingerprint": str(n)}) for n in range(2)]
    comparison = of(*rows)
    assert len(comparison.groups) == 1 and comparison.warnings == []


def test_a_run_of_which_nothing_is_known_is_nobodys_repeat() -> None:
    rows = [RunRow("a", "0" * 32, "FINISHED"), RunRow("b", "1" * 32, "FINISHED")]
    assert len(compared(rows, "0" * 32, "u").groups) == 2


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("mlp-seed={}", "mlp"),
        ("mlp-lr=1e-05-seed={}", "mlp-lr=1e-05"),
        ("mlp-seed={}-lr=1e-05", "mlp-lr=1e-05"),
        ("mlp-unseed={}", "mlp-unseed=0"),
        ("-seed={}", "-seed=0"),
    ],
)
def test_a_groups_name_has_no_seed(name: str, label: str) -> None:
    (group,) = of(*(row(n, name=name.format(n), params={"seed": str(n)}) for n in range(2))).groups
    assert group.label == label


def test_groups_that_would_be_called_the_same_are_told_apart() -> None:
    labels = [group.label for group in of(row(1, name="n"), row(2, name="n", params={"optimizer.lr": "2"})).groups]
    assert labels == ["n (00000001)", "n (00000002)"]


def test_a_ratio_whose_interval_contains_1_is_marked() -> None:
    base = [row(n, tokens, params={"seed": str(n)}) for n, tokens in enumerate((100.0, 102.0, 98.0))]
    near = [row(n + 10, t, params={"seed": str(n), "optimizer.lr": "1"}) for n, t in enumerate((101.0, 104.0, 99.0))]
    far = [row(n + 20, t, params={"seed": str(n), "optimizer.lr": "2"}) for n, t in enumerate((150.0, 151.0, 149.0))]
    groups = of(*base, *near, *far).groups
    undecided = [group.speedup.undecided for group in groups if group.speedup is not None]
    assert undecided == [False, True, False]
    assert groups[0].speedup is not None and groups[0].speedup.interval is None, "the baseline is no news"


def test_memory_has_a_ratio_of_its_own() -> None:
    comparison = of(row(0, peak_memory_gib=4.0), row(1, peak_memory_gib=3.0, params={"optimizer.lr": "1"}))
    memory = comparison.groups[1].memory
    assert memory is not None and (memory.ratio, memory.value, memory.baseline_value) == (0.75, 3.0, 4.0)


def test_figures_that_are_no_numbers_are_left_out_of_means() -> None:
    rows = [row(n, tokens) for n, tokens in enumerate((100.0, math.nan, None, math.inf))]
    (group,) = of(*rows).groups
    assert (mean := group.mean(RATES[0])) is not None and (mean.count, mean.mean) == (1, 100.0)


def test_only_what_differs_is_listed() -> None:
    comparison = of(row(0), row(1, params={"optimizer.lr": "2", "seed": "5"}), row(2, params={"train.batch_size": "8"}))
    found = {difference.key: difference.values for difference in comparison.differences}
    assert found == {
        "optimizer.lr": [None, "2", None],
        "train.batch_size": ["4", "4", "8"],
        "seed": ["0", "5", "0"],
    }
    assert of(row(0), row(1, params={"seed": "1"})).differences == []


def test_what_follows_from_the_choice_of_an_option_is_no_difference() -> None:
    def params(*words: str) -> dict[str, str]:
        return flatten(to_dict(to_config(compose(["model=mlp", *words]))))

    eager, ort = params("backend=eager", "trainer=ddp"), params("backend=ort", "trainer=deepspeed")
    comparison = of(row(0, params=eager), row(1, params=ort))
    assert {one.key: one.values for one in comparison.differences} == {
        "backend.name": ["eager", "ort"],
        "trainer.name": ["ddp", "deepspeed"],
    }
    threads = params("backend=ort", "trainer=deepspeed", "backend.threads=8")
    comparison = of(row(0, params=eager), row(1, params=ort), row(2, params=threads))
    found = {one.key: one.values for one in comparison.differences}
    assert found["backend.threads"] == [None, "null", "8"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tags": {"ortlaunch.world_size": "4"}}, ["number of workers", "baseline's 2", "run-1 (4)"]),
        ({"params": {"train.batch_size": "8"}}, ["train.batch_size", "baseline's 4", "run-1 (8)"]),
        ({"tags": {"ortlaunch.code": "d" * 16}}, ["other code of your own than the baseline's"]),
        ({"tags": {"ortlaunch.git_commit": "b" * 40}}, ["commit", "aaaaaaaaaaaa:", "run-1 (bbbbbbbbbbbb)"]),
        ({"status": "FAILED"}, ["not finished", "run-1 (00000001) FAILED"]),
        ({"tags": {"ortlaunch.throttled": "true"}}, ["throttled", "run-1"]),
        ({"tags": {"ortlaunch.exchanged_nothing": "no group"}}, ["exchanged nothing", "run-1", "no group"]),
        ({"tags": {"ortlaunch.git_dirty": "true"}}, ["in no commit", "run-1"]),
        ({"other_cpu_percent": 35.0}, ["other processes", "10 %", "run-1 (00000001) 35 %"]),
        ({"steady_windows": 2.0}, ["fewer than 5 steady windows", "run-1 (00000001) 2"]),
        ({"last_loss": math.nan}, ["loss is not finite", "run-1"]),
        ({"backend": "ort"}, ["backend=ort", "no ortlaunch.ort_active tag", "run-1"]),
        ({"backend": "ort", "ort_active": False}, ["ortlaunch.ort_active=false"]),
    ],
)
def test_what_is_unfair_is_named(change: dict[str, object], words: list[str]) -> None:
    (warning,) = of(row(0), row(1, **change)).warnings
    for word in words:
        assert word in warning
    assert of(row(0), row(1)).warnings == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data_fingerprint", "f1"),
        ("device", "cuda"),
        ("device_name", "H100"),
        ("torch", "2.6.0"),
    ],
)
def test_what_a_baseline_does_not_say_is_no_difference(key: str, value: str) -> None:
    tag = {f"ortlaunch.{key}": value}
    assert of(row(0), row(1, tags=tag)).warnings == [], "an old run knows nothing of it"
    (warning,) = of(row(0, tags={f"ortlaunch.{key}": "other"}), row(1, tags=tag)).warnings
    assert "baseline's other" in warning and f"({value})" in warning


@pytest.mark.parametrize("key", ["train.grad_accumulation", "data.seq_len"])
def test_other_batches_are_unfair(key: str) -> None:
    (warning,) = of(row(0, params={key: "1"}), row(1, params={key: "2"})).warnings
    assert key in warning


@pytest.mark.parametrize(
    ("base", "other", "key"),
    [
        ({"model.params.n_layer": "2"}, {"model.params.n_layer": "4"}, "model.params.n_layer"),
        ({"model.params": "{}"}, {"model.params.n_layer": "4"}, "model.params.n_layer"),
        ({"model.target": "mine:small"}, {"model.target": "mine:large"}, "model.target"),
    ],
)
def test_a_model_that_is_built_otherwise_is_other_work(base: dict[str, str], other: dict[str, str], key: str) -> None:
    (warning,) = of(row(0, params=base), row(1, params=other)).warnings
    assert warning == f"the speed-up compares different work: another {key} than the baseline's in run-1"
    assert of(row(0, params=base), row(1, None, params=other)).warnings == [], "it has no speed-up"


@pytest.mark.parametrize(
    ("device", "is_active", "params", "is_fair"),
    [
        ("cuda", True, {}, False),
        ("cuda", None, {"train.tf32": "true"}, False),
        ("cuda", False, {}, True),
        ("cuda", True, {"train.precision": "bf16"}, True),
        ("cpu", True, {}, True),
    ],
)
def test_tf32_against_full_fp32_is_unfair(
    device: str, is_active: bool | None, params: dict[str, str], is_fair: bool
) -> None:
    """ONNX Runtime multiplies fp32 matrices in TF32 on a GPU that has it, PyTorch does so with train.tf32=true."""
    tags, fp32 = {"ortlaunch.device": device}, {"train.precision": "fp32", "train.tf32": "false"}
    other = row(1, params={**fp32, "optimizer.lr": "1", **params}, tags=tags, ort_active=is_active)
    warning = (
        "fp32 matrices are multiplied in TF32 where the GPU has it (ONNX Runtime, or train.tf32=true), the baseline's "
        "in full fp32: run-1"
    )
    assert of(row(0, params=fp32, tags=tags), other).warnings == ([] if is_fair else [warning])


def test_a_thousand_unfair_runs_are_one_line() -> None:
    rows = [row(0), *(row(n, status="FAILED", params={"optimizer.lr": str(n)}) for n in range(1, 1000))]
    (warning,) = of(*rows).warnings
    assert "and 995 more" in warning and len(warning) < 300


def test_the_url_of_mlflows_own_page() -> None:
    rows = [row(1), row(2)]
    one, two = rows[0].run_id, rows[1].run_id
    assert compared(rows, one, "https://u:***@host:5000/mlflow/").url == (
        f"https://host:5000/mlflow/#/compare-runs?runs=%5B%22{one}%22%2C%22{two}%22%5D&experiments=%5B%227%22%5D"
    )
    assert compared(rows, one, "sqlite:////x.db").url is None
    assert compared([row(n) for n in range(101)], f"{0:032x}", "http://host").url is None


@pytest.mark.parametrize(
    ("better", "values", "said"),
    [
        ("higher", (0.9, 0.91, 0.92), "better"),
        ("lower", (0.9, 0.91, 0.92), "worse"),
        ("lower", (-0.9, -0.91, -0.92), "better"),
        (None, (0.9, 0.91, 0.92), None),
        ("higher", (0.4, 0.5, 0.63), None),
    ],
)
def test_a_figure_of_any_name_gets_a_verdict_by_its_direction(
    better: str | None, values: tuple[float, ...], said: str | None
) -> None:
    """Also where it is negative, which has no ratio."""
    base = [row(n, accuracy=value, params={"seed": str(n)}) for n, value in enumerate((0.5, 0.51, 0.52))]
    other = [row(9 + n, accuracy=value, params={"optimizer.lr": "1", "seed": str(n)}) for n, value in enumerate(values)]
    figure = Figure("eval/accuracy", better)
    first, second = compared([*base, *other], base[0].run_id, figures=[figure]).groups
    change, own = second.change(figure.metric), first.change(figure.metric)
    assert change is not None and change.verdict(better) == said
    assert change.difference == pytest.approx(sum(values) / 3 - 0.51) and change.undecided is (values[0] == 0.4)
    assert own is not None and own.interval is None, "the baseline is no news"


def test_each_run_is_a_group_of_its_own_if_that_is_asked() -> None:
    rows = [row(n, 100.0 + n, params={"seed": str(n)}) for n in range(3)]
    found = compared(rows, rows[0].run_id, each=True)
    assert [[one.run_id for one in group.rows] for group in found.groups] == [[one.run_id] for one in rows]
    assert [group.speedup.ratio for group in found.groups if group.speedup] == [1.0, 1.01, 1.02]


def test_thinning_keeps_ends_peaks_and_gaps() -> None:
    points = [(step, float(step), 1.0) for step in range(10_000)]
    points[5003] = (5003, 5003.0, 99.0)
    points[7001] = (7001, 7001.0, -3.0)
    gap = [(step, seconds, None if step == 400 else value) for step, seconds, value in points]
    kept = thinned(gap, 600)
    assert len(kept) <= 605 and kept[0][0] == 0 and kept[-1][0] == 9999
    assert {(5003, 99.0), (7001, -3.0), (400, None)} <= {(step, value) for step, _, value in kept}
    assert thinned(points[:600], 600) == points[:600]


def test_a_scripts_own_metrics_are_compared_and_it_has_no_throughput_to_miss() -> None:
    logged = {"val/acc": 0.5, "train/loss": 2.0, "memory/rss_gib": 1.0, "system/rank-0/memory_gib": 1.0}
    logged |= {"checkpoint/stall_seconds": 1.0, "goodput/down_seconds": 0.0, "train/grad_norm": 1.0}
    script = replace(row(1, None, tags={"ortlaunch.script": "train.py"}), metrics=logged)
    named = of_scripts([script, row(2)])
    assert [(one.metric, one.better) for one in named] == [("train/loss", "lower"), ("val/acc", None)]
    trainer = replace(script, metrics=dict.fromkeys(("entropy", "epoch", "eval_loss", "grad_norm", "loss", "lr"), 1.0))
    assert [one.metric for one in of_scripts([trainer])] == ["eval_loss", "loss", "entropy", "epoch"]
    assert "not finished: run-1 (00000001) FAILED" in of(replace(script, status="FAILED")).warnings
    assert "throughput summary" not in " ".join(of(script).warnings)
    assert "throughput summary" in " ".join(of(row(1, None)).warnings)
