"""The pages in headless Chromium, on a real service: what people see, and that the console stays empty."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, Route, expect

from ortlaunch.run.journal import Journal
from tests.serve.pages.conftest import HOSTILE_LINE, STEPS, Person, Site
from tests.serve.pages.test_render import COUNTS, DURATIONS, NUMBERS, SIZES
from tests.support.service import PASSWORD
from tests.support.waiting import until

People = Callable[..., Person]
LINES = '() => [...document.querySelectorAll(".log div")].map((one) => one.textContent)'
INKED = """() => [...document.querySelectorAll("canvas")].map((canvas) => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const found = new Set();
  for (let at = 0; at < pixels.length; at += 4) if (pixels[at + 3] === 255) found.add(pixels.slice(at, at + 3).join());
  return [...found];
})"""
"""The colours of every plot."""
BLUE, ORANGE = "47,126,216", "224,123,0"
CUT_OFF = """() => [...document.querySelectorAll("main button, main input, main select, header button, header a")]
  .filter((one) => one.offsetParent && one.getBoundingClientRect().right > document.documentElement.clientWidth)
  .map((one) => one.outerHTML)"""
"""What somebody would have to find by scrolling sideways."""
WIDER = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(autouse=True)
def consoles_are_empty(person: People, site: Site):
    people: list[Person] = []
    yield people
    for one in people:
        assert one.errors == []
        assert one.hosts <= {f"127.0.0.1:{site.server.port}"}


@pytest.fixture
def ada(person: People, site: Site, consoles_are_empty: list[Person]) -> Person:
    """The administrator, logged in."""
    ada = person()
    consoles_are_empty.append(ada)
    ada.is_logged_in(site.server.cookie)
    return ada


def run_path(run_dir) -> str:
    parts = run_dir.name.split("-")
    return f"/runs/{parts[0]}-{parts[1]}-{parts[-1]}"


def ready(page: Page) -> Page:
    """A run's page whose log is there."""
    page.wait_for_selector('.log[data-ready="yes"]')
    return page


def show(page: Page, is_seen: bool) -> None:
    """What a browser does when somebody turns to a tab, or to another one."""
    page.evaluate("(seen) => { isHidden = !seen; document.dispatchEvent(new Event('visibilitychange')); }", is_seen)


def test_somebody_logs_in_with_the_keyboard_alone_and_comes_to_the_page_that_was_asked_for(
    person: People, site: Site
) -> None:
    one = person()
    page = one.tab("/tokens")
    assert "/login?next=%2Ftokens" in page.url
    expect(page.get_by_role("button", name="Log in")).to_be_enabled()
    page.keyboard.type("ada")
    page.keyboard.press("Tab")
    page.keyboard.type("a wrong password")
    page.keyboard.press("Enter")
    expect(page.locator("#problem")).to_contain_text("wrong")
    page.get_by_label("Password").fill(PASSWORD)
    page.keyboard.press("Enter")
    page.wait_for_url("**/tokens")
    page.get_by_role("button", name="Log out").click()
    page.wait_for_url("**/login")
    page.goto(f"{site.server.url}/")
    assert "/login" in page.url


def test_the_list_shows_hostile_names_as_text_and_is_filtered_and_turned_without_loading_the_page(ada: Person) -> None:
    page = ada.tab("/")
    page.evaluate("() => { window.same = true; }")
    expect(page.locator("caption")).to_have_text("63 runs")
    assert page.locator("tbody tr").count() == 50
    page.get_by_role("link", name="Next page").click()
    expect(page.locator("tbody tr")).to_have_count(13)
    page.get_by_label("Name, experiment or id").fill("<img")
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("tbody a")).to_contain_text('<img src=x onerror="document.title=1">')
    assert page.title().startswith("Runs")
    assert "text=" in page.url and page.evaluate("() => window.same")
    page.go_back()
    expect(page.locator("caption")).to_contain_text("63")


