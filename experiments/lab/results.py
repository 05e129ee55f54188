"""What finished runs measured: final losses, curves, FLOPs, choices made from them, and results.json.

Enters: runs. Leaves: numbers; None where a run is not finished.
"""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from suite import circumstances

from tokenformer import cost
from tokenformer.models.prefixes import resized
from tokenformer.training.nested import row_shares

from .models import build, config_of, grow_both, muon_flops, optimizer_of
from .spec import Adapter, Growth, NeoX, Run, Shape, TokenFormer, TokenViT, ViT
from .train import result_of


def lines(run: Run) -> list[dict[str, Any]]:
    """All measurements of a run's finished segments, in order."""
    measured = [result["lines"] for segment in run.segments() if (result := result_of(segment)) is not None]
    return [line for lines_of_one in measured for line in lines_of_one]


def final(run: Run, kind: str = "end") -> float | None:
    """The loss at the end, in nats a byte or an image: on validation data, or on test data (`kind="test"`)."""
    measured = last(run, kind)
    return None if measured is None else measured["loss"] if math.isfinite(measured["loss"]) else math.inf


def accuracy(run: Run, kind: str = "end") -> float | None:
    """The share of images that are right at the end."""
    measured = last(run, kind)
    return None if measured is None else measured["accuracy"]


def last(run: Run, kind: str) -> dict[str, Any] | None:
    """The last measurement of a kind in a run's last segment; None if that is not finished, or has none."""
    result = result_of(run.segments()[-1])
    return next((line for line in reversed(result["lines"]) if line["kind"] == kind), None) if result else None


def best(runs: Iterable[Run]) -> Run | None:
    """The run with the lowest validation loss, once all of them are finished; None of no runs."""
    losses = {run: final(run) for run in runs}
    return None if not losses or None in losses.values() else min(losses, key=lambda run: losses[run] or math.inf)


def shape_at(run: Run, step: int) -> Any:
    """The model that makes a step."""
    shape: Any = run.model
    for growth in run.growths:
        if growth.step <= step and growth.method != "none":
            if isinstance(shape, TokenFormer):
                layers = growth.depth or shape.layers
                shape = replace(shape, tokens=round(shape.tokens * growth.factor), layers=layers)
            elif growth.adopts:
                pass  # the host's shape; _adopted says how much more there is
            elif growth.sizes:
                shape = replace(shape, **dict(growth.sizes))
            else:
                shape = replace(shape, width=2 * shape.width, heads=2 * shape.heads)
    return shape


@cache
def _adopted(shape: Shape, growths: tuple[Growth, ...]) -> tuple[int, int]:
    """Parameters, and FLOPs per token of a forward pass, that adopted layers add to a model. No weights are needed."""
    if not any(growth.adopts for growth in growths):
        return 0, 0
    run, model = Run(shape, 0.0, 0, growths=growths), build(shape)
    for growth in growths:
        model, _ = grow_both(model, optimizer_of(model, run), growth, run)
    layers = cost.adopted_layers(model.config.adopted)
    more = model.num_parameters() - cost.parameters(config_of(shape)).total
    return more, layers.flops_per_token - layers.replaced_flops_per_token


def _adopted_at(run: Run, step: int) -> tuple[int, int]:
    return _adopted(run.model, tuple(growth for growth in run.growths if growth.step <= step))


def rise_at_growth(run: Run) -> float:
    """How far the validation loss moved when the model grew: the largest step, up or down."""
    return max((line["rise"] for line in lines(run) if line["kind"] == "growth"), key=abs)


