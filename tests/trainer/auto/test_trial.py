"""A trial's steps: those of the training loop."""

from __future__ import annotations

from types import SimpleNamespace

from ortlaunch.trainer.auto.trial import _step


def test_a_trial_asks_the_backend_after_each_micro_batch_as_the_training_does():
    """Otherwise the run changes to a backend that refuses the second batch, and ends there."""
    calls = []
    batches = iter("ab")
    feed = SimpleNamespace(take=lambda: next(batches), prefetch=lambda: calls.append("prefetch"))
    engine = SimpleNamespace(
        micro_step=lambda batch, *, last: calls.append((batch, last)), step=lambda: calls.append("step")
    )
    backend = SimpleNamespace(check_decisions=lambda batch: calls.append(f"check {batch}"))
    assert _step(SimpleNamespace(engine=engine, backend=backend), feed, 2, None) >= 0
    assert calls == [("a", False), "check a", "prefetch", ("b", True), "check b", "prefetch", "step"]
