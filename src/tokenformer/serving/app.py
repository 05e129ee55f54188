"""The routes: what arrives by HTTP becomes jobs of the engine, and its tokens become answers.

Enters: `Served`, its `Engine` and limits. Leaves: a Starlette application. Every refusal is an error in OpenAI's form;
a client that goes away takes its jobs with it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from . import answers
from .answering import Answering, Service
from .engine import Engine, GenerationError
from .guards import LOCAL, read_json
from .limits import Limits, RefusalError, bad_request
from .metrics import Metrics
from .models import Served
from .requests import ChatRequest, CompletionRequest, parsed
from .routes import NO_STORE, guarded_routes, json_response, page_policy, page_response


class EventStream(StreamingResponse):
    """A stream that is closed when the client goes away, not when it is next collected."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body: Any = self.body_iterator  # a generator of ours, which can be closed
        async with aclosing(body):
            await super().__call__(scope, receive, send)


class App:
    """The routes of one server."""

    def __init__(self, served: Served, engine: Engine, limits: Limits, *, key: str | None, local: bool) -> None:
        self.served, self.engine, self.limits, self.key = served, engine, limits, key
        self.hosts = LOCAL if local else ()
        self.metrics, self.created = Metrics(engine), int(time.time())
        self.service = Service(served, engine, limits, self.metrics)
        self._page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
        self._policy = page_policy(self._page)
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encoder")  # tokenizers take one thread at a time

    def asgi(self) -> Starlette:
        """The application."""
        routes = [
            ("/v1/completions", self.completions, "POST", True),
            ("/v1/chat/completions", self.chat, "POST", True),
            ("/v1/models", self.models, "GET", True),
            ("/v1/models/{name:path}", self.model, "GET", True),
            ("/metrics", self.counters, "GET", True),
            ("/health", self.health, "GET", False),
            ("/", self.page, "GET", False),
        ]
        return guarded_routes(routes, self.hosts, self.key, self._counted, "GET /v1/models and docs/serving.md")

    def _counted(self, path: str, status: int) -> None:
        self.metrics.requests.labels(path, status).inc()

    async def completions(self, request: Request) -> Response:
        asked = parsed(CompletionRequest, await read_json(request, self.limits))
        self._check_choices(len(asked.prompts) * asked.n)
        return await self._answer(request, asked, lambda: [self.served.ids_of(prompt) for prompt in asked.prompts])

    async def chat(self, request: Request) -> Response:
        asked = parsed(ChatRequest, await read_json(request, self.limits))
        self._check_choices(asked.n)
        messages = [message.as_text() for message in asked.messages]
        return await self._answer(request, asked, lambda: [self.served.chat_ids(messages)])

    def _check_choices(self, choices: int) -> None:
        if choices > self.limits.choices:
            raise bad_request(f"{choices} answers were asked for; at most {self.limits.choices} come in one request")

    async def _answer(self, request: Request, asked: Any, encode: Callable[[], list[list[int]]]) -> Response:
        choice = self.served.choice(asked.model)
        self.engine.check_room(1)
        prompts = await asyncio.get_running_loop().run_in_executor(self._encoder, encode)
        answering = Answering(self.service, asked, prompts, choice)
        form = answers.Form(isinstance(asked, ChatRequest), asked.model)
        if asked.stream:
            include = asked.stream_options.include_usage
            return EventStream(_stream(answering, form, include), media_type="text/event-stream", headers=NO_STORE)
        return await _whole(request, answering, form)

    async def models(self, request: Request) -> Response:
        return JSONResponse(answers.model_list(self.served.names, self.created))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self.served.choice(name)
        return JSONResponse(answers.model_card(name, self.created))

    async def counters(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def health(self, request: Request) -> Response:
        state = "failed" if self.engine.failed else "draining" if self.engine.draining else "ok"
        return JSONResponse({"status": state}, status_code=200 if state == "ok" else 503)

    async def page(self, request: Request) -> Response:
        return page_response(self._page, self._policy)


async def _stream(answering: Answering, form: answers.Form, include_usage: bool) -> AsyncIterator[bytes]:
    try:
        if form.chat:
            for index in range(len(answering.jobs)):
                yield answers.event(form.opening(index))
        async with aclosing(answering.events()) as events:
            async for index, text, reason in events:
                if text:
                    yield answers.event(form.piece(index, text, None))
                if reason is not None:
                    yield answers.event(form.piece(index, "", reason))
        if include_usage:
            yield answers.event(form.counts(answering.usage))
        yield answers.DONE
    except GenerationError as error:
        yield answers.event(answers.error_body(RefusalError(500, "server_error", str(error))))
    finally:
        answering.close()


async def _whole(request: Request, answering: Answering, form: answers.Form) -> Response:
    """All answers at once, unless the client goes away first."""

    async def gather() -> Response:
        texts, reasons = dict.fromkeys(range(len(answering.jobs)), ""), {}
        async with aclosing(answering.events()) as events:
            async for index, text, reason in events:
                texts[index] += text
                if reason is not None:
                    reasons[index] = reason
        return json_response(form.whole(texts, reasons, answering.usage))

    work = asyncio.create_task(gather())
    gone = asyncio.ensure_future(request.receive())  # after the body, only that the client has gone can come
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise bad_request("the client went away", status=499)
        return work.result()
    finally:
        for task in (work, gone):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
        answering.close()
