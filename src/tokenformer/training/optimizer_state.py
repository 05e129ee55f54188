"""The optimizer's state on disk: keyed by parameter name, in safetensors, the same for one process and for many.

Trainer's own optimizer.pt is keyed by index, which growth cannot follow, and a sharded one is bound to its number of
processes. Here every state stands whole in optimizer.safetensors as "<parameter>/<state>"; shards are gathered when it
is written and cut again when it is read. The settings of the groups come from the recipe, not from the file.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from .distributed import gathered, like

FILE = "optimizer.safetensors"


State = dict[str, dict[str, Tensor]]


def save(folder: Path, model: nn.Module, optimizer: Optimizer, *, carried: State, write: bool) -> None:
    """Write the state of `model`'s parameters. Every process must call it; one writes.

    `carried` are states of parameters that this optimizer does not hold, for a later stage that trains them again.
    """
    held = {name: optimizer.state.get(parameter, {}) for name, parameter in model.named_parameters()}
    tensors = gathered(_flat({**held, **carried}), keep=write)
    if write:
        save_file(tensors, folder / FILE)


def read(folder: Path) -> State:
    """The states in a checkpoint by parameter name; empty if it has none."""
    state: State = {}
    if (folder / FILE).exists():
        for path, tensor in load_file(folder / FILE).items():
            name, _, key = path.rpartition("/")
            state.setdefault(name, {})[key] = tensor
    return state


def write(folder: Path, state: State) -> None:
    """Write states by parameter name."""
    save_file(_flat(state), folder / FILE)


def load(folder: Path, model: nn.Module, optimizer: Optimizer) -> State:
    """Put a checkpoint's states into an optimizer; returns those of parameters that it does not hold.

    A parameter without a state starts afresh.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    state = read(folder)
    for name, parameter in model.named_parameters():
        if id(parameter) in held and name in state:
            optimizer.state[parameter] = {
                # Adam keeps its step count on the CPU.
                key: like(value, parameter) if value.dim() else value
                for key, value in state.pop(name).items()
            }
    return state


def _flat(state: State) -> dict[str, Tensor]:
    return {f"{name}/{key}": torch.as_tensor(value) for name, entry in state.items() for key, value in entry.items()}
