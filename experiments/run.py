"""Make experiments: train what is not trained yet, then write their results and figures.

    make experiment NAME=progressive_scaling        or: python experiments/run.py NAME [NAME…] [--report]

Enters: folders beside this file with an experiment.py that has `plan()`, the runs it needs, `report()`, `tables()`, and
`measure()` where something else than a loss is measured. Leaves: NAME/results.json, NAME/*.png, and the tables in the
pages. States lie in runs/lab; the same command goes on where it was stopped, and runs that several experiments need are
trained once. With --report nothing is trained and unfinished runs are left out.
"""

import importlib
import signal
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from lab.pool import OnlyOne, train_all  # noqa: E402
from lab.tables import findings_of, pages, with_tables  # noqa: E402
from lab.train import STORE  # noqa: E402


def names() -> list[str]:
    """All experiments."""
    return sorted(path.parent.name for path in HERE.glob("*/experiment.py"))


def main(arguments: list[str]) -> None:
    """Run the experiments that are named."""
    chosen = [argument for argument in arguments if argument != "--report"]
    for name in chosen:
        if name not in names():
            raise SystemExit(f"{name!r} is not an experiment; choose from {', '.join(names())}")
    if not chosen:
        raise SystemExit(f"say which experiment: {', '.join(names())}")
    experiments = [importlib.import_module(f"{name}.experiment") for name in chosen]
    # So that the runs under way are stopped too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if "--report" not in arguments:
        with OnlyOne(STORE):
            train_all(lambda: [run for experiment in experiments for run in experiment.plan()])
            for experiment in experiments:
                if hasattr(experiment, "measure"):
                    experiment.measure()
    for experiment in experiments:
        experiment.report()
    for page in pages():
        page.write_text(with_tables(page.read_text(), tables_of))


def tables_of(name: str) -> dict[str, str]:
    """The tables of an experiment, from its committed results."""
    return importlib.import_module(f"{name}.experiment").tables(findings_of(name))


if __name__ == "__main__":
    main(sys.argv[1:])
