"""The documentation as a site: it builds without a complaint, every page is reached, nothing comes from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # A proxy that is not there: whatever would be fetched while it is built fails.
    offline = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, **offline, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_every_page_stands_in_the_navigation() -> None:
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text())
    named = set(re.findall(r"[\w-]+\.md", str(yaml.safe_load(text)["nav"])))
    assert named == {path.name for path in (ROOT / "docs").glob("*.md")} | {"reference.md"}


def test_pages_have_titles_and_are_shown_in_light_and_in_dark(site: Path) -> None:
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text())
    settings = yaml.safe_load(text)
    untitled = [entry for entry in settings["nav"] if isinstance(entry, str)]
    untitled += [
        page
        for entry in settings["nav"]
        for pages in entry.values()
        if isinstance(pages, list)
        for page in pages
        if isinstance(page, str)
    ]
    assert not untitled
    home = (site / "index.html").read_text()
    assert home.count('name="__palette"') == 3
    assert all(f'data-md-color-scheme="{scheme}"' in home for scheme in ("default", "slate"))
    assert [name for name in re.findall(r'<img [^>]*src="([^"]+)"', home) if not (site / name).is_file()] == []
    assert home.count("<img ") >= 2


def test_nothing_is_fetched_when_it_is_read(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 12
    for page in pages:
        text = page.read_text()
        fetched = re.findall(r'<(?:script|img|iframe|source)[^>]+src="(https?:[^"]+)"', text)
        fetched += re.findall(r'<link[^>]+rel="(?:stylesheet|preconnect|icon)"[^>]+href="(https?:[^"]+)"', text)
        assert not fetched, page
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"url\(['\"]?https?:", sheet.read_text()), sheet


def test_the_page_of_all_keys_is_made_of_the_schema(site: Path) -> None:
    assert "train.grad_accumulation" in (site / "reference.html").read_text()
    assert (site / "precision.html").read_text().count("refused (1)") >= 6


def test_the_api_page_is_made_of_the_docstrings(site: Path) -> None:
    text = (site / "api.html").read_text()
    for name in ("register_model", "wrap_backend", "RequestError", "load_config", "Journal"):
        assert name in text
    assert "Raises" in text


def test_links_of_the_readme_lead_somewhere() -> None:
    pages = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "slurm/lab/README.md")
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#]+)", page.read_text())]
    assert len(links) > 5
    for page, link in links:
        assert link.startswith("http") or (page.parent / link).exists(), f"{page}: {link}"


def test_files_and_folders_of_the_code_that_pages_name_are_there() -> None:
    """As the root, the package, a folder of it or the tests see them; what a run or a user makes has no such ending."""
    code = [path.relative_to(ROOT).as_posix() for top in ("ortlaunch", "tests") for path in (ROOT / top).rglob("*.py")]
    rows = re.findall(r"^\| ((?:`[\w/]+/?(?:\.py)?` ?)+) \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    folders = [folder for row in rows for folder in re.findall(r"`(\w+/)`", row)]
    assert len(folders) > 8 and all((ROOT / "ortlaunch" / folder).is_dir() for folder in folders), folders
    named = {
        name for page in (ROOT / "docs").glob("*.md") for name in re.findall(r"`([a-z_/]+\.py)`", page.read_text())
    }
    assert len(named) > 15
    assert [name for name in sorted(named) if not any(f"/{file}".endswith(f"/{name}") for file in code)] == []
