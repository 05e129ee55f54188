"""export_model and export_folder: a model as a folder that runs without this library.

    tokenformer export models/mine exported/mine --to onnx

Enters: a model, or its folder. Leaves: a new folder with the exported file, config.json, the tokenizer or image
processor, and a README with a script that runs it. The file is compared with the model before the folder takes its
name; if it is wrong, there is none.
"""

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import BadRequestError, did_you_mean
from ..io import check_new, check_outside, write_new
from ..models.loading import local_folder, read_config, read_model
from ..models.side_files import copy_beside_weights
from . import aoti_file, onnx_file
from .compare import check_close, check_same
from .graph import Graph, graph_of
from .readme import RUNTIMES, write_readme

FORMATS = ("onnx", "aoti")


@dataclass(frozen=True)
class Exported:
    """What was written.

    difference: how far the file's output is from the model's, relative to its largest entry; None if the runtime is not
    installed. int8: how far the output is once the file is in 8 bits; None if it was not asked for.
    """

    folder: Path
    files: tuple[str, ...]
    size: int
    difference: float | None
    dtype: torch.dtype
    int8: float | None = None


def export_model(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    to: str = "onnx",
    *,
    int8: bool = False,
    source: str | os.PathLike | None = None,
) -> Exported:
    """Export a model into the new folder, with the token groups that are on as part of it.

    Args:
        model: a TokenFormer, an adopted model, or another one of transformers, that takes ids or pixels.
        folder: what is made.
        to: onnx, for ONNX Runtime; or aoti, one file of machine code for the device that the model is on, for torch.
        int8: with onnx, weights of 8 bits.
        source: the folder whose tokenizer or image processor is copied.
    """
    folder = Path(folder)
    check_request(folder, to, int8)
    graph = graph_of(model)
    with write_new(folder) as (partial,):
        partial.mkdir()
        difference, change = _write(graph, partial, to, int8)
        _config_alone(model).save_pretrained(partial)
        if source is not None:
            copy_beside_weights(Path(source), partial)
        file = _file(to)
        readme = write_readme(graph, to, file, _said(to, difference, change), (partial / "tokenizer.json").is_file())
        (partial / "README.md").write_text(readme)
        files = sorted(path.name for path in partial.iterdir())
        size = sum(path.stat().st_size for path in partial.glob(f"{file}*"))
    return Exported(folder, tuple(files), size, difference, model.dtype, change)


def export_folder(
    source: str | os.PathLike,
    folder: str | os.PathLike,
    to: str = "onnx",
    *,
    int8: bool = False,
    device: str | None = "cpu",
    trust_remote_code: bool = False,
    prepare: Any = None,
) -> Exported:
    """Export the model in `source`, as `export_model` does. `prepare` is called with the model first."""
    folder = Path(folder)
    check_request(folder, to, int8)
    source = local_folder(source, trust_remote_code=trust_remote_code)
    check_outside(folder, source)
    config = read_config(source, trust_remote_code=trust_remote_code)
    # ONNX Runtime has no bf16 on CPUs; the same numbers in fp32 are exact.
    wider = {"dtype": torch.float32} if to == "onnx" and config.dtype == torch.bfloat16 else {}
    model = read_model(source, device, trust_remote_code=trust_remote_code, **wider)
    if prepare is not None:
        prepare(model)
    return export_model(model, folder, to, int8=int8, source=source)


def check_request(folder: Path, to: str, int8: bool) -> None:
    """Refuse what cannot be carried out, before a weight is read."""
    if to not in FORMATS:
        raise BadRequestError(f"export: to={to!r} is not known; {did_you_mean(to, FORMATS)}")
    if int8 and to != "onnx":
        raise BadRequestError("export: int8 is ONNX Runtime's; for aoti, quantise the model before it is exported")
    check_new(folder)
    if to == "onnx":
        onnx_file.check_onnx(int8)
    else:
        aoti_file.check_aoti()


def _write(graph: Graph, folder: Path, to: str, int8: bool) -> tuple[float | None, float | None]:
    """Write the file; how far it is from the model, and how far in 8 bits."""
    file = folder / _file(to)
    if to == "aoti":
        aoti_file.write_aoti(graph, folder)
        return check_same(graph, aoti_file.run_aoti(file), file.name), None
    onnx_file.write_onnx(graph, folder)
    run = onnx_file.run_onnx(file)
    difference = None if run is None else check_same(graph, run, file.name)
    if not int8:
        return difference, None
    onnx_file.to_int8(file)
    run = onnx_file.run_onnx(file)
    assert run is not None  # or there would be no int8
    return difference, check_close(graph, run, file.name)


def _config_alone(model: PreTrainedModel) -> Any:
    """The configuration without the name of a Python file that is not there."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "auto_map"):
        del config.auto_map
    return config


def _file(to: str) -> str:
    return onnx_file.FILE if to == "onnx" else aoti_file.FILE


def _said(to: str, difference: float | None, change: float | None) -> str:
    """For the README: how far the file is from the model."""
    if difference is None:
        return f"It was not compared with the model, because {RUNTIMES[to]} was not installed."
    said = f"Its output differed from the model's by {difference:.1e} of the largest entry when it was written"
    return f"{said}, in 8 bits by {change:.1e}." if change is not None else f"{said}."
