"""What an edit did: to the fact itself, in other words, to what is near it, and to everything else.

Enters: a model, and a way to write a fact. Leaves: for every edit, each from the unedited model, shares and losses.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch
from lab.facts import PHRASINGS, RELATIONS, Fact, World, prompt_of
from torch import Tensor

from .ways import RANK_ONE, TOKEN, TRAINED, Wanted, Writer, losses, top

SAID, KEPT = ("success", "in context", "paraphrase"), ("neighbours", "same subject")
PREFIXES, PREFIX = 4, 24  # beginnings of held-out text, behind which the same is asked again; other than edit() has
NEAR = 12  # subjects with one of the two names, and as many with neither


def chosen(world: World, count: int, seed: int) -> list[Wanted]:
    """Facts with other answers than the true ones, in random order."""
    chance = random.Random(seed)
    facts = chance.sample(world.facts, count)
    return [
        Wanted(fact, chance.choice([one for one in world.objects[fact.relation] if one != fact.answer]), i % PHRASINGS)
        for i, fact in enumerate(facts)
    ]


def known(model: Any, world: World) -> float:
    """How many of the facts a model knows, in the four ways in which each is told."""
    prompts = [world.ids([".", *prompt_of(fact, phrasing)]) for fact in world.facts for phrasing in range(PHRASINGS)]
    answers = torch.tensor([world.ids([fact.answer])[0] for fact in world.facts for _ in range(PHRASINGS)])
    return (top(model, prompts) == answers).float().mean().item()


class Judge:
    """Asks a model before and after an edit."""

    def __init__(self, model: Any, world: World, held_out: Tensor) -> None:
        self.model, self.world, self.held_out = model, world, held_out
        self.before = losses(model, held_out)
        self.prefixes = held_out[:PREFIXES, :PREFIX].tolist()

    def asked(self, wanted: Wanted) -> dict[str, list[list[int]]]:
        """The prompts of every kind."""
        world, fact = self.world, wanted.fact
        itself = wanted.prompt(world)
        others = [Wanted(one, "", wanted.phrasing) for one in self._neighbours(fact)]
        same = [Wanted(Fact(fact.subject, relation, ""), "", 0) for relation in RELATIONS if relation != fact.relation]
        return {
            "success": [itself],
            "in context": [[*prefix, *itself] for prefix in self.prefixes],
            "paraphrase": [wanted.prompt(world, phrasing) for phrasing in wanted.others],
            "neighbours": [one.prompt(world) for one in others],
            "same subject": [one.prompt(world, phrasing) for one in same for phrasing in range(PHRASINGS)],
        }

    def _neighbours(self, fact: Fact) -> list[Fact]:
        """Of other subjects the same relation: half of them have a name in common."""
        same = [one for one in self.world.facts if one.relation == fact.relation and one.subject != fact.subject]
        near = [one for one in same if set(one.subject) & set(fact.subject)][:NEAR]
        far = [one for one in same if not set(one.subject) & set(fact.subject)]
        return [*near, *far[:: len(far) // NEAR][:NEAR]]

    def answers(self, wanted: Wanted) -> dict[str, Tensor]:
        """What the model says to each."""
        asked = self.asked(wanted)
        said = top(self.model, [prompt for prompts in asked.values() for prompt in prompts])
        return dict(zip(asked, said.split([len(prompts) for prompts in asked.values()]), strict=True))

    def judged(self, wanted: Wanted, before: dict[str, Tensor]) -> dict[str, float]:
        """After the edit: how often the new answer is said, and the old one where it should be; and the drift."""
        (answer,), after = self.world.ids([wanted.answer]), self.answers(wanted)
        said = {kind: (after[kind] == answer).float().mean().item() for kind in SAID}
        kept = {kind: (after[kind] == before[kind]).float().mean().item() for kind in KEPT}
        risen = losses(self.model, self.held_out) - self.before
        first, last = self.world.ids(wanted.fact.subject)
        has = ((self.held_out[:, :-1] == first) & (self.held_out[:, 1:] == last)).any(1)
        return {**said, **kept, "drift": risen[~has].mean().item(), "drift, all text": risen.mean().item()}


def in_every_way(writer: Writer, judge: Judge, wanted: Wanted, rate: float, places: Sequence[str]) -> dict[str, Any]:
    """One edit in every way, each from the unedited model."""
    before, found = judge.answers(wanted), {}
    for at in places:
        with writer.token(wanted, at) as written:
            added = written.pop("added")
            found[f"{TOKEN}, {at}"] = {**judge.judged(wanted, before), **written}
        with writer.rank_one(wanted, at, added):
            found[f"{RANK_ONE}, {at}"] = judge.judged(wanted, before)
    with writer.trained(wanted, rate) as steps:
        found[TRAINED] = {**judge.judged(wanted, before), "steps": float(steps)}
    return found