def test_boxes_stay_ticked_from_page_to_page_and_lead_to_the_curves_of_both(ada: Person, site: Site) -> None:
    page = ada.tab("/?text=gpt2")
    page.get_by_label("compare gpt2-ort").check()
    page.goto(f"{site.server.url}/?text=gpt2-eager")
    page.get_by_label("compare gpt2-eager").check()
    expect(page.locator("#tray output")).to_have_text("2 ticked")
    page.get_by_role("link", name="Compare").click()
    page.wait_for_selector('#plots[data-ready="yes"] canvas')
    expect(page.locator("h1")).to_have_text("Comparison of 2 runs")
    colours = page.evaluate(INKED)
    assert any(BLUE in found and ORANGE in found for found in colours)
    page.get_by_role("checkbox", name="gpt2-eager").uncheck()
    until(lambda: not any(ORANGE in found for found in page.evaluate(INKED)))


def test_a_box_counts_however_late_its_script_comes_and_after_the_list_was_filtered(ada: Person, site: Site) -> None:
    page = ada.tab("/queue")

    def late(route: Route) -> None:
        time.sleep(0.5)
        route.continue_()

    page.route("**/static/runs.js", late)
    page.goto(f"{site.server.url}/?text=gpt2")
    page.get_by_label("compare gpt2-ort").check()
    page.goto(f"{site.server.url}/?text=gpt2")
    expect(page.locator("#tray output")).to_have_text("1 ticked")
    page.get_by_label("Name, experiment or id").fill("gpt2-eager")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_label("compare gpt2-eager").check()
    expect(page.locator("#tray output")).to_have_text("2 ticked")


def test_a_rank_whose_log_comes_late_is_not_shown_under_another_one(ada: Person, site: Site) -> None:
    log = site.ended / "logs" / "rank-1.log"
    log.write_text("of rank 1\n")
    try:
        page = ready(ada.tab(run_path(site.ended)))
    finally:
        log.unlink()
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route(re.compile(r"/logs/1\?"), hold)
    page.locator("[name=rank]").select_option("1")
    page.locator("[name=rank]").select_option("0")
    ready(page)
    part = {"rank": "1", "offset": 0, "next": 10, "size": 10, "text": "of rank 1\n", "rest": "", "more": False}
    until(lambda: page.wait_for_timeout(20) or held)
    assert len(held) == 1
    with page.expect_response(re.compile(r"/logs/1\?")):
        held[0].fulfill(json={**part, "matches": None})
    page.wait_for_timeout(200)
    lines = page.evaluate(LINES)
    assert lines[-1] == "line 2999" and "of rank 1" not in lines


def test_a_log_without_a_line_says_so(ada: Person, site: Site) -> None:
    log = site.ended / "logs" / "rank-3.log"
    log.touch()
    try:
        page = ready(ada.tab(run_path(site.ended)))
        page.locator("[name=rank]").select_option("3")
        ready(page)
        written = "() => getComputedStyle(document.querySelector('.log'), '::before').content"
        until(lambda: "Nothing has been printed so far" in page.evaluate(written))
        page.locator("[name=rank]").select_option("0")
        ready(page)
        assert "Nothing" not in page.evaluate(written)
    finally:
        log.unlink()


def test_a_run_is_followed_live(ada: Person, site: Site) -> None:
    page = ready(ada.tab(run_path(site.running)))
    expect(page.locator("#panel [data-cell=step]")).to_have_text(f"1 / {STEPS}")
    assert page.evaluate(LINES)[-1] == "line 2999"
    site.log("a new line", HOSTILE_LINE)
    site.measure(7, 3.25)
    expect(page.locator(".log div").last).to_contain_text("<script>document.title")
    expect(page.locator("#panel [data-cell=step]")).to_have_text(f"7 / {STEPS}")
    expect(page.locator("#panel [data-cell=loss]")).to_have_text("3.25")
    expect(page.get_by_role("region", name="train/loss")).to_be_visible()
    lines = page.evaluate(LINES)
    assert lines[-2] == "a new line"
    assert "\x1b" not in lines[-1] and "\u202e" not in lines[-1]
    assert page.title().startswith("gpt2-ort")
    page.locator("[name=word]").fill("LINE 17\t".strip())
    page.keyboard.press("Enter")
    expect(page.locator(".found li").first).to_be_visible()
    assert page.locator(".found li").first.inner_text() == "line 17"
    page.locator(".found button").first.click()
    expect(page.locator(".log div").first).to_have_text("line 17")
    expect(page.locator(".log .hit")).to_have_count(1)


