"""People who may log in, their passwords, one-time links and browser sessions."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import re
import threading
import time

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from ortlaunch.base.user import account_name
from ortlaunch.serve.access import Caller, Role, require_unchanged
from ortlaunch.serve.answers import not_found
from ortlaunch.serve.audit import record
from ortlaunch.serve.database import reading, writing
from ortlaunch.serve.limits import TooManyRequests, network_of
from ortlaunch.serve.projects import checked
from ortlaunch.serve.queue import store
from ortlaunch.serve.queue.tables import JobState
from ortlaunch.serve.secret import digest, new_secret
from ortlaunch.serve.service import Service
from ortlaunch.serve.tables import AuditEntry, Link, LoginSession, Token, User
from ortlaunch.serve.unfit import unfit

SESSION_SECONDS = 12 * 3600.0
LINK_SECONDS = 24 * 3600.0
FIRST_LINK_SECONDS = 3600.0
SHORTEST_PASSWORD = 12
_LONGEST_PASSWORD = 1024
_LEAST_CHOICES = 8
_LOOK_ALIKES = str.maketrans("0134578@$!", "oieastbasi")
_COMMON = frozenset(
    [
        *("password", "passwort", "passwd", "passw", "pass", "letmein", "welcome", "changeme", "secret", "login"),
        *("admin", "administrator", "root", "user", "guest", "test", "default", "ortlaunch", "service", "server"),
        *("qwertzuiop", "qwertyuiop", "qwertz", "qwerty", "azerty", "asdfghjkl", "asdf", "zxcvbnm", "yxcvbnm"),
        *("iloveyou", "sunshine", "princess", "football", "baseball", "monkey", "dragon", "master", "superman"),
        *("summer", "winter", "spring", "autumn", "michael", "jordan", "shadow", "trustno", "whatever", "starwars"),
    ]
)
"""Words that lists of stolen passwords begin with."""
_OLD_LINK = "the link was used or is too old: ask an administrator for another one"
_FAILED = "login.failed"
_FAILURE_SECONDS = 30 * 86400.0
"""How long an attempt to log in that failed is in the audit."""
_LONGEST_NAME = 64
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_UNIX_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}\$?")
# OWASP's smaller choice for argon2id. One at a time, so that logins cannot fill the memory.
_HASHER = PasswordHasher(time_cost=2, memory_cost=19 * 1024, parallelism=1)
_ONE_AT_A_TIME = threading.Lock()
_NOBODY = "$argon2id$v=19$m=19456,t=2,p=1$2wNHh6wWNGtOckJRR9A0HQ$2FR6HFTQ2Bca8a7HG5VDZ0RG2/M6x3czFEZBp1I86/A"
"""Checked for names that do not exist, so that the time of an answer does not tell who exists."""


def login(service: Service, name: str, password: str, address: str, mark: str = "") -> str:
    """Logs somebody in, and returns the secret of the session for the cookie.

    Args:
        service: the service.
        name: the user's name.
        password: the user's password.
        address: where the request comes from; attempts are counted by it and by the name.
        mark: from `mark_of`, by a browser in which this user has logged in before. The attempts of others, behind the
            same router or with the same name, do not count against it.

    Raises:
        TooManyRequests: too many attempts were made; see `ortlaunch.serve.limits`.
        Unfit: name or password is wrong; it does not say which.
    """
    known = name.strip().lower()
    network, counted = network_of(address), known[:_LONGEST_NAME]
    with reading(service.engine) as session:
        user = session.scalar(select(User).where(User.name == known))
    is_known = user is not None and hmac.compare_digest(mark.encode(), _mark(user).encode())
    service.limits.login.take(f"{'known browser' if is_known else network} {counted}")
    if not is_known:
        service.limits.address.take(network)
        service.limits.name.take(counted)
    stored = user.password if user is not None and user.password is not None else _NOBODY
    right = _matches(stored, password)
    with writing(service.engine) as session:
        # The user may have been locked out, or have got another password, while this one was compared.
        user = session.scalar(select(User).where(User.name == known))
        if right and user is not None and not user.disabled and user.password == stored:
            if _HASHER.check_needs_rehash(stored):
                user.password = _hashed(password)
            if not is_known:
                service.limits.address.give_back(network)
            return _begin_session(session, user, address)
        _note_failure(service, session, known, {"address": address})
    raise unfit("name or password is wrong")


def mark_of(service: Service, name: str) -> str:
    """Returns what a browser keeps after a login, by which it is known again until the user's password changes."""
    with reading(service.engine) as session:
        user = session.scalar(select(User).where(User.name == name.strip().lower()))
    return "" if user is None else _mark(user)


