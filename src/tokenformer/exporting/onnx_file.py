"""A graph as an ONNX file, and such a file as a function.

write_onnx(graph, folder)            model.onnx, and model.onnx.data beside it where it has more than 2 GB
run_onnx(path)                       the file as a function, or None if onnxruntime is not installed
to_int8(path)                        the same file with weights of 8 bits
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BadRequestError, require
from .graph import Graph, Inputs, Runner
from .program import export, quiet

FILE = "model.onnx"
PACKAGES = ("onnx", "onnxscript")


def check_onnx(int8: bool = False) -> None:
    """Refuse where the packages that write ONNX are missing."""
    require("export --to onnx", "export", *PACKAGES)
    if int8:
        require("export --int8", "export", "onnxruntime")


def write_onnx(graph: Graph, folder: Path) -> None:
    """Write FILE into the folder."""
    if next(graph.model.parameters()).dtype == torch.bfloat16:
        raise BadRequestError(
            "export: the weights are bfloat16, with which ONNX Runtime does not compute on CPUs; export model.float(), "
            "which holds the same numbers"
        )
    export(graph, "onnx", output_path=folder / FILE, external_data=False)


def run_onnx(path: Path) -> Runner | None:
    """The file as a function of tensors, computed by onnxruntime; None if it is not installed."""
    if find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(inputs: Inputs) -> dict[str, Any]:
        feed = {name: tensor.numpy(force=True) for name, tensor in flat(inputs).items()}
        return nested(dict(zip(names, map(torch.from_numpy, session.run(None, feed)), strict=True)))

    return run


def to_int8(path: Path) -> None:
    """Give every matrix whole numbers of 8 bits and a scale for each column; rows get theirs when they are computed."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    whole = path.rename(path.with_name("whole.onnx"))
    with quiet():
        external = path.with_name(f"{path.name}.data").exists()
        quantize_dynamic(whole, path, per_channel=True, weight_type=QuantType.QInt8, use_external_data_format=external)
    whole.unlink()


def flat(tensors: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Tensors in dictionaries within dictionaries, by names with dots, as ONNX has them."""
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def nested(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The other way."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *parents, last = name.split(".")
        place = found
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = tensor
    return found
