"""Ways to write a fact into a model, each undone when the `with` ends.

Enters: a model, what is to be written, text of the kind that the model is for. Leaves, within the `with`, the model
with the fact: as one token beside a layer, by the rank-one change of ROME to the same layer, or by training.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lab.facts import PHRASINGS, Fact, World, prompt_of
from torch import Tensor, nn
from torch.nn import functional as F

from tokenformer import edit, remove_tokens
from tokenformer.inside.calls import watching
from tokenformer.inside.editing import LIKELY, _contexts, _loss, _prefixes
from tokenformer.inside.places import find_places

PROMPT, SUBJECT = "prompt", "subject"  # at the end of which a write is to fire
TOKEN, RANK_ONE, TRAINED = "one token", "rank one", "all weights"
RATES, MOST_STEPS = (1e-4, 3e-4, 1e-3), 50
RIDGE = 1e-2  # of the mean variance of a weight, as in edit()


@dataclass(frozen=True)
class Wanted:
    """A fact with another answer, told in one of the ways to tell it."""

    fact: Fact
    answer: str
    phrasing: int

    def prompt(self, world: World, phrasing: int | None = None) -> list[int]:
        """The ids before the answer; in another phrasing, if one is given."""
        return world.ids([".", *prompt_of(self.fact, self.phrasing if phrasing is None else phrasing)])

    @property
    def others(self) -> list[int]:
        """The other phrasings."""
        return [one for one in range(PHRASINGS) if one != self.phrasing]


class Writer:
    """Writes facts beside, or into, one feed-forward layer of a model.

    The covariance of the layer's weights over the text, which the rank-one change needs, is measured once.
    """

    def __init__(self, model: Any, layer: int, world: World, text: Tensor) -> None:
        self.model, self.world, self.batches = model, world, list(text.split(64))
        ours = model.config.model_type == "tokenformer"
        self.layer = f"model.layers.{layer}.ffn" if ours else f"gpt_neox.layers.{layer}.mlp"
        self.place = find_places(model, self.layer if ours else f"{self.layer}.dense_4h_to_h", "edits")
        (self.part,) = (place.layer for place in self.place.values())
        weights = torch.cat([self._weights(batch).flatten(0, 1) for batch in self.batches]).double()
        self.moments = weights.mT @ weights / len(weights)  # [n, n]
        self.moments.diagonal().add_(RIDGE * self.moments.diagonal().mean())

    def _weights(self, ids: Tensor) -> Tensor:
        """What the layer's tokens, or its neurons, do: [batch, length, n]."""
        found: list[Tensor] = []
        with torch.no_grad(), watching(self.place, lambda name, call: found.append(call.weights)):
            self.model(input_ids=ids, use_cache=False)
        return found[0]

    @contextmanager
    def token(self, wanted: Wanted, at: str) -> Iterator[dict[str, Any]]:
        """As one token; what `edit` says of it, and what it adds where it fires."""
        subject, answer = self.world.ids(wanted.fact.subject), self.world.ids([wanted.answer])
        how = {"data": self.batches, "at": at}
        found = edit(self.model, self.layer, wanted.prompt(self.world), subject, answer, **how)
        group = self.model.get_submodule(f"{self.layer}.token_groups.edit")
        added = group.tau * group.value_tokens[0].detach()
        try:
            yield {"fires on": found.fires_on, "margin": found.margin, "added": added.clone()}
        finally:
            remove_tokens(self.model, "edit")

    @contextmanager
    def rank_one(self, wanted: Wanted, at: str, added: Tensor) -> Iterator[None]:
        """As a change of the values that adds the same at the place, and as little as can be elsewhere."""
        ids = wanted.prompt(self.world)
        end = self.world.ids(wanted.fact.subject)[-1]
        last = len(ids) - 1 if at == PROMPT else max(place for place, one in enumerate(ids) if one == end)
        contexts = _contexts(torch.tensor(ids), _prefixes(self.batches))
        key = torch.cat([self._weights(batch)[:, last - len(ids)] for batch in contexts]).double().mean(0)
        asked = torch.linalg.solve(self.moments, key)
        change = torch.outer(asked / (asked @ key), added.double()).float()  # [n, d_out]
        values = self.part.weight if isinstance(self.part, nn.Linear) else self.part.value_tokens
        before = values.detach().clone()
        values.data += change.mT if isinstance(self.part, nn.Linear) else change
        try:
            yield
        finally:
            values.data.copy_(before)

    @contextmanager
    def trained(self, wanted: Wanted, rate: float) -> Iterator[int]:
        """By training all weights until the answer is likely in all contexts that `edit` has; yields the steps."""
        ids = torch.tensor([*wanted.prompt(self.world), *self.world.ids([wanted.answer])])
        contexts = _contexts(ids, _prefixes(self.batches))
        before = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        steps = 0
        try:
            with torch.enable_grad():
                while steps < MOST_STEPS:
                    losses = [_loss(self.model, batch, 1) for batch in contexts]
                    if all((-loss).exp() > LIKELY for loss in losses):
                        break
                    torch.stack(losses).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    steps += 1
            yield steps
        finally:
            self.model.load_state_dict(before)


def top(model: Any, prompts: list[list[int]]) -> Tensor:
    """The likeliest next word behind every prompt."""
    found = torch.zeros(len(prompts), dtype=torch.long)
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(number)
    for numbers in by_length.values():
        ids = torch.tensor([prompts[number] for number in numbers])
        with torch.no_grad():
            found[numbers] = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1)
    return found


@torch.no_grad()
def losses(model: Any, blocks: Tensor) -> Tensor:
    """Nats a word of every block: [blocks]."""
    found = []
    for ids in blocks.split(64):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        found.append(F.cross_entropy(logits.mT, ids[:, 1:], reduction="none").mean(1))
    return torch.cat(found)