def change_password(service: Service, caller: Caller, old: str, new: str, address: str) -> None:
    """Changes the password of somebody who knows it. Other sessions end, and tokens.

    Raises:
        TooManyRequests: too many attempts were made.
        Unfit: the old password is wrong, or the new one will not do.
    """
    service.limits.login.take(f"change {caller.name}")
    check_password(new, caller.name)
    with reading(service.engine) as session:
        stored = session.get_one(User, caller.user_id).password
    if stored is None or not _matches(stored, old):
        raise unfit("the old password is wrong", "old")
    hashed = _hashed(new)
    with writing(service.engine) as session:
        require_unchanged(service, session, caller)
        user = session.get_one(User, caller.user_id)
        if user.password != stored:
            raise unfit("the password was changed meanwhile", "old")
        _set_password(session, user, hashed, but=caller.session_id)
        record(session, caller, "password.change", user.name, {"address": address})


def end_other_sessions(service: Service, caller: Caller) -> int:
    """Ends all sessions of a user but the one that asks for it; returns how many they were."""
    others = LoginSession.user_id == caller.user_id, LoginSession.id != caller.session_id
    with writing(service.engine) as session:
        count = session.scalar(select(func.count()).select_from(LoginSession).where(*others)) or 0
        session.execute(delete(LoginSession).where(*others))
        record(session, caller, "sessions.end", caller.name, {"sessions": count})
    return count


def login_known(service: Service, name: str, address: str, subject: str | None = None) -> str:
    """Logs somebody in whom a provider or a proxy vouches for, and returns the secret of the session for the cookie.

    Args:
        service: the service.
        name: the name that is given.
        address: where the request comes from.
        subject: who it is for the provider, by which the user is found from the second time on; None from a proxy.

    Raises:
        Unfit: no administrator has added this user, the user is disabled, or the name was somebody else's before.
    """
    known = name.strip().lower()
    if not name.isascii():
        # Other letters may become ASCII ones when they are made small.
        raise unfit(f"{known!a} is no user of this service: ask an administrator")
    with writing(service.engine) as session:
        user = None if subject is None else session.scalar(select(User).where(User.subject == subject))
        user = user or session.scalar(select(User).where(User.name == known))
        is_same = user is not None and (subject is None or user.subject in (None, subject))
        if user is not None and is_same and not user.disabled:
            user.subject = subject or user.subject
            return _begin_session(session, user, address)
        _note_failure(service, session, known, {"address": address, "by": "provider"})
    if not is_same and user is not None:
        raise unfit(f"{known} was another person of the provider's before: ask an administrator for a new link")
    raise unfit(f"{known} is no user of this service: ask an administrator")


def logout(service: Service, caller: Caller) -> None:
    """Ends the session of a browser."""
    with writing(service.engine) as session:
        session.execute(delete(LoginSession).where(LoginSession.id == caller.session_id))
        record(session, caller, "logout", caller.name)


def first_link(service: Service) -> str | None:
    """Returns the secret of a new link that makes the first administrator; None if there is an administrator."""
    with writing(service.engine) as session:
        if _administrators(session):
            return None
        session.execute(delete(Link).where(Link.user_id.is_(None)))
        return _new_link(session, None, FIRST_LINK_SECONDS)


def link_is_for(service: Service, secret: str) -> tuple[bool, str | None]:
    """Returns whether a link can still be used, and whom it is for; None for the first administrator."""
    with reading(service.engine) as session:
        link = _link(session, secret)
        if link is None:
            return False, None
        return True, None if link.user_id is None else session.get_one(User, link.user_id).name


def use_link(service: Service, secret: str, name: str, password: str, address: str) -> str:
    """Sets a password by a one-time link, logs its user in, and returns the secret of the session for the cookie.

    Args:
        service: the service.
        secret: what the link ends with.
        name: the name of the first administrator; of no use for other links.
        password: the new password.
        address: where the request comes from.

    Raises:
        Unfit: the link was used, is too old, or name or password will not do.
    """
    # Before the costly hash. Its 256 bits need no limit, and one would let others keep an administrator out.
    if not link_is_for(service, secret)[0]:
        raise unfit(_OLD_LINK)
    check_password(password, link_is_for(service, secret)[1] or name)
    hashed = _hashed(password)
    with writing(service.engine) as session:
        link = _link(session, secret)
        if link is None:
            raise unfit(_OLD_LINK)
        if link.user_id is None:
            user = _add(session, name, Role.admin, account_name())
        else:
            user = session.get_one(User, link.user_id)
        session.delete(link)
        _set_password(session, user, hashed)
        caller = Caller(user.id, user.name, Role[user.role], user.unix_user)
        record(session, caller, "password.set", user.name, {"address": address})
        return _begin_session(session, user, address)


