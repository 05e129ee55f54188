"""The text of one answer while its tokens come in: whole characters only, and no further than a stop string.

Enters: ids as they are drawn. Leaves: pieces of text; what might be the beginning of a stop string is held back until
it is known not to be.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..models.text import TextStream


class AnswerText:
    """Text from ids, one after the other."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self.stops, self.stopped = stops, False
        self._held = ""
        self._pieces: list[str] = []
        self._stream = TextStream(tokenizer, self._pieces.append)
        self._stream.in_prompt = False  # which the stream would leave out

    def add(self, token: int) -> str:
        """The text that is certain now. Nothing comes after a stop string."""
        self._stream.put(torch.tensor([token]))
        return self._release(final=False)

    def end(self) -> str:
        """The rest, when the last token has come."""
        self._stream.end()
        return self._release(final=True)

    def _release(self, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + "".join(self._pieces)
        self._pieces.clear()
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        held = 0 if final else max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text begin the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
