"""Reports: the losses of training runs against compute and tokens, as a page and as pictures."""

from .page import write_report
from .read import Run, load_run, load_runs

__all__ = ["Run", "load_run", "load_runs", "write_report"]
