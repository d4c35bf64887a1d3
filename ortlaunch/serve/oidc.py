"""Login by an OpenID Connect provider (the extra `oidc`): Authlib's code flow with PKCE.

The provider says who somebody is. What the person may do stays here: only users whom an administrator has added can
log in. A user is found by a claim of the provider's, such as `preferred_username`, the first time, and by issuer and
subject from then on: names are given to others, subjects are not.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import RedirectResponse

from ortlaunch.base.text import library_error
from ortlaunch.serve.unfit import unfit

CALLBACK = "/oidc/callback"
_ALGORITHMS = ["RS256", "PS256", "ES256", "EdDSA"]
"""Signatures by a key that the provider alone has."""
_SECONDS = 10
_LEEWAY_SECONDS = 60


class Provider:
    """An OpenID Connect provider."""

    def __init__(self, issuer: str, client_id: str, client_secret: str, claim: str = "preferred_username") -> None:
        """
        Args:
            issuer: the provider's address.
            client_id: the name by which it knows the service.
            client_secret: the secret by which it does.
            claim: the claim that holds the name of the user here.
        """
        from authlib.integrations.starlette_client import OAuth

        self.issuer = issuer
        self.claim = claim
        kwargs = {"scope": "openid profile email", "code_challenge_method": "S256", "timeout": _SECONDS}
        self._client_id = client_id
        self._client = OAuth().register(
            "oidc",
            client_id=client_id,
            client_secret=client_secret,
            server_metadata_url=f"{issuer.rstrip('/')}/.well-known/openid-configuration",
            client_kwargs=kwargs,
        )

    async def begin(self, request: Request, callback: str) -> RedirectResponse:
        """Sends a browser to the provider, which sends it back to `callback`.

        Raises:
            Unfit: the provider cannot be asked.
        """
        await self._ask()
        answer: RedirectResponse = await self._client.authorize_redirect(request, callback)
        answer.status_code = 303
        return answer

    async def finish(self, request: Request) -> tuple[str, str]:
        """Ends a login, and returns who it is for the provider, and the name of the user.

        Raises:
            Unfit: the login was not begun by this browser, or the provider does not vouch for anybody.
        """
        from authlib.integrations.base_client import MismatchingStateError

        await self._ask()
        # Authlib itself compares who a token was given to, and not whom it is for.
        required = {"iss": self.issuer, "aud": self._client_id}
        options = {name: {"essential": True, "value": value} for name, value in required.items()}
        try:
            found = await self._client.authorize_access_token(request, claims_options=options, leeway=_LEEWAY_SECONDS)
            claims = found["userinfo"]
        except MismatchingStateError:
            raise unfit("this login was not begun in this browser, or too long ago: begin again") from None
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
        return f"{self.issuer} {claims['sub']}", name

    async def _ask(self) -> None:
        """Asks the provider for its addresses."""
        try:
            metadata: dict[str, Any] = await self._client.load_server_metadata()
            is_itself = metadata.get("issuer") == self.issuer
            metadata["id_token_signing_alg_values_supported"] = _ALGORITHMS
        except Exception as error:
            raise unfit(f"the provider cannot be asked: {library_error(error)}") from None
        if not is_itself:
            raise unfit(f"{self.issuer} does not describe itself as this provider")
