"""Routes behind guards, and errors in OpenAI's form: what the two servers of this project share.

Enters: handlers by path. Leaves: a Starlette application that refuses in one line what a handler raises as a refusal,
and counts how each request ended; and the policy under which a page runs nothing but itself.
"""

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from .answers import error_body
from .engine import GenerationError
from .guards import check_host, check_key
from .limits import RefusalError, bad_request

Handler = Callable[[Request], Awaitable[Response]]
NO_STORE = {"Cache-Control": "no-store"}


def guarded_routes(
    routes: Iterable[tuple[str, Handler, str, bool]],
    hosts: Collection[str],
    key: str | None,
    counted: Callable[[str, int], Any],
    see: str,
) -> Starlette:
    """The application of (path, handler, method, whether the key is asked for).

    Only requests for one of `hosts` are let in, if there are any. `see` is what an unknown path is told to look at.
    """

    def guarded(path: str, act: Handler, needs_key: bool) -> Handler:
        async def handle(request: Request) -> Response:
            try:
                check_host(request, hosts)
                if needs_key:
                    check_key(request, key)
                response = await act(request)
            except RefusalError as refusal:
                response = error_response(refusal)
            except GenerationError as error:
                response = error_response(RefusalError(500, "server_error", str(error)))
            counted(path, response.status_code)
            return response

        return handle

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path[:100]} is not known here; see {see}"
        return error_response(bad_request(message, status=error.status_code))

    return Starlette(
        routes=[Route(path, guarded(path, act, with_key), methods=[method]) for path, act, method, with_key in routes],
        exception_handlers={HTTPException: unknown, Exception: _unforeseen},
    )


def error_response(refusal: RefusalError) -> Response:
    """A refusal as the client sees it."""
    headers = {"Retry-After": "1"} if refusal.status in (429, 503) else {}
    return JSONResponse(error_body(refusal), status_code=refusal.status, headers=headers)


def json_response(answer: Any) -> Response:
    """An answer that nobody keeps."""
    return JSONResponse(answer, headers=NO_STORE)


def page_response(page: str, policy: str) -> Response:
    """A page under its policy."""
    return HTMLResponse(page, headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})


async def _unforeseen(request: Request, error: Exception) -> Response:
    return error_response(RefusalError(500, "server_error", "the server failed on this request; its log says why"))


def page_policy(page: str) -> str:
    """The policy of a page whose own script and style alone count, and which may ask this server alone."""
    sources = []
    for tag in ("script", "style"):
        found = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert found is not None
        digest = base64.b64encode(hashlib.sha256(found.group(1).encode()).digest()).decode()
        sources.append(f"{tag}-src 'sha256-{digest}'")
    allowed = ["connect-src 'self'", "img-src data:", *sources, "form-action 'none'", "base-uri 'none'"]
    return "; ".join(["default-src 'none'", *allowed])
