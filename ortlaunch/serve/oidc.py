"""Login by an OpenID Connect provider (the extra `oidc`), by the code flow with PKCE.

The provider says who somebody is. What the person may do stays here: only users whom an administrator has added can
log in, and are found by a claim of the provider's, such as `preferred_username`.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from ortlaunch.base.text import library_error
from ortlaunch.serve.secret import digest, new_secret
from ortlaunch.serve.unfit import Unfit, unfit

CALLBACK = "/oidc/callback"
_ALGORITHMS = ("RS256", "PS256", "ES256", "EdDSA")
"""Signatures by a key that the provider alone has."""
_SECONDS = 10
_LEEWAY_SECONDS = 60
_LOGIN_SECONDS = 600.0
_MOST_LOGINS = 1000


@dataclass(frozen=True)
class Begun:
    """A login that a browser has begun at the provider."""

    nonce: str
    verifier: str
    browser: str
    """The digest of what the browser has in its cookie, so that nobody can log another browser in."""
    until: float


@dataclass
class Provider:
    """An OpenID Connect provider."""

    issuer: str
    client_id: str
    client_secret: str
    claim: str = "preferred_username"
    """The claim that holds the name of the user here."""
    _begun: OrderedDict[str, Begun] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, callback: str) -> tuple[str, str]:
        """Begins a login.

        Args:
            callback: the address that the provider sends the browser back to.

        Returns:
            The address at the provider to send the browser to, and what its cookie must hold when it comes back.

        Raises:
            Unfit: the provider cannot be asked.
        """
        browser = new_secret()
        begun = Begun(new_secret(), new_secret(), digest(browser), time.monotonic() + _LOGIN_SECONDS)
        with self._session(callback) as session:
            url, state = session.create_authorization_url(
                self._known("authorization_endpoint"), nonce=begun.nonce, code_verifier=begun.verifier
            )
        with self._lock:
            self._begun[state] = begun
            while len(self._begun) > _MOST_LOGINS:
                self._begun.popitem(last=False)
        return str(url), browser

    def finish(self, callback: str, state: str, code: str, browser: str) -> str:
        """Ends a login, and returns the name of the user.

        Args:
            callback: as at the beginning.
            state: what the provider sends back.
            code: what the provider gives for an identity.
            browser: what the cookie of this browser holds.

        Raises:
            Unfit: the login was not begun by this browser, or the provider does not vouch for anybody.
        """
        with self._lock:
            begun = self._begun.pop(state, None)
        if begun is None or begun.until < time.monotonic() or not hmac.compare_digest(begun.browser, digest(browser)):
            raise unfit("this login was not begun in this browser, or too long ago: begin again")
        try:
            with self._session(callback) as session:
                answer = session.fetch_token(
                    self._known("token_endpoint"), code=code, code_verifier=begun.verifier, timeout=_SECONDS
                )
            claims = self._claims(str(answer["id_token"]), begun.nonce)
        except Unfit:
            raise
        # What a provider answers may break the library in many ways, and none of them logs anybody in.
        except Exception as error:
            raise unfit(f"the provider does not vouch for this login: {library_error(error)}") from None
        name = claims.get(self.claim)
        if (
            not isinstance(name, str)
            or not name
            or (self.claim == "email" and claims.get("email_verified") is not True)
        ):
            raise unfit(f"the provider gives no {self.claim} that can be relied on")
        return name

    def _claims(self, token: str, nonce: str) -> dict[str, Any]:
        from joserfc import jwt
        from joserfc.jwk import KeySet

        keys = KeySet.import_key_set({"keys": self._json(self._known("jwks_uri"))["keys"]})
        found = jwt.decode(token, keys, algorithms=list(_ALGORITHMS))
        rules = jwt.JWTClaimsRegistry(
            leeway=_LEEWAY_SECONDS,
            iss={"essential": True, "value": self.issuer},
            aud={"essential": True, "value": self.client_id},
            exp={"essential": True},
            iat={"essential": True},
            nonce={"essential": True, "value": nonce},
            azp={"essential": _has_several(found.claims.get("aud")), "value": self.client_id},
        )
        rules.validate(found.claims)
        return dict(found.claims)

    def _known(self, name: str) -> str:
        """An address of the provider, as its own description says."""
        try:
            described = self._json(f"{self.issuer.rstrip('/')}/.well-known/openid-configuration")
        except Exception as error:
            raise unfit(f"the provider cannot be asked: {library_error(error)}") from None
        if described.get("issuer") != self.issuer or not isinstance(described.get(name), str):
            raise unfit(f"{self.issuer} does not describe itself as this provider")
        return str(described[name])

    def _json(self, url: str) -> dict[str, Any]:
        import requests

        answer = requests.get(url, timeout=_SECONDS, allow_redirects=False)
        answer.raise_for_status()
        found = answer.json()
        if not isinstance(found, dict):
            raise ValueError(f"{url} answers with no JSON object")
        return found

    def _session(self, callback: str) -> Any:
        from authlib.integrations.requests_client import OAuth2Session

        return OAuth2Session(
            self.client_id,
            self.client_secret,
            scope="openid profile email",
            redirect_uri=callback,
            code_challenge_method="S256",
        )


def _has_several(audience: Any) -> bool:
    """Whether a token is for other clients too, so that it must say which one it was given to. A list may have one."""
    return isinstance(audience, list) and len(audience) > 1
