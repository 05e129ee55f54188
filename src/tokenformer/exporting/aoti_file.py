"""A graph compiled by AOTInductor into one file that torch runs by itself, and such a file as a function.

    write_aoti(graph, folder)            model.pt2: machine code for the device that the model is on, and the weights
    run_aoti(path)                       what it computes

The code takes tensors as they lie in memory in their usual order. Of others, as `expand` makes them, it computes
something else and does not say so.
"""

from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import BadRequestError, one_line
from .graph import Graph, Inputs, Runner
from .program import export, quiet

FILE = "model.pt2"


def check_aoti() -> None:
    """Refuse where there is no compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # torch's own class for it has moved between versions
        raise BadRequestError(
            f"export --to aoti needs a C++ compiler, and none was found ({one_line(error)[:100]}); install g++, or "
            "name one in the variable CXX"
        ) from error


def write_aoti(graph: Graph, folder: Path) -> None:
    """Write FILE into the folder. Compiling takes a minute and more."""
    check_aoti()
    program = export(graph, "dynamo")
    try:
        with quiet():
            torch._inductor.aoti_compile_and_package(program, package_path=str(folder / FILE))
    except Exception as error:  # from the compiler's exit code to Inductor's own assertions
        raise BadRequestError(
            f"export: AOTInductor cannot compile {type(graph.model).__name__}: {one_line(error)[:300]}"
        ) from error


def run_aoti(path: Path) -> Runner:
    """The file as a function of tensors."""
    compiled: Any = torch._inductor.aoti_load_package(str(path))

    def run(inputs: Inputs) -> dict[str, Any]:
        return compiled(**pytree.tree_map(lambda tensor: tensor.contiguous(), inputs))

    return run
