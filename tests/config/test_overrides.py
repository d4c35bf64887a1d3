"""The words of a command line are checked one by one before Hydra composes: added and removed keys, syntax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, OmegaConf

from ortlaunch.base.errors import RequestError
from ortlaunch.cli import dispatch
from ortlaunch.compose.hydra_tree import backend_reason, compose, multirun_task, run_with_hydra
from ortlaunch.compose.overrides import check_overrides, parsed
from ortlaunch.compose.prepare import prepared
from ortlaunch.compose.sweep_folder import sweep_folder
from ortlaunch.config.keys import is_free
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import GROUPS, OPTIONAL_GROUPS


@pytest.fixture(autouse=True)
def variable_of_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run_with_hydra` sets it for this process; the commands of other tests would print tracebacks."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")


def test_the_runs_of_a_sweep_are_counted_before_they_are_made() -> None:
    check_overrides(["seed=range(0,100)", "optimizer.lr=0.1,0.2", "train.steps=range(1,50)"], [])
    with pytest.raises(RequestError, match=r"^train.steps=range\(1,52\): a sweep has at most"):
        check_overrides(["seed=range(0,100)", "optimizer.lr=0.1,0.2", "train.steps=range(1,52)"], [])


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("+train.stpes=5", "train.stpes: no such key. Did you mean train.steps?"),
        ("++train.stpes=5", "train.stpes: no such key. Did you mean train.steps?"),
        ("+optimzer=sgd", "optimzer: no such key. Did you mean optimizer?"),
        ("++nowhere.x=1", "nowhere.x: no such key"),
        ("+optimizer=sgd", "write optimizer=sgd"),
        ("+launcher=[]", "write launcher=[]"),
        ("++model=mlp", "write model=mlp"),
        ("+profile=[]", "chooses no option of the group"),
        ("+profile=", "chooses no option of the group"),
        ("+jobs=null", "chooses no option of the group"),
        ("++after=x", "+after=RUN goes with ortlaunch run"),
        ("~train.steps", "a key cannot be removed"),
        ("~optimizer", "a key cannot be removed"),
        ("~hydra", "this key of Hydra cannot be set"),
        ("hydra.run.dir=/proc/nowhere", "run_root, experiment and name say where a run is"),
        ("hydra.output_subdir=x", "this key of Hydra cannot be set"),
        ("+hydra.sweep.dir=x", "this key of Hydra cannot be set"),
        ("hydra/launcher=joblib", "this key of Hydra cannot be set"),
        ("=5", "KEY=VALUE"),
        ("++=5", "KEY=VALUE"),
        ("train.steps=" + "9" * 10_000, "4300 digits"),
        ("name=" + "[" * 2000, "name="),
        ("seed=range(1,1e9)", "seed=range(1,1e9): a sweep has at most 10,000 runs"),
        ("seed=range(5,1)", "seed=range(5,1): it gives no value"),
        ("seed=range(1,5,0)", "seed=range(1,5,0): it gives no value"),
        ("seed=range(nan,3)", "seed=range(nan,3): it gives no value"),
    ],
)
def test_what_is_refused(word: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_overrides([word], [])
    assert said in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(RequestError):
        compose([word])


def test_a_key_that_is_there_needs_no_plus() -> None:
    with pytest.raises(RequestError, match=r"^\+train\.steps: the key is there already: write train\.steps=VALUE$"):
        compose(["+train.steps=5"])


@pytest.mark.parametrize(
    "word",
    [
        *("train.steps=5", "++train.steps=5", "+profile=torch", "+jobs=llama", "+model.params.width=3"),
        *("~model.params.n_layer", "+trainer.config.zero_optimization.stage=1", "+launcher.env.NCCL_DEBUG=INFO"),
        *("hydra.sweep.dir=x", "hydra.searchpath=[file://x]", "+launcher/slurm_profile=lab"),
    ],
)
def test_what_is_allowed(word: str) -> None:
    check_overrides([word], [])


def test_a_group_of_the_users_own_may_be_added(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    check_overrides(["+mine=a"], [str(tmp_path)])
    with pytest.raises(RequestError, match="mine: no such key"):
        check_overrides(["+mine=a"], [])


def test_variables_of_a_job_are_taken_or_refused_but_never_ignored() -> None:
    tree = compose(["launcher=slurm", "+launcher.env.NCCL_DEBUG=INFO", "++launcher.env.X=1"])
    assert dict(tree.launcher.env) == {"NCCL_DEBUG": "INFO", "X": "1"}
    with pytest.raises(RequestError, match=r"^launcher\.env: .*belongs to launcher=slurm"):
        compose_and_check("+launcher.env.X=1")


def compose_and_check(*words: str) -> None:
    from ortlaunch.config.load import to_config

    to_config(compose(list(words)))


def test_which_nodes_take_any_key() -> None:
    assert is_free("model.params.width") and is_free("launcher.env.X") and is_free("trainer.config.a.b")
    assert not is_free("model.params") and not is_free("model.name") and not is_free("train.steps")


def test_the_check_sees_what_is_only_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError, match=r"train\.stpes: no such key"):
        run_with_hydra(["--cfg", "job", "+train.stpes=5"], lambda tree: None)
    assert capsys.readouterr().out == ""


def test_an_error_of_the_task_is_not_taken_for_one_of_hydra() -> None:
    def task(tree: object) -> None:
        raise LookupError("ours")

    with pytest.raises(LookupError, match="ours"):
        run_with_hydra(["model=mlp"], task)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"name: [", "line 1: "),
        (b"name: a\nname: b\n", "line 2: found duplicate key name"),
        (b"\xff\xfe", "no UTF-8 text at byte 0"),
        (b'name: !!python/object/apply:os.system ["touch planted"]', "line 1: could not determine a constructor"),
        (b"5", "Invalid loaded object type"),
        (b"name: " + b"[" * 5000, "nested too deeply"),
    ],
)
def test_a_broken_file_of_the_users_own_configuration_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "model" / "broken.yaml"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(RequestError) as caught:
        run_with_hydra(["--config-dir", str(tmp_path), "model=broken"], lambda tree: None)
    assert str(caught.value).startswith(f"{path}: cannot be used: ") and said in str(caught.value)
    assert "\n" not in str(caught.value)


OWN_GROUPS = sorted({*GROUPS} - OPTIONAL_GROUPS)


def of_own_file(folder: Path, group: str, content: str) -> None:
    (folder / group).mkdir()
    (folder / group / "mine.yaml").write_text(content)
    run_with_hydra(["--config-dir", str(folder), f"{group}=mine"], lambda tree: prepared(to_config(tree)))


@pytest.mark.parametrize("group", OWN_GROUPS)
def test_an_option_that_is_not_there_is_refused(tmp_path: Path, group: str) -> None:
    with pytest.raises(RequestError, match=r"there is no such .*\(there are .*\)") as caught:
        of_own_file(tmp_path, group, "name: nosuch\n")
    assert group in str(caught.value) and "nosuch" in str(caught.value)


@pytest.mark.parametrize(
    ("group", "name"),
    [
        pytest.param(group, name, marks=[pytest.mark.nightly] * (number > 0))
        for group in OWN_GROUPS
        for number, name in enumerate(GROUPS[group])
    ],
)
def test_a_file_of_an_option_has_the_options_keys(tmp_path: Path, group: str, name: str) -> None:
    """Without its schema the option's rules would not be asked, and its defaults would be missing."""
    if (group, name) not in {("tracking", "none"), ("adapter", "none")}:  # They have no keys.
        with pytest.raises(RequestError, match=rf"^{group}: .*defaults: \[/schema/{group}/{name}@_here_, _self_\]$"):
            of_own_file(tmp_path, group, f"name: {name}\n")
    taken = f"defaults: [/schema/{group}/{name}@_here_, _self_]\nname: {name}\n"
    (tmp_path / "with").mkdir()
    try:
        of_own_file(tmp_path / "with", group, taken)
    except RequestError as error:
        # Some options need more keys, or another model.
        assert "has not its keys" not in str(error)


