"""Every button of a run's life in Chromium, on a real service with real runs: each does what it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from ortlaunch.serve.actor import own_user
from tests.serve.pages.conftest import Person, Site
from tests.support.service import start

pytestmark = pytest.mark.nightly
KEYS = {"model": "mlp", "backend": "eager", "trainer": "single", "tracking": "none"}
STEP = "document.querySelector('#panel [data-cell=step]').textContent"
PATIENT = 60_000
"""Milliseconds for what a real run does."""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Site]:
    """A service with one slot and nothing else."""
    server = start(tmp_path, "--slots=1")
    try:
        server.first_administrator("ada")
        yield Site(tmp_path, server, tmp_path, tmp_path)
    finally:
        server.kill()
        for process in psutil.process_iter(["cmdline"]):
            if str(tmp_path) in " ".join(process.info["cmdline"] or ()):
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def press(page: Page, name: str, sure: str | None = None) -> None:
    """Presses a button, and the one of the question that comes."""
    page.locator("main").get_by_role("button", name=name, exact=True).click()
    if sure is not None:
        page.get_by_role("dialog").get_by_role("button", name=sure).click()


def state(page: Page) -> Locator:
    return page.locator("h1 [data-cell=state]")


def submit(page: Page, site: Site, name: str, **keys: Any) -> str:
    """Fills in the form, looks at the dry run, and sends it; returns the address of the run."""
    page.goto(f"{site.server.url}/submit?" + "&".join(f"{key}={value}" for key, value in KEYS.items()))
    page.wait_for_selector('[data-ready="yes"]')
    for key, value in {"name": name, "train.save_weights": None, **keys}.items():
        field = page.locator(f'[id="key-{key}"]')
        field.evaluate("(one) => { one.closest('details').open = true; }")
        if value is not None:
            field.fill(str(value))
    return send(page)


def send(page: Page) -> str:
    press(page, "Check: show the dry run")
    expect(page.locator("#plan")).to_contain_text("the run folder would be")
    press(page, "Send this run")
    page.wait_for_url(re.compile(r"/runs/\d{8}-"))
    return page.url


def order(page: Page) -> list[str]:
    return page.locator("#queue tr:has(form[data-priority]) a").all_inner_texts()


def test_a_run_is_queued_stopped_exported_resumed_repeated_and_deleted(chromium: Browser, lab: Site) -> None:
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENT)
    expect.set_options(timeout=PATIENT)
    ada = Person(context, lab)
    ada.is_logged_in(lab.server.cookie)
    page = ada.tab("/")
    steps = {"train.steps": 100_000, "train.checkpoint_every": 100}
    first = submit(page, lab, "first", **steps)
    second, third = (submit(page, lab, name, **{"train.steps": 30}) for name in ("second", "third"))
    expect(state(page)).to_have_text("waiting")

    page.goto(f"{lab.server.url}/queue")
    assert order(page) == ["second", "third"]
    row = page.locator("tr", has_text="third")
    row.get_by_label("priority of third").fill("5")
    row.get_by_role("button", name="Set").click()
    expect(page.locator("#queue tr:has(form[data-priority]) a").first).to_have_text("third")
    press(page, "Pause")
    expect(page.locator("p.warnings")).to_contain_text("The queue is paused")
    press(page, "Drain", "Drain")
    expect(page.locator("p.warnings")).to_contain_text("The queue drains")
    expect(page.locator(".slots")).to_contain_text("busy: first")

    page.goto(first)
    page.wait_for_function(f"() => parseInt({STEP}) > 100")
    press(page, "Stop", "Stop the run")
    expect(state(page)).to_have_text("stopped")
    expect(page.locator("#panel [data-cell=reason]")).to_contain_text("at step ")
    stopped_at = int(page.evaluate(f"() => parseInt({STEP})"))
    press(page, "Export weights", "Export weights")
    expect(page.locator("#said")).to_contain_text("The weights are in weights-step-")
    page.locator("#place summary").click()
    with page.expect_download() as fetched:
        page.locator("#place a", has_text="model.safetensors").click()
    assert fetched.value.path().stat().st_size > 10_000
    press(page, "Resume", "Resume the run")
    expect(state(page)).to_have_text("waiting")
    # What was made before is still there.
    expect(page.locator("#place")).to_contain_text("Folder:")
    for address in (second, third):
        page.goto(address)
        expect(state(page)).to_have_text("waiting")

    page.goto(f"{lab.server.url}/queue")
    press(page, "Continue")
    for address in (third, second):
        page.goto(address)
        expect(state(page)).to_have_text("finished")
    page.get_by_role("link", name="Again, with changes").click()
    page.wait_for_selector('[data-ready="yes"]')
    assert page.locator('[id="key-train.steps"]').input_value() == "30"
    page.locator('[id="key-train.steps"]').fill("20")
    again = send(page)
    assert again not in (first, second, third)
    page.goto(first)
    # It loads what it had: at no moment it looks as if it could be resumed again.
    expect(state(page)).to_have_text(re.compile("waiting|starting|running"))
    expect(state(page)).to_have_text("running")
    # Workers that still load have nothing to save, and would be ended without a checkpoint.
    page.wait_for_function(f"() => parseInt({STEP}) > {stopped_at}")
    press(page, "Stop", "Stop the run")
    expect(state(page)).to_have_text("stopped")
    page.goto(again)
    expect(state(page)).to_have_text("finished")

    page.goto(third)
    press(page, "Delete", "Delete the run")
    page.wait_for_url(f"{lab.server.url}/")
    expect(page.locator("caption")).to_have_text("3 runs")
    assert len(list((lab.folder / "runs" / ".bin").glob("*/*third*"))) == 1
    assert ada.errors == []


def test_who_is_locked_out_is_out_everywhere(chromium: Browser, lab: Site) -> None:
    context = chromium.new_context(viewport={"width": 400, "height": 900}, color_scheme="dark")
    context.set_default_timeout(PATIENT)
    ada = Person(context, lab)
    ada.is_logged_in(lab.server.cookie)
    users = ada.tab("/users")
    form = users.locator("#new-user")
    form.get_by_label("Name").fill("bob")
    form.get_by_role("button").click()
    expect(users.locator("#link .secret")).to_contain_text("/link/")
    link = users.locator("#link .secret").inner_text()
    unix_user = users.get_by_label("Unix user of bob")
    expect(unix_user).to_have_value("")
    unix_user.fill(own_user())
    unix_user.press("Tab")
    expect(users.locator("#said")).to_have_text("The Unix user is changed.")
    assert [one["unix_user"] for one in lab.server.ask("GET", "/api/users").json] == [own_user()] * 2
    bob = Person(chromium.new_context(), lab)
    page = bob.tab(link.removeprefix(lab.server.url))
    page.get_by_label(re.compile("^Password")).fill("a long enough password")
    page.get_by_label("The same again").fill("a long enough password")
    page.get_by_role("button", name="Save and log in").click()
    page.wait_for_url(f"{lab.server.url}/")
    page.goto(f"{lab.server.url}/tokens")
    page.get_by_label("What for").fill("a program")
    page.get_by_role("button", name="Make a token").click()
    expect(page.locator("#token .secret")).to_contain_text("ort_")
    header = {"Authorization": f"Bearer {page.locator('#token .secret').inner_text()}"}
    assert lab.server.ask("GET", "/api/runs", headers=header).status == 200
    users.reload()
    users.locator("tr", has_text="bob").get_by_role("button", name="Lock out").click()
    users.get_by_role("dialog").get_by_role("button", name="Lock out").click()
    expect(users.locator("tr", has_text="bob")).to_contain_text("locked out")
    assert lab.server.ask("GET", "/api/runs", headers=header).status == 401
    page.reload()
    assert "/login" in page.url
    assert ada.errors == []
    assert bob.errors == []