def add_user(service: Service, caller: Caller, name: str, role: Role, unix_user: str | None) -> tuple[User, str]:
    """Adds a user, and returns the user and the secret of a link by which the person chooses a password.

    Raises:
        Unfit: the name will not do or is taken.
    """
    with writing(service.engine) as session:
        user = _add(session, name, role, unix_user)
        record(session, caller, "user.add", user.name, {"role": role.name, "unix_user": unix_user})
        return user, _new_link(session, user.id, LINK_SECONDS)


def new_link(service: Service, caller: Caller, user_id: int) -> str:
    """Returns the secret of a new link by which a user chooses another password; older links end."""
    with writing(service.engine) as session:
        user = _existing(session, user_id)
        # Whom the provider means by this name is found out anew.
        user.subject = None
        session.execute(delete(Link).where(Link.user_id == user.id))
        record(session, caller, "user.link", user.name)
        return _new_link(session, user.id, LINK_SECONDS)


def link_by_name(service: Service, name: str) -> str | None:
    """Returns what `new_link` does, for the person at the terminal of the service; None if there is no such user."""
    with writing(service.engine) as session:
        user = session.scalar(select(User).where(User.name == name.strip().lower()))
        if user is None:
            return None
        session.execute(delete(Link).where(Link.user_id == user.id))
        record(session, None, "user.link", user.name, {"by": "terminal"})
        return _new_link(session, user.id, LINK_SECONDS)


def change_user(
    service: Service,
    caller: Caller,
    user_id: int,
    role: Role | None,
    unix_user: str | None,
    disabled: bool | None,
    projects: list[str] | None = None,
) -> User:
    """Changes a user; None leaves a field as it is, and an empty `unix_user` takes it away.

    Jobs that wait or are being started end when their user is disabled, gets a lower role or another Unix user: they
    were checked for what the user was before. Runs that have begun go on.

    Raises:
        Unfit: no administrator would be left, or there is no such project.
    """
    with writing(service.engine) as session:
        user = _existing(session, user_id)
        user.projects = user.projects if projects is None else checked(session, projects)
        before, before_unix = Role[user.role], user.unix_user
        user.role = user.role if role is None else role.name
        user.disabled = user.disabled if disabled is None else disabled
        if unix_user is not None:
            user.unix_user = _unix_name(unix_user)
        session.flush()
        if not _administrators(session):
            raise unfit("the service needs an administrator who can log in", "disabled" if disabled else "role")
        if user.disabled:
            session.execute(delete(LoginSession).where(LoginSession.user_id == user.id))
            _end_jobs(session, user.id, "its user was locked out")
        elif Role[user.role] < before:
            _end_jobs(session, user.id, "its user has a lower role now: submit it again")
        elif user.unix_user != before_unix and not service.settings.shared_account:
            _end_jobs(session, user.id, "its user has another Unix user now: submit it again")
        changes = {name: getattr(user, name) for name in ("role", "unix_user", "projects", "disabled")}
        record(session, caller, "user.change", user.name, changes)
    if service.queue is not None:
        service.queue.wake()
    return user


def users(service: Service) -> list[User]:
    """Returns all users by name."""
    with reading(service.engine) as session:
        return list(session.scalars(select(User).order_by(User.name)))


def check_password(password: str, name: str) -> None:
    """Refuses a password that is too short, longer than anyone means, or easy to guess.

    Args:
        password: the password.
        name: whose it is.

    Raises:
        Unfit: it will not do.
    """
    if len(password) < SHORTEST_PASSWORD:
        raise unfit(f"a password has {SHORTEST_PASSWORD} characters at least", "password")
    if len(password) > _LONGEST_PASSWORD:
        raise unfit(f"a password has {_LONGEST_PASSWORD} characters at most", "password")
    if _choices(password, name) < _LEAST_CHOICES:
        text = "this password is easy to guess: it has common words, repetitions or rows of letters and little else"
        raise unfit(text, "password")


def _choices(password: str, name: str) -> int:
    """Counts what a guesser has to find of a password: a common word, a repetition and a row are one choice each."""
    plain = password.lower().translate(_LOOK_ALIKES)
    for word in sorted({*_COMMON, name.strip().lower().translate(_LOOK_ALIKES)} - {""}, key=len, reverse=True):
        plain = plain.replace(word, "\0")
    plain = re.sub(r"(.{1,8}?)\1+", r"\1", plain)
    steps = [ord(after) - ord(before) for before, after in itertools.pairwise(plain)]
    return 1 + sum(abs(step) != 1 or step != last for last, step in zip([0, *steps], steps, strict=False))