def test_the_parsed_word() -> None:
    assert parsed("+a.b='x y'").value() == "x y"


def test_the_configuration_is_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trees: list[DictConfig] = []
    compositions = _counted(monkeypatch)
    run_with_hydra(["model=mlp"], trees.append)
    assert (len(compositions), len(trees)) == (1, 1)


def test_a_composition_reads_the_root_and_the_model_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further file, also one of Hydra's own, would cost a short command two milliseconds."""
    usual, read = OmegaConf.load, []

    def reading(file: Any) -> Any:
        read.append(Path(file.name).name)
        return usual(file)

    monkeypatch.setattr(OmegaConf, "load", reading)
    compose([])
    assert sorted(read) == ["config.yaml", "gpt2_nano.yaml"]


@pytest.mark.parametrize(
    "words", [["model=mlp", "train.steps=3"], ["launcher=slurm"], ["tracking=[mlflow,tensorboard]"]]
)
def test_keys_alone_compose_as_hydras_own_program_does(words: list[str]) -> None:
    composed = []
    for option in ([], ["--run"]):
        run_with_hydra(
            [*words, *option], lambda tree: composed.append((to_config(tree), backend_reason(), multirun_task()))
        )
    assert composed[0] == composed[1]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model=glob(x*)", r"^model=glob\(x\*\): no option of the group matches \(there are bert, .*vit\)$"),
        ("backend=glob(x*)", r"no option of the group matches \(there are auto, compile, eager, ort\)$"),
        (
            "seed=glob(*)",
            r"^seed=glob\(\*\): a pattern chooses among .* and seed is none: give its values$",
        ),
    ],
)
def test_a_pattern_without_a_match_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, word: str, said: str
) -> None:
    """Hydra makes a sweep of no runs of it, which would end as if all had been done."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=said):
        dispatch(["trainer=glob(d*)", word, "--multirun"])
    assert list(tmp_path.iterdir()) == []


def test_keys_alone_after_a_sweep_are_no_sweep(tmp_path: Path) -> None:
    tasks: list[Any] = []
    for words in (["seed=1,2", "--multirun", f"run_root={tmp_path}"], ["seed=3"]):
        run_with_hydra(words, lambda tree: tasks.append(multirun_task()))
    assert [task is None for task in tasks] == [False, False, True]
    assert sweep_folder() is None


def test_a_file_of_the_users_may_make_a_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "twice.yaml").write_text("hydra: {mode: MULTIRUN, sweeper: {params: {seed: '1,2'}}}\n")
    monkeypatch.setenv("ORTLAUNCH_JOBS", str(tmp_path))
    seeds: list[int] = []
    run_with_hydra(["+jobs=twice", f"run_root={tmp_path}"], lambda tree: seeds.append(tree.seed))
    assert seeds == [1, 2]


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The configurations that Hydra composes from now on."""
    usual, found = ConfigLoaderImpl.load_configuration, []

    def counting(loader: ConfigLoaderImpl, config_name: str, *arguments: Any, **named: Any) -> DictConfig:
        found.append(config_name)
        return usual(loader, config_name, *arguments, **named)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counting)
    return found
