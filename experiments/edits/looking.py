"""Which models facts are written into, and where what came of it is kept.

Enters: nothing but what is trained here. Leaves: a line of the kind `edits` for each model, with every edit; on the way
rates.json and edits.jsonl in the run's folder, a line for each edit that is done: a call that was stopped goes on.
"""

import json
from collections.abc import Iterable
from typing import Any

from lab.data import held_out
from lab.facts import World, world
from lab.results import lines
from lab.spec import Run
from lab.texts import bytes_of
from lab.train import add_to_result, finished_model, folder_of, trained

from tokenformer.io import replace_file

from .judging import Judge, chosen, in_every_way, known
from .models import CONTEXT, TEXT, knowing
from .ways import PROMPT, RATES, SUBJECT, TRAINED, Writer

EDITS, AT_SUBJECT, TRIED = (
    100,
    12,
    6,
)  # the first few are also made at the end of the subject; on others rates are tried
BLOCKS = 64  # of text, on which drift is measured
DATA = 128  # of other text, which tells where a token must be quiet
LAYERS = {"TokenFormer": 1, "GPT-NeoX": 1}
GOOD = 0.95  # success of training, below which a rate does not count


def found(run: Run) -> dict[str, Any] | None:
    """What came of the edits that are made, None of none."""
    return next((line for line in reversed(lines(run)) if line["kind"] == "edits"), None)


def done_here(run: Run) -> list[dict[str, Any]]:
    """The edits that are made, also those that are not written down beside the run's measurements yet."""
    path, line = folder_of(run.segments()[-1]) / "edits.jsonl", found(run)
    here = [json.loads(one) for one in path.read_text().splitlines()] if path.exists() else []
    return max(here, line["edits"] if line else [], key=len)


def made_world() -> World:
    """The facts of the text."""
    return world(bytes_of("fiction"))


def look_at(names: Iterable[str] = LAYERS, most: int = EDITS) -> None:
    """Edit all models that are here, until so many edits of each are made."""
    for (name, _), run in knowing().items():
        segment, done = run.segments()[-1], done_here(run)
        written = found(run)
        if name not in names or trained(segment) is None or (written and len(written["edits"]) >= most):
            continue
        model, facts = finished_model(run), made_world()
        text, other = held_out(TEXT, "validation", CONTEXT, DATA), held_out(TEXT, "test", CONTEXT, BLOCKS)
        writer, judge = Writer(model, LAYERS[name], facts, text), Judge(model, facts, other)
        wanted = chosen(facts, EDITS + TRIED, run.seed)
        rate, tried = _rate_of(run, writer, judge, wanted[EDITS:])
        for number, one in list(enumerate(wanted[:most]))[len(done) :]:
            places = (PROMPT, SUBJECT) if number < AT_SUBJECT else (PROMPT,)
            done.append(in_every_way(writer, judge, one, rate, places))
            with (folder_of(segment) / "edits.jsonl").open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
        facts_of_model = {"known": known(model, facts), "layer": LAYERS[name], "rate": rate, "rates": tried}
        add_to_result(segment, {"kind": "edits", **facts_of_model, "edits": done})


def _rate_of(run: Run, writer: Writer, judge: Judge, wanted: list[Any]) -> tuple[float, dict[str, dict[str, float]]]:
    """The rate of training with the least drift, of those that succeed; and what each did. Kept beside the run."""
    path = folder_of(run.segments()[-1]) / "rates.json"
    if not path.exists():
        tried = {}
        for rate in RATES:
            made = [in_every_way(writer, judge, one, rate, ())[TRAINED] for one in wanted]
            tried[f"{rate:g}"] = {key: sum(one[key] for one in made) / len(made) for key in made[0]}
        replace_file(path, json.dumps(tried))
    tried = json.loads(path.read_text())
    succeed = [rate for rate in RATES if tried[f"{rate:g}"]["success"] >= GOOD] or [RATES[-1]]
    return min(succeed, key=lambda rate: tried[f"{rate:g}"]["drift"]), tried
