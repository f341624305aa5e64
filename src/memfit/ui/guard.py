"""Who may ask: this machine's own page. Every answer forbids the page all but itself."""

from __future__ import annotations

import secrets
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memfit.core.system.reading import exists

TOKEN = "x-memfit-token"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PRIVATE = ("/api/runs", "/api/run")  # what this user's files hold
DATA = ("task.data", "task.evaluation")  # keys that name files
LARGEST = 2**20  # bytes of what is sent here
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}


class Guard:
    """ASGI middleware; a refusal says its reason as every other error does."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a permitted request, and add the headers to its answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        refused = self._refuse(scope)
        if refused is None:
            await self.app(scope, receive, send_guarded)
            return
        status, reason, hint = refused
        body = {"error": reason, "hint": hint, "exit_code": 2}
        await JSONResponse(body, status)(scope, receive, send_guarded)

    def _refuse(self, scope: Scope) -> tuple[int, str, str] | None:
        """Return status, reason and hint of a refusal; None for a permitted request."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if _name_of(host) not in LOOPBACK:  # another name that was made to point here
            return 403, f"`{host}` is not this machine", "open the address that `memfit ui` printed"
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return 403, f"a page of `{origin}` may not ask here", ""
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and scope["path"] != "/":
            return 403, "a page of another origin may not ask here", ""
        if scope["method"] not in ("GET", "HEAD"):
            return self._refuse_change(scope["method"], headers)
        if scope["path"] in PRIVATE or _reads_files(scope["query_string"]):
            return self._refuse_stranger(headers)
        return None

    def _refuse_stranger(self, headers: Headers) -> tuple[int, str, str] | None:
        """Another user of this machine can ask, and has not seen the address with the token."""
        token = headers.get(TOKEN, "")
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            reason = "the token is missing" if not token else "the token is of another server"
            return 403, reason, "open the address that `memfit ui` printed"
        return None

    def _refuse_change(self, method: str, headers: Headers) -> tuple[int, str, str] | None:
        """What starts work or writes takes the token, which other pages cannot know."""
        if (refused := self._refuse_stranger(headers)) is not None:
            return refused
        length = headers.get("content-length", "")
        if method == "DELETE" and not length and "transfer-encoding" not in headers:
            return None  # nothing is sent with it
        if not length.isdecimal():
            return 411, "what is sent must say its length", ""
        if int(length) > LARGEST:
            return 413, f"{length} B were sent, and {LARGEST} B are the most", ""
        return None


def _reads_files(query: bytes) -> bool:
    """Whether a question names data, or a model that is a folder here."""
    keys = parse_qsl(query.decode("latin-1"), errors="surrogateescape")
    return any(key in DATA or (key == "model" and _is_here(text.strip())) for key, text in keys)


def _is_here(name: str) -> bool:
    """Return whether it is a file or folder below the one in which the server was started; False
    for any other."""
    path = Path(name)
    outside = path.is_absolute() or ".." in path.parts or name.startswith(("{", "~"))
    return not outside and exists(path)


def _name_of(host: str) -> str:
    """Without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
