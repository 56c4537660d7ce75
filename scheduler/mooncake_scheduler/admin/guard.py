"""Who may come in at the admin port, asked before anything else of a request is looked at."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias

from fastapi import Request
from fastapi.responses import JSONResponse

from mooncake_scheduler.gateway.auth import AdminToken

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN: Final = frozenset({"/healthz", "/readyz", "/metrics"})


class Guard:
    """Answers 401 to whoever lacks the token, whatever path, method or body is sent.

    A dependency of each route would leave out what is no route, such as the API's description, and would be
    asked after the body has been read, however large.

    Args:
        app: what is guarded.
        token: the admin token.
    """

    def __init__(self, app: ASGIApp, token: AdminToken) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self._admits(scope):
            await self._app(scope, receive, send)
            return
        refusal = JSONResponse(
            {"detail": "a token is needed: send the header Authorization: Bearer <token>"},
            401,
            {"WWW-Authenticate": "Bearer", "Connection": "close"},
        )
        await refusal(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        sent = Request(scope).headers.getlist("authorization")
        return self._token.admits(sent[0].encode("latin-1") if len(sent) == 1 else b"")
