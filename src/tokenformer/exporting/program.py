"""torch.export of a graph, by transformers' exporters, without what they print.

Enters: a `Graph`. Leaves: an exported program, or an ONNX file; or one line that says why there is none.
"""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from torch.fx.experimental import _config

from ..errors import BadRequestError, one_line
from ..models.sample import evaluating
from .graph import Graph

# Who reports every step and every operator that was not needed.
TALKERS = ("torch.onnx", "transformers", "torch.export", "torch.utils._pytree", "root")


def export(graph: Graph, exporter: str, **options: Any) -> Any:
    """What one of transformers' exporters, "dynamo" or "onnx", makes of a graph."""
    with quiet(), evaluating(graph.module), _sizes_from_zero():
        maker, config = _exporter(exporter)
        try:
            return maker.export(graph.module, dict(graph.inputs), config(dynamic_shapes=graph.dims, **options))
        except Exception as error:  # torch and transformers raise whatever a model's code meets
            raise BadRequestError(
                f"export: torch.export cannot follow {type(graph.model).__name__}: {one_line(error)[:300]}"
            ) from error


def _exporter(name: str) -> tuple[Any, Any]:
    """The exporter of that name and its settings. Older versions of transformers have none."""
    try:
        from transformers.exporters import auto

        return auto.AUTO_EXPORTER_MAPPING[name](), auto.AUTO_EXPORT_CONFIG_MAPPING[name]
    except ImportError as error:
        raise BadRequestError(
            f"export needs torch 2.11 and a transformers with exporters, such as 5.22.2: {one_line(error)}"
        ) from error


def _sizes_from_zero() -> Any:
    """Sizes may be 0 and 1. Otherwise torch assumes at least 2; an empty cache and a single row are less."""
    settings: Any = _config
    return settings.patch(backed_size_oblivious=True)


@contextmanager
def quiet() -> Iterator[None]:
    """No reports of torch's and transformers' exporters, on stdout, in the log or as warnings, except errors."""
    levels = {name: logging.getLogger(name).level for name in TALKERS}
    try:
        for name in levels:
            logging.getLogger(name).setLevel(logging.ERROR)
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