def test_what_comes_while_a_page_is_open_looks_as_it_does_on_one_that_is_opened_later(ada: Person, site: Site) -> None:
    page = ready(ada.tab(run_path(site.running)))
    page.locator("#curve-filter").fill("/later")
    with Journal(site.running / "journal.jsonl") as journal:
        for name in ("startup", "goodput", "memory"):
            journal.metrics(8, {f"{name}/later": 1.0})
            expect(page.get_by_role("region", name=f"{name}/later")).to_be_visible()
    live = page.locator("#plots h3").all_text_contents()
    page.reload()
    assert live == ready(page).locator("#plots h3").all_text_contents()


def test_every_curve_is_found_also_where_a_run_has_more_than_come_at_once(ada: Person, site: Site) -> None:
    with Journal(site.ended / "journal.jsonl") as journal:
        journal.metrics(STEPS, {f"many/{number}": 1.0 for number in range(10, 70)})
    page = ready(ada.tab(run_path(site.ended)))
    names = site.server.ask("GET", f"/api{run_path(site.ended)}/metrics").json["names"]
    page.get_by_role("button", name=f"Show all {len(names)} curves").click()
    expect(page.get_by_role("region", name="many/69")).to_be_visible()
    assert sorted(page.locator("#plots h3").all_text_contents()) == sorted(names)
    ids = ",".join(run_path(one).rpartition("/")[2] for one in (site.ended, site.running))
    page.goto(f"{site.server.url}/compare?ids={ids}")
    page.wait_for_selector('#plots[data-ready="yes"]')
    page.locator("#curve-filter").fill("many/69")
    expect(page.get_by_role("region", name="many/69")).to_be_visible()


def test_a_page_that_was_opened_before_the_workers_wrote_turns_to_their_log(ada: Person, site: Site) -> None:
    logs = site.running / "logs"
    (logs / "relay.log").write_text("of the relay\n")
    (logs / "rank-0.log").rename(site.folder / "rank-0.log")
    try:
        page = ready(ada.tab(run_path(site.running)))
        expect(page.locator("[name=rank]")).to_have_value("relay")
        # It looks once, and what comes soon after that is looked at later.
        with page.expect_response(f"**/api{run_path(site.running)}"):
            site.measure(8, 3.1)
    finally:
        (site.folder / "rank-0.log").rename(logs / "rank-0.log")
        (logs / "relay.log").unlink()
    site.measure(9, 3.0)
    expect(page.locator("[name=rank]")).to_have_value("0")


def test_the_figures_that_only_the_panel_has_are_made_anew_each_minute(ada: Person, site: Site) -> None:
    page = ada.tab("/tokens")
    page.clock.install()
    page.goto(f"{site.server.url}{run_path(site.running)}")
    ready(page)
    checkpoints = site.running / "checkpoints"
    summary = page.locator("[data-part=checkpoints] summary")
    try:
        for number, text in ((1, "1 checkpoint"), (2, "2 checkpoints")):
            (checkpoints / f"step-0000000{number}").mkdir(parents=True)
            page.clock.run_for(61_000)
            site.measure(10 + number, 3.0)
            expect(summary).to_contain_text(text)
            if number == 1:
                summary.click()
        # What somebody has opened stays open, and a keyboard stays where it was.
        expect(page.locator("[data-part=checkpoints][open] table")).to_be_visible()
        expect(summary).to_be_focused()
    finally:
        shutil.rmtree(checkpoints)


