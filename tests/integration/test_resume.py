"""Runs that go on from a checkpoint: bit by bit as if nothing had happened, and what they refuse."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.support.ort import runnable

# Dropout on: the generators' states count. Two samples a step on each of two workers.
SMALL = ("model=gpt2_nano", "model.params.n_layer=2", "data.seq_len=32", "train.batch_size=2", "tracking=none")
STEPS = (
    "train.steps=8",
    "train.checkpoint_every=4",
    "train.log_every=1",
    "scheduler=cosine",
    "scheduler.warmup_steps=2",
)

NO_DROPOUT = tuple(f"model.params.{kind}_pdrop=0" for kind in ("resid", "embd", "attn"))

# Three optimizers, of which one takes matrices alone.
MIXED = (
    *("optimizer=factory", "optimizer.target=torch.optim:NAdam"),
    "optimizer.groups=[{match: '*.mlp.*.weight', target: 'torch.optim:Muon'}, {match: '*.bias', lr_factor: 0.5}, "
    "{match: '*wpe*', frozen: true}, {match: '*.attn.*', target: 'torch.optim:Adamax', params: {eps: 1e-6}}]",
)
IN_PIECES = tuple(word.replace("Muon", "RAdam") for word in MIXED)

KINDS = runnable(
    {
        "single": ("backend=eager", "trainer=single", "train.ema=0.9", *MIXED),
        "ddp": ("backend=eager", "trainer=ddp", "train.ema=0.9"),
        "ddp-ort": ("backend=ort", "trainer=ddp"),
        # Where more than two add up, the order counts.
        "ddp-3-workers": ("backend=eager", "trainer=ddp"),
        # Dropout from ONNX Runtime's own generator.
        "ddp-ort-alone": ("backend=ort", "trainer=ddp", "backend.torch_kernels=false"),
        "fsdp": ("backend=eager", "trainer=fsdp", "train.ema=0.9"),
        "fsdp-mixed": ("backend=eager", "trainer=fsdp", "train.ema=0.9", *IN_PIECES),
        "ddp-mixed": ("backend=eager", "trainer=ddp", *MIXED),
        **{
            f"zero{stage}-mixed": ("backend=eager", "trainer=deepspeed", f"trainer.zero_stage={stage}", *IN_PIECES)
            for stage in range(4)
        },
        **{f"zero{stage}": ("backend=eager", "trainer=deepspeed", f"trainer.zero_stage={stage}") for stage in range(4)},
        **{f"zero{stage}-ort": ("backend=ort", "trainer=deepspeed", f"trainer.zero_stage={stage}") for stage in (2, 3)},
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


WORKERS = {"single": 1, "ddp-3-workers": 3}


@pytest.fixture(scope="module")
def straight(train, folder):
    """The undisturbed run of a kind, made once."""
    made = {}

    def make(kind):
        if kind not in made:
            made[kind] = train(folder, *SMALL, *STEPS, *KINDS[kind], workers=WORKERS.get(kind, 2))
            assert made[kind].status == "FINISHED", made[kind].report
        return made[kind]

    return make


def figures(result):
    """Loss and gradient norm by step: the norm shows the state that the loss does not show yet."""
    return {step: (loss, result.series("train/grad_norm")[step]) for step, loss in result.losses.items()}


# Each of these differs from one that CI runs by a stage, or by one worker.
NIGHTLY = (
    "ddp-3-workers",
    "ddp-ort-alone",
    "zero0",
    "zero1",
    "zero2",
    "zero2-ort",
    *(kind for kind in KINDS if kind.endswith("-mixed")),
)
CASES = [pytest.param(kind, marks=[pytest.mark.nightly] * (kind in NIGHTLY)) for kind in KINDS]


@pytest.mark.parametrize("kind", CASES)
def test_half_and_half_is_the_whole(train, folder, straight, kind):
    whole, workers = straight(kind), WORKERS.get(kind, 2)
    middle = whole.run_dir / "checkpoints" / "step-00000004"
    rest = train(folder, *SMALL, *STEPS, *KINDS[kind], f"train.resume={middle}", workers=workers)
    assert rest.status == "FINISHED", rest.report
    expected = {step: value for step, value in figures(whole).items() if step > 4}
    if kind.startswith("zero3"):
        # Two equal runs of it have been seen to differ by 1e-8 in a gradient's norm, with no checkpoint in between.
        assert figures(rest) == {step: pytest.approx(value, rel=1e-6) for step, value in expected.items()}
    else:
        assert figures(rest) == expected
        # With an average of the weights, these are its.
        left, there = (load_file(one.run_dir / "weights" / "model.safetensors") for one in (rest, whole))
        assert all(torch.equal(value, there[name]) for name, value in left.items())
    assert f"going on from {middle}" in rest.stdout
    meta = [
        json.loads((result.run_dir / "checkpoints" / "latest" / "run.json").read_text()) for result in (whole, rest)
    ]
    assert meta[0]["tokens"] == meta[1]["tokens"] == 8 * 2 * 32 * workers
    assert meta[0]["position"] == meta[1]["position"]


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("ddp", 2, 1),
        pytest.param("ddp", 2, 4, marks=pytest.mark.nightly),
        pytest.param("zero1", 2, 1, marks=pytest.mark.nightly),
        pytest.param("zero3", 2, 4, marks=pytest.mark.nightly),
        ("zero3", 2, 1),
    ],
)
def test_another_number_of_workers_goes_on_in_the_same_data(train, folder, straight, kind, before, after):
    """Dropout differs from worker to worker, so it is off; a global batch of 4 whoever shares it."""
    same = (*SMALL, *STEPS, *KINDS[kind], *NO_DROPOUT)
    whole = train(folder, *same, f"train.batch_size={4 // before}", workers=before)
    assert whole.status == "FINISHED", whole.report
    middle = whole.run_dir / "checkpoints" / "step-00000004"
    rest = train(folder, *same, f"train.batch_size={4 // after}", f"train.resume={middle}", workers=after)
    assert rest.status == "FINISHED", rest.report
    expected = {step: loss for step, loss in whole.losses.items() if step > 4}
    assert rest.losses.keys() == expected.keys()
    assert rest.losses == pytest.approx(expected, abs=2e-6)


@pytest.mark.nightly
def test_fsdp_goes_on_with_one_two_and_three_workers(train, folder):
    """A global batch of 6 whoever shares it; with three workers the shards are of unlike sizes."""
    same = (*SMALL, *STEPS, *KINDS["fsdp"], *NO_DROPOUT, "train.steps=8", "train.checkpoint_every=2")
    same += ("train.keep_checkpoints=4",)
    whole = run = train(folder, *same, "train.batch_size=6", workers=1)
    for workers, step in ((2, 2), (3, 4), (1, 6)):
        checkpoint = run.run_dir / "checkpoints" / f"step-{step:08d}"
        words = (f"train.batch_size={6 // workers}", f"train.resume={checkpoint}")
        run = train(folder, *same, *words, workers=workers)
        assert run.status == "FINISHED", run.report
        expected = {number: loss for number, loss in whole.losses.items() if number > step}
        assert run.losses == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(("before", "after"), [("ddp", "fsdp"), pytest.param("fsdp", "ddp", marks=pytest.mark.nightly)])
def test_what_was_whole_goes_on_sharded_and_the_other_way_round(train, folder, straight, before, after):
    whole = straight(before)
    middle = whole.run_dir / "checkpoints" / "step-00000004"
    rest = train(folder, *SMALL, *STEPS, *KINDS[after], f"train.resume={middle}")
    assert rest.status == "FINISHED", rest.report
    expected = {step: value for step, value in figures(whole).items() if step > 4}
    assert figures(rest) == {step: pytest.approx(value, rel=1e-5) for step, value in expected.items()}


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(train, folder, straight):
    whole = straight("ddp")
    copy = folder / "damaged"
    shutil.copytree(whole.run_dir / "checkpoints", copy / "checkpoints", symlinks=True)
    damaged = next((copy / "checkpoints" / "step-00000008" / "engine" / "tensors").glob("*.distcp"))
    data = bytearray(damaged.read_bytes())
    data[1000] ^= 255
    damaged.write_bytes(bytes(data))
    rest = train(folder, *SMALL, *STEPS, *KINDS["ddp"], f"train.resume={copy}")
    assert rest.status == "FINISHED", rest.report
    assert f"{copy / 'checkpoints' / 'step-00000008'} is damaged" in rest.stdout
    assert damaged.name in rest.stdout
    assert figures(rest) == {step: value for step, value in figures(whole).items() if step > 4}
    assert damaged.read_bytes() == bytes(data)


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (("model.params.n_embd=64",), ("is of another model", "transformer.wte.weight", "(256, 128)", "(256, 64)")),
        (("model.params.n_layer=1",), ("is of another model", "the model has no transformer.h.1.")),
        (("trainer=deepspeed", "train.ema=null"), ("trainer.zero_stage=1", "ortlaunch export weights")),
        (("data.seq_len=16",), ("245000", "490000")),
        (("data=synthetic",), ("fingerprint", "give the same data")),
        (("seed=1",), ("seed=0", "seed=1")),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(train, folder, straight, keys, parts):
    checkpoint = straight("ddp").run_dir / "checkpoints" / "step-00000004"
    result = train(folder, *SMALL, *STEPS, *KINDS["ddp"], f"train.resume={checkpoint}", *keys)
    assert result.is_request, result.report
    assert all(part in result.error for part in (str(checkpoint), *parts)), result.error


def test_more_steps_go_on_in_the_same_folder_and_the_same_mlflow_run(launch, ask, train, folder, mlflow_run):
    """`ortlaunch resume` of a run that has finished its 3 steps: refused as it is; with more steps to do it goes on.

    Its last step is kept whatever ``train.checkpoint_every`` says, so nothing is computed twice.
    """
    words = (*SMALL, *KINDS["ddp"], "train.log_every=1")
    whole = train(folder, *words, "train.steps=5", "train.checkpoint_every=null")
    assert not (whole.run_dir / "checkpoints").exists()
    first = launch(folder, *words, "train.steps=3", "tracking=mlflow")
    assert (first.run_dir / "checkpoints" / "step-00000003" / "manifest.json").is_file()
    before = (first.run_dir / "journal.jsonl").read_bytes()
    again = ask(folder, "resume", str(first.run_dir))
    assert again.returncode == 2
    assert "has finished its 3 steps" in again.stderr and "train.steps=6" in again.stderr
    assert (first.run_dir / "journal.jsonl").read_bytes() == before
    second = launch(folder, "resume", str(first.run_dir), "train.steps=5")
    assert second.returncode == 0, second.report
    assert "after step 3" in second.stdout
    assert second.run_dir == first.run_dir
    assert second.losses == whole.losses
    client, run = mlflow_run(second)
    assert run.info.status == "FINISHED"
    history = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(history) == sorted(whole.losses.items())
    assert (second.run_dir / "attempts" / "1" / "config.yaml").is_file()
    nothing = ask(folder, "resume", str(folder))
    assert nothing.returncode == 2
    assert "is no run folder" in nothing.stderr


@pytest.mark.ort
def test_weights_of_blocks_under_onnx_runtime_have_the_plain_models_names(straight, ask, folder):
    """What the run leaves, and what is exported from its last checkpoint; of other kinds test_weights.py reads it."""
    run = straight("zero3-ort")
    left = load_file(run.run_dir / "weights" / "model.safetensors")
    plain = load_file(straight("zero3").run_dir / "weights" / "model.safetensors")
    kinds = [{name: (value.shape, value.dtype) for name, value in one.items()} for one in (left, plain)]
    assert kinds[0] == kinds[1]
    exported = ask(folder, "export", "weights", str(run.run_dir), "--out", str(folder / "exported"))
    assert exported.returncode == 0, exported.stderr
    again = load_file(folder / "exported" / "model.safetensors")
    assert again.keys() == left.keys() and all(torch.equal(again[name], left[name]) for name in left)


def test_nothing_is_left_to_train_but_the_weights_are_still_written(train, folder, straight):
    """As after a loss of power between the last checkpoint and the weights."""
    whole = straight("ddp")
    rest = train(folder, *SMALL, *STEPS, *KINDS["ddp"], f"train.resume={whole.run_dir}")
    assert rest.status == "FINISHED", rest.report
    assert rest.losses == {}
    weights = "weights/model.safetensors"
    assert (rest.run_dir / weights).read_bytes() == (whole.run_dir / weights).read_bytes()


@pytest.mark.nightly
def test_best_is_the_checkpoint_with_the_lowest_evaluation_loss(train, folder):
    """A learning rate that grows makes it worse. CI has a best value of another name in test_own_step.py."""
    keys = ("train.steps=8", "train.checkpoint_every=2", "train.eval_every=2", "optimizer.lr=1")
    keys += ("scheduler.warmup_steps=100", "data.eval_fraction=0.001", "train.log_every=1")
    result = train(folder, *SMALL, *KINDS["ddp"], *keys)
    assert result.status == "FINISHED", result.report
    losses = result.series("eval/loss")
    best = min(losses, key=lambda step: losses[step])
    assert best < 8, losses
    checkpoints = result.run_dir / "checkpoints"
    assert (checkpoints / "best").resolve().name == f"step-{best:08d}"
    assert (checkpoints / "latest").resolve().name == "step-00000008"
    assert json.loads((checkpoints / "best" / "run.json").read_text())["eval_loss"] == losses[best]


QUEUES = """
import torch
from torch import nn


