"""Five texts learnt one after the other: a group of tokens for each, against all weights trained on one after another.

Enters: the rates that were the best on python. Leaves: the runs; and once they are finished, the losses of both models
on every text, with no group on, the right one, all of them, or the one under which the beginning of a row is likeliest.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from groups.ways import FULL, MIDDLE, OWN, adapted, rated
from lab.data import held_out
from lab.results import best
from lab.spec import Run
from lab.train import finished_model, folder_of
from torch import Tensor
from torch.nn import functional as F

import tokenformer
from tokenformer import add_tokens

DOMAINS = ("python", "fiction", "cpp", "questions", "stubs")
OLD, NONE = "enwik8", "__base__"
PROMPT, BLOCKS = 64, 256  # bytes by which a group is chosen; blocks of every text
Chooser = Callable[[Any, Tensor, str], list[Any]]


def groups() -> list[Run]:
    """A group for every text, each trained beside the base alone; empty as long as the rate is not known."""
    chosen = best(rated(OWN, MIDDLE, "python"))
    if chosen is None or chosen.begins is None or chosen.adapter is None:
        return []
    return [adapted(chosen.begins, chosen.adapter, text, chosen.lr) for text in DOMAINS]


def in_turn() -> list[Run]:
    """All weights on one text after the other."""
    chosen = best(rated(FULL, "all", "python"))
    runs: list[Run] = []
    if chosen is not None and chosen.begins is not None and chosen.adapter is not None:
        begins = chosen.begins
        for text in DOMAINS:
            begins = adapted(begins, chosen.adapter, text, chosen.lr)
            runs.append(begins)
    return runs


def model_with(runs: list[Run]) -> Any:
    """The base of these runs with the groups of all of them."""
    first = runs[0]
    assert first.begins is not None
    model = finished_model(first.begins)
    for run in runs:
        assert run.adapter is not None
        add_tokens(model, run.text, dict(run.adapter.sizes))
        state = torch.load(folder_of(run.segments()[-1]) / "state.pt", weights_only=True)["model"]
        own = {name: tensor for name, tensor in state.items() if f".token_groups.{run.text}." in name}
        assert not model.load_state_dict(own, strict=False).unexpected_keys
    return model


def _chosen(model: Any, ids: Tensor, _: str) -> list[Any]:
    return tokenformer.choose_tokens(model, ids[:, :PROMPT])


SWITCHED: dict[str, Chooser] = {
    "none": lambda _, ids, text: [NONE] * len(ids),
    "right": lambda _, ids, text: [NONE if text == OLD else text] * len(ids),
    "all": lambda _, ids, text: [list(DOMAINS)] * len(ids),
    "chosen": _chosen,
}


@torch.no_grad()
def losses_by_text(groups: list[Run], turned: Run) -> dict[str, Any]:
    """By text: the loss after the prompt of every variant, and which groups were chosen how often."""
    model, other = model_with(groups), finished_model(turned)
    found: dict[str, Any] = {}
    for text in (OLD, *DOMAINS):
        sums: Counter[str] = Counter()
        chosen: Counter[str] = Counter()
        for ids, share in _batches(text, turned.context):
            for way, choose in SWITCHED.items():
                names = choose(model, ids, text)
                sums[way] += share * loss_after_prompt(model, ids, adapter_names=names)
                if way == "chosen":
                    chosen.update(names)
            sums["in turn"] += share * loss_after_prompt(other, ids)
        right = chosen[NONE if text == OLD else text] / sum(chosen.values())
        found[text] = {"losses": dict(sums), "chosen": dict(chosen), "accuracy": right}
    return found


def _batches(text: str, context: int) -> Iterator[tuple[Tensor, float]]:
    """Blocks of the test part, in batches, each with the share that it is of all."""
    for ids in held_out(text, "test", context, BLOCKS).split(32):
        yield ids, len(ids) / BLOCKS


def loss_after_prompt(model: Any, ids: Tensor, **more: Any) -> float:
    """Nats a byte of what follows the prompt."""
    logits = model(input_ids=ids, use_cache=False, **more).logits[:, PROMPT - 1 : -1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, PROMPT:].flatten()).item()
