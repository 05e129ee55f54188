"""What a trained model loses with fewer tokens, in size or by row (figures: docs/shrinking.md, docs/sizes.md).

    make demo
    python benchmarks/smaller.py runs/demo/stage-3/model [--recipe RECIPE] [--blocks N] [--seed N] [--out FOLDER]

Enters: a model folder, and the recipe that it was trained by, whose data is used: blocks of its training text rank the
tokens, blocks held out are scored. Leaves: the rise of the loss by the share of tokens that stay, of the feed-forward
blocks and of all layers, by which of them stay and what becomes of tau; by how many tokens mix their values; and which
part of the weights a share of a sorted folder reads. benchmarks/results/smaller.json.
"""

import argparse
import copy
import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import count
from suite import RESULTS, ROOT, circumstances
from torch import Tensor
from torch.utils.data import default_collate

from tokenformer import pattention_layers, sort_tokens
from tokenformer.growth.step import Growth
from tokenformer.models import prefixes
from tokenformer.models.language import top_k_tokens
from tokenformer.models.loading import read_model
from tokenformer.shrinking.measure import mean_loss, measure, ranking_of
from tokenformer.shrinking.plan import plan_shrink, share_of, tau_factor
from tokenformer.shrinking.search import as_if
from tokenformer.training import load_recipe

SHARES = (0.75, 0.5, 0.25, 0.125)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PARTS = {"feed-forward": ("ffn",), "all layers": ("query", "key", "value", "out", "ffn")}
RANDOM_SEEDS = 3


def chosen(
    model: Any, uses: Any, share: float, layers: tuple[str, ...], by: Callable[[str], Tensor], tau: str
) -> Growth:
    """The step that keeps a share of the tokens of these layers, the highest by `by`, with this tau."""
    growth = Growth("shrink", 0, 0.0, {})
    for name, layer in pattention_layers(model):
        if name.rpartition(".")[2] in layers:
            kept = by(name).argsort(descending=True)[: share_of(layer, 0, share)].sort().values
            step = plan_shrink(model, uses, {name: len(kept)}).layers[name]
            fitted = tau_factor(layer.kind, uses[name].shares[kept].sum().item())
            factor = {"fitted": fitted, "as it was": 1.0, "by the count": math.sqrt(share)}[tau]
            growth.layers[name] = type(step)(step.before, step.after, 1, kept=tuple(kept.tolist()), tau_factor=factor)
    return growth


def rises(model: Any, ranked_on: list[Any], scored_on: list[Any], seed: int) -> list[dict[str, Any]]:
    """The rise of the loss, for every way to choose tokens and tau."""
    uses, found = measure(model, ranked_on, "smaller"), []
    layers, start = dict(pattention_layers(model)), mean_loss(model, scored_on)

    def random(of: int) -> Callable[[str], Tensor]:
        generator = torch.Generator().manual_seed(seed + of)
        return lambda name: torch.rand(layers[name].num_tokens, generator=generator)

    ways: dict[str, list[tuple[Callable[[str], Tensor], str]]] = {
        "what they do": [(lambda name: uses[name].scores, "fitted")],
        "what they do, tau as it was": [(lambda name: uses[name].scores, "as it was")],
        "what they do, tau by the count": [(lambda name: uses[name].scores, "by the count")],
        "length of the value": [(lambda name: layers[name].value_tokens.detach().norm(dim=1), "fitted")],
        "length of the value, tau as it was": [
            (lambda name: layers[name].value_tokens.detach().norm(dim=1), "as it was")
        ],
        "at random": [(random(i), "fitted") for i in range(RANDOM_SEEDS)],
    }
    for part, names in PARTS.items():
        for share in SHARES:
            for way, tried in ways.items():
                losses = []
                for by, tau in tried:
                    with as_if(model, chosen(model, uses, share, names, by, tau)):
                        losses.append(mean_loss(model, scored_on) - start)
                found.append({"part": part, "share": share, "way": way, "rise": sum(losses) / len(losses)})
                print(f"{part}, {share:.1%} of the tokens, {way}: {found[-1]['rise']:+.4f}", flush=True)
    return found


