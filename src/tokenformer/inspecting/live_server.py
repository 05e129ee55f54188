"""The server of the live page: on this machine only, on the machinery of `tokenformer serve`.

    tokenformer inspect runs/demo/stage-3/model --text book.txt --serve

GET / is the page. POST api/answer, api/change, api/token and api/sheet take JSON, checked field by field, and are
refused in one line, in the form of OpenAI's errors. Requests for another host's name, or of another content type, which
is all that a foreign page in the same browser could send, are refused as there.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from ..errors import BadRequestError, one_line
from ..serving.guards import LOCAL, read_json
from ..serving.limits import Limits, bad_request
from ..serving.requests import Ids, checked
from ..serving.routes import guarded_routes, json_response, page_response
from ..serving.server import HttpServer
from .folder import Inspection
from .live import MOST_TEXT, Live
from .page import policy
from .sources import MOST

HOST = "127.0.0.1"
LIMITS = Limits(body=2**20, drain_seconds=5.0)
MOST_SWITCHES, MOST_SETS = 1000, 50
MOST_FACTOR = 100.0

Number = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Factor = Annotated[float, Field(ge=-MOST_FACTOR, le=MOST_FACTOR)]
ShortText = Annotated[StrictStr, Field(max_length=100)]
# The bounds of `Ids` say what an id is; this says how many.
ManyIds = Annotated[Ids, Field(max_length=MOST)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class AnswerRequest(_Request):
    """What comes after ids, with tokens switched: (layer, token, factor), where a factor of null is off."""

    ids: ManyIds | None = None
    switches: list[tuple[Number, Number, Factor | None]] = Field([], max_length=MOST_SWITCHES)
    sets: list[ShortText] = Field([], max_length=MOST_SETS)


class TokenRequest(_Request):
    """The weights of one token."""

    ids: ManyIds | None = None
    layer: Number
    token: Number


class SheetRequest(_Request):
    """Another text."""

    text: StrictStr = Field(min_length=1, max_length=MOST_TEXT)


class LiveServer(HttpServer):
    """A server that listens already, at `address`, and answers as soon as it runs."""

    def __init__(self, inspection: Inspection, *, port: int = 8000) -> None:
        self.live = Live(inspection)
        self.page = self.live.page()
        self.draining = self.failed = False
        self.answers: set[object] = set()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="answers")
        routes = [
            ("/", self._page, "GET", False),
            ("/api/answer", self._route(AnswerRequest, self.live.answer), "POST", False),
            ("/api/change", self._route(AnswerRequest, self.live.change), "POST", False),
            ("/api/token", self._route(TokenRequest, self.live.token), "POST", False),
            ("/api/sheet", self._route(SheetRequest, self.live.sheet), "POST", False),
        ]
        app = guarded_routes(routes, LOCAL, None, lambda path, status: None, "the page at /")
        super().__init__(app, self, host=HOST, port=port, drain_seconds=LIMITS.drain_seconds)

    def start(self) -> None:
        """Nothing is to be started: answers are computed when they are asked for."""

    def stop(self) -> None:
        """End, when what runs has ended."""
        self._worker.shutdown(cancel_futures=True)

    async def _page(self, request: Any) -> Any:
        return page_response(self.page, f"{policy(live=True)}; frame-ancestors 'none'")

    def _route(self, kind: type[BaseModel], act: Callable[..., dict[str, Any]]) -> Callable[[Any], Any]:
        """A route that reads JSON of this kind and answers with what `act` makes of its fields."""

        async def answer(request: Any) -> Any:
            asked = checked(kind, await read_json(request, LIMITS))
            fields = {name: getattr(asked, name) for name in kind.model_fields}
            running = object()
            self.answers.add(running)
            try:
                return json_response(
                    await asyncio.get_running_loop().run_in_executor(self._worker, lambda: act(**fields))
                )
            except BadRequestError as error:
                raise bad_request(one_line(error)) from error
            finally:
                self.answers.discard(running)

        return answer
