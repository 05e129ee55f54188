"""Make experiments: train what is not trained yet, then write their results and figures.

    make experiment NAME=progressive_scaling        or: python experiments/run.py NAME [NAME…] [--kept | --report]

Enters: folders beside this file with an experiment.py that has `plan()`, the runs it needs, `report()`, `tables()`,
`measure()` where something else than a loss is measured, `look()` where the models of finished runs are looked at, and
NEEDS_STATES where a report needs more than is kept.
Leaves: NAME/results.json, NAME/*.png, the tables in the pages, and measured.jsonl. States lie in runs/lab; the same
command goes on where it was stopped, and runs that several experiments need are trained once. With --kept, runs in
measured.jsonl count as made, wherever that was. With --report they do too, nothing is trained, and unfinished runs are
left out.
"""

import importlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from lab.kept import keep, take  # noqa: E402
from lab.pool import OnlyOne, train_all  # noqa: E402
from lab.results import final, run_of  # noqa: E402
from lab.tables import findings_of, pages, with_tables  # noqa: E402
from lab.train import STORE  # noqa: E402


def names() -> list[str]:
    """All experiments."""
    return sorted(path.parent.name for path in HERE.glob("*/experiment.py"))


def main(arguments: list[str]) -> None:
    """Run the experiments that are named."""
    chosen = [argument for argument in arguments if argument not in ("--report", "--kept")]
    for name in chosen:
        if name not in names():
            raise SystemExit(f"{name!r} is not an experiment; choose from {', '.join(names())}")
    if not chosen:
        raise SystemExit(f"say which experiment: {', '.join(names())}")
    experiments = [importlib.import_module(f"{name}.experiment") for name in chosen]
    # So that the runs under way are stopped too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if len(chosen) < len(arguments) and not any(hasattr(experiment, "NEEDS_STATES") for experiment in experiments):
        take()
    if "--report" in arguments:
        look_and_keep(experiments)
        for name in chosen:
            check_nothing_is_lost(name)
    else:
        with OnlyOne(STORE):
            try:
                train_all(lambda: [run for experiment in experiments for run in experiment.plan()])
            finally:
                look_and_keep(experiments)
            for experiment in experiments:
                if hasattr(experiment, "measure"):
                    experiment.measure()
    for experiment in experiments:
        experiment.report()
    for page in pages():
        page.write_text(with_tables(page.read_text(), tables_of))


def look_and_keep(experiments: list[Any]) -> None:
    """Write down what is finished here, also of what is not finished as a whole."""
    for experiment in experiments:
        if hasattr(experiment, "look"):
            experiment.look()
    keep()


def check_nothing_is_lost(name: str) -> None:
    """A report where committed runs are not known would throw them away."""
    results = HERE / name / "results.json"
    committed = json.loads(results.read_text())["runs"] if results.exists() else []
    missing = [facts for facts in committed if final(run_of(facts)) is None]
    if missing:
        raise SystemExit(
            f"{name}: results.json has {len(committed)} runs, and {len(missing)} of them are not here; it is left as "
            f"it is; make them again first: make experiment NAME={name}"
        )


def tables_of(name: str) -> dict[str, str]:
    """The tables of an experiment, from its committed results."""
    return importlib.import_module(f"{name}.experiment").tables(findings_of(name))


if __name__ == "__main__":
    main(sys.argv[1:])
