"""Memory of a step, seen from two sides: what autograd keeps for the backward pass, and what the process holds.

Enters: a forward pass, or a function that prepares work to be measured. Leaves: bytes. The kept bytes are exact and
repeatable, but do not see what comes and goes within the step; the peak of resident memory sees all of it, in pages,
and is taken in a fresh process, whose freed tensors go back to the system at once (which takes time: seconds are
measured elsewhere).
"""

import ctypes
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

# glibc keeps freed blocks below a threshold, which it raises as blocks are freed: then the peak would depend on what
# ran before. A fixed threshold gives every tensor of 64 KiB and more pages of its own.
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024)}


def kept_for_backward(forward: Callable[[], Tensor], not_counted: Iterable[Tensor]) -> int:
    """Bytes that autograd holds between forward and backward, each storage once.

    `not_counted` are the parameters and inputs, which are there in any case.
    """
    there_anyway = {tensor.untyped_storage().data_ptr() for tensor in not_counted}
    kept: dict[int, Tensor] = {}  # the tensors are held, so that no address comes twice

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in there_anyway:
            kept.setdefault(address, tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del output
    return total


def peak_of(prepare: Callable[..., Callable[[], Any]], *args: Any) -> tuple[Any, int]:
    """What `prepare(*args)()` returns, and the peak of resident memory over what was there after the preparation.

    VmHWM, not ru_maxrss, which a process inherits from the one that started it.
    """
    work = prepare(*args)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = _resident("VmRSS")
    result = work()
    return result, _resident("VmHWM") - before


def fresh_peak_of(prepare: Callable[..., Callable[[], Any]], *args: Any) -> tuple[Any, int]:
    """`peak_of` in a new process; `prepare` has to be a function of a module."""
    return in_fresh_process(peak_of, prepare, *args, variables=RETURN_FREED_MEMORY)


def in_fresh_process(function: Callable[..., Any], *args: Any, variables: dict[str, str] | None = None) -> Any:
    """What a function of a module returns when a new process runs it, with more environment variables."""
    with _environment(variables or {}), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def _resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


@contextmanager
def _environment(variables: dict[str, str]):
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
