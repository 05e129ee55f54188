"""What stands before every route: the key, the host's name, the size and form of a body.

Enters: a request as it arrives. Leaves: its JSON, or a refusal. A page of a foreign site that is open in the user's
browser could otherwise ask a server on the same machine: the host's name and the content type keep it out.
"""

import asyncio
import hmac
import json
from collections.abc import Collection
from typing import Any

from starlette.requests import ClientDisconnect, Request

from ..errors import one_line
from .limits import Limits, RefusalError, bad_request

LOCAL = ("127.0.0.1", "localhost", "::1")


def check_key(request: Request, key: str | None) -> None:
    """Refuse who does not know the key, if there is one."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if key is None or (scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode())):
        return
    what = "is wrong" if given else "is missing"
    message = f"the API key {what}; send it as Authorization: Bearer KEY"
    raise RefusalError(401, "invalid_request_error", message, code="invalid_api_key")


def check_host(request: Request, known: Collection[str]) -> None:
    """Refuse a request for another host's name, where only this machine may ask."""
    name = request.headers.get("host", "").rsplit(":", 1)[0] if known else ""
    if known and name.strip("[]").lower() not in known:
        raise bad_request(f"the host {name[:60]!r} is not this server; use {' or '.join(known)}", status=403)


async def read_json(request: Request, limits: Limits) -> Any:
    """The JSON of a body, of which no more is read than the limit."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise bad_request(f"the content type is {kind[:60]!r}; application/json is expected", status=415)
    try:
        body = await asyncio.wait_for(_read(request, limits.body), limits.body_seconds)
    except asyncio.TimeoutError:
        raise bad_request(f"the request did not arrive within {limits.body_seconds:g} seconds", status=408) from None
    except ClientDisconnect:
        raise bad_request("the client went away", status=499) from None
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the request is not JSON: {one_line(error)}") from error


async def _read(request: Request, most: int) -> bytes:
    too_large = bad_request(f"the request is larger than {most:,} bytes; send less", status=413)
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > most:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise too_large
    return bytes(body)
