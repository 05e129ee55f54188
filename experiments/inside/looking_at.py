"""Which finished models are looked into, and where what was found is kept: beside the measurements of their runs.

Enters: nothing but what is trained here. Leaves: a line of the kind `inside` for each model on enwik8, and one of the
kind `fault` for each that was trained on a wrong spelling, with one of what its units do, unless there is one already.
"""

from collections.abc import Iterable
from typing import Any

from lab.results import lines
from lab.spec import Run
from lab.train import add_to_result, finished_model, trained

import tokenformer

from .fault import SHOWN, on_test, removed, shown
from .looking import look_into
from .models import ADOPTED, CLEAN, NAMES, RETRAINED, THEIRS, bases, faulty, retrained


def found(kind: str, name: str, run: Run) -> dict[str, Any] | None:
    """What was found inside a model, None if it was not looked into."""
    return next((line for line in lines(run) if line["kind"] == kind and line["name"] == name), None)


def is_here(run: Run) -> bool:
    """Whether the model at the end of a run is on this machine."""
    return trained(run.segments()[-1]) is not None


def look_at_bases(names: Iterable[str] = NAMES) -> None:
    """Look into all models on enwik8 that are here, and into the adopted twins."""
    for name in names:
        for (base, _), run in bases().items():
            if base == (THEIRS if name == ADOPTED else name) and is_here(run) and not found("inside", name, run):
                model = finished_model(run)
                if name == ADOPTED:
                    tokenformer.adopt(model)
                add_to_result(run.segments()[-1], {"kind": "inside", "name": name, **look_into(model, CLEAN)})


def look_at_faults() -> None:
    """Find and remove the fault in all models that have it and were trained on without it."""
    for (name, _, _), run in faulty().items():
        after = retrained(run)
        if all(map(is_here, [run, *after])) and not found("fault", name, run):
            trained_on = {str(steps): on_test(finished_model(one)) for steps, one in zip(RETRAINED, after, strict=True)}
            line = {"kind": "fault", "name": name, **removed(finished_model(run)), "trained on": trained_on}
            add_to_result(run.segments()[-1], line)
        line = found("fault", name, run)
        if line and is_here(run) and not found("fault units", name, run):
            units = [(one["layer"], one["unit"]) for one in line["units"][:SHOWN]]
            seen = {"kind": "fault units", "name": name, "units": shown(finished_model(run), units)}
            add_to_result(run.segments()[-1], seen)
