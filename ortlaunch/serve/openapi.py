"""The description of the API: FastAPI's, and how each route refuses, whom it lets in, and by what."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from ortlaunch.serve.access import COOKIE, Role, role_of, takes_tokens

_REFUSALS = {
    "401": "nobody is logged in, and there is no token that is valid",
    "403": "the role, the project or the token does not allow it, or another site has sent it",
    "404": "there is no such thing, or the caller does not see it",
    "409": "its state does not allow it now",
    "422": "the request is refused; each problem names its key",
    "429": "too many requests; Retry-After says when the next one is taken",
    "503": "the service cannot do it now; Retry-After says when to ask again",
}
_PROBLEM = {
    "type": "object",
    "required": ["key", "message"],
    "properties": {"key": {"type": ["string", "null"]}, "message": {"type": "string"}},
}
_PROBLEMS = {
    "type": "object",
    "required": ["problems"],
    "properties": {"problems": {"type": "array", "items": _PROBLEM}},
}
_SCHEMES = {
    "token": {"type": "http", "scheme": "bearer"},
    "session": {"type": "apiKey", "in": "cookie", "name": COOKIE},
}


def described(app: FastAPI) -> dict[str, Any]:
    """Returns the OpenAPI document of the service."""
    document = app.openapi()
    parts = document.setdefault("components", {})
    parts["securitySchemes"] = _SCHEMES
    parts.setdefault("schemas", {})["Problems"] = _PROBLEMS
    for route in app.router.routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            for method in route.methods or ():
                _complete(document["paths"][route.path_format][method.lower()], route, method)
    return document


def _complete(operation: dict[str, Any], route: APIRoute, method: str) -> None:
    role = role_of(route)
    needed = {"422", "429", "503"}
    if role is not None:
        kinds = ["token", "session"] if takes_tokens(route) else ["session"]
        operation["security"] = [{kind: []} for kind in kinds]
        needed.add("401")
    if role not in (None, Role.viewer) or method != "GET" or not takes_tokens(route):
        needed.add("403")
    if "{" in route.path_format:
        needed |= {"404"} if method == "GET" else {"404", "409"}
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Problems"}}}
    for status in sorted(needed):
        operation["responses"][status] = {"description": _REFUSALS[status], "content": content}
