"""What is counted over the attempts of a run."""

from __future__ import annotations

from ortlaunch.launch.queue import history


def test_it_survives_a_process(tmp_path):
    past = history.load(tmp_path)
    assert past.begin("7", 0, "n[1-2]") == 0
    past.end("crashed", is_crash=True, checkpoint="step-00000010")
    assert past.begin("7", 1, "n[1-2]") == 1
    history.save(tmp_path, past)
    again = history.load(tmp_path)
    assert again == past
    assert again.crashes("7") == 1
    # A person's `ortlaunch resume` is a new job with crashes and restarts of its own.
    assert again.crashes("8") == 0
    assert again.restarts("7") == 1
    again.begin("8", 0, "n1")
    assert again.restarts("8") == 0


def left(*checkpoints):
    past = history.History()
    for checkpoint in checkpoints:
        past.begin("7", 0, "n1")
        past.end("requeued", is_crash=False, checkpoint=checkpoint)
    past.begin("7", 0, "n1")
    return past


def test_attempts_without_a_new_checkpoint():
    assert left().without_checkpoint("7", "") == 1
    assert left().without_checkpoint("7", "step-1") == 0
    assert left("step-1").without_checkpoint("7", "step-2") == 0
    assert left("step-1").without_checkpoint("7", "step-1") == 1
    assert left("step-1", "step-1").without_checkpoint("7", "step-1") == 2
    assert left("", "").without_checkpoint("7", "") == 3
    assert left("step-1", "step-1").without_checkpoint("7", "step-2") == 0