def by_count(model: Any, scored_on: list[Any]) -> list[dict[str, Any]]:
    """The rise of the loss where only so many tokens of a feed-forward block mix their values."""
    start, found = mean_loss(model, scored_on), []
    for k in COUNTS:
        if k < model.config.ffn_tokens:
            with top_k_tokens(model, k):
                found.append(
                    {"token_top_k": k, "of": model.config.ffn_tokens, "rise": mean_loss(model, scored_on) - start}
                )
            print(f"the {k} heaviest tokens of {model.config.ffn_tokens}: {found[-1]['rise']:+.4f}", flush=True)
    return found


def by_fraction(model: Any, ranked_on: list[Any], scored_on: list[Any]) -> list[dict[str, Any]]:
    """What shares of a sorted folder read, and their loss; and the rise that sorting itself makes."""
    model, found = copy.deepcopy(model), []
    start = mean_loss(model, scored_on)
    sort_tokens(model, ranking_of(measure(model, ranked_on, "smaller")))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        whole = Path(folder, "model.safetensors").stat().st_size
        for fraction in (1.0, *SHARES):
            read = _Read()
            prefixes.safe_open, original = read.open, prefixes.safe_open
            try:
                part = type(model).from_pretrained(folder, token_fraction=fraction)
            finally:
                prefixes.safe_open = original
            rise = mean_loss(part, scored_on) - start
            found.append({"fraction": fraction, "parameters": count(part), "read": read.bytes / whole, "rise": rise})
            print(f"token_fraction={fraction}: {read.bytes / whole:.1%} of the file is read, {rise:+.4f}", flush=True)
    return found


class _Read:
    """Counts the bytes that are taken from files of safetensors."""

    def __init__(self) -> None:
        self.bytes = 0

    def open(self, *args: Any, **options: Any) -> Any:
        """In place of safetensors' own."""
        self.file = ORIGINAL(*args, **options)
        return self

    def __enter__(self) -> "_Read":
        self.open_file = self.file.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self.file.__exit__(*args)

    def keys(self) -> Any:
        """The names of the tensors."""
        return self.open_file.keys()

    def get_tensor(self, name: str) -> Tensor:
        """All of one."""
        return self._counted(self.open_file.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        """A part of one."""
        return _Slice(self, name)

    def _counted(self, tensor: Tensor) -> Tensor:
        self.bytes += tensor.numel() * tensor.element_size()
        return tensor


class _Slice:
    def __init__(self, read: _Read, name: str) -> None:
        self.read, self.name = read, name

    def __getitem__(self, rows: slice) -> Tensor:
        return self.read._counted(self.read.open_file.get_slice(self.name)[rows])


ORIGINAL = prefixes.safe_open


def main(argv: list[str] | None = None) -> None:
    """Measure, print a line each, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "demo.yaml")
    parser.add_argument("--blocks", type=int, default=128, help="how many rank, and how many are scored")
    parser.add_argument("--seed", type=int, default=0, help="of the random choice")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(argv)
    data, model = load_recipe(given.recipe).data.prepare(), read_model(given.model)
    order = torch.Generator().manual_seed(given.seed)
    places = torch.randperm(len(data.train), generator=order)[: given.blocks].tolist()
    batches = [
        [default_collate([part[i] for i in some]) for some in _by(16, at)]
        for part, at in ((data.train, places), (data.validation, range(min(given.blocks, len(data.validation)))))
    ]
    figures = [*rises(model, *batches, given.seed), *by_count(model, batches[1]), *by_fraction(model, *batches)]
    what = {"name": "smaller", "command": " ".join(["python", "benchmarks/smaller.py", *(argv or sys.argv[1:])])}
    about = {"loss": mean_loss(model, batches[1]), "seed": given.seed, "blocks": given.blocks, "repeats": 1}
    given.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**what, **about, **circumstances(), "figures": figures}, indent=1)
    (given.out / "smaller.json").write_text(text + "\n")


def _by(size: int, places: Any) -> list[list[int]]:
    places = list(places)
    return [places[i : i + size] for i in range(0, len(places), size)]


if __name__ == "__main__":
    main()
