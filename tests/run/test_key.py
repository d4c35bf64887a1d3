"""The key of a run and the name of its folder."""

from __future__ import annotations

import pytest

from ortlaunch.run.key import RunKey


@pytest.mark.parametrize("name", ["gpt2", "gpt2-ort-ddp", "1-2"])
def test_a_key_is_found_again_in_its_text_and_in_its_folders_name(name: str) -> None:
    key = RunKey.new()
    assert RunKey.parsed(str(key)) == key
    assert RunKey.of_folder(key.folder(name)) == key


def test_a_folder_of_any_name_has_an_id() -> None:
    assert RunKey.of_folder("mine").run_id == "mine"
    assert RunKey.of_folder("my-own-run").run_id == "run"
