"""The templates and scripts as files: nothing inline, nothing from elsewhere, no text that could become markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ortlaunch import compare
from ortlaunch.serve.app import OF_COMPARE, STATIC
from ortlaunch.serve.pages.render import TEMPLATES

FOLDERS = [STATIC, *(Path(compare.__file__).parent / one for one in OF_COMPARE)]
OWN_SCRIPTS = sorted(path for one in FOLDERS for path in one.glob("*.js") if not path.name.endswith(".min.js"))
UNSAFE = re.compile(r"innerHTML|outerHTML\s*=|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc")


class Inline(HTMLParser):
    """Finds what the Content-Security-Policy would refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        if tag == "style" or (tag == "script" and "src" not in names):
            self.found.append(tag)
        self.found += [name for name in names if name.startswith(("on", "hx-on")) or name == "style"]
        self.found += [value for value in names.values() if value and value.startswith(("javascript:", "http"))]


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.html")), ids=lambda path: path.name)
def test_a_template_has_nothing_inline_and_nothing_from_elsewhere(path: Path) -> None:
    text = path.read_text()
    parser = Inline()
    parser.feed(re.sub(r"\{%.*?%\}|\{\{.*?\}\}", "", text))
    assert parser.found == []
    assert "| safe" not in text and "|safe" not in text and "autoescape" not in text


@pytest.mark.parametrize("path", OWN_SCRIPTS, ids=lambda path: path.name)
def test_a_script_makes_no_markup_of_texts_and_asks_nobody_else(path: Path) -> None:
    text = path.read_text()
    assert UNSAFE.search(text) is None
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []


def test_there_are_scripts_and_templates_to_look_at() -> None:
    assert len(OWN_SCRIPTS) > 10
    assert len(list(TEMPLATES.glob("*.html"))) > 10


def test_every_script_that_is_imported_is_there() -> None:
    imports = [
        (path.name, name)
        for path in OWN_SCRIPTS
        for name in re.findall(r'(?:from|import|import\()\s*"\./([\w.-]+)"', path.read_text())
    ]
    assert len(imports) > 10
    for script, name in imports:
        assert any((one / name).is_file() for one in FOLDERS), f"{script} imports {name}"
