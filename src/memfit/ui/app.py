"""The routes of the page, and the server that is bound to this machine alone."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from contextlib import closing
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from memfit.core.errors import DoesNotFit, Error, InvalidRequest, NotCertified
from memfit.core.system.refused import explain_refusal
from memfit.ui import answers
from memfit.ui.asking import Pairs
from memfit.ui.guard import Guard
from memfit.ui.job import Wanted
from memfit.ui.jobs import Jobs
from memfit.ui.patience import Patient
from memfit.ui.turn import Busy

HOST = "127.0.0.1"
LONGEST = 2**16  # bytes of a request line: a pasted config.json stands in it
PAGE = {
    "": ("index.html", "text/html; charset=utf-8"),
    "app.js": ("app.js", "text/javascript; charset=utf-8"),
    "app.css": ("app.css", "text/css; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}


def make_app(token: str, runs: Path, jobs: Jobs | None = None) -> Starlette:
    """The whole application; runs: the folder of run folders that it shows."""
    jobs = jobs or Jobs()
    routes = [
        *(Route(f"/{path}", partial(_file, *file)) for path, file in PAGE.items()),
        *(Route(f"/api/{name}", partial(_tell, tell)) for name, tell in answers.CONSTANTS.items()),
        *(Route(f"/api/{name}", partial(_answer, ask)) for name, ask in answers.QUERIES.items()),
        Route("/api/runs", partial(_runs, runs)),
        Route("/api/run", partial(_run, runs)),
        Route("/api/jobs", partial(_create_job, jobs), methods=["POST"]),
        Route("/api/jobs", partial(_list_jobs, jobs)),
        Route("/api/jobs/{name}", partial(_remove_job, jobs), methods=["DELETE"]),
        Route("/api/jobs/{name}", partial(_find_job, jobs)),
        Route("/api/jobs/{name}/result", partial(_job_result, jobs)),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, token=token)],
        exception_handlers={
            Error: _explain,
            HTTPException: _no_such,
            Exception: _bug,
        },
    )


def listen(port: int) -> socket.socket:
    """Bound to this machine's loopback address alone; 0 takes a free port.

    Raises InvalidRequest where the port is taken.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        raise InvalidRequest(
            f"cannot listen on port {port}: {error.strerror}", hint="`--port 0` takes a free one"
        ) from None
    listener.listen()
    return listener


def configure(app: Starlette) -> uvicorn.Config:
    """How the page is served: quietly, and with room for a pasted config.json in the address."""
    return uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", http=Patient, ws="none",
        h11_max_incomplete_event_size=LONGEST, server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=1,
    )  # fmt: skip


def serve(runs: Path, *, port: int, ready: Callable[[str], None]) -> None:
    """Serve until interrupted; ready: called with the address once it can be opened.

    Raises InvalidRequest where the port is taken.
    """
    token = secrets.token_urlsafe(24)
    with listen(port) as listener, closing(Jobs()) as jobs:
        server = uvicorn.Server(configure(make_app(token, runs, jobs)))
        ready(f"http://{HOST}:{listener.getsockname()[1]}/#token={token}")
        server.run(sockets=[listener])


async def _file(name: str, kind: str, _: Request) -> Response:
    content = resources.files("memfit.ui").joinpath("page", name).read_bytes()
    return Response(content, media_type=kind)


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


async def _tell(tell: Callable[[], bytes], _: Request) -> Response:
    return _json(await run_in_threadpool(tell))


async def _answer(ask: Callable[[Pairs], bytes], request: Request) -> Response:
    pairs = tuple(request.query_params.multi_items())
    if len(dict(pairs)) < len(pairs):
        raise InvalidRequest("a key stands twice in the address")
    return _json(await run_in_threadpool(ask, pairs))


async def _runs(root: Path, _: Request) -> Response:
    return _json(await run_in_threadpool(answers.list_runs, root))


async def _run(root: Path, request: Request) -> Response:
    name, after = request.query_params.get("name", ""), request.query_params.get("after", "0")
    if not after.isdecimal() or len(after) > 12:
        raise InvalidRequest(f"`after: {after}` is no step", hint="a whole number, 0 or more")
    return _json(await run_in_threadpool(answers.read_run, root, name, int(after)))


async def _create_job(jobs: Jobs, request: Request) -> Response:
    """Certify a plan, with its memory over the events of a step, in the background."""
    try:
        wanted = msgspec.json.decode(await request.body(), type=Wanted)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read what is to be certified: {error}") from None
    made = await run_in_threadpool(jobs.create, wanted)
    return Response(answers.encode(made), 201, media_type="application/json")


async def _list_jobs(jobs: Jobs, _: Request) -> Response:
    return _json(answers.encode(await run_in_threadpool(jobs.rows)))


async def _find_job(jobs: Jobs, request: Request) -> Response:
    return _json(answers.encode(await run_in_threadpool(jobs.find, request.path_params["name"])))


async def _job_result(jobs: Jobs, request: Request) -> Response:
    return _json(await run_in_threadpool(jobs.result, request.path_params["name"]))


async def _remove_job(jobs: Jobs, request: Request) -> Response:
    return _json(answers.encode(await run_in_threadpool(jobs.remove, request.path_params["name"])))


STATUS = ((DoesNotFit, 422), (NotCertified, 409), (Busy, 503))


async def _explain(_: Request, error: Exception) -> Response:
    """memfit's own errors, with the text and the hint of the command line."""
    assert isinstance(error, Error)
    status = next((status for kind, status in STATUS if isinstance(error, kind)), 400)
    body = {"error": error.message, "hint": error.hint, "exit_code": error.exit_code}
    return JSONResponse(body, status)


async def _no_such(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"`{request.method} {request.scope['path']}` is not answered here: {error.detail}"
    body: dict[str, Any] = {"error": what, "hint": "", "exit_code": 2}
    return JSONResponse(body, error.status_code, headers=error.headers)


async def _bug(request: Request, error: Exception) -> Response:
    if refused := explain_refusal(error):
        return await _explain(request, refused)
    body = {
        "error": f"this is a bug in memfit ({type(error).__name__}: {error})",
        "hint": "please report it with the output of `memfit doctor`",
        "exit_code": 1,
    }
    return JSONResponse(body, 500)
