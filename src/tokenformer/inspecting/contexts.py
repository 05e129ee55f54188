"""Contexts from an index of a larger text, for the cards of a page.

Enters: a folder of `index_tokens`, and which tokens have a card. Leaves: for each a few contexts as visible text.
"""

import os
from typing import Any

from torch import Tensor

from ..errors import BadRequestError
from ..inside import TokenIndex
from .pieces import visible
from .subject import Subject

EACH = 3
BEFORE, AFTER = 24, 10  # ids


class Contexts:
    """The contexts of an index."""

    def __init__(self, folder: str | os.PathLike) -> None:
        self.index = TokenIndex(folder)

    def of(self, subject: Subject, kept: dict[str, Tensor]) -> list[list[list[str]]]:
        """For every kept token, in order, what is before the place where it fires, there, and after it."""
        for name, place in subject.places.items():
            if name in kept and self.index.layers.get(name) != place.num_tokens:
                found = f"{self.index.layers[name]:,} tokens" if name in self.index.layers else "no layer of that name"
                raise BadRequestError(
                    f"the index in {self.index.folder} is of another model: {name} has {place.num_tokens:,} tokens, "
                    f"and it has {found}"
                )
        return [self._of(subject, name, token) for name, chosen in kept.items() for token in chosen.tolist()]

    def _of(self, subject: Subject, name: str, token: int) -> list[list[str]]:
        return [
            [
                _short(subject.reads, ids)
                for ids in (example.ids[max(0, example.at - BEFORE) : example.at], *_rest(example))
            ]
            for example in self.index.examples(name, token)[:EACH]
        ]


def _rest(example: Any) -> tuple[list[int], list[int]]:
    return example.ids[example.at : example.at + 1], example.ids[example.at + 1 : example.at + 1 + AFTER]


def _short(tokenizer: Any, ids: list[int]) -> str:
    """Ids as one line of text."""
    return visible(tokenizer.decode(ids)).replace("\n", "").replace("\t", "")
