"""The requests that the server understands: OpenAI's, checked field by field.

Enters: the JSON of a request. Leaves: a `CompletionRequest` or `ChatRequest` whose values are in their bounds, or a
refusal that names the field. What OpenAI's interface has and this server does not do is refused, unless it asks for
nothing: to answer as if it had been done would be wrong in silence.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError, field_validator

from ..errors import did_you_mean, one_line, shown
from .limits import bad_request

# What asks for nothing: accepted with these values only.
NOTHING: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
# Notes for OpenAI's own books, which change no answer.
NOTES = ("metadata", "prompt_cache_key", "safety_identifier", "store", "user")
MOST_STOPS = 4
LONGEST_STOP = 256

Ids = list[Annotated[StrictInt, Field(ge=0)]]
Model = TypeVar("Model", bound=BaseModel)


class StreamOptions(BaseModel):
    """Whether the last event of a stream counts the tokens."""

    model_config = ConfigDict(extra="forbid")
    include_usage: StrictBool = False


class _Request(BaseModel):
    """What both kinds have."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    model: StrictStr
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[StrictInt, Field(ge=0)] = 0
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    stop: list[Annotated[StrictStr, Field(min_length=1, max_length=LONGEST_STOP)]] = Field([], max_length=MOST_STOPS)
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[StrictInt, Field(ge=1)] = 1
    stream: StrictBool = False
    stream_options: StreamOptions = StreamOptions()

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class CompletionRequest(_Request):
    """POST /v1/completions: text that goes on."""

    prompt: StrictStr | Ids | list[StrictStr] | list[Ids]

    @property
    def prompts(self) -> list[str | list[int]]:
        """Every prompt; several may come in one request."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or not given or isinstance(given[0], int) else given


class TextPart(BaseModel):
    """A part of a message that comes in parts. Only text is known."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: StrictStr


class Message(BaseModel):
    """A turn of a conversation."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: StrictStr | list[TextPart]
    name: StrictStr | None = None

    def as_text(self) -> dict[str, str]:
        """As chat templates know it."""
        parts = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": parts}


class ChatRequest(_Request):
    """POST /v1/chat/completions: the next turn of a conversation."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None


def parsed(kind: type[_Request], body: Any) -> Any:
    """The request in the JSON of a body."""
    asked = {name: value for name, value in _given(body).items() if name not in NOTES}
    for name, values in NOTHING.items():
        if name in asked and asked.pop(name) not in values:
            raise bad_request(f"{name} is not supported by this server; leave it out", name)
    return checked(kind, asked)


def _given(body: Any) -> dict[str, Any]:
    """The fields of a body that are not null."""
    if not isinstance(body, dict):
        raise bad_request(f"the request is {shown(body, 40)}; a JSON object is expected")
    return {name: value for name, value in body.items() if value is not None}


def checked(kind: type[Model], body: Any) -> Model:
    """The JSON of a body as what a route takes, or a refusal that names the field."""
    asked = _given(body)
    for name in asked:
        if name not in kind.model_fields:
            raise bad_request(
                f"{shown(name, 60)} is not a field; {did_you_mean(name[:60], kind.model_fields)}", name[:60]
            )
    try:
        return kind.model_validate(asked)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"][:3] if not str(part).startswith(("list[", "constrained")))
        given = "" if first["type"] == "missing" else f"; {shown(first['input'], 60)} was given"
        raise bad_request(f"{where}: {one_line(first['msg'])}{given}", str(first["loc"][0])) from error
