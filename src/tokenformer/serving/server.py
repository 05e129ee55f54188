"""The server: a socket, the event loop, and an end that loses nobody.

Enters: `Served` and limits. Leaves: when SIGTERM or Ctrl-C has come and what was running has been answered. A second
signal ends it at once. While it drains, new requests get 503.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from ..errors import BadRequestError, BadResultError, one_line
from .app import App
from .engine import FAILED, Engine
from .guards import LOCAL
from .limits import Limits
from .models import Served

CONNECTIONS = 1024


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which on a signal first lets the engine finish what runs.

    uvicorn by itself would stop listening at once, and end by the signal it caught.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine, seconds: float) -> None:
        super().__init__(config)
        self.engine, self.seconds = engine, seconds
        self.deadline: float | None = None

    def handle_exit(self, sig: int, frame: Any) -> None:
        """A signal."""
        if self.engine.draining:
            self.force_exit = self.should_exit = True
        self.engine.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is time to end."""
        if self.engine.draining:
            now = asyncio.get_running_loop().time()
            self.deadline = self.deadline or now + self.seconds
            self.should_exit |= not self.engine.answers or now > self.deadline
        self.should_exit |= self.engine.failed and not self.engine.answers
        return await super().on_tick(counter)


def serve(
    served: Served,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    key: str | None = None,
    limits: Limits | None = None,
    started: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve until a signal comes. `started` is called with the address as soon as requests are taken."""
    limits = limits or Limits()
    engine = Engine(served.model, served.always, limits, served.context, served.stop_ids)
    listening = _listen(host, port)
    app = App(served, engine, limits, key=key, local=host in LOCAL)
    config = uvicorn.Config(
        app.asgi(),
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=5,
        lifespan="off",
    )
    server = DrainingServer(config, engine, limits.drain_seconds)

    async def run() -> None:
        engine.start()
        try:
            shown = f"[{host}]" if ":" in host else host
            started(f"http://{shown}:{listening.getsockname()[1]}")
            await server.serve(sockets=[listening])
        finally:
            failed = engine.failed
            await asyncio.to_thread(engine.stop)
        if failed:
            raise BadResultError(f"{FAILED.partition(';')[0]}; it has ended, and can be started again")

    asyncio.run(run())


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise BadRequestError(
            f"{host} port {port} cannot be listened on: {one_line(error.strerror or error)}; choose another --port"
        ) from error
