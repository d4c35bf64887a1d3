"""What is printed of names and errors of others: it cannot control the terminal."""

from __future__ import annotations

import json

import pytest

from ortlaunch.base.text import json_text, library_error, log_line, printable, say

HOSTILE = "a\x1b[31mb\x9b2Jc\x07d\u202ee\u2066f\u200bg\x7fh\udcffi"


def test_nothing_that_controls_a_terminal_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"{HOSTILE}\nstate: finished\n  in\tside\r\n")
    said = capsys.readouterr().out
    assert said == "a?[31mb?2Jc?d?e?f?g?h?i\n  state: finished\n  in\tside\n"


def test_a_name_is_one_line() -> None:
    assert printable("one\ntwo\u2028three") == "one?two?three"
    assert printable("Läufe 日本 🙂") == "Läufe 日本 🙂"


def test_a_log_line_keeps_its_tabs_and_what_a_progress_bar_has_left() -> None:
    assert log_line(" 10%|#  |\r 20%|## |\r") == " 20%|## |"
    assert log_line("a\tb\x1b]0;title\x07") == "a\tb?]0;title?"


def test_json_keeps_exact_values_and_escapes_the_rest() -> None:
    values = {"ü": [HOSTILE.replace("\udcff", ""), "\U000e0001", "日本", 1.5, None]}
    text = json_text(values)
    assert json.loads(text) == values
    assert text.replace("\n", "").isprintable() and "日本" in text


def test_a_databases_error_is_one_line_without_sql() -> None:
    error = Exception(
        "(sqlite3.OperationalError) no such column: x\n[SQL: SELECT a FROM runs]\n[parameters: ('hunter2',)]\n"
        "(Background on this error at: https://sqlalche.me/e/20/e3q8)"
    )
    assert library_error(error) == "(sqlite3.OperationalError) no such column: x"
    assert len(library_error(Exception("x" * 5000))) < 400
