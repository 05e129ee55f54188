"""What a model says with tokens switched off or scaled: the answers behind the live page.

Enters: an `Inspection`, and requests, each with its full state of switches. Leaves: dictionaries that become JSON. The
model is one for all: while an answer is computed its switches are put on under a lock, and are off when it is done, so
that no request changes what another sees.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import BadRequestError, did_you_mean
from ..inside import ablate
from ..models.sample import evaluating
from ..shrinking.measure import call
from .folder import Inspection, fitting
from .page import make_page
from .pieces import visible
from .reading import read_bits, read_token
from .sheet import parts_of, window_of
from .sources import ImageSource, TextSource, text_source

NEW = 24  # tokens that the text goes on for
NEXT = 6  # words that are compared
MOST_TEXT = 2000  # characters of a text that is typed in
KEPT = 64  # answers of the model as it is

Switches = Sequence[tuple[int, int, float | None]]


class Live:
    """The answers of one model."""

    def __init__(self, inspection: Inspection) -> None:
        self.inspection, self.subject = inspection, inspection.subject
        self.new = min(NEW, self.subject.context // 4)
        self.lock = threading.Lock()
        self._plain: OrderedDict[tuple[int, ...], dict[str, Any]] = OrderedDict()

    def page(self) -> str:
        """The page, which knows that it is live."""
        facts = {"context": self.subject.context - self.new, "most_text": MOST_TEXT}
        return make_page({**self.inspection.sheet, "live": facts}, live=True)

    def answer(self, ids: Sequence[int] | None, switches: Switches, sets: Sequence[str]) -> dict[str, Any]:
        """What comes next after ids, or what the image is, with all tokens and with these switched."""
        began = time.perf_counter()
        checked = self._ids(ids, self.subject.context - self.new)
        with self.lock:
            before = self._plain.get(tuple(checked)) or self._said(checked)
            self._plain[tuple(checked)] = before
            while len(self._plain) > KEPT:
                self._plain.popitem(last=False)
            with self._switched(switches, sets):
                after = self._said(checked) if switches or sets else before
        source = self.inspection.source
        words = {one: source.label(one) for answer in (before, after) for one, _ in answer["next"]}
        return {"before": before, "after": after, "words": words, "milliseconds": (time.perf_counter() - began) * 1000}

    def change(self, ids: Sequence[int] | None, switches: Switches, sets: Sequence[str]) -> dict[str, Any]:
        """By how many bits each id of a text surprises more with tokens switched."""
        checked, length = self._ids(ids, None), window_of(self.subject)
        if not checked:
            raise BadRequestError("ids: an image has no text that surprises; leave this to texts")
        with self.lock:
            before = read_bits(self.subject.model, checked, length)
            with self._switched(switches, sets):
                after = read_bits(self.subject.model, checked, length)
        return {"change": [round(bits, 4) for bits in (after - before).nan_to_num().tolist()]}

    def token(self, ids: Sequence[int] | None, layer: int, token: int) -> dict[str, Any]:
        """The weight of one token at every position."""
        name = self._layer(layer, token)
        source: Any = self.inspection.source
        if not isinstance(source, ImageSource):
            source = TextSource(self._ids(ids, None), [], "", source.tokenizer)
        with self.lock:
            weights = read_token(
                self.subject.model, name, token, parts_of(self.subject, source, window_of(self.subject))
            )
        return {"weights": [float(f"{weight:.4g}") for weight in weights.tolist()]}

    def sheet(self, text: str) -> dict[str, Any]:
        """The sheet of another text."""
        if isinstance(self.inspection.source, ImageSource):
            raise BadRequestError("text: this model takes images; start the server with another --image")
        with self.lock:
            source = text_source(self.subject, text.encode(), "the text that was typed in")
            return fitting(self.subject, source, self.inspection.contexts)[1]

    def _said(self, ids: Sequence[int]) -> dict[str, Any]:
        """What the model expects next, and how it goes on."""
        model, source = self.subject.model, self.inspection.source
        with torch.no_grad(), evaluating(model):
            if isinstance(source, ImageSource):
                return {"next": _likeliest(call(model, {"pixel_values": source.pixels}, "inspect").logits[0])}
            given = torch.tensor([ids], device=model.device)
            found = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=self.new,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        new = found.sequences[0, len(ids) :].tolist()
        text = visible(source.tokenizer.decode(new)).replace("⏎\n", "\n").replace("⇥\t", "\t")
        return {"next": _likeliest(found.logits[0][0]), "text": text}

    def _ids(self, ids: Sequence[int] | None, most: int | None) -> list[int]:
        """The ids of a request, checked; of an image none."""
        if isinstance(self.inspection.source, ImageSource):
            return []
        if not ids:
            raise BadRequestError("ids: at least one is needed")
        if max(ids) >= self.subject.vocab_size or min(ids) < 0:
            raise BadRequestError(f"ids: they go from 0 to {self.subject.vocab_size - 1:,}")
        if most is not None and len(ids) > most:
            raise BadRequestError(f"ids: {len(ids):,} were sent, and at most {most:,} have room in the context")
        return list(ids)

    def _layer(self, layer: int, token: int) -> str:
        """The name of a layer by its number on the page, if it has such a token."""
        layers = self.subject.layers
        if not 0 <= layer < len(layers):
            raise BadRequestError(f"layer: {layer} was asked for; they go from 0 to {len(layers) - 1}")
        if not 0 <= token < layers[layer].tokens:
            raise BadRequestError(f"token: {token} was asked for; {layers[layer].name} has {layers[layer].tokens:,}")
        return layers[layer].name

    @contextmanager
    def _switched(self, switches: Switches, sets: Sequence[str]) -> Iterator[None]:
        """Within the `with`, tokens are scaled, or gone where the factor is None."""
        gone: dict[str, set[int]] = {}
        factors: dict[str, dict[int, float]] = {}
        for layer, token, factor in switches:
            name = self._layer(layer, token)
            if factor is None:
                gone.setdefault(name, set()).add(token)
            else:
                factors.setdefault(name, {})[token] = factor
        for one in dict.fromkeys(sets):
            for name, found in self._of_set(one).items():
                gone.setdefault(name, set()).update(found.tolist())
        with ExitStack() as stack:
            for tokens in (gone, factors):
                stack.enter_context(ablate(self.subject.model, {name: _plain(each) for name, each in tokens.items()}))
            yield

    def _of_set(self, name: str) -> dict[str, Tensor]:
        """The tokens of a growth step, `step:2`, or of a token group, `group:law`."""
        steps = {f"step:{number}": number for number in range(1, len(self.subject.growth) + 1)}
        groups = {f"group:{place.group}": place.group for place in self.subject.places.values() if place.group}
        if name in steps:
            chosen = {layer: (ages == steps[name]).nonzero().flatten() for layer, ages in self.subject.ages.items()}
        elif name in groups:
            places = self.subject.places.items()
            chosen = {layer: torch.arange(place.num_tokens) for layer, place in places if place.group == groups[name]}
        else:
            known = [*steps, *groups]
            way_out = did_you_mean(name[:60], known) if known else "this model has none"
            raise BadRequestError(f"sets: {name[:60]!r} is not known; {way_out}")
        return {layer: tokens for layer, tokens in chosen.items() if len(tokens)}


def _plain(tokens: Any) -> Any:
    return tokens if isinstance(tokens, dict) else sorted(tokens)


def _likeliest(logits: Tensor) -> list[tuple[int, float]]:
    """The ids that are likeliest, with their probabilities."""
    best = logits.float().softmax(-1).topk(min(NEXT, len(logits)))
    return [(int(one), round(float(share), 5)) for one, share in zip(best.indices, best.values, strict=True)]
