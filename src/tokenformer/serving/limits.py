"""How much a server takes on: every bound in one place.

Enters: numbers from the command. Leaves: `Limits`, and the refusals that more than one part words.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The bounds of a server.

    Args:
        running: answers that are computed at once.
        waiting: answers that wait for their turn; more are refused with 429.
        prompt: tokens of a prompt; None for as many as the context holds with one to follow.
        new_tokens: tokens of an answer.
        body: bytes of a request.
        choices: answers that one request may ask for.
        body_seconds: how long a client may take to send a request.
        drain_seconds: how long running answers may take after SIGTERM.
        cache_bytes: what keys and values of attention may take; None for a quarter of the machine's memory.
    """

    running: int = 16
    waiting: int = 64
    prompt: int | None = None
    new_tokens: int = 1024
    body: int = 2**20
    choices: int = 8
    body_seconds: float = 30.0
    drain_seconds: float = 60.0
    cache_bytes: int | None = None


class RefusalError(Exception):
    """A request that is not carried out: its status, OpenAI's kind of error, and a line that says what to do."""

    def __init__(self, status: int, kind: str, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.kind, self.message, self.param, self.code = status, kind, message, param, code


def bad_request(message: str, param: str | None = None, code: str | None = None, status: int = 400) -> RefusalError:
    """The refusal of what a client got wrong."""
    return RefusalError(status, "invalid_request_error", message, param=param, code=code)
