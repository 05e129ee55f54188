"""Long context, measured: a TokenFormer grown at a small width against a Transformer of as many parameters.

    make experiment NAME=context_length        (on a quiet machine: it takes times)

Time and peak memory of a training step and of prefill, from 1024 to 8192 tokens, in turns; and the length from which
ours is faster, beside the one at which the cost model says that it takes fewer FLOPs. It measures with the tools of
benchmarks/.
"""

import json
from pathlib import Path
from typing import Any

import torch
from lab.figures import OURS, THEIRS, draw, legend, plain_ticks
from lab.results import made_by
from lab.spec import Run
from lab.tables import markdown, number
from long_context import crossing_point
from memory import fresh_peak_of, peak_of
from models import TrainingStep, build, pair, prepare_training, shape_of, token_former
from timing import in_turns

from tokenformer import cost

HERE = Path(__file__).parent
SHAPE, CONTEXTS, REPEATS = (256, 2, 1024), [1024, 2048, 4096, 8192], 5
QUICK = (64, 2, 256), [16, 32], 2
STEP_TOKENS = 2048  # in a batch of shorter sequences


class Prefill:
    """Reading a prompt: all positions into the cache, logits of the last."""

    def __init__(self, model: Any, batch: int, context: int) -> None:
        self.model = model.eval()
        self.ids = torch.randint(0, model.config.vocab_size, (batch, context))

    @torch.no_grad()
    def __call__(self) -> None:
        self.model(input_ids=self.ids, use_cache=True, logits_to_keep=1)


def prepare_prefill(config: Any, batch: int, context: int) -> Any:
    """For fresh_peak_of: the model is there before, so that what is measured is the prefill alone."""
    work = Prefill(build(config), batch, context)
    Prefill(work.model, 1, 16)()
    return work


def plan() -> list[Run]:
    """No training runs."""
    return []


def measure(quick: bool = False) -> None:
    """Every length, training and prefill."""
    shape, contexts, repeats = QUICK if quick else (SHAPE, CONTEXTS, REPEATS)
    torch.manual_seed(0)
    rows = []
    for context in contexts:
        config = token_former(*shape, context)
        peer, batch = cost.equal_neox(config), max(1, STEP_TOKENS // context)
        models = pair(config)
        row: dict[str, Any] = {"context": context, "batch": batch}
        row["shapes"] = {name: shape_of(model, batch, context) for name, model in models.items()}
        row["flops_ratio"] = cost.flops_ratio(config, context, peer)
        for phase, work, prepare in (
            ("training", TrainingStep, prepare_training),
            ("prefill", Prefill, prepare_prefill),
        ):
            times = in_turns({name: work(model, batch, context) for name, model in models.items()}, repeats, warmup=1)
            ratio = times.speedup("tokenformer", over="gpt-neox")
            peak = peak_of if quick else fresh_peak_of
            peaks = {name: peak(prepare, model.config, batch, context)[1] for name, model in models.items()}
            row[phase] = {
                "times_as_fast": ratio.median,
                "quartiles": [ratio.lower, ratio.upper],
                "median_seconds": times.medians,
                "peak_bytes": peaks,
            }
            print(f"{context} tokens, {phase}: {ratio.median:.2f} times as fast, peak bytes {peaks}", flush=True)
        rows.append(row)
    config = token_former(*shape, contexts[-1])
    findings: dict[str, Any] = {
        "rows": rows,
        "predicted_crossing": cost.crossing_length(config, cost.equal_neox(config)),
    }
    for phase in ("training", "prefill"):
        findings[f"{phase}_crossing"] = crossing_point(contexts, [row[phase]["times_as_fast"] for row in rows])
    made = made_by(HERE.name, threads=torch.get_num_threads())
    (HERE / "results.json").write_text(json.dumps({"made": made, "findings": findings, "runs": []}, indent=1) + "\n")


def report() -> None:
    """The figure of what was measured."""
    rows = json.loads((HERE / "results.json").read_text())["findings"]["rows"]
    draw(HERE / "context.png", [_speed(rows), _memory(rows)])


def _speed(rows: list[dict[str, Any]]) -> Any:
    def panel(axes: Any) -> None:
        at = [row["context"] for row in rows]
        axes.plot(at, [row["training"]["times_as_fast"] for row in rows], "o-", color=OURS, label="training, measured")
        axes.plot(at, [row["prefill"]["times_as_fast"] for row in rows], "s-", color=THEIRS, label="prefill, measured")
        axes.plot(at, [row["flops_ratio"] for row in rows], "--", color="#777777", label="by FLOPs")
        axes.axhline(1, color="#777777", lw=0.8)
        axes.set(xscale="log", xlabel="context, tokens", ylabel="times as fast as GPT-NeoX")
        plain_ticks(axes.xaxis, at)
        legend(axes)

    return panel


def _memory(rows: list[dict[str, Any]]) -> Any:
    def panel(axes: Any) -> None:
        at = [row["context"] for row in rows]
        for phase, style in (("training", "o-"), ("prefill", "s--")):
            for name, colour in (("tokenformer", OURS), ("gpt-neox", THEIRS)):
                peaks = [row[phase]["peak_bytes"][name] / 1e6 for row in rows]
                axes.plot(at, peaks, style, color=colour, label=f"{name}, {phase}")
        axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="peak memory, MB")
        plain_ticks(axes.xaxis, at)
        plain_ticks(axes.yaxis, [100, 200, 400, 800])
        legend(axes)

    return panel


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """Speed and memory by length."""
    rows = []
    for row in findings["rows"]:
        cells = [str(row["context"]), number(row["flops_ratio"], 2)]
        for phase in ("training", "prefill"):
            peaks = row[phase]["peak_bytes"]
            low, high = row[phase]["quartiles"]
            cells.append(f"{row[phase]['times_as_fast']:.2f} ({low:.2f} to {high:.2f})")
            cells.append(f"{peaks['tokenformer'] / peaks['gpt-neox']:.2f}")
        rows.append(cells)
    header = ["context", "FLOPs of GPT-NeoX over ours", "training: times as fast", "peak memory, ours over theirs"]
    header += ["prefill: times as fast", "peak memory, ours over theirs"]
    return {"lengths": markdown(header, rows)}
