"""What cannot work is refused with the key and the way out, before anything is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.rules import check
from ortlaunch.config.load import load_config, save_config, to_config
from ortlaunch.config.schema import Config, DigitsConfig, OrtConfig, OrtZero3, Precision
from ortlaunch.config.trainers.deepspeed import DeepSpeedConfig
from ortlaunch.run.checkpoints import Store


def config(*overrides: str) -> Config:
    return to_config(compose(["device=cpu", *overrides]))


def refusal(*overrides: str) -> str:
    with pytest.raises(RequestError) as caught:
        check(config(*overrides))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("named", ["run", "run/checkpoints", "run/checkpoints/step-00000008"])
def test_a_run_that_would_end_before_the_checkpoint_that_it_resumes_from_is_refused(tmp_path: Path, named: str) -> None:
    store = Store(tmp_path / "run" / "checkpoints", keep=2)
    store.begin(8)
    checkpoint = store.commit(8, {"step": 8})
    resume = f"train.resume={tmp_path / named}"
    assert f"{checkpoint} was written after step 8, and train.steps=7 is less" in refusal(resume, "train.steps=7")
    check(config(resume, "train.steps=8"))


@pytest.mark.parametrize(
    ("word", "package", "extra"),
    [
        ("trainer=deepspeed", "deepspeed", "deepspeed"),
        ("data=hf", "datasets", "hf"),
        ("adapter=lora", "peft", "lora"),
        ("eval.metrics=[accuracy]", "torchmetrics", "metrics"),
    ],
)
def test_what_is_not_installed_is_refused_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, word: str, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    words = (word, "backend=eager", "train.eval_every=2", *(["data.path=team/texts"] if package == "datasets" else []))
    assert f"needs {package}, which is not installed: pip install 'ortlaunch[{extra}]'" in refusal(*words)
    # A container has an environment of its own.
    check(config(*words, "launcher=slurm", "launcher.container.image=team.sqsh"))


def test_a_misspelt_metric_is_refused_before_there_are_workers() -> None:
    words = "backend=eager", "train.eval_every=2"
    assert "torchmetrics has no metric of this name. Did you mean accuracy?" in refusal(
        *words, "eval.metrics=[acuracy]"
    )
    check(config(*words, "eval.metrics=[f1,mse,word_error_rate,{name: Accuracy, as: top}]"))


def test_the_default_configuration_is_accepted() -> None:
    check(config())
    check(config("model=gpt2", "trainer=deepspeed"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.steps", 0),
        ("train.batch_size", 0),
        ("train.grad_accumulation", 0),
        ("train.log_every", -1),
        ("data.seq_len", 1),
        ("launcher.workers_per_node", 0),
        ("backend.threads", 0),
        ("optimizer.lr", 0),
        ("train.clip_grad_norm", 0),
        ("train.eval_every", 0),
        ("train.eval_samples", 0),
        ("train.gc_every", -1),
        ("train.checkpoint_every", 0),
        ("train.keep_checkpoints", 1),
        ("launcher.max_restarts", -1),
        ("launcher.timeout_seconds", 0),
        ("launcher.grace_seconds", 0),
        ("tracking.timeout_seconds", 0),
        ("tracking.flush_seconds", -1),
    ],
)
def test_numbers_below_their_least_value_are_refused_by_key(key: str, value: int) -> None:
    assert refusal(f"{key}={value}").startswith(f"{key}={value}")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer=deepspeed", "trainer.zero_stage=4"], ["trainer.zero_stage=4", "0, 1, 2 or 3"]),
        (
            ["trainer=deepspeed", "+trainer.config.zero_optimization.stage=3"],
            ["trainer.config.zero_optimization.stage", "trainer.zero_stage"],
        ),
        (
            ["trainer=deepspeed", "+trainer.config.gradient_accumulation_steps=4"],
            ["trainer.config.gradient_accumulation_steps", "train.grad_accumulation"],
        ),
        (
            ["trainer=deepspeed", "+trainer.config.bf16.enabled=true"],
            ["trainer.config.bf16.enabled", "train.precision"],
        ),
        (["trainer=deepspeed", "+trainer.config.optimizer.type=Adam"], ["trainer.config.optimizer", "optimizer=NAME"]),
        (
            ["trainer.static_graph=true", "train.grad_accumulation=2"],
            ["trainer.static_graph=true", "train.grad_accumulation=2", "leave it out"],
        ),
        (["train.resume=nowhere"], ["train.resume=nowhere", "auto, never"]),
        (["tracking.uri=databricks"], ["tracking.uri=databricks", "tracking.experiment_name=/Users/NAME/TITLE"]),
        (["train.resume=/"], ["train.resume=/", "no run folder, no checkpoint"]),
        (["run_root="], ["run_root=''", "must not be empty"]),
        (["data=tokens", "data.path=a.bin", "data.dtype=float99"], ["data.dtype=float99", "uint8, uint16"]),
        (["model=hf", "model.params.pretrained=/nowhere"], ["model.params.pretrained=/nowhere", "no such folder"]),
        (["model=hf", "model.params.pretrained=gpt2", "model.params.task=causal"], ["task=causal", "causal-lm?"]),
        (["model.weights=nowhere"], ["model.weights=nowhere", "no such"]),
        (["backend.blocks=GPT2Block"], ["backend.blocks=GPT2Block", "trainer.zero_stage=3"]),
        (["backend.zero3=hold"], ["backend.zero3=hold", "trainer.zero_stage=3"]),
        (["trainer=deepspeed", "trainer.zero_stage=2", "backend.zero3=hold"], ["backend.zero3=hold"]),
        (["train.precision=bf16"], ["train.precision=bf16", "backend=ort", "fp32"]),
        (["train.precision=fp16"], ["train.precision=fp16", "backend=ort"]),
        (
            ["backend=eager", "trainer=deepspeed", "trainer.zero_stage=0", "train.precision=fp16"],
            ["train.precision=fp16", "trainer.zero_stage=0", "trainer.zero_stage=1", "trainer=ddp"],
        ),
        (["train.tf32=true"], ["train.tf32=true", "device=cuda"]),
        (["launcher.allocator=keep", "device=cuda"], ["launcher.allocator=keep", "device=cpu"]),
        (["data.eval_fraction=1"], ["data.eval_fraction=1", "less than 1"]),
        (["optimizer=adafactor", "trainer=deepspeed"], ["optimizer=adafactor", "trainer.zero_stage=1", "trainer=ddp"]),
        (["trainer=fsdp"], ["backend=ort", "trainer=fsdp", "trainer.zero_stage=3", "backend=eager"]),
        (["trainer=fsdp", "backend=eager", "optimizer=adafactor"], ["optimizer=adafactor", "trainer=fsdp", "adamw"]),
        (["trainer=fsdp", "backend=compile", "backend.fullgraph=true"], ["backend.fullgraph=true", "trainer=fsdp"]),
        (
            ["trainer=fsdp", "backend=compile", "backend.mode=reduce-overhead"],
            ["backend.mode=reduce-overhead", "trainer=fsdp", "backend.mode=default"],
        ),
        (["trainer=deepspeed", "trainer.offload_optimizer=true"], ["trainer.offload_optimizer=true", "device=cuda"]),
        (
            ["trainer=deepspeed", "trainer.zero_stage=0", "trainer.offload_optimizer=true"],
            ["trainer.offload_optimizer=true", "trainer.zero_stage=1"],
        ),
        (
            ["trainer=deepspeed", "+trainer.config.zero_optimization.offload_optimizer.device=cpu"],
            ["trainer.config.zero_optimization.offload_optimizer", "trainer.offload_optimizer"],
        ),
        (
            ["trainer=deepspeed", "trainer.zero_stage=3", "backend.zero3=hold", "train.activation_checkpointing=true"],
            ["train.activation_checkpointing=true", "backend.zero3=hold", "backend.zero3=recompute"],
        ),
        (["trainer=single", "launcher.workers_per_node=2"], ["trainer=single", "launcher.workers_per_node=2"]),
        (["data=text", "data.path=nowhere.txt"], ["data.path=nowhere.txt"]),
        (["data=tokens", "data.path=a.bin,b.bin"], ["data.path=a.bin"]),
        (["data=hf", "data.path=./nowhere"], ["data.path=./nowhere"]),
        (["data=text", "data.path=.", "data.tokenizer=nowhere"], ["data.tokenizer=nowhere"]),
        (["model=mlp", "data=pysource"], ["model=mlp", "data=digits"]),
        (["model=gpt2", "data=digits"], ["model=gpt2", "data=pysource"]),
        (["data.seq_len=4096"], ["data.seq_len=4096", "1024"]),
        (["model=factory"], ["model.target"]),
        (["model.name=gtp2"], ["gtp2", "model=gpt2", "llama"]),
        (["backend=compile", "backend.mode=fast"], ["backend.mode=fast", "max-autotune"]),
        (["experiment=a/b"], ["experiment='a/b'"]),
        (["backend.debug.onnx_prefix=a/b"], ["backend.debug.onnx_prefix='a/b'"]),
        (["backend.debug.onnx_prefix="], ["backend.debug.onnx_prefix=''"]),
        (["launcher.run=mine"], ["launcher.run=mine", "20260101-120000-1a2b3c"]),
        (["launcher.master_port=70000"], ["launcher.master_port=70000", "65535"]),
        (["tracking.uri=file:///tmp/x"], ["tracking.uri", "sqlite:///"]),
        (["optimizer=factory"], ["optimizer=factory", "optimizer.target=module:Class"]),
        (["optimizer=factory", "optimizer.target=nets:Own"], ["optimizer.target=nets:Own: there is no module 'nets'"]),
        (["optimizer=factory", "optimizer.target=torch.optim"], ["optimizer.target=torch.optim is not of the form"]),
        (["scheduler=factory"], ["scheduler=factory", "scheduler.target=module:function"]),
        (["scheduler=factory", "scheduler.target=json:dumpss"], ["json has no 'dumpss'"]),
        (["optimizer.groups=[{match: a, target: nets:Own}]"], ["optimizer.groups.0.target=nets:Own: there is no"]),
        (["optimizer.groups=[{match: a, params: {eps: 1}}]"], ["optimizer.groups.0.params", "give target"]),
        (["optimizer.groups=[{match: a}, {match: b, lr_factor: -1}]"], ["optimizer.groups.1.lr_factor=-1.0: must be"]),
        (["trainer=deepspeed", "train.ema=0.9"], ["train.ema=0.9 does not go with trainer=deepspeed", "trainer=fsdp"]),
        (["train.ema=1"], ["train.ema=1.0: must be greater than 0 and less than 1"]),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(overrides: list[str], words: list[str]) -> None:
    message = refusal(*overrides)
    for word in words:
        assert word in message


@pytest.mark.parametrize("backend", ["eager", "ort"])
def test_zero_3_is_accepted(backend: str) -> None:
    check(config("trainer=deepspeed", "trainer.zero_stage=3", f"backend={backend}"))


def test_how_ort_runs_under_zero_3_can_be_chosen() -> None:
    chosen = config("trainer=deepspeed", "trainer.zero_stage=3", "backend.zero3=hold", "backend.blocks=transformer.h.*")
    check(chosen)
    assert chosen.backend.zero3 is OrtZero3.hold
    assert chosen.backend.blocks == "transformer.h.*"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_on_the_cpu_is_accepted_without_ort(precision: str) -> None:
    check(config(f"train.precision={precision}", "backend=eager"))
    check(config(f"train.precision={precision}", "backend=eager", "trainer=deepspeed"))


def test_more_workers_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # The only machine part that is replaced: the number of GPUs.
    monkeypatch.setattr("ortlaunch.config.devices._present_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    message = refusal("device=cuda", "launcher.workers_per_node=3")
    assert "launcher.workers_per_node=3" in message
    assert "2 visible GPUs" in message
    check(config("device=cuda", "launcher.workers_per_node=2"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert "1 visible GPU" in refusal("device=cuda", "launcher.workers_per_node=2")


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortlaunch.config.devices._present_gpus", lambda: 0)
    assert "device=cuda" in refusal("device=cuda")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stpes=3", ["train.stpes", "train.steps"]),
        ("modle=gpt2", ["modle", "model"]),
        ("train.steps=many", ["train.steps=many", "whole number"]),
        ("trainer=dp", ["trainer=dp", "trainer=ddp", "deepspeed"]),
        ("model=gtp2", ["gtp2", "model=gpt2"]),
        ("trainer.zero_stage=2", ["trainer.zero_stage", "trainer=deepspeed"]),
        ("backend.fallback=maybe", ["backend.fallback=maybe", "warn"]),
        ("model.params.n_layr=3", ["model.params.n_layr"]),
        ("optimizer.groups=[{match: a, lr: 3}]", ["optimizer.groups: a group has no lr", "lr_factor"]),
        ("name=ä", ["name=ä", "quotes"]),
        ("train.steps=[1", ["train.steps=[1", "quotes"]),
    ],
)
def test_typos_fail_while_composing_with_the_nearest_name(override: str, words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        compose([override])
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_runs_go_where_mlflows_own_variable_says_unless_a_key_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://team:5000")
    (tmp_path / "job.yaml").write_text("# A job.\ntracking:\n  uri: http://job\n")
    monkeypatch.setenv("ORTLAUNCH_JOBS", str(tmp_path))
    assert config().tracking.uri == "http://team:5000"
    assert config("tracking.uri=sqlite:///mlruns.db").tracking.uri == "sqlite:///mlruns.db"
    assert config("+jobs=job").tracking.uri == "http://job"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "./mlruns")
    assert refusal().startswith("MLFLOW_TRACKING_URI=./mlruns is a file store")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert config().tracking.uri == "sqlite:///mlruns.db"


def test_a_value_that_the_user_must_give_is_asked_for_by_key() -> None:
    with pytest.raises(RequestError, match=r"model\.params\.pretrained is not set"):
        to_config(compose(["model=hf"]))


def test_parameters_of_a_factory_need_no_plus() -> None:
    chosen = config("model=factory", "model.target=a.b:c", "model.params.width=3")
    assert chosen.model.params == {"width": 3}
    for group in ("optimizer", "scheduler"):
        chosen = config(f"{group}=factory", f"{group}.target=a.b:c", f"{group}.params.width=3")
        assert getattr(chosen, group).params == {"width": 3}


def test_a_configuration_survives_the_run_folder(tmp_path: Path) -> None:
    groups = "optimizer.groups=[{match: '*.bias', lr_factor: 2, target: a.b:c, params: {eps: 1}}]"
    words = ("model=mlp", "trainer=deepspeed", "trainer.zero_stage=2", "train.precision=bf16", "name='ä b'")
    chosen = config(*words, groups)
    save_config(chosen, tmp_path / "config.yaml")
    read = load_config(tmp_path / "config.yaml")
    assert read == chosen
    assert isinstance(read.trainer, DeepSpeedConfig)
    assert isinstance(read.data, DigitsConfig)
    assert isinstance(read.backend, OrtConfig)
    assert read.train.precision is Precision.bf16


@pytest.mark.parametrize(
    "override",
    [
        *("model.imports=[{a:1}]", "launcher.setup=[[a]]", "launcher.container.mounts=[{a:1}]", "backend.allow=[[a]]"),
        *("launcher.extra=[null]", "launcher.env={A:{b:1}}", "profile.ranks=[[1]]", "profile.ranks=[true]"),
    ],
)
def test_an_item_of_another_type_is_refused_by_its_key(override: str) -> None:
    with pytest.raises(RequestError) as caught:
        config("launcher=slurm", "+profile=torch", override)
    assert override.partition("=")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.steps=ten", "train.steps=ten: must be a whole number"),
        ("optimizer.lr=high", "optimizer.lr=high: must be a number"),
        ("train.tf32=maybe", "train.tf32=maybe: must be true or false"),
        ("train.precision=fp8", "train.precision=fp8: must be one of fp32, bf16, fp16"),
        ("train.steps=null", "train.steps=null: must not be null"),
        ("model.params=3", "model.params=3: must be keys and values, {NAME: VALUE}"),
        ("model.imports=3", "model.imports=3: must be a list, [A,B]"),
        ("model.imports={a:1}", "model.imports={a:1}: a list is written as [A,B], keys and values as {NAME: VALUE}"),
        ("train=3", "train=3: has keys of its own: give these (ortlaunch --cfg job)"),
    ],
)
def test_a_value_of_another_type_is_refused_in_plain_words(override: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        config(override)
    assert str(caught.value) == said


def test_so_is_one_in_a_ready_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text("# Mine.\ntrain:\n  steps: ten\n")
    monkeypatch.setenv("ORTLAUNCH_JOBS", str(tmp_path))
    with pytest.raises(RequestError, match=r"jobs/mine: train\.steps: must be a whole number"):
        config("+jobs=mine")


def test_items_of_the_right_type_are_taken() -> None:
    words = ["model.imports=[a.b]", "launcher.setup=['module load x']", "+launcher.env.A=1", "backend.allow=[]"]
    taken = config("launcher=slurm", "+profile=torch", "profile.ranks=[0,1]", "trainer=deepspeed", *words)
    assert taken.model.imports == ["a.b"]