def test_a_log_is_whole_after_the_server_was_killed_in_the_midst(ada: Person, site: Site) -> None:
    page = ready(ada.tab(run_path(site.running)))
    begin = len(page.evaluate(LINES))
    site.log(*(f"before {n}" for n in range(5)))
    expect(page.locator(".log div").last).to_have_text("before 4")
    site.server.kill()
    site.log(*(f"while away {n}" for n in range(5)))
    expect(page.locator("#offline")).to_be_visible()
    site.restart()
    site.log(*(f"after {n}" for n in range(5)))
    expect(page.locator(".log div").last).to_have_text("after 4")
    expect(page.locator("#offline")).to_be_hidden()
    wanted = [f"{part} {n}" for part in ("before", "while away", "after") for n in range(5)]
    assert page.evaluate(LINES)[begin:] == wanted
    # What a browser says of a connection that was cut is no fault of the page.
    for visit in ada.visits:
        visit.errors = [error for error in visit.errors if "net::ERR" not in error]


def test_two_people_see_what_their_roles_allow(
    ada: Person, person: People, site: Site, consoles_are_empty: list[Person]
) -> None:
    site.add("vic", "viewer")
    vic = person(width=400, scheme="dark")
    page = vic.log_in("vic", run_path(site.ended))
    expect(page.locator("h1")).to_contain_text("gpt2-eager")
    assert page.locator("#panel button").count() == 0
    assert page.get_by_role("link", name="New run").count() == 0
    answer = page.goto(f"{site.server.url}/users")
    assert answer is not None and answer.status == 403
    expect(page.locator("h1")).to_have_text("You may not see this")
    users = ada.tab("/users")
    users.locator("tr", has_text="vic").get_by_role("button", name="Lock out").click()
    users.get_by_role("dialog").get_by_role("button", name="Lock out").click()
    expect(users.locator("tr", has_text="vic")).to_contain_text("locked out")
    page.goto(f"{site.server.url}/")
    assert "/login" in page.url


def test_a_token_is_shown_once_and_revoked(ada: Person, site: Site) -> None:
    page = ada.tab("/tokens")
    page.get_by_label("What for").fill("nightly <b>runs</b>")
    page.get_by_role("button", name="Make a token").click()
    expect(page.locator("#token .secret")).to_contain_text("ort_")
    secret = page.locator("#token .secret").inner_text()
    header = {"Authorization": f"Bearer {secret}"}
    assert site.server.ask("GET", "/api/runs", headers=header).status == 200
    page.reload()
    assert secret not in page.content()
    page.locator("tr", has_text="nightly <b>runs</b>").get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(page.locator("tr", has_text="nightly")).to_contain_text("revoked")
    assert site.server.ask("GET", "/api/runs", headers=header).status == 401


def test_a_tab_listens_while_it_is_seen(ada: Person, site: Site) -> None:
    ada.context.add_init_script("""
      window.isHidden = true;
      Object.defineProperty(document, "hidden", { get: () => window.isHidden });
    """)
    page = ready(ada.tab(run_path(site.running)))
    begin = len(page.evaluate(LINES))
    until(lambda: site.streams() == 0)
    site.log("from before it was seen")
    show(page, True)
    expect(page.locator(".log div").last).to_have_text("from before it was seen")
    assert site.streams() == 1
    site.log("while it is seen")
    expect(page.locator(".log div").last).to_have_text("while it is seen")
    show(page, False)
    until(lambda: site.streams() == 0)
    site.log("while it is hidden")
    show(page, True)
    site.log("when it is seen again")
    expect(page.locator(".log div").last).to_have_text("when it is seen again")
    wanted = ["from before it was seen", "while it is seen", "while it is hidden", "when it is seen again"]
    assert page.evaluate(LINES)[begin:] == wanted


