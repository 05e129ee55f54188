"""One model of three sizes, trained together, against a model trained at each size.

    make experiment NAME=nested

128 tokens at width 128, whose first 32 and 64 are trained as models of their own (`training.nested`): the rows of a
batch are divided evenly over the three sizes, or half of them go to the whole. Steps are as many as 1.3 times the FLOPs
of training the largest size alone allow. The goal is a loss within 1 % of that size's own at every size. Two rates are
tried, those that are best for the sizes alone; the way and the rate whose worst size is best then have all seeds.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.figures import OURS, THEIRS, draw, legend
from lab.results import final, finished, flops, lines, spread, write_results
from lab.sizes import SEEDS, STEPS, scratch, token_former
from lab.spec import Run
from lab.tables import markdown, with_spread

HERE = Path(__file__).parent
SIZES = (32, 64, 128)
ALONE = {32: 2e-3, 64: 2e-3, 128: 1e-3}  # the best rates from scratch, of progressive_scaling
WHOLE, RATES, COMPUTE, DECAY = token_former(SIZES[-1]), (1e-3, 2e-3), 1.3, 0.2
WAYS = {"a third of the rows each": (0.25, 0.5, 1.0), "half of the rows for the whole": (0.25, 0.5, 1.0, 1.0)}


def alone(tokens: int, seed: int = 0) -> Run:
    """A size trained by itself."""
    return scratch(token_former(tokens), ALONE[tokens], seed)


def nested(way: str, rate: float, seed: int = 0) -> Run:
    """All sizes together, for COMPUTE times the FLOPs of the largest."""
    step = flops(Run(WHOLE, rate, 1, nested=WAYS[way]))
    return Run(WHOLE, rate, round(COMPUTE * flops(alone(SIZES[-1])) / step), seed, nested=WAYS[way], decay=DECAY)


def size_losses(run: Run, kind: str = "end") -> dict[int, float]:
    """The loss of every size of a finished run: on validation data, or on test data."""
    found = {line["share"]: line[kind] for line in lines(run) if line["kind"] == "prefix"}
    whole = final(run, kind)
    return {n: found.get(n / SIZES[-1], whole) for n in SIZES} if whole is not None else {}


def gaps(run: Run) -> dict[int, float]:
    """By size, how far the validation loss is above that of the model trained at it, as a share; of finished runs."""
    own = {n: final(alone(n, run.seed)) for n in SIZES}
    found = size_losses(run)
    return {n: found[n] / own[n] - 1 for n in found} if None not in own.values() else {}


def chosen() -> tuple[str, float] | None:
    """The way and the rate whose worst size is best with the first seed, once all are tried."""
    tried = {(way, rate): gaps(nested(way, rate)) for way in WAYS for rate in RATES}
    return min(tried, key=lambda one: max(tried[one].values())) if all(tried.values()) else None


def plan() -> list[Run]:
    """The sizes alone, both ways at both rates, then the seeds of the best."""
    first = [*(alone(n) for n in SIZES), *(nested(way, rate) for rate in RATES for way in WAYS)]
    best = chosen()
    later = SEEDS[1:] if best else ()
    return [*first, *(run for seed in later for run in (*(alone(n, seed) for n in SIZES), nested(*best, seed)))]


def report() -> None:
    """Losses by size, of all that is finished."""
    findings: dict[str, Any] = {}
    best = chosen()
    for way in WAYS:
        for rate in RATES:
            seeds = SEEDS if (way, rate) == best else SEEDS[:1]
            runs = [run for run in finished(nested(way, rate, seed) for seed in seeds) if gaps(run)]
            if runs:
                findings[f"{way}, rate {rate:g}"] = _found(runs)
    write_results(HERE, findings, plan())
    draw(HERE / "nested.png", [_losses])


def _found(runs: Sequence[Run]) -> dict[str, Any]:
    by_size = {}
    for n in SIZES:
        by_size[str(n)] = {
            "nested": spread([size_losses(run)[n] for run in runs]),
            "alone": spread([final(alone(n, run.seed)) or 0.0 for run in runs]),
            "gap": spread([gaps(run)[n] for run in runs]),
        }
    of_largest = flops(runs[0]) / flops(alone(SIZES[-1]))
    return {"sizes": by_size, "steps": runs[0].steps, "flops_of_the_largest": of_largest, "alone_steps": STEPS}


def _losses(axes: Any) -> None:
    best = chosen()
    ways = [best] if best else [(way, rate) for way in WAYS for rate in RATES]
    for way, rate in ways:
        found = size_losses(nested(way, rate))
        if found:
            axes.plot(SIZES, [found[n] for n in SIZES], "o-", color=OURS, label=f"{way}, {rate:g}")
    own = {n: final(alone(n)) for n in SIZES}
    if None not in own.values():
        axes.plot(SIZES, list(own.values()), "s--", color=THEIRS, label="each trained alone")
    axes.set(xlabel="tokens", ylabel="validation loss, nats a byte", xscale="log", xticks=SIZES)
    axes.set_xticklabels([str(n) for n in SIZES])
    legend(axes)


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """Every size beside the model trained at it."""
    rows = [
        [name, tokens, with_spread(one["nested"]), with_spread(one["alone"]), f"{one['gap']['mean']:+.1%}"]
        for name, found in findings.items()
        for tokens, one in found["sizes"].items()
    ]
    return {"sizes": markdown(["way", "tokens", "nested", "alone", "gap"], rows)}
