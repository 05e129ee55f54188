"""Eight growth steps in a row against one of the same total, at equal compute: do tokens die, do norms drift?

    make experiment NAME=many_growths

From 16 tokens a projection to 128. The single step comes at the mean of the many steps' times, so that both take the
same FLOPs.
"""

from pathlib import Path
from typing import Any

import torch
from lab.data import held_out
from lab.figures import colour, draw, legend
from lab.results import curve, finished, flops, losses, write_results
from lab.sizes import SEEDS, SIZES, rate_of, sweep, token_former
from lab.spec import Growth, Run
from lab.tables import markdown, number, with_spread
from lab.train import finished_model

from tokenformer.pattention import pattention_layers
from tokenformer.pattention.functional import reference

HERE = Path(__file__).parent
SMALL = token_former(16)
STEPS, FIRST, EVERY = 1200, 240, 90
WAYS: dict[str, tuple[list[int], str, tuple[int, ...]]] = {
    "8 steps, zero": ([16, 30, 44, 58, 72, 86, 100, 114, 128], "zero", SEEDS),
    "1 step, zero": ([16, 128], "zero", SEEDS),
    "3 steps, rotate": ([16, 32, 64, 128], "rotate", SEEDS[:1]),
    "1 step, rotate": ([16, 128], "rotate", SEEDS[:1]),
}
NEEDS_STATES = True  # the report looks at tokens


def growths(sizes: list[int], method: str) -> tuple[Growth, ...]:
    """Growth steps over the same span of time for any number of them, with the same FLOPs as eight equal ones."""
    if len(sizes) == 9:
        times = [FIRST + EVERY * i for i in range(8)]
    elif len(sizes) == 2:
        times = [FIRST + EVERY * 7 // 2]
    else:
        # Doublings add 16, 32 and 64 of the 112 tokens.
        times = [FIRST, FIRST + 2 * EVERY, 702]
    steps = zip(times, sizes, sizes[1:], strict=False)
    return tuple(Growth(at, after / before, method) for at, before, after in steps)


def runs(way: str) -> list[Run]:
    """With its seeds; empty as long as the best rate is not known."""
    sizes, method, seeds = WAYS[way]
    rate = rate_of(token_former(SIZES[0]))
    if rate is None:
        return []
    return [Run(SMALL, rate, STEPS, seed, growths(sizes, method)) for seed in seeds]


def plan() -> list[Run]:
    """The rates, then all ways."""
    return sweep(token_former(SIZES[0])) + [run for way in WAYS for run in runs(way)]


@torch.no_grad()
def tokens_used(run: Run) -> list[dict[str, float]]:
    """For every cohort of tokens, by birth, over all layers: the share that is used, and the norms of keys and values.

    A token is used if what it adds to its layer's output, as a root mean square over validation text, is at least a
    hundredth of the mean token's.
    """
    model = finished_model(run)
    weights: dict[str, torch.Tensor] = {}
    hooks = []
    for name, layer in pattention_layers(model):

        def note(module: Any, inputs: Any, output: Any, name: str = name) -> None:
            # With one-hot values the outputs are the tokens' weights.
            one_hot = torch.eye(module.num_tokens)
            tokens = reference(inputs[0].flatten(0, 1), module.key_tokens, one_hot, module.tau, module.kind)
            weights[name] = tokens.square().mean(dim=0).sqrt()

        hooks.append(layer.register_forward_hook(note))
    model(input_ids=held_out(run.text, "validation", run.context, 32), use_cache=False)
    for hook in hooks:
        hook.remove()
    sizes, cohorts = [SMALL.tokens], []
    for growth in run.growths:
        sizes.append(round(sizes[-1] * growth.factor))
    for before, after in zip([0, *sizes], sizes, strict=False):
        used, keys, values = [], [], []
        for name, layer in pattention_layers(model):
            scale = layer.num_tokens // sizes[-1]
            rows = slice(before * scale, after * scale)
            norms = layer.value_tokens.norm(dim=1)
            share = weights[name] * norms
            used.append((share[rows] >= 0.01 * share.mean()).float().mean().item())
            keys.append((layer.key_tokens[rows].norm(dim=1) / layer.key_tokens.norm(dim=1).mean()).mean().item())
            values.append((norms[rows] / norms.mean()).mean().item())
        cohorts.append({key: sum(v) / len(v) for key, v in (("used", used), ("keys", keys), ("values", values))})
    return cohorts


def report() -> None:
    """Losses by way, and cohorts of tokens."""
    findings: dict[str, Any] = {}
    for way in WAYS:
        done = finished(runs(way))
        if done:
            findings[way] = {**losses(done), "flops": flops(done[0]), "cohorts": tokens_used(done[0])}
    write_results(HERE, findings, plan())
    draw(HERE / "curves.png", [_curves, _cohorts(findings)])


def _curves(axes: Any) -> None:
    for i, way in enumerate(WAYS):
        for run in runs(way)[:1]:
            axes.plot(*curve(run), color=colour(i), label=way)
    axes.set(xlabel="training FLOPs", ylabel="validation loss, nats a byte", ylim=(None, 2.6))
    legend(axes)


def _cohorts(findings: dict[str, Any]) -> Any:
    def panel(axes: Any) -> None:
        for i, (way, found) in enumerate(findings.items()):
            axes.plot([cohort["values"] for cohort in found["cohorts"]], "o-", color=colour(i), label=way)
            axes.plot([cohort["keys"] for cohort in found["cohorts"]], "o--", color=colour(i))
        axes.set(xlabel="cohort of tokens, the oldest first", ylabel="norm, relative to the layer's mean token")
        axes.set_title("values solid, keys dashed")

    return panel


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """Losses by way; cohorts of tokens."""
    rows, cohorts = [], []
    for way, found in findings.items():
        rows.append([way, f"{found['flops']:.3g}", with_spread(found["validation"]), with_spread(found["test"])])
        for i, cohort in enumerate(found["cohorts"]):
            cohorts.append([way, str(i), *(number(cohort[key], 2) for key in ("used", "keys", "values"))])
    return {
        "losses": markdown(["growth", "FLOPs", "validation", "test"], rows),
        "cohorts": markdown(["growth", "cohort", "tokens used", "norm of keys", "norm of values"], cohorts),
    }
