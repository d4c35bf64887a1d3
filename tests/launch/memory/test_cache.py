"""Estimates and measurements that are kept, and what is in the place of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Config
from ortlaunch.launch.memory import cache
from ortlaunch.launch.memory.band import Band
from ortlaunch.launch.memory.cache import Change, Estimate
from ortlaunch.launch.memory.calibration import ENOUGH, Calibration, Correction, learn
from ortlaunch.launch.memory.question import key_of

GIB = 2**30
KEPT = Estimate(Band(GIB, 2 * GIB, 3 * GIB), GIB, (Change("train.batch_size=2", Band(1, 2, 3)),))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def config() -> Config:
    return to_config(compose(["model=mlp", "trainer=single", "backend=eager", "device=cpu"]))


def test_an_estimate_is_kept_for_its_owner_alone(own_cache: Path) -> None:
    cache.store("key", KEPT)
    assert cache.load("key") == KEPT
    (file,) = own_cache.glob("estimates/*")
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_changes_that_were_traced_are_kept_by_an_estimate_that_looks_for_none() -> None:
    cache.store("key", KEPT)
    cache.store("key", replace(KEPT, worker=2 * GIB, changes=()))
    assert cache.load("key") == replace(KEPT, worker=2 * GIB)
    cache.store("key", replace(KEPT, changes=(), is_probed=True))
    assert cache.load("key") == replace(KEPT, changes=(), is_probed=True)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "no JSON",
        "[" * 100_000,
        "[]",
        "{}",
        '{"machine": [1, 2, 3], "worker": 1}',
        '{"machine": [3, 2, 1], "worker": 1, "changes": []}',
        '{"machine": [1, 2, 1e400], "worker": 1, "changes": []}',
        '{"machine": [1, 2, NaN], "worker": 1, "changes": []}',
        '{"machine": [1, 2, -3], "worker": 1, "changes": []}',
        '{"machine": [1, 2, 3], "worker": true, "changes": []}',
        '{"machine": [1, 2, 3], "worker": 1, "changes": [{"words": "\\u001b[2J", "machine": [1, 2, 3]}]}',
        '{"machine": [1, 2, 3], "worker": 1, "changes": "' + "x" * 100_000 + '"}',
    ],
    ids=lambda text: text[:40],
)
def test_what_is_damaged_is_no_estimate(own_cache: Path, content: str) -> None:
    cache.store("key", KEPT)
    (own_cache / "estimates" / "key.json").write_text(content)
    assert cache.load("key") is None


@pytest.mark.parametrize("name", ["estimates", "estimates/key.json"])
def test_what_others_may_have_written_is_no_estimate(own_cache: Path, name: str) -> None:
    cache.store("key", KEPT)
    (own_cache / name).chmod(0o707)
    assert cache.load("key") is None


def test_a_link_is_no_estimate(own_cache: Path) -> None:
    cache.store("other", KEPT)
    (own_cache / "estimates" / "key.json").symlink_to("other.json")
    assert cache.load("key") is None


def test_a_cache_that_cannot_be_written_keeps_nothing(own_cache: Path) -> None:
    (own_cache / "estimates").write_text("a file")
    cache.store("key", KEPT)
    assert cache.load("key") is None


def test_the_key_has_what_the_memory_depends_on_and_nothing_else(config: Config) -> None:
    def key(**train: object) -> str:
        return key_of(replace(config, train=replace(config.train, **train)), 2, 1)  # type: ignore[arg-type]

    assert key() == key(log_every=3) == key(steps=200, keep_checkpoints=5)
    # Holes of the allocator grow in the first steps.
    few, more, many = (key(checkpoint_every=None, steps=steps) for steps in (3, 20, 2000))
    assert few != more == many
    # The memory of a copy is kept only for a further one.
    once = key(checkpoint_every=50)
    assert once == key(checkpoint_every=99) == key(steps=2000)
    assert key(checkpoint_every=33) == key(checkpoint_every=10) != once
    others = [key(batch_size=8), key(checkpoint_every=None), key(eval_every=2), key_of(config, 1, 1)]
    assert len({key(), once, key(checkpoint_every=10), *others}) == 7


def test_a_run_that_compares_its_gradients_again_has_another_key() -> None:
    def key(*words: str) -> str:
        given = ["model=mlp", "trainer=single", "backend=ort", "device=cpu", "train.checkpoint_every=null"]
        return key_of(to_config(compose([*given, *words])), 1, 1)

    never = "backend.recheck_every=0"
    assert key("train.steps=100") == key("train.steps=999") != key("train.steps=1000") == key("train.steps=5000")
    assert key("train.steps=100", never) == key("train.steps=5000", never)
    # The step after an evaluation compares them too.
    at_the_end, between, often = (key("train.steps=99", f"train.eval_every={every}") for every in (99, 50, 5))
    assert at_the_end != between == often
    # Beside the only copy of a checkpoint, if that is of the same step.
    together, apart = (
        key("train.steps=99", "train.eval_every=30", f"train.checkpoint_every={every}") for every in (60, 90)
    )
    assert together != apart


def test_a_changed_model_of_the_user_is_asked_about_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Config
) -> None:
    monkeypatch.chdir(tmp_path)
    own = replace(config, model=replace(config.model, target="nets:Net"))
    (tmp_path / "nets.py").write_text("Net = 1")
    before = key_of(own, 1, 1)
    assert key_of(own, 1, 1) == before
    (tmp_path / "nets.py").write_text("Net = 123")
    changed = key_of(own, 1, 1)
    assert changed != before
    # It may import a module that lies beside it.
    (tmp_path / "layers.py").write_text("Layer = 1")
    assert key_of(own, 1, 1) != changed


def test_a_changed_folder_of_a_pretrained_model_is_asked_about_again(tmp_path: Path, config: Config) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    params = {"pretrained": str(folder)}
    own = replace(config, model=replace(config.model, name="hf", params=params))
    (folder / "config.json").write_text('{"dim": 8}')
    before = key_of(own, 1, 1)
    assert key_of(own, 1, 1) == before
    (folder / "config.json").write_text('{"dim": 1024}')
    assert key_of(own, 1, 1) != before
    # A name on the hub, or a folder that is gone, is left to what loads the model.
    gone = replace(own, model=replace(own.model, params={"pretrained": "some/name"}))
    assert key_of(gone, 1, 1) == key_of(gone, 1, 1)


def test_changed_files_of_data_are_asked_about_again(tmp_path: Path) -> None:
    # A worker reads all of them into memory.
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("a" * 1000)

    def key(*words: str) -> str:
        given = ["model=gpt2_nano", "trainer=single", "backend=eager", "device=cpu"]
        return key_of(to_config(compose([*given, *words])), 1, 1)

    own = ("data=text", f"data.path={tmp_path}/texts")
    before = key(*own)
    assert key(*own) == before
    (tmp_path / "texts" / "two.txt").write_text("b" * 100_000)
    more = key(*own)
    (tmp_path / "texts" / "two.txt").write_text("b" * 900_000)
    assert len({before, more, key(*own)}) == 3
    # A name on the hub, or a folder that is gone, is left to what opens the data.
    gone = ("data=hf", "data.path=some/name")
    assert key(*gone) == key(*gone)


def test_a_node_with_other_cores_is_asked_about_again() -> None:
    few, many = (
        key_of(to_config(compose(["model=mlp", "launcher=slurm", f"launcher.cpus_per_node={cores}"])), 2, 1)
        for cores in (4, 64)
    )
    assert few != many


def test_a_measurement_above_the_band_widens_it_at_once(config: Config) -> None:
    learn(config, "one", 100, 150)
    found = Calibration.of(config).near(100)
    assert (found.runs, found.narrows) == (1, False)
    band = found.apply(Band(90, 100, 120))
    assert band.middle == 150
    assert band.low == 90
    assert band.high >= 1.05 * 150 - 1


def test_a_measurement_below_the_band_lowers_only_its_lower_end(config: Config) -> None:
    learn(config, "one", 100, 60)
    band = Calibration.of(config).near(100).apply(Band(90, 100, 120))
    assert (band.middle, band.high) == (100, 120)
    assert band.low <= 0.95 * 60


def test_a_band_is_narrowed_after_many_configurations_of_its_size_only(config: Config) -> None:
    wide = Band(500, 1000, 2000)
    for number in range(ENOUGH):
        assert Calibration.of(config).near(1000).apply(wide).high == 2000
        for _ in range(3):
            learn(config, "0", 1000, 980)  # Repeats are no further configurations.
        learn(config, str(number), 1000, 980 + 5 * number)
    near = Calibration.of(config).near(1000)
    narrow = near.apply(wide)
    assert near.narrows
    assert 1.05 * 1025 < narrow.high < 1300
    assert narrow.low > 800
    # A run three times as large was never measured.
    assert Calibration.of(config).near(3000).apply(Band(1500, 3000, 6000)).high == 6000


def test_a_run_that_chooses_its_backend_is_calibrated_by_all_of_them_and_never_narrower() -> None:
    words = ["model=mlp", "trainer=single", "device=cpu"]
    of = {name: to_config(compose([*words, f"backend={name}"])) for name in ("auto", "eager", "compile")}
    for number in range(ENOUGH):
        learn(of["eager"], f"eager {number}", 1000, 700)
        learn(of["auto"], f"auto {number}", 1000, 500)
    assert Calibration.of(of["eager"]).near(1000).narrows
    found = Calibration.of(of["auto"]).near(1000)
    assert (found.runs, found.narrows) == (2 * ENOUGH, False)
    assert found.apply(Band(800, 1000, 2000)).high == 2000
    learn(of["compile"], "compile", 1000, 2500)
    assert Calibration.of(of["auto"]).near(1000).apply(Band(800, 1000, 2000)).high > 2500


def test_the_largest_of_repeated_measurements_counts(config: Config) -> None:
    for measured in (120, 150, 110):
        learn(config, "one", 100, measured)
    assert Calibration.of(config).near(100).most == 1.5


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "{",
        lambda text: "[1]",
        lambda text: text.replace("100", "1e5000"),
        lambda text: text.replace("100", "0"),
        lambda text: text.replace("100", '"100"'),
        lambda text: text.replace("100", "100000"),
    ],
)
def test_damaged_measurements_are_none(own_cache: Path, config: Config, damage: Callable[[str], str]) -> None:
    learn(config, "one", 100, 150)
    (file,) = own_cache.glob("measured/*")
    assert json.loads(file.read_text()) == {"one": [100, 150]}
    file.write_text(damage(file.read_text()))
    assert Calibration.of(config).near(100) == Correction()


def test_a_measurement_that_cannot_be_of_the_run_is_left_out(config: Config) -> None:
    learn(config, "one", 100, 1000)
    assert Calibration.of(config).near(100).runs == 0


def test_other_precisions_and_stages_are_measured_apart(config: Config) -> None:
    learn(config, "one", 100, 150)
    other = to_config(compose(["model=mlp", "trainer=single", "backend=eager", "device=cpu", "train.precision=bf16"]))
    assert Calibration.of(other).near(100).runs == 0
