"""Looking into some steps of a run."""

from __future__ import annotations

import gzip
import json

import pytest

SMALL = ("model=gpt2_nano", "model.params.n_layer=2", "data.seq_len=32", "train.batch_size=2", "train.log_every=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def profiled(train, folder):
    keys = ("train.steps=12", "profile.start=6", "profile.steps=3", "profile.ranks=[1]", "tracking=none")
    result = train(folder, *SMALL, "backend=eager", "+profile=torch", *keys)
    assert result.status == "FINISHED", result.report
    return result


def test_the_trace_has_the_named_parts_of_exactly_the_steps_asked_for(profiled):
    folder = profiled.run_dir / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["operators-rank-1.txt", "trace-rank-1.json.gz"]
    events = json.loads(gzip.decompress((folder / "trace-rank-1.json.gz").read_bytes()))["traceEvents"]
    names = [event.get("name", "") for event in events if event.get("cat") == "user_annotation"]
    assert names.count("ortlaunch/forward and backward") == names.count("ortlaunch/optimizer") == 3
    assert sorted(name for name in names if name.startswith("ProfilerStep#")) == [
        "ProfilerStep#0",
        "ProfilerStep#1",
        "ProfilerStep#2",
    ]
    table = (folder / "operators-rank-1.txt").read_text()
    assert "aten::addmm" in table and "Self CPU" in table


def test_it_is_kept_with_the_run(profiled):
    """test_ort_debug.py shows that what the journal names so goes to MLflow."""
    kept = [event["path"] for event in profiled.events if event["event"] == "artifact"]
    assert kept.count("profile") == 1, kept


def test_it_changes_no_number_and_its_steps_are_left_out_of_the_summary(train, folder, profiled):
    """On every worker: those that are not looked into wait for the one that is."""
    plain = train(folder, *SMALL, "backend=eager", "train.steps=12", "tracking=none")
    assert profiled.losses == plain.losses
    assert plain.series("summary/steady_steps")[12] - profiled.series("summary/steady_steps")[12] == 3


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        (("profile.steps=3",), "add +profile=NAME"),
        (("profile=torch",), "add +profile=NAME"),
        (("+profile=torc",), "profile=torch"),
        (("+profile=torch", "train.steps=12"), "lower profile.start"),
        (("+profile=memory", "device=cpu"), "+profile=torch"),
    ],
)
def test_what_cannot_work_is_refused(refused, keys, part):
    assert part in refused(*SMALL, *keys)
