"""The activation Θ of Pattention: L2 norm then GeLU (the paper's), GeLU then L2 norm, softmax; and LayerNorm's weights.

    make experiment NAME=theta

Every kind tries the same rates at both sizes; the best is then trained with three seeds. The gradient norm of every
parameter is noted every 100 steps. LayerNorm with weight and bias is tried at the rate of the paper's.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.figures import colour, draw, legend, plain_ticks
from lab.results import best, finished, lines, losses, spread, write_results
from lab.sizes import PROBE, RATES, SEEDS, at_rates, token_former
from lab.spec import Run, TokenFormer
from lab.tables import markdown, with_spread

HERE = Path(__file__).parent
SIZES = (32, 64)
KINDS = ("l2_gelu", "gelu_l2", "softmax")
PARAMETRIC = "l2_gelu, parametric LayerNorm"
NEEDS_STATES = True  # the report looks at gradients, which are not kept


def sweep(tokens: int, kind: str) -> list[Run]:
    """Every rate, with the first seed."""
    return at_rates(lambda rate: Run(token_former(tokens, kind=kind), rate, PROBE), RATES[TokenFormer])


def seeded(tokens: int, name: str) -> list[Run]:
    """Every seed at the best rate; empty as long as it is not known."""
    chosen = best(sweep(tokens, "l2_gelu" if name == PARAMETRIC else name))
    if chosen is None:
        return []
    if name == PARAMETRIC:
        chosen = replace(chosen, model=replace(chosen.model, changes=(("parametric_norm", True),)))
    return [replace(chosen, seed=seed) for seed in SEEDS]


def plan() -> list[Run]:
    """The sweeps, then the seeds."""
    runs = [run for tokens in SIZES for kind in KINDS for run in sweep(tokens, kind)]
    return runs + [run for tokens in SIZES for name in (*KINDS, PARAMETRIC) for run in seeded(tokens, name)]


def layer_gradients(run: Run) -> list[tuple[int, list[float]]]:
    """For every noted step the gradient norm of each block's tokens, from the first block to the last."""
    noted = []
    for line in lines(run):
        if line["kind"] == "gradients":
            squares = [0.0] * run.model.layers
            for name, norm in line["norms"].items():
                if "layers." in name:
                    squares[int(name.split("layers.")[1].split(".")[0])] += norm**2
            noted.append((line["step"], [square**0.5 for square in squares]))
    return noted


def token_gradients(run: Run) -> list[float]:
    """The norms of all tokens' gradients at all noted steps."""
    noted = [line["norms"] for line in lines(run) if line["kind"] == "gradients"]
    return [norm for norms in noted for name, norm in norms.items() if name.endswith("_tokens")]


def report() -> None:
    """Losses and gradients by size and kind."""
    findings: dict[str, Any] = {}
    for tokens in SIZES:
        for name in (*KINDS, PARAMETRIC):
            runs = finished(seeded(tokens, name))
            if runs:
                norms = [sorted(token_gradients(run)) for run in runs]
                findings.setdefault(str(tokens), {})[name] = {
                    **losses(runs),
                    "smallest_gradient": spread([values[0] for values in norms]),
                    "largest_gradient": spread([values[-1] for values in norms]),
                    "last_layer_gradients": layer_gradients(runs[0])[-1][1],
                }
    write_results(HERE, findings, plan())
    draw(HERE / "gradients.png", [_gradients(tokens) for tokens in SIZES])


def _gradients(tokens: int) -> Any:
    def panel(axes: Any) -> None:
        for i, kind in enumerate(KINDS):
            for run in seeded(tokens, kind)[:1]:
                noted = layer_gradients(run)
                for layer in range(run.model.layers):
                    at, norms = [step for step, _ in noted], [values[layer] for _, values in noted]
                    axes.plot(at, norms, color=colour(i), alpha=1 - 0.2 * layer, label=kind if layer == 0 else None)
        axes.set(yscale="log", xlabel="step", ylabel="gradient norm of a block's tokens", title=f"{tokens} tokens")
        plain_ticks(axes.yaxis)
        legend(axes)

    return panel


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """Losses and gradients by kind and size."""
    rows = [
        [
            tokens,
            name,
            f"{found['lr']:g}",
            with_spread(found["validation"]),
            with_spread(found["test"]),
            f"{found['smallest_gradient']['mean']:.2g}",
            f"{found['largest_gradient']['mean']:.2g}",
        ]
        for tokens, kinds in findings.items()
        for name, found in kinds.items()
    ]
    header = ["tokens", "Θ", "rate", "validation", "test", "smallest gradient", "largest gradient"]
    return {"kinds": markdown(header, rows)}