def test_a_stream_asks_for_each_topic_once_and_begins_again_after_a_login(ada: Person) -> None:
    page = ada.tab("/tokens")
    asked = page.evaluate("""async () => {
      const made = [];
      window.EventSource = class extends EventTarget {
        constructor(url) { super(); this.url = url; made.push(this); }
        close() {}
      };
      const { Stream } = await import("/static/stream.js");
      const stream = new Stream(() => {});
      const event = (kind, data, lastEventId = "") => made.at(-1).dispatchEvent(
        new MessageEvent(kind, { data: JSON.stringify(data), lastEventId }));
      const opening = async (topics) => {
        const before = made.length;
        stream.follow(new Set(topics));
        for (let waited = 0; made.length === before && waited < 20; waited += 1)
          await new Promise((resolve) => setTimeout(resolve, 10));
      };
      await opening(["run:00aa00@5", "log:00aa00:0", "list"]);
      event("log", { id: "00aa00", rank: 0 }, "log:00aa00:0@9,list@a.1");
      event("bye", { reason: "you are logged out" });
      await opening(["run:00aa00@5", "log:00aa00:0", "list"]);
      await opening(["run:00aa00@5", "log:00aa00:0", "list"]);
      return made.map((one) => one.url);
    }""")
    at_first = "/api/events?topics=list,log:00aa00:0,run:00aa00@5"
    assert asked == [at_first, "/api/events?topics=list@a.1,log:00aa00:0@9,run:00aa00@5"]


def test_a_stream_whose_session_has_ended_says_so_and_asks_no_more(ada: Person) -> None:
    page = ada.tab("/tokens")
    opened, told = page.evaluate("""async () => {
      const made = [];
      window.EventSource = class extends EventTarget {
        constructor() { super(); made.push(this); }
        close() {}
      };
      let status = 503;
      window.fetch = async () => ({ status });
      const later = window.setTimeout.bind(window);
      window.setTimeout = (work, wait) => later(work, Math.min(wait, 10));
      const pause = () => new Promise((resolve) => later(resolve, 10));
      const { Stream } = await import("/static/stream.js");
      const told = [];
      const stream = new Stream(({ kind, up, data }) => told.push(kind === "bye" ? data.reason : `${kind} ${up}`));
      const opening = async (count) => { for (let n = 0; made.length < count && n < 200; n += 1) await pause(); };
      stream.follow(new Set(["list"]));
      await opening(1);
      made[0].dispatchEvent(new Event("error"));
      await opening(2);
      status = 401;
      made[1].dispatchEvent(new Event("error"));
      for (let n = 0; told.length < 2 && n < 200; n += 1) await pause();
      await opening(3);
      return [made.length, told];
    }""")
    assert (opened, told) == (2, ["line false", "You are logged out: load the page again to log in."])


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), pytest.param(1280, "light", marks=pytest.mark.nightly)])
def test_no_page_is_wider_than_the_screen(
    person: People, site: Site, consoles_are_empty: list[Person], width: int, scheme: str
) -> None:
    one = person(width, scheme)
    consoles_are_empty.append(one)
    one.is_logged_in(site.server.cookie)
    site.server.ask("POST", "/api/tokens", {"name": "a program", "role": "viewer", "days": 3})
    site.server.ask("POST", "/api/users", {"name": f"person-of-{width}", "role": "runner"})
    site.server.ask("POST", "/api/queue/pause")
    site.server.ask("POST", "/api/runs", {"keys": {"model": "mlp", "backend": "eager", "name": "waits"}})
    ended = run_path(site.ended)
    page = one.tab("/")
    for path in ("/", ended, "/submit", "/queue", "/users", "/tokens", "/audit", f"/compare?ids={ended[6:]},000002"):
        page.goto(site.server.url + path)
        page.wait_for_selector('[data-ready="yes"]') if path == "/submit" else page.wait_for_timeout(100)
        assert page.evaluate(WIDER) <= 0, path
        assert page.evaluate(CUT_OFF) == [], path


