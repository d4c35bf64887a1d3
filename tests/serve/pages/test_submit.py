"""The form of a new run in headless Chromium: typed fields, refusals beside them, the dry run, and a run that waits."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.serve.pages.conftest import Person, Site

IN_SIGHT = """(one) => {
  const { left, top, height } = one.getBoundingClientRect();
  return document.elementFromPoint(left + 2, top + height / 2) === one;
}"""
"""Whether nothing covers an element, such as the bar at the end of the screen."""


@pytest.fixture
def ada(person: Callable[..., Person], site: Site) -> Person:
    """The administrator, whose queue starts nothing."""
    assert site.server.ask("POST", "/api/queue/pause").status == 200
    ada = person()
    ada.is_logged_in(site.server.cookie)
    return ada


@pytest.mark.ort
def test_a_run_is_checked_sent_once_taken_back_and_made_again(ada: Person, site: Site) -> None:
    page = ada.tab("/submit")
    page.get_by_label("Ready job").select_option("gpt2_ort")
    page.wait_for_url("**/submit?job=gpt2_ort")
    page.wait_for_selector('#submit[data-ready="yes"]')
    steps = page.locator('.field[data-key="train.steps"]')
    steps.locator("input").fill("-5")
    page.evaluate("() => scrollTo(0, 0)")
    page.get_by_role("button", name="Check").click()
    expect(steps.locator(".problem")).to_contain_text("at least 1")
    expect(steps.locator("input")).to_be_focused()
    assert steps.locator(".problem").evaluate(IN_SIGHT)
    steps.locator("input").fill("12")
    expect(steps).to_have_class(re.compile("changed"))
    page.get_by_label("Find a key").fill("name")
    name = page.locator('.field[data-key="name"] input')
    name.fill("from-the-page")
    send = page.get_by_role("button", name="Send this run")
    expect(send).to_be_hidden()
    page.get_by_role("button", name="Check").click()
    expect(page.locator("#plan")).to_contain_text("torch.distributed.run")
    # What was checked is what is sent: a change asks for another check.
    name.fill("another-name")
    expect(send).to_be_hidden()
    page.get_by_role("button", name="Check").click()
    expect(send).to_be_enabled()
    send.dblclick()
    page.wait_for_url("**/runs/*")
    expect(page.locator("h1")).to_contain_text("another-name")
    expect(page.locator("h1 .state")).to_have_text("waiting")
    found = site.server.ask("GET", "/api/queue").json["waiting"]
    assert [one["name"] for one in found] == ["another-name"]

    queue = ada.tab("/queue")
    expect(queue.locator("#queue")).to_contain_text("paused")
    expect(queue.locator("tr", has_text="another-name")).to_contain_text("1")

    page.get_by_role("button", name="Stop").click()
    page.get_by_role("dialog").get_by_role("button", name="Take it back").click()
    expect(page.locator("h1 .state")).to_have_text("cancelled")
    page.get_by_role("link", name="Again, with changes").click()
    page.wait_for_selector('#submit[data-ready="yes"]')
    expect(page.locator('.field[data-key="name"] input')).to_have_value("another-name")
    expect(page.locator('.field[data-key="train.steps"] input')).to_have_value("12")
    assert ada.errors == ["Failed to load resource: the server responded with a status of 422 (Unprocessable Entity)"]


def test_another_group_brings_its_keys_and_keeps_what_was_filled_in(ada: Person) -> None:
    page = ada.tab("/submit?job=gpt2_ort")
    page.wait_for_selector('#submit[data-ready="yes"]')
    page.locator('.field[data-key="train.steps"] input').fill("77")
    page.locator('.field[data-key="trainer"] select').select_option("deepspeed")
    page.wait_for_url("**trainer=deepspeed**")
    page.wait_for_selector('#submit[data-ready="yes"]')
    expect(page.locator('.field[data-key="train.steps"] input')).to_have_value("77")
    assert page.locator('.field[data-key^="trainer."]').count() == 4
    assert ada.errors == []
