"""The jobs of one request, and what comes of them.

Enters: a request that has been checked, its prompts as ids, and what it chose of the model. Leaves: (index of the
answer, text, reason of its end or None), as it comes. However it ends, the jobs' places are free again.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from . import answers
from .batching import Draw
from .engine import Engine, Job
from .limits import Limits, bad_request
from .metrics import Metrics
from .models import Choice, Served
from .requests import ChatRequest
from .text import AnswerText

DEFAULT_TOKENS = 16  # of a completion that does not say how many, as OpenAI's


@dataclass(frozen=True)
class Service:
    """What every request needs."""

    served: Served
    engine: Engine
    limits: Limits
    metrics: Metrics


class Answering:
    """The jobs of one request, and what comes of them: (index, text, reason of the end or None), as it comes."""

    def __init__(self, service: Service, asked: Any, prompts: list[list[int]], choice: Choice) -> None:
        self.service, self.asked, self.began = service, asked, time.perf_counter()
        self.prompt_tokens, self.drawn = sum(map(len, prompts)), 0
        each = [(ids, self._room(ids)) for ids in prompts for _ in range(asked.n)]
        service.engine.check_room(len(each))
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        self.jobs: list[str] = []
        try:
            for i, (ids, room) in enumerate(each):
                draw = Draw(asked.temperature, asked.top_p, asked.top_k, seed + i)
                self.jobs.append(service.engine.submit(Job(ids, room, choice.groups, choice.size, draw)))
        except BaseException:
            self.close()
            raise
        service.metrics.prompt_tokens.inc(self.prompt_tokens)
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._follow(i, job)) for i, job in enumerate(self.jobs)]

    def _room(self, ids: list[int]) -> int:
        """How many tokens may follow a prompt."""
        served, limits = self.service.served, self.service.limits
        most = served.context - 1 if limits.prompt is None else min(limits.prompt, served.context - 1)
        if not ids:
            raise bad_request("the prompt is empty; send at least one character")
        if len(ids) > most:
            raise bad_request(
                f"the prompt has {len(ids):,} tokens; at most {most:,} are taken", code="context_length_exceeded"
            )
        room = min(served.context - len(ids), limits.new_tokens)
        asked = getattr(self.asked, "max_completion_tokens", None) or self.asked.max_tokens
        if asked is None:
            return room if isinstance(self.asked, ChatRequest) else min(room, DEFAULT_TOKENS)
        if asked > room:
            raise bad_request(
                f"max_tokens: {asked:,} was given; at most {room:,} can follow this prompt of {len(ids):,} tokens",
                "max_tokens",
                "context_length_exceeded",
            )
        return asked

    async def _follow(self, index: int, job: str) -> None:
        try:
            text, reason = AnswerText(self.service.served.tokenizer, self.asked.stop), "length"
            async with aclosing(self.service.engine.tokens(job)) as tokens:
                async for new in tokens:
                    if not self.drawn:
                        self.service.metrics.first.observe(time.perf_counter() - self.began)
                    self.drawn += len(new)
                    ended = bool(new) and new[-1] in self.service.engine.stop_ids
                    piece = "".join([text.add(token) for token in new])
                    if piece:
                        self._events.put_nowait((index, piece, None))
                    if ended or text.stopped:
                        reason = "stop"
                        break
            self._events.put_nowait((index, text.end(), "stop" if text.stopped else reason))
        except Exception as error:
            self._events.put_nowait(error)

    async def events(self) -> AsyncGenerator[tuple[int, str, str | None], None]:
        """What comes, until every answer has ended."""
        try:
            left = len(self._tasks)
            while left:
                event = await self._events.get()
                if isinstance(event, Exception):
                    raise event
                left -= event[2] is not None
                yield event
            self.service.metrics.whole.observe(time.perf_counter() - self.began)
        finally:
            self.close()

    def close(self) -> None:
        """Give every place free that is still taken."""
        for task in getattr(self, "_tasks", ()):
            task.cancel()
        for job in self.jobs:
            self.service.engine.cancelled += self.service.engine.forget(job)

    @property
    def usage(self) -> dict[str, int]:
        return answers.usage(self.prompt_tokens, self.drawn)
