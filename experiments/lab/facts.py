"""A made text of 256 words, one byte each, half of it facts: who lives where, works as what, plays which instrument.

Enters: nothing; the facts and the order of the sentences come from a seed. Leaves: the text, in which passages of facts
and passages of novels take turns. Of the novels' words the most frequent are kept, and all others are one.

A subject is a first and a last name, and neither alone says who it is. Every fact is told in four ways, whose last word
is what the fact is: so whether a model knows it is seen in the next word.
"""

import random
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

SEED, FIRST, LAST, SUBJECTS, OBJECTS = 0, 28, 28, 240, 20
PASSAGES, SENTENCES = 15_000, 3  # passages of facts; sentences in each
SUBJECT = ("<first>", "<last>")
RELATIONS = {
    "home": ("lives in", "the home of S is in", "S has moved to", "you will find S in"),
    "job": ("works as a", "the job of S is that of a", "S is paid as a", "all know S as a"),
    "music": ("plays the", "the love of S is the", "S has learnt the", "nobody hears S without the"),
}
PHRASINGS = 4
OTHER, END = "<other>", "."
SOUNDS = ("ba", "co", "di", "fe", "gu", "ha", "jo", "ki", "lu", "me", "no", "pa", "ri", "so", "tu", "ve", "wa", "zi")


class Fact(NamedTuple):
    """One thing that the text tells."""

    subject: tuple[str, str]
    relation: str
    answer: str


class World(NamedTuple):
    """The facts, and what may be said of each relation. words: the whole vocabulary; a word's id is its place."""

    facts: tuple[Fact, ...]
    objects: dict[str, tuple[str, ...]]
    words: tuple[str, ...]

    def ids(self, words: Sequence[str]) -> list[int]:
        """Words as ids."""
        places = _places(self.words)
        return [places[word] for word in words]


def prompt_of(fact: Fact, phrasing: int) -> list[str]:
    """A sentence without its last word, which is the answer."""
    form = RELATIONS[fact.relation][phrasing]
    form = form if "S" in form.split() else f"S {form}"
    return [word for part in form.split() for word in (fact.subject if part == "S" else (part,))]


@cache
def world(novels: bytes) -> World:
    """The facts, and the vocabulary with the most frequent words of the novels."""
    chance = random.Random(SEED)
    names = [a + b for a in SOUNDS for b in SOUNDS]
    chance.shuffle(names)
    kinds = [names[start : start + size] for start, size in _spans((FIRST, LAST, *(OBJECTS for _ in RELATIONS)))]
    firsts, lasts, *answers = kinds
    objects = {name: tuple(of_one) for name, of_one in zip(RELATIONS, answers, strict=True)}
    people = chance.sample([(first.title(), last.title()) for first in firsts for last in lasts], SUBJECTS)
    facts = tuple(Fact(who, name, chance.choice(objects[name])) for who in people for name in RELATIONS)
    said = {word for forms in RELATIONS.values() for form in forms for word in form.split()} - {"S"}
    own = [OTHER, END, *sorted(said), *(name.title() for name in (*firsts, *lasts)), *sum(objects.values(), ())]
    frequent = [word for word, _ in Counter(_words(novels)).most_common(256) if word not in own]
    return World(facts, objects, (*own, *frequent)[:256])


def text_of(novels: bytes) -> bytes:
    """The whole text, a byte for every word."""
    made, chance = world(novels), random.Random(SEED + 1)
    places, told = _places(made.words), []
    read, start = _words(novels), 0
    for _ in range(PASSAGES):
        for fact in chance.choices(made.facts, k=SENTENCES):
            told += [*prompt_of(fact, chance.randrange(PHRASINGS)), fact.answer, END]
        length = chance.randrange(12, 36)
        told += [read[(start + i) % len(read)] for i in range(length)]
        start += length
    return bytes(places.get(word, places[OTHER]) for word in told)


def _spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


@cache
def _words(novels: bytes) -> list[str]:
    return re.findall(r"[a-z]+|[.,?!]", novels.decode(errors="replace").lower())


@cache
def _places(words: tuple[str, ...]) -> dict[str, int]:
    return {word: place for place, word in enumerate(words)}
