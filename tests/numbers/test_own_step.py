"""A step, an evaluation, metrics and hooks that the user wrote, against plain torch in one process."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from ortlaunch.base.errors import RequestError
from ortlaunch.config.load import load_config
from ortlaunch.data.loader import build_loader
from ortlaunch.export.run_weights import export_weights
from tests.support.referee import course_of, difference, replayed

MINE = '''
import torch
from torch import nn
from torch.nn import functional
import ortlaunch

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, image):
        return self.head(torch.tanh(self.body(image.flatten(1))))

def step(model, batch):
    """Two losses of two views, and a value to log."""
    logits, turned = model(batch["pixel_values"]), model(batch["pixel_values"].flip(-1))
    apart = (logits - turned).square().mean()
    assert isinstance(ortlaunch.unwrapped(model), Net)
    return functional.cross_entropy(logits, batch["labels"]) + 0.1 * apart, {"apart": apart, "four": 4}

class Counted:
    """A step with a state, which each call changes and which the loss depends on."""

    def __init__(self):
        self.calls = 0

    def __call__(self, model, batch):
        self.calls += 1
        return functional.cross_entropy(model(batch["pixel_values"]), batch["labels"]) * (1 + self.calls % 5)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]

def evaluate(model, batch):
    logits = model(batch["pixel_values"])
    values = {"preds": logits, "target": batch["labels"], "length": logits.norm(dim=1).mean()}
    return functional.cross_entropy(logits, batch["labels"]), values

class Worst:
    """Knows nothing of workers."""

    higher_is_better = False

    def reset(self):
        self.worst = 0.0

    def update(self, preds, target):
        self.worst = max(self.worst, float(functional.cross_entropy(preds, target, reduction="none").max()))

    def compute(self):
        return self.worst

def share(preds, target):
    return (preds.argmax(1) == target).float().mean()

class Notes:
    def __init__(self, every, name="mine"):
        self.every, self.steps, self.name = every, 0, name

    def step(self, run):
        self.steps += 1
        if run.step % self.every == 0:
            run.log_metric(f"{self.name}/steps", self.steps)
            run.log_text(f"{run.values['train/loss']:.6f}", f"losses/{run.step}.txt")
            run.log_image(torch.zeros(3, 4, 5), "black.png")

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

class Everywhere:
    everywhere = True

    def end(self, run):
        (run.folder / f"ended-{run.rank}").touch()

class Stops:
    def step(self, run):
        if run.step == 3:
            run.stop()

class Fails:
    def evaluation(self, run):
        return run.values["eval/nope"]

class Freezes:
    def start(self, run):
        run.freeze('body.*')

class Idle:
    pass

class Odd(Notes):
    def state_dict(self):
        return {"steps": Idle()}

def alone(model):
    return model

def nothing(model, batch):
    return None

def rows(model, batch):
    return model(batch["pixel_values"])

def named(model, batch):
    return step(model, batch)[0], {"rows": batch["pixel_values"]}

def taken(preds, target):
    return preds
'''
WORDS = (
    *("model=factory", "model.target=mine:Net", "data=digits", "backend=eager", "train.batch_size=3"),
    *("data.eval_fraction=0.03", "train.steps=6", "train.log_every=1", "tracking=none", "optimizer.lr=0.01"),
)
EVALUATED = ("train.eval_every=3", "eval.step=mine:evaluate")
TRAINERS = {
    "single": (1, "trainer=single", "train.grad_accumulation=2"),
    "ddp": (2, "trainer=ddp"),
    "zero1": (2, "trainer=deepspeed", "trainer.zero_stage=1"),
    "fsdp": (2, "trainer=fsdp", "trainer.blocks=Linear"),
    "ort": (2, "trainer=ddp", "backend=ort"),
}


@pytest.fixture
def trained(train, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)

    def run(*words, workers=2, record=None):
        return train(tmp_path, *WORDS, *words, workers=workers, record=record)

    return run


def in_fp64(run, records, workers, *, first_steps=6, values=None, begins=None):
    """The course of runs with `mine:step`, in one process by plain torch; its value `apart` goes into `values`."""
    names = {"__name__": "mine"}
    exec(MINE, names)

    def loss(model, _buffers, batch):
        found, more = names["step"](model, batch)
        if values is not None:
            values.append(more["apart"].item())
        return found

    return replayed(
        names["Net"](),
        loss,
        lambda batch: len(batch["labels"]),
        load_config(run.run_dir / "config.yaml"),
        records,
        first_steps=first_steps,
        sends_buffers=False,
        workers=workers,
        evaluated=None,
        begins=begins,
    )


METRICS = "eval.metrics=[accuracy,f1,{name: accuracy, top_k: 3, as: top3},mine:Worst,mine:share]"


@pytest.fixture(scope="module")
def stepped(train, tmp_path_factory):
    """The run of a trainer with a step, an evaluation and metrics of its own, made once, and the batches it took."""
    made = {}

    def run(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            (folder / "mine.py").write_text(MINE)
            record = folder / "record"
            record.mkdir()
            workers, *words = TRAINERS[name]
            words = (*WORDS, *EVALUATED, METRICS, "train.step=mine:step", *words)
            made[name] = train(folder, *words, workers=workers, record=record), record
            assert made[name][0].status == "FINISHED", made[name][0].report
        return made[name]

    return run


NAMES = [pytest.param(n, marks=pytest.mark.ort) if n == "ort" else n for n in TRAINERS]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_ones_own_trains_as_a_plain_loop_in_fp64(stepped, name):
    run, record = stepped(name)
    values = []
    exact = in_fp64(run, [record], TRAINERS[name][0], values=values)
    # Evaluations are held against fp64 below.
    assert difference(replace(course_of([run]), evaluations=[]), exact) == ""
    means = [sum(values[step : step + 2]) / 2 for step in range(0, 12, 2)]
    assert list(run.series("train/apart").values()) == pytest.approx(means, rel=1e-4)
    assert set(run.series("train/four").values()) == {4.0}


@pytest.mark.parametrize("name", NAMES)
def test_metrics_are_those_of_all_held_out_samples_in_one_process(stepped, name):
    run, _ = stepped(name)
    (file,) = (run.run_dir / "weights").glob("*.safetensors")
    weights = {name: one.double() for name, one in load_file(file).items()}
    config = load_config(run.run_dir / "config.yaml")
    loader = build_loader(config.data, batch_size=7, rank=0, world_size=1, seed=0)
    batches = [one.batch for one in loader.held_out(config.train.eval_samples)]
    images, labels = (torch.cat([batch[key] for batch in batches]) for key in ("pixel_values", "labels"))
    assert len(labels) == 53
    hidden = torch.tanh(images.double().flatten(1) @ weights["body.weight"].T + weights["body.bias"])
    logits = hidden @ weights["head.weight"].T + weights["head.bias"]
    each = functional.cross_entropy(logits, labels, reduction="none")
    found = logits.argmax(1)
    best = logits.topk(3).indices
    expected = {
        "loss": float(each.mean()),
        "length": float(logits.norm(dim=1).mean()),
        "accuracy": float((found == labels).double().mean()),
        "f1": _macro_f1(found.tolist(), labels.tolist()),
        "top3": float((best == labels[:, None]).any(1).double().mean()),
        "Worst": float(each.max()),
        "share": float((found == labels).double().mean()),
    }
    last = {name: run.series(f"eval/{name}")[6] for name in expected}
    assert last == pytest.approx(expected, rel=1e-5)


def _macro_f1(found, labels):
    hits = Counter(a for a, b in zip(found, labels, strict=True) if a == b)
    found_of, labels_of = Counter(found), Counter(labels)
    classes = {*found_of, *labels_of}
    return sum(2 * hits[one] / (found_of[one] + labels_of[one]) for one in classes) / len(classes)


@pytest.mark.parametrize(
    "backend", [pytest.param("eager", marks=pytest.mark.nightly), pytest.param("ort", marks=pytest.mark.ort)]
)
def test_the_state_of_a_step_is_that_of_the_training_alone_and_is_resumed(trained, backend):
    """What is called beside the training, as to count operations or to compare ORT, is not part of it."""
    words = ("train.step=mine:Counted", f"backend={backend}", "train.eval_every=2", "train.checkpoint_every=3")
    whole = trained(*words)
    assert whole.status == "FINISHED", whole.report
    first = trained(*words, "train.steps=3")
    second = trained(*words, f"train.resume={first.run_dir}")
    assert second.status == "FINISHED", second.report
    assert first.series("train/loss") | second.series("train/loss") == whole.series("train/loss")


def test_hooks_log_and_their_state_is_resumed(trained):
    words = (
        "train.hooks=[{target: mine:Notes, every: 3},mine:Everywhere,{target: mine:Notes, every: 2, name: b}]",
        "train.checkpoint_every=3",
    )
    first = trained(*words, "train.steps=3")
    second = trained(*words, f"train.resume={first.run_dir}")
    assert second.status == "FINISHED", second.report
    assert (first.series("mine/steps"), second.series("mine/steps")) == ({3: 3.0}, {6: 6.0})
    assert (first.series("b/steps"), second.series("b/steps")) == ({2: 2.0}, {4: 4.0, 6: 6.0})
    logged = second.run_dir / "logged"
    assert (logged / "losses" / "6.txt").read_text() == f"{second.series('train/loss')[6]:.6f}"
    assert (logged / "black.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in second.run_dir.glob("ended-*")) == ["ended-0", "ended-1"]


# The test below has ddp.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("single", marks=pytest.mark.nightly),
        pytest.param("ddp", marks=pytest.mark.nightly),
        "fsdp",
        pytest.param("ort", marks=pytest.mark.ort),
    ],
)
def test_a_hook_unfreezes_weights_and_a_resumed_run_keeps_them_frozen(trained, tmp_path, name):
    workers, *words = TRAINERS[name]
    words += [
        "train.step=mine:step",
        "train.hooks=[{target: ortlaunch.hooks:Unfreeze, parts: [{match: 'body.*', steps: 4}]}]",
    ]
    records = [tmp_path / "first", tmp_path / "second"]
    for record in records:
        record.mkdir()
    first = trained(*words, "train.steps=2", "train.checkpoint_every=2", workers=workers, record=records[0])
    assert first.status == "FINISHED", first.report
    run = trained(*words, f"train.resume={first.run_dir}", workers=workers, record=records[1])
    assert run.status == "FINISHED", run.report
    exact = in_fp64(run, records, workers, first_steps=2, begins={"body.*": 4})
    assert difference(course_of([first, run]), exact) == ""


def test_what_one_hook_freezes_stays_so_beside_another_hook(trained, tmp_path):
    parts = [
        f"{{target: ortlaunch.hooks:Unfreeze, parts: [{{match: '{one}.*', steps: 4}}]}}" for one in ("body", "head")
    ]
    record = tmp_path / "record"
    record.mkdir()
    run = trained("train.step=mine:step", f"train.hooks=[{','.join(parts)}]", workers=2, record=record)
    assert run.status == "FINISHED", run.report
    exact = in_fp64(run, [record], 2, begins={"body.*": 4, "head.*": 4})
    assert difference(course_of([run]), exact) == ""


def test_a_hook_stops_the_run_with_a_checkpoint(trained):
    run = trained("train.hooks=[mine:Stops]", "train.steps=60000", "train.log_every=1000")
    stopped = json.loads((run.run_dir / "stopped.json").read_text())
    assert 3 <= stopped["step"] < 60000
    assert (run.run_dir / "checkpoints" / f"step-{stopped['step']:08d}").is_dir()


def test_a_better_evaluation_gets_a_checkpoint_and_patience_ends_the_run(trained, tmp_path, monkeypatch, capsys):
    words = ("train.best=eval/length:max", "train.patience=2", "train.steps=60", "train.checkpoint_every=1000")
    run = trained(*EVALUATED, *words, "train.eval_every=2", "optimizer.lr=0.3", "optimizer=sgd")
    assert run.status == "FINISHED", run.report
    lengths = list(run.series("eval/length").values())
    best = lengths.index(max(lengths))
    assert len(lengths) == best + 3 or len(lengths) == 30
    link = (run.run_dir / "checkpoints" / "best").readlink()
    assert link.name == f"step-{2 * (best + 1):08d}"
    monkeypatch.chdir(tmp_path)
    assert export_weights([str(run.run_dir), "--best", "--out", str(tmp_path / "best")]) == 0
    assert f"after step {2 * (best + 1)}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.step=mine:nothing"], "train.step=mine:nothing: returned None: return a loss"),
        (["train.step=mine:rows"], "the loss of train.step=mine:rows has the shape (1, 10): return one number"),
        (["train.step=mine:named"], "the value 'rows' is a tensor of shape (1, 1, 8, 8): return numbers by name"),
        (["train.step=mine:alone"], "must take two arguments, model and batch"),
        ([*EVALUATED, "eval.metrics=[{name: accuracy, topk: 3}]"], "Unexpected keyword arguments: `topk`"),
        ([*EVALUATED, "eval.metrics=[accuracy,accuracy]"], "two with the name accuracy"),
        ([*EVALUATED, "eval.metrics=[{name: accuracy, as: length}]"], "eval/length is there already"),
        ([*EVALUATED, "train.best=eval/nope"], "the evaluation has no such value, but eval/loss, eval/length"),
        ([*EVALUATED, "train.best=eval/length"], "say which is better, by eval/length:max or eval/length:min"),
        (["train.eval_every=3", "train.step=mine:step", "eval.metrics=[accuracy]"], "let eval.step=module:function"),
        (["train.hooks=[mine:Idle]"], "train.hooks=mine:Idle: it has none of the methods start, step"),
        (["train.hooks=[{target: mine:Notes, ever: 3}]"], "train.hooks.ever"),
        (["train.hooks=[mine:Freezes]"], "mine:Freezes: write everywhere = True"),
        (
            ["train.hooks=[{target: ortlaunch.hooks:Unfreeze, parts: [{match: 'nope.*', steps: 4}]}]"],
            "no parameter's name matches nope.*",
        ),
        (
            [
                "train.hooks=[{target: ortlaunch.hooks:Unfreeze, parts: [{match: 'body.*', steps: 4}]}]",
                *TRAINERS["zero1"][1:],
            ],
            "updates all weights at once",
        ),
        (["train.hooks=[{target: mine:Odd, every: 3}]"], "mine:Odd: its state_dict holds what a checkpoint cannot"),
    ],
)
def test_what_is_wrong_is_one_message_before_the_first_step(trained, words, said):
    try:
        run = trained(*words)
    except RequestError as error:  # Before there are workers.
        assert said in str(error)
        return
    assert run.is_request, run.report
    assert said in run.error and "\n" not in run.error
    assert run.series("train/loss") == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*EVALUATED, "train.hooks=[mine:Fails]"], r"mine:Fails: evaluation failed at step 3 \(.*mine\.py:\d+\): Key"),
        ([*EVALUATED, "eval.metrics=[mine:taken]"], "taken computes a tensor of shape"),
    ],
)
def test_what_fails_later_is_named(trained, words, said):
    assert re.search(said, trained(*words).error)