def growth_steps(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Every growth step of finished runs, each once: what the model became, and how smooth it was.

    rise: how far the validation loss moved when it grew; above: how far, at most, the training losses of the next steps
    lay above those of the model that did not grow, on the same batches.
    """
    found = {}
    for run in finished(runs):
        for line in lines(run):
            if "above_ungrown" in line:
                shape, step = shape_at(run, line["step"]), line["step"]
                grown = {"blocks": shape.layers, "tokens": shape.tokens, "step": step}
                found[run.seed, step] = {**grown, "rise": line["rise"], "above": max(line["above_ungrown"])}
    return [found[key] for key in sorted(found)]


def parameters(run: Run) -> int:
    """Of the model at the end of a run."""
    if isinstance(run.model, NeoX) and run.model.replaced:
        return build(run.model).num_parameters()
    return cost.parameters(config_of(shape_at(run, run.steps))).total + _adopted_at(run, run.steps)[0]


def non_embedding(run: Run) -> int:
    """Of the same model, without its embedding."""
    return cost.parameters(config_of(shape_at(run, run.steps))).non_embedding + _adopted_at(run, run.steps)[0]


def flops(run: Run, step: int | None = None, since: int = 0) -> float:
    """Training FLOPs of the steps from `since` up to `step`, all steps without it, by the cost model."""
    step = run.steps if step is None else step
    cuts = sorted({since, step, *(g.step for g in run.growths if since < g.step < step)})
    return sum((end - start) * _flops_of_step(run, start) for start, end in pairwise(cuts))


def _flops_of_step(run: Run, step: int) -> int:
    """AdamW's own are not counted: they do not depend on the batch either, but are a few per parameter."""
    muon = muon_flops(shape_at(run, step)) if run.optimizer == "muon" else 0
    return run.batch * _flops_of_sample(run, step) + muon


def _flops_of_sample(run: Run, step: int) -> int:
    """Of training on a block of text or on an image."""
    shape = shape_at(run, step)
    if isinstance(shape, TokenViT | ViT):
        return cost.training_flops_per_image(config_of(shape))
    config, adopted = config_of(shape), _adopted_at(run, step)[1]
    parts = row_shares(run.nested or (1.0,), run.batch)
    sizes = [(rows, resized(config, share) if run.nested else config) for share, rows in parts]
    forward = sum(rows * (cost.forward_flops_per_token(each, run.context) + adopted) for rows, each in sizes)
    return round(run.context * 3 * forward)


def compute(runs: list[Run]) -> float:
    """FLOPs of runs, with what they share counted once, also where one leaves the other in the middle of a segment."""
    segments = {segment.name: segment for run in runs for segment in run.segments()}
    shared = {
        replace(longer, end=shorter.end).name
        for longer in segments.values()
        for shorter in segments.values()
        if longer.start == shorter.start and longer.end > shorter.end
    }
    counted = [segment for name, segment in segments.items() if name not in shared]
    return sum(flops(segment.run, segment.end, segment.start) for segment in counted)


def curve(run: Run, kind: str = "validation", value: str = "loss") -> tuple[list[float], list[float]]:
    """FLOPs and losses, or another value, along a run."""
    points = [(flops(run, line["step"]), line[value]) for line in lines(run) if line["kind"] == kind]
    return [at for at, _ in points], [measured for _, measured in points]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation and the values themselves."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "deviation": deviation, "values": list(values)}


def losses(runs: Sequence[Run]) -> dict[str, Any]:
    """The losses of finished runs that differ in the seed, with the rate they share."""
    return {
        "lr": runs[0].lr,
        "validation": spread([final(run) or 0.0 for run in runs]),
        "test": spread([final(run, "test") or 0.0 for run in runs]),
    }


def image_scores(runs: Sequence[Run]) -> dict[str, Any]:
    """Losses and accuracies of finished runs that differ in the seed."""
    return {**losses(runs), "accuracy": accuracies(runs), "test_accuracy": accuracies(runs, "test")}


def accuracies(runs: Sequence[Run], kind: str = "end") -> dict[str, Any]:
    """The accuracies of finished runs that differ in the seed."""
    return spread([accuracy(run, kind) or 0.0 for run in runs])


def finished(runs: Iterable[Run]) -> list[Run]:
    """Those of the runs that have come to their end."""
    return [run for run in runs if final(run) is not None]


def facts(run: Run) -> dict[str, Any]:
    """One run for results.json."""
    return {
        **_described(run),
        "parameters": parameters(run),
        **_seen(run),
        # Those of an adapter are not counted: what learns is a part of the model.
        "flops": flops(run) if run.adapter is None else None,
        "validation_loss": final(run),
        "test_loss": final(run, "test"),
    }


def _described(run: Run) -> dict[str, Any]:
    """All that a run is, and the same of the one that it begins with."""
    begins = None if run.begins is None else _described(run.begins)
    return {"kind": type(run.model).__name__, **asdict(run), "begins": begins}


def run_of(facts_of_one: dict[str, Any]) -> Run:
    """The run that `facts` tells of, as results.json has it."""
    kind = {shape.__name__: shape for shape in (TokenFormer, NeoX, TokenViT, ViT)}[facts_of_one["kind"]]
    # Fields that have come since the run was made have their defaults.
    said = {field.name: _tuples(facts_of_one[field.name]) for field in fields(Run) if field.name in facts_of_one}
    model = kind(**{name: _tuples(value) for name, value in said["model"].items()})
    growths = [Growth(**{name: _tuples(value) for name, value in growth.items()}) for growth in said["growths"]]
    begins, adapter = (facts_of_one.get(name) for name in ("begins", "adapter"))
    said["begins"] = None if begins is None else run_of(begins)
    said["adapter"] = None if adapter is None else Adapter(**{name: _tuples(value) for name, value in adapter.items()})
    return Run(**{**said, "model": model, "growths": tuple(growths)})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _seen(run: Run) -> dict[str, Any]:
    """What it was trained on; of images also how many are right in the end."""
    if not isinstance(run.model, TokenViT | ViT):
        return {"tokens": run.steps * run.batch * run.context}
    right = {"validation_accuracy": accuracy(run), "test_accuracy": accuracy(run, "test")}
    return {"images": run.steps * run.batch, **right}


def write_results(folder: Path, findings: dict[str, Any], runs: Iterable[Run]) -> None:
    """results.json: how it was made, what was found, and every finished run behind it."""
    done = finished(dict.fromkeys(runs))
    # The code and the machine of every run, each once; training runs have one thread.
    by = {json.dumps(made): made for run in done if (made := (result_of(run.segments()[-1]) or {}).get("made"))}
    made = {**_command(folder.name), "by": list(by.values())}
    text = json.dumps({"made": made, "findings": findings, "runs": [facts(run) for run in done]}, indent=1)
    (folder / "results.json").write_text(text + "\n")


def made_by(name: str, threads: int) -> dict[str, Any]:
    """The command, the code and the machine behind what is measured here and now."""
    return {**circumstances(), **_command(name), "threads": threads}


def _command(name: str) -> dict[str, Any]:
    return {"command": f"make experiment NAME={name}", "loss": "nats a byte or an image"}
