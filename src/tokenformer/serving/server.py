"""The server: a socket, the event loop, and an end that loses nobody.

Enters: `Served` and limits. Leaves: when SIGTERM or Ctrl-C has come and what was running has been answered. A second
signal ends it at once. While it drains, new requests get 503.
"""

import asyncio
import signal
import socket
from collections.abc import Sized
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette

from ..errors import BadRequestError, BadResultError, one_line
from .app import App
from .engine import Engine
from .guards import LOCAL
from .limits import Limits
from .models import Served

CONNECTIONS = 1024


class Work(Protocol):
    """What a server does: an engine, or whatever else computes answers.

    draining: new requests are refused. failed: no answer will come any more. answers: those that are being computed.
    """

    draining: bool
    failed: bool

    @property
    def answers(self) -> Sized: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which on a signal first lets the work finish what runs.

    uvicorn by itself would stop listening at once, and end by the signal it caught.
    """

    def __init__(self, config: uvicorn.Config, work: Work, seconds: float) -> None:
        super().__init__(config)
        self.work, self.seconds = work, seconds
        self.deadline: float | None = None

    def handle_exit(self, sig: int, frame: Any) -> None:
        """A signal."""
        if self.work.draining:
            self.force_exit = self.should_exit = True
        self.work.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is time to end."""
        if self.work.draining:
            now = asyncio.get_running_loop().time()
            self.deadline = self.deadline or now + self.seconds
            self.should_exit |= not self.work.answers or now > self.deadline
        self.should_exit |= self.work.failed and not self.work.answers
        return await super().on_tick(counter)


class HttpServer:
    """An application that listens already, at `address`, and answers as soon as it runs."""

    def __init__(self, app: Starlette, work: Work, *, host: str, port: int, drain_seconds: float) -> None:
        self._work, self._listening = work, _listen(host, port)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._listening.getsockname()[1]}"
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=5,
            lifespan="off",
        )
        self._server = DrainingServer(config, work, drain_seconds)

    def run(self) -> None:
        """Serve until a signal comes, or `drain` is called."""
        asyncio.run(self._run())

    def drain(self) -> None:
        """Take no new requests, finish what runs, and end; called again, end at once."""
        self._server.handle_exit(signal.SIGTERM, None)

    async def _run(self) -> None:
        self._work.start()
        try:
            await self._server.serve(sockets=[self._listening])
        finally:
            failed = self._work.failed
            await asyncio.to_thread(self._work.stop)
        if failed:
            raise BadResultError("the model failed to compute a step, as the log says; the server has ended")


class Server(HttpServer):
    """The server of a model: OpenAI's interface, and the page."""

    def __init__(
        self,
        served: Served,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        key: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        limits = limits or Limits()
        self.engine = Engine(served.model, served.always, limits, served.context, served.stop_ids)
        app = App(served, self.engine, limits, key=key, local=host in LOCAL)
        super().__init__(app.asgi(), self.engine, host=host, port=port, drain_seconds=limits.drain_seconds)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise BadRequestError(
            f"{host} port {port} cannot be listened on: {one_line(error.strerror or error)}; choose another --port"
        ) from error
