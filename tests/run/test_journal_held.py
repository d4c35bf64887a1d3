"""A journal that holds events back until it is known that they count."""

from __future__ import annotations

from pathlib import Path

from ortlaunch.run.journal import Journal, read_events


def test_held_events_are_written_with_the_times_at_which_they_happened(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, is_patient=True) as journal:
        journal.metrics(1, {"train/loss": 2.0})
        journal.hold()
        journal.metrics(2, {"train/loss": 1.5})
        journal.tags({"a": "b"})
        assert len(read_events(path, 0)[0]) == 1
        between = read_events(path, 0)[0][0].t
        journal.release()
        journal.metrics(3, {"train/loss": 1.0})
        journal.release()
    events, _ = read_events(path, 0)
    assert [event.kind for event in events] == ["metrics", "metrics", "tags", "metrics"]
    assert [event.t for event in events] == sorted(event.t for event in events)
    assert events[1].t >= between