class Queues(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 16), nn.Linear(16, 10)
        self.register_buffer("queue", torch.zeros(12, 16))
        self.register_buffer("mean", torch.zeros(16), persistent=False)
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.register_buffer("mask", torch.ones(16), persistent=False)

    def forward(self, pixel_values):
        hidden = self.hidden(pixel_values.flatten(1)).relu()
        near = torch.softmax(hidden @ self.queue.clone().T, dim=1) @ self.queue.clone()
        centred = (hidden - self.mean.clone()) * self.mask / (1 + self.count.clone())
        if self.training:
            with torch.no_grad():
                self.queue.copy_(torch.cat([hidden.detach(), self.queue])[:12])
                self.mean.copy_(0.5 * self.mean + 0.5 * hidden.detach().mean(0))
                self.count.add_(1)
        return self.out(centred + near)
"""
QUEUE_KINDS = {kind: words for kind, words in KINDS.items() if kind not in ("ddp-3-workers", "ddp-ort-alone")}
if "zero3-ort" in QUEUE_KINDS:
    QUEUE_KINDS["zero3-ort"] += ("backend.blocks=Linear",)
QUEUE_OFTEN = ("ddp", "fsdp")
QUEUE_CASES = [pytest.param(kind, marks=[pytest.mark.nightly] * (kind not in QUEUE_OFTEN)) for kind in QUEUE_KINDS]
QUEUE_STEPS = ("train.steps=6", "train.checkpoint_every=3", "train.log_every=1", "scheduler=constant")


@pytest.fixture(scope="module")
def queues(train, folder):
    """Trains the model with queues; the same words make one run."""
    (folder / "queues.py").write_text(QUEUES)
    words = ("model=factory", "model.target=queues:Queues", "data=digits", "train.batch_size=4", "tracking=none")
    made = {}

    def make(kind, *more, workers=None):
        workers = workers or WORKERS.get(kind, 2)
        key = kind, more, workers
        if key not in made:
            made[key] = train(folder, *words, *QUEUE_STEPS, *QUEUE_KINDS[kind], *more, workers=workers)
            assert made[key].status == "FINISHED", made[key].report
        return made[key]

    return make


def own_buffers(result, step, rank):
    saved = torch.load(result.run_dir / "checkpoints" / f"step-{step:08d}" / "workers" / f"rank-{rank}.pt")
    return {name: one["value"].tolist() for name, one in saved["buffers"].items()}


@pytest.mark.parametrize("kind", QUEUE_CASES)
def test_buffers_that_the_loss_reads_go_on_as_each_worker_has_them(queues, kind):
    whole = queues(kind)
    rest = queues(kind, f"train.resume={whole.run_dir / 'checkpoints' / 'step-00000003'}")
    expected = {step: value for step, value in figures(whole).items() if step > 3}
    if kind.startswith("zero3"):
        # As above: two equal runs of it may differ in the last digit.
        assert figures(rest) == {step: pytest.approx(value, rel=1e-6) for step, value in expected.items()}
    else:
        assert figures(rest) == expected
        weights = "weights/model.safetensors"
        assert (rest.run_dir / weights).read_bytes() == (whole.run_dir / weights).read_bytes()
        for rank in range(WORKERS.get(kind, 2)):
            assert own_buffers(rest, 6, rank) == own_buffers(whole, 6, rank)
    assert own_buffers(rest, 6, 0).keys() == {"mean", "count"}
    if kind != "single":
        # DDP sends the first worker's before each step, and the mask and the count are the same on all workers.
        assert own_buffers(rest, 6, 1).keys() == (set() if kind.startswith("ddp") else {"queue", "mean"})


def test_an_evaluation_leaves_each_worker_its_own_buffers(queues):
    """Else a run that ends with one, and goes on with more steps, would not be the run that had them from the start."""
    assert figures(queues("fsdp", "train.eval_every=1")) == figures(queues("fsdp"))


def test_another_number_of_workers_takes_the_first_ones_buffers_and_says_so(queues):
    middle = queues("zero1").run_dir / "checkpoints" / "step-00000003"
    rest = queues("zero1", f"train.resume={middle}", workers=1)
    (line,) = [line for line in rest.stdout.splitlines() if "buffers" in line]
    assert line == (
        f"warning: {middle} was written by 2 workers, which differed in the buffers mean, queue: in this run of 1 "
        "worker all begin with the first one's"
    )