def test_a_loss_that_is_no_number_stays_one_when_its_row_is_written_anew(ada: Person) -> None:
    page = ada.tab("/tokens")
    written = page.evaluate("""async () => {
      const { fillIn } = await import("/static/row.js");
      const place = document.createElement("div"), cell = document.createElement("span");
      cell.dataset.cell = "loss";
      place.append(cell);
      const row = { state: "running", reason: "", position: null, step: 1, steps: 2, rate: null, seconds_left: null };
      return [[null, true], [1.5, false], [null, false]].map(([loss, diverged]) => {
        fillIn(place, { ...row, loss, diverged });
        return cell.textContent;
      });
    }""")
    assert written == ["NaN", "1.5", "\N{EN DASH}"]


def test_a_rate_that_comes_later_has_its_unit(ada: Person) -> None:
    page = ada.tab("/tokens")
    written = page.evaluate("""async () => {
      const { fillIn } = await import("/static/row.js");
      const place = document.createElement("div");
      place.innerHTML = '<span data-cell="unit"></span><dt data-cell="rate-name">Rate</dt>';
      const row = { state: "running", reason: "", position: null, step: 1, steps: 2, loss: 1, seconds_left: null };
      return [[null, ""], [7, "samples/s"]].map(([rate, rate_unit]) => {
        fillIn(place, { ...row, rate, rate_unit });
        return [...place.children].map((cell) => cell.textContent);
      });
    }""")
    assert written == [["", "Rate"], ["samples/s", "samples/s"]]


def test_the_numbers_of_an_axis_differ(ada: Person) -> None:
    page = ada.tab("/tokens")
    cases = {
        "0.0002": ([2.302, 2.3022, 2.3024], ["2.3020", "2.3022", "2.3024"]),
        "0.25": ([0, 0.25, 0.5], ["0.00", "0.25", "0.50"]),
        "5000": ([0, 5000, 10000], ["0", "5,000", "10,000"]),
        "0.0001": ([0, 0.0001, 0.0005], ["0", "1.0e-4", "5.0e-4"]),
        "1000000000": ([1e9, 2e9], ["1.0e+9", "2.0e+9"]),
    }
    write = """async ([values, step]) => (await import("/static/format.js")).ticks(values, step)"""
    for step, (values, texts) in cases.items():
        assert page.evaluate(write, [values, float(step)]) == texts


def test_scripts_write_figures_as_the_server_does(ada: Person) -> None:
    page = ada.tab("/tokens")
    write = """async ([name, values]) => {
      const made = await import("/static/format.js");
      return values.map((value) => made[name](value));
    }"""
    for name, cases in (("number", NUMBERS), ("count", COUNTS), ("duration", DURATIONS), ("bytes", SIZES)):
        values, texts = zip(*cases, strict=True)
        assert page.evaluate(write, [name, list(values)]) == list(texts)


@pytest.mark.parametrize(("path", "pause"), [("/?state=failed", 11_000), ("/queue", 4_000)], ids=["list", "queue"])
def test_a_run_that_goes_on_loads_no_page_anew_that_does_not_show_it(
    ada: Person, site: Site, path: str, pause: int
) -> None:
    shown, page = ada.tab("/"), ada.tab("/tokens")
    page.clock.install()
    page.goto(site.server.url + path)
    asked: list[str] = []
    page.on("request", lambda one: asked.append(one.url) if one.resource_type in ("xhr", "fetch") else None)
    for step in range(20, 24):
        site.measure(step, 1.0)
        row = shown.locator(f'tr[data-id="{run_path(site.running).rpartition("/")[2]}"]')
        expect(row.locator('[data-cell="step"]')).to_have_text(f"{step} / {STEPS}")
        page.clock.run_for(pause)
    # What was not heard of before may belong on the page.
    assert len(asked) <= 1, asked
