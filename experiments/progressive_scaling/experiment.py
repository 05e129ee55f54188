"""The ladder: one model that grows 0.26M -> 0.52M -> 1.05M -> 2.1M, against training every size from scratch.

    make experiment NAME=progressive_scaling

The trunk of a ladder never decays: the smallest model trains for BASE steps at a constant rate, grows, trains on for
`hold` steps, grows again. At every size a branch leaves the trunk and decays over `decay` steps: that is the model of
that size. The ladder's compute is that of the trunk and of all branches.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab.figures import OURS, THEIRS, colour, draw, legend
from lab.results import compute, curve, final, finished, flops, losses, rise_at_growth, shape_at, spread, write_results
from lab.sizes import (
    RATES,
    SEEDS,
    SIZES,
    STEPS,
    contenders,
    models,
    probes,
    rate_of,
    scratch,
    seeded,
    sweep,
    to_the_end,
    token_former,
)
from lab.spec import Growth, Run, TokenFormer
from lab.tables import change, markdown, number, with_spread

HERE = Path(__file__).parent
SMALLEST = token_former(SIZES[0])
BASE = 1600


@dataclass(frozen=True)
class Ladder:
    """How to climb. `growth` has everything but the step and the factor."""

    hold: int = 400
    decay: int = 300
    base: int = BASE
    factors: tuple[int, ...] = (2, 2, 2)
    growth: dict[str, Any] = field(default_factory=dict)
    halved: int | None = None  # the growth step, from 0, at which the rate is halved for good
    cosine: bool = False
    model: TokenFormer = SMALLEST
    text: str = "enwik8"

    def run(self, rung: int, lr: float, seed: int = 0) -> Run:
        """The branch that ends at a size; `rung` 0 is the smallest."""
        if self.cosine:
            stage = self.hold + self.decay
            growths = self._growths(rung, STEPS, stage, lr)
            return Run(self.model, lr, STEPS + rung * stage, seed, growths, self.text, "cosine")
        steps, growths = self.base + rung * self.hold + self.decay, self._growths(rung, self.base, self.hold, lr)
        return Run(self.model, lr, steps, seed, growths, self.text, decay=self.decay / steps)

    def _growths(self, rung: int, start: int, every: int, lr: float) -> tuple[Growth, ...]:
        rates = [lr / 2 if i == self.halved else None for i in range(rung)]
        return tuple(Growth(start + i * every, self.factors[i], **self.growth, lr=rate) for i, rate in enumerate(rates))

    def runs(self, lr: float, seed: int = 0) -> list[Run]:
        """The branches of all sizes but the smallest, which is trained from scratch."""
        return [self.run(rung, lr, seed) for rung in range(1, len(self.factors) + 1)]


TWO = (2, 2)  # the first two steps of the ladder, on which most variants are compared
ROTATE = {"method": "rotate"}
METHODS: dict[str, Ladder] = {
    "rotate": Ladder(growth=ROTATE),
    "split": Ladder(),
    "zero": Ladder(growth={"method": "zero"}),
    "zero, tau raised over 200 steps": Ladder(factors=TWO, growth={"method": "zero", "tau_steps": 200}),
    "random (the authors' code)": Ladder(factors=TWO, growth={"method": "random"}),
}
OTHERS: dict[str, Ladder] = {
    "rotate, decay over 400 steps instead of 300": Ladder(decay=400, growth=ROTATE),
    "rotate, decay over 400 steps, grown 400 steps later": Ladder(decay=400, base=2000, growth=ROTATE),
    "the same, with half the rate from 128 tokens on": Ladder(decay=400, base=2000, growth=ROTATE, halved=1),
    "rotate, the rate warmed up again over 50 steps": Ladder(factors=TWO, growth={**ROTATE, "rewarm": 50}),
    "rotate, Adam reset": Ladder(factors=TWO, growth={**ROTATE, "adam": "reset"}),
    "rotate, only new tokens train": Ladder(factors=TWO, growth={**ROTATE, "trains": "new"}),
    "rotate, grown early": Ladder(factors=TWO, base=800, growth=ROTATE),
    "rotate, 8x at once": Ladder(hold=760, factors=(8,), growth=ROTATE),
    "a cosine a stage, random, Adam reset (the paper)": Ladder(
        factors=TWO, growth={"method": "random", "adam": "reset"}, cosine=True
    ),
    "a cosine a stage, rotate": Ladder(factors=TWO, growth=ROTATE, cosine=True),
    "rotate, half as long": Ladder(hold=200, decay=150, growth=ROTATE),
    "rotate, a quarter as long": Ladder(hold=100, decay=75, factors=TWO, growth=ROTATE),
}
AT_1600 = OTHERS["rotate, decay over 400 steps instead of 300"]
LATER = OTHERS["rotate, decay over 400 steps, grown 400 steps later"]
BEST = OTHERS["the same, with half the rate from 128 tokens on"]
RATED = replace(AT_1600, factors=(2,))
SEEDED = {
    "grown at 1600": replace(AT_1600, factors=TWO),
    "grown at 2000": replace(LATER, factors=TWO),
    "grown at 2000, then half the rate": replace(BEST, factors=TWO),
}
# The methods once more, with the paper's initialisation: these came first.
PAPER, PAPER_RATE = TokenFormer(SIZES[0]), 2e-3
PAPER_LADDERS = {name: replace(ladder, model=PAPER, factors=TWO) for name, ladder in METHODS.items()}
# And one doubling on the other text.
PYTHON_LADDERS = {name: replace(ladder, text="python", factors=(2,)) for name, ladder in METHODS.items()}


def plan() -> list[Run]:
    """The methods, from scratch, the other variants, then the best with other rates and seeds."""
    lr = rate_of(SMALLEST)
    if lr is None:
        return sweep(SMALLEST)
    paper = [run for ladder in PAPER_LADDERS.values() for run in ladder.runs(PAPER_RATE)]
    methods, others = ([run for one in ladders.values() for run in one.runs(lr)] for ladders in (METHODS, OTHERS))
    kinds = [model for tokens in SIZES for model in models(tokens)]
    peers = [run for runs in (probes, to_the_end) for model in kinds for run in runs(model)]
    peers += [run for tokens in SIZES[:3] for runs in contenders(token_former(tokens)) for run in runs]
    rates = [run for other in RATES[TokenFormer] for run in RATED.runs(other)]
    seeds = [run for ladder in SEEDED.values() for seed in SEEDS for run in ladder.runs(lr, seed)]
    python = [*on_python(lr).values(), *(run for ladder in PYTHON_LADDERS.values() for run in ladder.runs(lr))]
    return [*paper, *methods, *others, *rates, *peers, *seeds, *python]


def on_python(lr: float) -> dict[str, Run]:
    """The two sizes that are compared there, from scratch."""
    return {str(tokens): replace(scratch(token_former(tokens), lr), text="python") for tokens in SIZES[:2]}


def from_scratch(seed: int = 0) -> dict[str, dict[str, Run]]:
    """The best run of each kind at each size, as far as it is finished with that seed."""
    found: dict[str, dict[str, Run]] = {}
    for tokens in SIZES:
        for name, model in zip(("tokenformer", "gpt_neox"), models(tokens), strict=True):
            for run in seeded(model):
                if run.seed == seed and final(run) is not None:
                    found.setdefault(str(tokens), {})[name] = run
    return found


def climbed(
    ladder: Ladder, lr: float, seed: int = 0, peers: dict[str, dict[str, Run]] | None = None
) -> dict[str, Any] | None:
    """What a ladder reached at each size, and its compute against that of all sizes from scratch."""
    runs, peers = ladder.runs(lr, seed), from_scratch(seed) if peers is None else peers
    if any(final(run) is None for run in runs):
        return None
    rows = {}
    for run in runs:
        tokens = str(shape_at(run, run.steps).tokens)
        rows[tokens] = {"validation": final(run), "test": final(run, "test"), "flops": flops(run)}
        for name, peer in peers.get(tokens, {}).items():
            rows[tokens][f"against_{name}"] = (final(run) or 0.0) / (final(peer) or 1.0)
    sizes = [str(SIZES[0]), *rows]
    smallest = replace(scratch(ladder.model, lr, seed), text=ladder.text)
    rise = max((rise_at_growth(run) for run in runs), key=abs)
    result: dict[str, Any] = {"sizes": rows, "flops": compute([smallest, *runs]), "rise": rise}
    if all("tokenformer" in peers.get(tokens, {}) for tokens in sizes):
        result["of_from_scratch"] = result["flops"] / sum(flops(peers[tokens]["tokenformer"]) for tokens in sizes)
    return result


def report() -> None:
    """Losses of all sizes by variant, the ratio of compute, and the curves."""
    lr, findings = rate_of(SMALLEST), {}
    findings["scratch"] = {
        tokens: {name: {"flops": flops(run), **losses(finished(seeded(run.model)))} for name, run in kinds.items()}
        for tokens, kinds in from_scratch().items()
    }
    if lr is not None:
        findings["rate"] = lr
        findings["variants"] = {name: climbed(ladder, lr) for name, ladder in {**METHODS, **OTHERS}.items()}
        findings["paper_initialisation"] = {name: climbed(ladder, PAPER_RATE) for name, ladder in PAPER_LADDERS.items()}
        findings["rates"] = {f"{other:g}": climbed(RATED, other) for other in RATES[TokenFormer]}
        peers = {tokens: {"tokenformer": run} for tokens, run in on_python(lr).items() if final(run) is not None}
        findings["python_scratch"] = {tokens: final(run["tokenformer"]) for tokens, run in peers.items()}
        findings["python"] = {name: climbed(ladder, lr, peers=peers) for name, ladder in PYTHON_LADDERS.items()}
        findings["seeds"] = {
            name: {str(seed): climbed(ladder, lr, seed) for seed in SEEDS} for name, ladder in SEEDED.items()
        }
    write_results(HERE, findings, plan())
    draw(HERE / "ladder.png", [_curves, _ends], size=(6, 4.2))


def _curves(axes: Any) -> None:
    lr = rate_of(SMALLEST)
    for tokens, kinds in from_scratch().items():
        for name, run in kinds.items():
            hue, end = THEIRS if name == "gpt_neox" else colour(2), (flops(run), final(run))
            axes.plot(*curve(run), color=hue, lw=0.8, alpha=0.8)
            axes.plot(*end, ".", color=hue)
            axes.annotate(tokens, end, fontsize=7)
    for run in BEST.runs(lr) if lr is not None else []:
        if final(run) is not None:
            axes.plot(*curve(run), color=OURS, lw=1.2)
    for name, hue in (("ladder", OURS), ("TokenFormer from scratch", colour(2)), ("GPT-NeoX from scratch", THEIRS)):
        axes.plot([], [], color=hue, label=name)
    axes.set(xlabel="training FLOPs of the run", ylabel="validation loss, nats a byte", ylim=(None, 2.4))
    legend(axes)


def _ends(axes: Any) -> None:
    """Where each size ends: all compute spent up to that size, and its loss."""
    lr = rate_of(SMALLEST)
    for name, hue in (("tokenformer", colour(2)), ("gpt_neox", THEIRS)):
        spent, at, ends = 0.0, [], []
        for kinds in from_scratch().values():
            if name in kinds:
                spent += flops(kinds[name])
                at.append(spent)
                ends.append(final(kinds[name]))
        axes.plot(at, ends, "o-", color=hue)
    if lr is not None and all(final(run) is not None for run in BEST.runs(lr)):
        runs = [scratch(SMALLEST, lr), *BEST.runs(lr)]
        at = [compute(runs[: i + 1]) for i in range(len(runs))]
        axes.plot(at, [final(run) for run in runs], "o-", color=OURS)
    axes.set(xlabel="training FLOPs of all sizes so far", ylabel="validation loss at the end, nats a byte")


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """From scratch; variants of the ladder; rates and seeds of the best."""
    scratch_rows = [
        [tokens, *(with_spread(kinds.get(name, {}).get("validation")) for name in ("tokenformer", "gpt_neox"))]
        for tokens, kinds in findings["scratch"].items()
    ]
    grown = [str(tokens) for tokens in SIZES[1:]]

    def rows(found: dict[str, Any]) -> list[list[str]]:
        return [
            [
                name,
                change(ladder["rise"]),
                *(_loss(ladder, tokens) for tokens in grown),
                "-" if "of_from_scratch" not in ladder else f"{ladder['of_from_scratch']:.0%}",
            ]
            for name, ladder in found.items()
            if ladder is not None
        ]

    header = ["rise at growth", *(f"{tokens} tokens" for tokens in grown), "compute"]
    seeds = []
    for name, by_seed in findings.get("seeds", {}).items():
        found = {seed: ladder for seed, ladder in by_seed.items() if ladder is not None}
        seeds += [[f"{name}, seed {row[0]}", *row[1:]] for row in rows(found)]
        seeds.append([f"{name}, mean", "", *(_mean_loss([*found.values()], tokens) for tokens in grown), ""])
    return {
        "scratch": markdown(["tokens", "TokenFormer", "GPT-NeoX"], scratch_rows),
        "variants": markdown(["ladder", *header], rows(findings.get("variants", {}))),
        "rates": markdown(["rate", *header], rows(findings.get("rates", {}))),
        "seeds": markdown(["ladder", *header], seeds),
        "paper_initialisation": markdown(["ladder", *header], rows(findings.get("paper_initialisation", {}))),
        "python": markdown(
            ["ladder", *header[:2], header[-1]], [[*row[:3], row[-1]] for row in rows(findings.get("python", {}))]
        ),
    }


def _loss(ladder: dict[str, Any], tokens: str) -> str:
    """The loss of a size, and how far it is from that of a TokenFormer from scratch."""
    found = ladder["sizes"].get(tokens)
    if found is None:
        return "-"
    against = found.get("against_tokenformer")
    return number(found["validation"]) + (f" ({against - 1:+.1%})" if against else "")


def _mean_loss(ladders: list[dict[str, Any]], tokens: str) -> str:
    """The same for ladders that differ in the seed, with the standard deviation."""
    found = [ladder["sizes"][tokens] for ladder in ladders if tokens in ladder["sizes"]]
    if not found:
        return "-"
    against = [one["against_tokenformer"] for one in found if "against_tokenformer" in one]
    mean = f" ({sum(against) / len(against) - 1:+.1%})" if len(against) == len(found) else ""
    return with_spread(spread([one["validation"] for one in found])) + mean
