"""The engine: requests in from the event loop, tokens out of the thread that runs the model.

Enters: a `Job`: a prompt's ids, how many tokens to draw, how, with which token groups and with which share of the
model's tokens. Leaves: its tokens, as they
come, to one `async for`; who stops listening gives the place free. What is asked when every place is taken, or while
the server drains, is refused before it begins.
"""

import asyncio
import threading
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.continuous_batching import RequestStatus

from ..pattention.sizes import WHOLE
from .batching import Draw, new_manager
from .limits import Limits, RefusalError

BUSY = RefusalError(429, "rate_limit_error", "the server has as many requests as it takes; try again in a moment")
DRAINING = RefusalError(503, "server_error", "the server is shutting down and takes no new requests")
FAILED = "generation failed on the server; its log says why"
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Job:
    """One answer that is to be generated."""

    ids: Sequence[int]
    new_tokens: int
    groups: tuple[str, ...] = ()
    size: float = WHOLE
    draw: Draw = field(default_factory=Draw)


class GenerationError(RuntimeError):
    """The model could not compute the answer."""


class Engine:
    """A model that answers many jobs at once. To be started inside the event loop."""

    def __init__(
        self, model: PreTrainedModel, always: Sequence[str], limits: Limits, context: int, stop_ids: Sequence[int]
    ) -> None:
        self.limits, self.stop_ids = limits, list(stop_ids)
        self.manager = new_manager(model, always, limits, context, self.stop_ids or -1)
        self.answers: dict[str, asyncio.Queue[Any]] = {}  # of each job, its tokens, None after the last, or an error
        self.draining = self.stopping = self.failed = False
        self.generated = 0
        self.cancelled = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener = threading.Thread(target=self._listen, name="answers", daemon=True)

    def start(self) -> None:
        """Begin to run the model."""
        self._loop = asyncio.get_running_loop()
        self.manager.start()
        self._listener.start()

    def stop(self) -> None:
        """End at once: what still runs fails."""
        self.stopping = True
        self.manager.stop(block=True, hard_stop=True)
        self._listener.join()

    @property
    def running(self) -> int:
        """How many jobs are being answered."""
        return min(len(self.answers), self.limits.running)

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return len(self.answers) - self.running

    def check_room(self, jobs: int) -> None:
        """Refuse so many jobs more if there is no room for all of them."""
        if self.draining or self.stopping:
            raise DRAINING
        if self.failed:
            raise RefusalError(503, "server_error", FAILED)
        if len(self.answers) + jobs > self.limits.running + self.limits.waiting:
            raise BUSY

    def submit(self, job: Job) -> str:
        """Begin a job. Whoever calls this must listen to it by `tokens`."""
        name = uuid.uuid4().hex
        self.answers[name] = asyncio.Queue()
        added = self.manager.add_request(
            list(job.ids),
            request_id=name,
            max_new_tokens=job.new_tokens,
            streaming=True,
            eos_token_id=self.stop_ids or -1,
            groups=job.groups,
            size=job.size,
            draw=job.draw,
        )
        if added is None:
            del self.answers[name]
            raise RefusalError(503, "server_error", FAILED)
        return name

    async def tokens(self, name: str) -> AsyncGenerator[list[int], None]:
        """The new tokens of a job as they come. Left early, it is cancelled."""
        answer, seen, ended = self.answers[name], 0, False
        try:
            while not ended:
                output = await answer.get()
                if output is None or output.status == RequestStatus.FAILED:
                    ended = True
                    raise GenerationError(FAILED)
                new, seen = output.generated_tokens[seen:], len(output.generated_tokens)
                self.generated += len(new)
                ended = output.is_finished()
                yield new
        finally:
            self.forget(name, cancel=not ended)

    def forget(self, name: str, cancel: bool = True) -> bool:
        """Give the place of a job free. Whether it still had one."""
        had_one = self.answers.pop(name, None) is not None
        if had_one and cancel:
            self.manager.cancel_request(name)
        return had_one

    def _listen(self) -> None:
        """Hand outputs over to the event loop. Runs in a thread of its own."""
        assert self._loop is not None
        while True:
            output = self.manager.get_result(timeout=POLL_SECONDS)
            if output is not None:
                self._loop.call_soon_threadsafe(self._deliver, output)
            elif not self.manager.is_running():
                if not self._loop.is_closed():
                    self._loop.call_soon_threadsafe(self._end)
                return

    def _deliver(self, output: Any) -> None:
        answer = self.answers.get(output.request_id)
        if answer is not None:  # its listener may have gone
            answer.put_nowait(output)

    def _end(self) -> None:
        """The model's thread is over: nobody is left waiting."""
        self.failed = not self.stopping
        for answer in self.answers.values():
            answer.put_nowait(None)
