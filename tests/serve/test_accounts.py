"""People, passwords, one-time links, sessions and tokens."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import select, update

from ortlaunch.serve import accounts, tokens
from ortlaunch.serve.access import Caller, Role, still_allowed
from ortlaunch.serve.database import reading, writing
from ortlaunch.serve.limits import FOR_NAME, FROM_ADDRESS, Bucket, TooManyRequests
from ortlaunch.serve.queue import store
from ortlaunch.serve.queue.tables import Job, JobState
from ortlaunch.serve.tables import AuditEntry, Link, LoginSession, Token, User
from ortlaunch.serve.unfit import Unfit
from tests.support.service import ORIGIN, PASSWORD, InProcess, in_process

CHECKED = {
    "slots": 1,
    "name": "x",
    "experiment": "e",
    "launcher": "local",
    "steps": 1,
    "run_dir": "",
    "words": [],
    "needs": {},
}
"""What the check of a run has returned."""


@pytest.fixture
def inside(tmp_path: Path) -> InProcess:
    return in_process(tmp_path)


def test_the_first_link_makes_an_administrator_once(inside: InProcess) -> None:
    service = inside.service
    older, secret = accounts.first_link(service), accounts.first_link(service)
    assert older and secret
    with pytest.raises(Unfit, match="used or is too old"):
        accounts.use_link(service, older, "ada", PASSWORD, "here")
    assert accounts.link_is_for(service, secret) == (True, None)
    accounts.use_link(service, secret, "Ada", PASSWORD, "here")
    with pytest.raises(Unfit, match="used or is too old"):
        accounts.use_link(service, secret, "eve", PASSWORD, "here")
    assert accounts.first_link(service) is None
    assert [(user.name, user.role) for user in accounts.users(service)] == [("ada", "admin")]


def test_a_link_ends_after_its_time(inside: InProcess) -> None:
    secret = accounts.first_link(inside.service)
    with writing(inside.service.engine) as session:
        session.execute(update(Link).values(expires=time.time() - 1))
    assert secret is not None
    assert accounts.link_is_for(inside.service, secret) == (False, None)
    with pytest.raises(Unfit, match="too old"):
        accounts.use_link(inside.service, secret, "ada", PASSWORD, "here")


def test_a_password_is_stored_as_argon2id_and_a_secret_as_a_digest(inside: InProcess, tmp_path: Path) -> None:
    header = inside.token("ada", Role.admin)["Authorization"]
    cookie = accounts.login(inside.service, "ada", PASSWORD, "here")
    with reading(inside.service.engine) as session:
        user = session.scalar(select(User))
    assert user is not None and user.password is not None
    assert user.password.startswith("$argon2id$")
    stored = b"".join(path.read_bytes() for path in (tmp_path / ".serve").iterdir())
    assert b"$argon2id$" in stored
    for secret in (PASSWORD, cookie, header.split()[1]):
        assert secret.encode() not in stored


@pytest.mark.parametrize("name", ["ada", "nobody"])
def test_a_wrong_login_does_not_tell_who_exists(inside: InProcess, name: str) -> None:
    inside.person("ada", Role.viewer)
    with pytest.raises(Unfit, match=r"^name or password is wrong$"):
        accounts.login(inside.service, name, "wrong", "here")


@pytest.mark.parametrize(
    ("password", "words"),
    [
        ("short", "12 characters at least"),
        ("x" * 1025, "at most"),
        ("aaaaaaaaaaaaaaaa", "easy to guess"),
        ("passwordpassword1", "easy to guess"),
        ("P@ssw0rd123456", "easy to guess"),
        ("abcdefghijklmnop", "easy to guess"),
        ("qwertyuiop1234", "easy to guess"),
        ("xyxyxyxyxyxyxy", "easy to guess"),
        ("ada-ada-ada-2026", "easy to guess"),
    ],
)
def test_a_password_has_bounds(inside: InProcess, password: str, words: str) -> None:
    secret = accounts.first_link(inside.service)
    assert secret is not None
    with pytest.raises(Unfit, match=words):
        accounts.use_link(inside.service, secret, "ada", password, "here")
    assert accounts.link_is_for(inside.service, secret)[0], "the link is still there for a better one"


def test_five_logins_a_minute_for_a_name_from_an_address(inside: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine, five attempts may take long enough for a sixth.
    monkeypatch.setattr("ortlaunch.serve.limits.time", SimpleNamespace(monotonic=lambda: 1000.0))

    def attempt(name: str, address: str) -> None:
        with pytest.raises(Unfit):
            accounts.login(inside.service, name, "wrong", address)

    for _ in range(5):
        attempt("ada", "one")
    with pytest.raises(TooManyRequests) as refused:
        accounts.login(inside.service, "ada", "wrong", "one")
    assert 1 <= refused.value.seconds <= 12
    # Who guesses keeps neither the user out, who is elsewhere, nor others who share the address.
    attempt("ada", "elsewhere")
    attempt("another", "one")


def test_one_address_and_one_name_are_bounded_in_all(inside: InProcess) -> None:
    limits = inside.service.limits
    for number in range(FROM_ADDRESS):
        limits.address.take("one", now=float(number) / 1000)
    with pytest.raises(TooManyRequests):
        limits.address.take("one", now=1.0)
    assert FOR_NAME > FROM_ADDRESS, "one address could lock a name out"


def test_wrong_logins_lock_out_nobody_who_has_logged_in_there_before(inside: InProcess) -> None:
    inside.person("ada", Role.viewer)
    client = inside.client({"Origin": ORIGIN})
    right = {"name": "ada", "password": PASSWORD}
    assert client.post("/api/session", json=right).status_code == 200
    known = client.cookies["__Host-ortlaunch-known"]
    client.cookies.clear()
    inside.service.limits.address = Bucket(1, 1000.0)
    inside.service.limits.login = Bucket(10, 1000.0)
    wrong = [client.post("/api/session", json={"name": name, "password": "wrong"}) for name in ("eve", "ada", "ivy")]
    assert [one.status_code for one in wrong] == [422, 429, 429]
    assert client.post("/api/session", json=right).status_code == 429
    cookie = {"Cookie": f"__Host-ortlaunch-known={known}"}
    assert client.post("/api/session", json=right, headers=cookie).status_code == 200
    # Its own wrong attempts count, and the mark of one name is none of another's.
    client.cookies.clear()
    inside.service.limits.login = Bucket(1, 1000.0)
    tried = [client.post("/api/session", json={**right, "password": "no"}, headers=cookie) for _ in range(2)]
    assert [one.status_code for one in tried] == [422, 429]
    inside.person("bob", Role.viewer)
    other = client.post("/api/session", json={**right, "name": "bob"}, headers=cookie)
    assert other.status_code == 429


def test_right_logins_do_not_count_against_their_address(inside: InProcess) -> None:
    for name in ("ada", "bob", "eve"):
        inside.person(name, Role.viewer)
    inside.service.limits.address = Bucket(1, 1e9)
    for name in ("ada", "bob", "eve"):
        accounts.login(inside.service, name, PASSWORD, "one")


def test_somebody_changes_their_password_and_ends_their_other_sessions(inside: InProcess) -> None:
    here, there = inside.browser("bob", Role.runner), inside.browser("bob", Role.runner)
    other, token = inside.browser("ada", Role.admin), inside.token("bob", Role.runner)
    client = inside.client()

    def change(old: str, new: str) -> tuple[int, str]:
        answer = client.post("/api/session/password", headers=here, json={"old": old, "new": new})
        return answer.status_code, answer.text

    assert client.delete("/api/session/others", headers=here).json() == {"sessions": 2}
    there = inside.browser("bob", Role.runner)
    assert change("wrong", "another good password")[0] == 422
    assert "easy to guess" in change(PASSWORD, "passwordpassword")[1]
    assert client.get("/api/session", headers=there).status_code == 200, "nothing was changed"
    assert change(PASSWORD, "another good password") == (204, "")
    sessions = [client.get("/api/session", headers=one).status_code for one in (here, there, token, other)]
    assert sessions == [200, 401, 401, 200]
    with pytest.raises(Unfit, match="wrong"):
        accounts.login(inside.service, "bob", PASSWORD, "here")
    accounts.login(inside.service, "bob", "another good password", "here")


def test_a_browser_has_a_rate(inside: InProcess) -> None:
    inside.service.limits.session = Bucket(2, 1000.0)
    browser = inside.browser("bob", Role.viewer)
    answers = [inside.client().get("/api/session", headers=browser) for _ in range(3)]
    assert [one.status_code for one in answers] == [200, 200, 429]
    assert int(answers[2].headers["Retry-After"]) > 0


def test_refusals_and_downloads_are_in_the_audit(inside: InProcess) -> None:
    folder = inside.service.settings.root / "default" / "20260101-000000-mine-aaaaaa"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("train: {steps: 3}\nmodel: {params: {hub_token: 0123456789abcdef}}\n")
    (folder / "journal.jsonl").write_text("")
    inside.service.runs.refresh()
    headers, client = inside.token("bob", Role.viewer), inside.client()
    assert client.get("/api/audit", headers=headers).status_code == 403
    got = client.get("/api/runs/aaaaaa/files/config.yaml", headers=headers)
    assert (got.status_code, "steps: 3" in got.text, "0123456789abcdef" in got.text) == (200, True, False)
    with reading(inside.service.engine) as session:
        found = session.execute(select(AuditEntry.user, AuditEntry.action, AuditEntry.target)).all()[-2:]
    assert found == [
        ("bob", "refused", "GET /api/audit"),
        ("bob", "run.download", "GET /api/runs/aaaaaa/files/config.yaml"),
    ]
    # Who is refused again and again fills no disk.
    inside.service.limits.noted = Bucket(1, 1000.0)
    for _ in range(5):
        client.get("/api/audit", headers=headers)
    with reading(inside.service.engine) as session:
        assert len(session.scalars(select(AuditEntry).where(AuditEntry.action == "refused")).all()) == 2


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9%eth0", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("unknown", "10.0.0.1", False),
    ],
)
def test_attempts_are_counted_by_network(inside: InProcess, one: str, other: str, is_same: bool) -> None:
    inside.service.limits.address = Bucket(1, 1000.0)
    with pytest.raises(Unfit, match="wrong"):
        accounts.login(inside.service, "ada", "wrong", one)
    with pytest.raises(TooManyRequests if is_same else Unfit):
        accounts.login(inside.service, "bob", "wrong", other)


def test_attempts_to_log_in_do_not_fill_the_audit(inside: InProcess) -> None:
    service = inside.service
    with writing(service.engine) as session:
        for action, days in (("login.failed", 31), ("login.failed", 29), ("login", 31)):
            at = time.time() - 86400 * days
            session.add(AuditEntry(at=at, user_id=None, user="", action=action, target=f"{days}", detail=""))
    for _ in range(2):
        with pytest.raises(Unfit, match="wrong"):
            accounts.login(service, "x" * 1000, "wrong", "here")
    with reading(service.engine) as session:
        found = [(entry.action, entry.target) for entry in session.scalars(select(AuditEntry).order_by(AuditEntry.id))]
    failed = ("login.failed", "x" * 64)
    assert found == [("login.failed", "29"), ("login", "31"), failed, failed]


def test_a_link_works_whoever_else_asks_from_the_address(inside: InProcess) -> None:
    link = accounts.first_link(inside.service)
    assert link is not None
    for _ in range(100):
        with pytest.raises(Unfit, match="used or is too old"):
            accounts.use_link(inside.service, "0" * 43, "eve", PASSWORD, "here")
    assert accounts.use_link(inside.service, link, "first", PASSWORD, "here")


def test_a_new_password_ends_the_tokens_of_whoever_knew_the_old_one(inside: InProcess) -> None:
    token = inside.token("bob", Role.runner)
    admin, bob = inside.person("ada", Role.admin), inside.person("bob", Role.runner)
    assert inside.client().get("/api/session", headers=token).status_code == 200
    secret = accounts.new_link(inside.service, admin, bob.user_id)
    accounts.use_link(inside.service, secret, "", PASSWORD, "here")
    assert inside.client().get("/api/session", headers=token).status_code == 401


def test_a_provider_cannot_give_a_name_that_becomes_another(inside: InProcess) -> None:
    inside.person("kim", Role.admin)
    with pytest.raises(Unfit, match="is no user"):
        accounts.login_known(inside.service, "\u212aim", "here")


def test_a_user_who_is_disabled_is_out_at_once(inside: InProcess) -> None:
    admin, bob = inside.person("ada", Role.admin), inside.browser("bob", Role.runner)
    token = inside.token("bob", Role.runner)
    client = inside.client()
    assert client.get("/api/session", headers=bob).status_code == 200
    accounts.change_user(inside.service, admin, inside.person("bob", Role.runner).user_id, None, None, True)
    assert client.get("/api/session", headers=bob).status_code == 401
    assert client.get("/api/session", headers=token).status_code == 401
    with pytest.raises(Unfit, match="wrong"):
        accounts.login(inside.service, "bob", PASSWORD, "here")


def test_what_is_being_started_for_a_user_who_is_disabled_is_stopped(inside: InProcess) -> None:
    admin, bob = inside.person("ada", Role.admin), inside.person("bob", Role.runner)
    with writing(inside.service.engine) as session:
        for owner in (admin, bob):
            key = store.new_run_key(session)
            store.add_job(session, (owner.user_id, owner.name), "unix", key, {}, CHECKED).state = JobState.STARTING
    accounts.change_user(inside.service, admin, bob.user_id, None, None, True)
    with reading(inside.service.engine) as session:
        found = {job.owner: (job.stop_asked is not None, job.reason) for job in session.scalars(select(Job))}
    assert found == {"ada": (False, ""), "bob": (True, "its user was locked out")}


def test_what_a_user_who_is_disabled_has_waiting_does_not_start(inside: InProcess) -> None:
    admin, bob = inside.person("ada", Role.admin), inside.person("bob", Role.runner)
    with writing(inside.service.engine) as session:
        for owner in (admin, bob, bob):
            key = store.new_run_key(session)
            job = store.add_job(session, (owner.user_id, owner.name), "unix", key, {}, CHECKED)
        job.state = JobState.RUNNING
    accounts.change_user(inside.service, admin, bob.user_id, None, None, True)
    with reading(inside.service.engine) as session:
        found = [(job.owner, job.state, job.reason) for job in session.scalars(select(Job).order_by(Job.number))]
    ended = ("bob", JobState.CANCELLED, "its user was locked out")
    assert found == [("ada", JobState.WAITING, ""), ended, ("bob", JobState.RUNNING, "")]


@pytest.mark.parametrize(
    ("role", "unix_user", "reason"),
    [
        (Role.viewer, None, "its user has a lower role now: submit it again"),
        (None, "other", "its user has another Unix user now: submit it again"),
        (Role.author, None, ""),
        (None, "unix", ""),
    ],
)
def test_waiting_jobs_end_that_their_user_could_not_submit_now(
    inside: InProcess, role: Role | None, unix_user: str | None, reason: str
) -> None:
    admin, bob = inside.person("ada", Role.admin), inside.person("bob", Role.runner, "unix")
    with writing(inside.service.engine) as session:
        key = store.new_run_key(session)
        job = store.add_job(session, (bob.user_id, bob.name), "unix", key, {}, CHECKED)
    accounts.change_user(inside.service, admin, bob.user_id, role, unix_user, None)
    with reading(inside.service.engine) as session:
        found = session.get_one(Job, job.id)
    assert (found.state, found.reason) == (JobState.CANCELLED if reason else JobState.WAITING, reason)


@pytest.mark.parametrize("changes", [{"disabled": True}, {"password": "another"}])
def test_who_is_locked_out_while_a_password_is_compared_is_not_logged_in(
    inside: InProcess, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside.person("bob", Role.runner)
    compared = accounts._matches

    def matches(stored: str, password: str) -> bool:
        with writing(inside.service.engine) as session:
            session.execute(update(User).values(**changes))
        return compared(stored, password)

    monkeypatch.setattr(accounts, "_matches", matches)
    with pytest.raises(Unfit, match="wrong"):
        accounts.login(inside.service, "bob", PASSWORD, "here")


@pytest.mark.parametrize(("role", "disabled"), [(Role.viewer, None), (None, True)])
def test_the_last_administrator_stays(inside: InProcess, role: Role | None, disabled: bool | None) -> None:
    admin = inside.person("ada", Role.admin)
    inside.person("bob", Role.runner)
    with pytest.raises(Unfit, match="needs an administrator"):
        accounts.change_user(inside.service, admin, admin.user_id, role, None, disabled)
    assert inside.client().get("/api/users", headers=inside.token("ada", Role.admin)).status_code == 200


def test_another_password_ends_the_sessions_of_the_old_one(inside: InProcess) -> None:
    admin, bob = inside.person("ada", Role.admin), inside.browser("bob", Role.runner)
    link = accounts.new_link(inside.service, admin, inside.person("bob", Role.runner).user_id)
    assert inside.client().get("/api/session", headers=bob).status_code == 200
    accounts.use_link(inside.service, link, "", "another long password", "here")
    assert inside.client().get("/api/session", headers=bob).status_code == 401


@pytest.mark.parametrize("page", ["/login", "/link/{link}"])
@pytest.mark.parametrize("is_over", [True, False])
def test_a_browser_with_a_session_can_log_in_again(inside: InProcess, page: str, is_over: bool) -> None:
    """Its cookie is still there when the session is over, and goes along with what the page sends."""
    admin, bob = inside.person("ada", Role.admin), inside.browser("bob", Role.runner)
    link = accounts.new_link(inside.service, admin, inside.person("bob", Role.runner).user_id)
    if is_over:
        with writing(inside.service.engine) as session:
            session.execute(update(LoginSession).values(expires=time.time() - 1))
    client, cookie = inside.client(), {name: bob[name] for name in ("Cookie", "Origin", "Sec-Fetch-Site")}
    shown = client.get(page.format(link=link), headers={"Cookie": bob["Cookie"]}).text
    token = re.search(r'<meta name="csrf" content="(\w+)">', shown)
    assert token is not None, shown
    body = {"name": "bob", "password": PASSWORD} if page == "/login" else {"link": link, "password": PASSWORD}
    to = "/api/session" if page == "/login" else "/api/link"
    assert client.post(to, json=body, headers=cookie).status_code == 403
    assert client.post(to, json=body, headers={**cookie, "X-CSRF-Token": token[1]}).status_code == 200


@pytest.mark.parametrize("name", ["", "../x", "a b", "x" * 65, "<b>", "-x", "ö"])
def test_names_are_plain(inside: InProcess, name: str) -> None:
    with pytest.raises(Unfit) as refused:
        accounts.add_user(inside.service, inside.person("ada", Role.admin), name, Role.viewer, None)
    assert refused.value.problems[0].key == "name"


@pytest.mark.parametrize("unix_user", ["root", "a b", "-u", "x;y", "../x"])
def test_a_unix_user_is_a_name_and_never_root(
    inside: InProcess, unix_user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "account_name", lambda: "service")
    with pytest.raises(Unfit) as refused:
        accounts.add_user(inside.service, inside.person("ada", Role.admin), "bob", Role.viewer, unix_user)
    assert refused.value.problems[0].key == "unix_user"


def test_a_token_gives_the_lower_one_of_two_roles(inside: InProcess) -> None:
    runner = inside.person("bob", Role.runner)
    with pytest.raises(Unfit, match="cannot have more"):
        tokens.make_token(inside.service, runner, "mine", Role.author, 1)
    _, secret = tokens.make_token(inside.service, runner, "mine", Role.viewer, 1)
    client = inside.client({"Authorization": f"Bearer {secret}"})
    assert client.get("/api/session").json()["role"] == "viewer"
    _, secret = tokens.make_token(inside.service, runner, "mine", Role.runner, 1)
    accounts.change_user(inside.service, inside.person("ada", Role.admin), runner.user_id, Role.viewer, None, None)
    client = inside.client({"Authorization": f"Bearer {secret}"})
    assert client.get("/api/session").json()["role"] == "viewer"


def test_a_token_that_may_too_little_is_told_apart_from_its_user(inside: InProcess) -> None:
    client = inside.client(inside.token("ann", Role.viewer))
    browser = inside.client(inside.browser("bob", Role.viewer))
    for one, whose in ((client, "that of this token is"), (browser, "yours is")):
        (problem,) = one.post("/api/runs", json={}).json()["problems"]
        assert problem["message"] == f"this needs the role runner, {whose} viewer"


def test_a_token_makes_no_token_that_would_outlive_it(inside: InProcess) -> None:
    body = {"name": "mine", "role": "viewer", "days": 365}
    refused = inside.client().post("/api/tokens", headers=inside.token("bob", Role.runner), json=body)
    assert (refused.status_code, "log in" in refused.text) == (403, True)
    assert inside.client().post("/api/tokens", headers=inside.browser("bob", Role.runner), json=body).status_code == 201


def test_a_token_ends_by_its_time_and_by_being_revoked(inside: InProcess) -> None:
    service, ada = inside.service, inside.person("ada", Role.admin)
    token, secret = tokens.make_token(service, ada, "mine", Role.viewer, 1)
    headers = {"Authorization": f"Bearer {secret}"}
    stream = Caller(ada.user_id, "ada", Role.viewer, None, token_id=token.id)
    assert inside.client().get("/api/session", headers=headers).status_code == 200
    assert still_allowed(service, stream)
    tokens.revoke_token(service, ada, token.id)
    assert inside.client().get("/api/session", headers=headers).status_code == 401
    assert not still_allowed(service, stream), "a stream that is open ends too"
    token, secret = tokens.make_token(service, ada, "mine", Role.viewer, 1)
    with writing(service.engine) as session:
        session.execute(update(Token).where(Token.id == token.id).values(expires=time.time() - 1))
    assert inside.client().get("/api/session", headers={"Authorization": f"Bearer {secret}"}).status_code == 401


def test_nobody_revokes_the_token_of_another_but_an_administrator(inside: InProcess) -> None:
    service = inside.service
    token, _ = tokens.make_token(service, inside.person("bob", Role.runner), "mine", Role.runner, 1)
    client = inside.client()
    other, admin = inside.token("eve", Role.author), inside.token("ada", Role.admin)
    assert client.delete(f"/api/tokens/{token.id}", headers=other).status_code == 404
    assert [one["user"] for one in client.get("/api/tokens?everybody=true", headers=other).json()] == ["eve"]
    assert client.delete(f"/api/tokens/{token.id}", headers=admin).status_code == 204


def test_ten_requests_a_second_with_one_token(inside: InProcess) -> None:
    ada = inside.person("ada", Role.admin)
    _, secret = tokens.make_token(inside.service, ada, "mine", Role.viewer, 1)
    client = inside.client({"Authorization": f"Bearer {secret}"})
    answers = [client.get("/api/session") for _ in range(40)]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused and all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert 10 <= 40 - len(refused) < 40


def test_what_is_written_is_audited_without_secrets(inside: InProcess) -> None:
    client, admin = inside.client(), inside.browser("ada", Role.admin)
    made = client.post("/api/users", headers=admin, json={"name": "bob", "role": "runner"})
    assert made.status_code == 201
    link = made.json()["link"]
    secret = client.post("/api/tokens", headers=admin, json={"name": "ci", "role": "viewer"}).json()["secret"]
    client.post(
        "/api/link", headers=admin, json={"link": link.rpartition("/")[2], "password": "hidden but long password"}
    )
    with reading(inside.service.engine) as session:
        found = list(session.scalars(select(AuditEntry)))
    actions = [entry.action for entry in found]
    assert {"user.add", "token.make", "password.set", "login"} <= set(actions)
    text = json.dumps([[entry.target, entry.detail, entry.user] for entry in found])
    for hidden in (secret, link.rpartition("/")[2], "hidden but long", PASSWORD):
        assert hidden not in text
