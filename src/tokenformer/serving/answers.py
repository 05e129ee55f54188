"""What the server sends: OpenAI's JSON of answers, of the events of a stream, and of errors.

Enters: pieces of answers with their index. Leaves: dictionaries, and server-sent events.
"""

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .limits import RefusalError

DONE = b"data: [DONE]\n\n"


@dataclass
class Form:
    """How the answers to one request are written: completions or turns of a chat."""

    chat: bool
    model: str
    name: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, texts: Mapping[int, str], reasons: Mapping[int, str], usage: dict[str, int]) -> dict[str, Any]:
        """All answers to a request, finished."""
        choices = []
        for index, text in texts.items():
            said = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            choices.append({"index": index, **said, "finish_reason": reasons[index], "logprobs": None})
        return {**self._head("chat.completion"), "choices": choices, "usage": usage}

    def opening(self, index: int) -> dict[str, Any]:
        """The first event of a chat's answer, which says who speaks."""
        return self._event(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def piece(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        """An event with some text, or with the reason of the end."""
        delta = {"content": text} if text or reason is None else {}
        return self._event(index, {"delta": delta} if self.chat else {"text": text}, reason)

    def counts(self, usage: dict[str, int]) -> dict[str, Any]:
        """The last event, if it was asked for."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage}

    def _event(self, index: int, said: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": index, **said, "finish_reason": reason, "logprobs": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        prefix, kind = ("chatcmpl", kind) if self.chat else ("cmpl", "text_completion")
        return {"id": f"{prefix}-{self.name}", "object": kind, "created": self.created, "model": self.model}


def usage(prompt: int, drawn: int) -> dict[str, int]:
    """How many tokens a request took."""
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


def error_body(refusal: RefusalError) -> dict[str, Any]:
    """An error as OpenAI writes it."""
    inner = {"message": refusal.message, "type": refusal.kind, "param": refusal.param, "code": refusal.code}
    return {"error": inner}


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode(errors="replace")


def model_list(names: list[str], created: int) -> dict[str, Any]:
    """What GET /v1/models answers."""
    return {"object": "list", "data": [model_card(name, created) for name in names]}


def model_card(name: str, created: int) -> dict[str, Any]:
    """One of them."""
    return {"id": name, "object": "model", "created": created, "owned_by": "tokenformer"}