def remove_expired(session: Session) -> None:
    """Deletes sessions, links and tokens whose time is over."""
    now = time.time()
    session.execute(delete(LoginSession).where(LoginSession.expires <= now))
    session.execute(delete(Link).where(Link.expires <= now))
    session.execute(delete(Token).where(Token.expires <= now - 30 * 86400))


def _note_failure(service: Service, session: Session, name: str, detail: dict[str, str]) -> None:
    """Writes an attempt to log in into the audit, and takes old ones out: anybody can make any number of them."""
    try:
        service.limits.forgetting.take("")
        oldest = time.time() - _FAILURE_SECONDS
        session.execute(delete(AuditEntry).where(AuditEntry.action == _FAILED, AuditEntry.at < oldest))
    except TooManyRequests:
        pass
    record(session, None, _FAILED, name[:_LONGEST_NAME], detail)


def _set_password(session: Session, user: User, hashed: str, but: int | None = None) -> None:
    """Gives a user another password. Whoever knew the old one is logged out, and so are the tokens that they made.

    Args:
        session: the session that writes.
        user: the user.
        hashed: the password's hash.
        but: a session that stays.
    """
    user.password = hashed
    session.execute(delete(LoginSession).where(LoginSession.user_id == user.id, LoginSession.id.is_distinct_from(but)))
    theirs = update(Token).where(Token.user_id == user.id, Token.revoked.is_(None))
    session.execute(theirs.values(revoked=time.time()))


def _mark(user: User) -> str:
    return hmac.new((user.password or "").encode(), f"known browser {user.name}".encode(), hashlib.sha256).hexdigest()


def _add(session: Session, name: str, role: Role, unix_user: str | None) -> User:
    known = name.strip().lower()
    if not _NAME.fullmatch(known):
        raise unfit(
            "a name has letters, digits, '.', '_' and '-' (64 at most), and begins with one of the first two", "name"
        )
    if session.scalar(select(User.id).where(User.name == known)) is not None:
        raise unfit(f"there is a user {known}", "name")
    user = User(name=known, role=role.name, unix_user=_unix_name(unix_user or ""), disabled=False, created=time.time())
    session.add(user)
    session.flush()
    return user


def _end_jobs(session: Session, user_id: int, reason: str) -> None:
    for job in store.in_states(session, JobState.WAITING, JobState.STARTING):
        if job.user_id != user_id:
            continue
        if job.state == JobState.WAITING:
            store.note_end(session, job, JobState.CANCELLED, reason=reason)
        else:
            # A child may be starting it at this moment. The queue ends it, before its run begins or after.
            job.stop_asked, job.reason = job.stop_asked or time.time(), reason


def _unix_name(text: str) -> str | None:
    name = text.strip()
    # A service that runs as root itself, as in a container, may start its own runs.
    if name and name != account_name() and (name == "root" or not _UNIX_NAME.fullmatch(name)):
        raise unfit("this is no name of a Unix user who may start runs", "unix_user")
    return name or None


def _existing(session: Session, user_id: int) -> User:
    user = session.get(User, user_id)
    if user is None:
        raise not_found("no such user")
    return user


def _administrators(session: Session) -> int:
    wanted = (User.role == Role.admin.name, User.disabled.is_(False), User.password.is_not(None))
    return session.scalar(select(func.count()).select_from(User).where(*wanted)) or 0


def _new_link(session: Session, user_id: int | None, seconds: float) -> str:
    secret = new_secret()
    session.add(Link(user_id=user_id, digest=digest(secret), expires=time.time() + seconds))
    return secret


def _link(session: Session, secret: str) -> Link | None:
    return session.scalar(select(Link).where(Link.digest == digest(secret), Link.expires > time.time()))


def _begin_session(session: Session, user: User, address: str) -> str:
    remove_expired(session)
    secret, now = new_secret(), time.time()
    session.add(
        LoginSession(user_id=user.id, digest=digest(secret), created=now, used=now, expires=now + SESSION_SECONDS)
    )
    session.flush()
    record(
        session, Caller(user.id, user.name, Role[user.role], user.unix_user), "login", user.name, {"address": address}
    )
    return secret


def _hashed(password: str) -> str:
    with _ONE_AT_A_TIME:
        return _HASHER.hash(password)


def _matches(stored: str, password: str) -> bool:
    if len(password) > _LONGEST_PASSWORD:
        return False
    try:
        with _ONE_AT_A_TIME:
            return _HASHER.verify(stored, password)
    except (VerificationError, InvalidHashError):
        return False
