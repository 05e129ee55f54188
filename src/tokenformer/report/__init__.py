"""Reports: the losses of training runs against compute and tokens, as a page and as pictures."""

from .read import Run, load_run, load_runs
from .write import write_report

__all__ = ["Run", "load_run", "load_runs", "write_report"]
