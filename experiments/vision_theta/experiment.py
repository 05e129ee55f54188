"""The activation Θ in a TokenFormer for images: softmax, GeLU with L1 norm, GeLU with L2 norm; and LayerNorm's weights.

    make experiment NAME=vision_theta

The steps of the paper's ablation, at one epoch of CIFAR-10. Every kind tries the same rates; the best is trained with
three seeds.
"""

from pathlib import Path
from typing import Any

from lab.figures import colour, draw
from lab.results import finished, image_scores, write_results
from lab.spec import Run
from lab.tables import IMAGE_HEADER, image_cells, markdown
from lab.vision import EPOCH, seeded, sweep, token_vit

HERE = Path(__file__).parent
KINDS = {
    "softmax": token_vit(kind="softmax"),
    "GeLU, then L1 norm": token_vit(kind="gelu_l1"),
    "GeLU, then L2 norm": token_vit(kind="gelu_l2"),
    "L2 norm, then GeLU": token_vit(),
    "L2 norm, then GeLU; LayerNorm with weights": token_vit(changes=(("parametric_norm", True),)),
}


def variants() -> dict[str, list[Run]]:
    """The runs of each kind, with every seed."""
    return {name: seeded(model, EPOCH) for name, model in KINDS.items()}


def plan() -> list[Run]:
    """The rates, then the seeds."""
    return [run for model in KINDS.values() for run in sweep(model)] + [r for runs in variants().values() for r in runs]


def report() -> None:
    """Accuracies by kind."""
    findings: dict[str, Any] = {}
    for name, runs in variants().items():
        done = finished(runs)
        if done:
            findings[name] = image_scores(done)
    write_results(HERE, findings, plan())
    draw(HERE / "kinds.png", [_kinds(findings)])


def _kinds(findings: dict[str, Any]) -> Any:
    def panel(axes: Any) -> None:
        for i, found in enumerate(findings.values()):
            values = found["test_accuracy"]["values"]
            axes.plot(values, [i] * len(values), "o", color=colour(0), alpha=0.6)
        axes.set(yticks=range(len(findings)), xlabel="accuracy on test images")
        axes.set_yticklabels(findings)

    return panel


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """Accuracy by kind."""
    rows = [[name, f"{found['lr']:g}", *image_cells(found)] for name, found in findings.items()]
    return {"kinds": markdown(["Θ", "rate", *IMAGE_HEADER], rows)}
