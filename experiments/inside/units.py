"""The units of a model and what they do: parameter tokens, neurons, and the rows of linear projections.

Enters: a TokenFormer, a GPT-NeoX, or a GPT-NeoX that was adopted; and text. Leaves: of every kind of unit and layer its
activations, [positions, units]. The activation of a token is its weight, of a neuron what GELU lets through, of a row
of a projection the number that it puts out.

As a control there are directions drawn at random, which read what the feed-forward networks read.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenformer.inside.calls import Call, watching
from tokenformer.inside.places import find_places
from tokenformer.pattention import Pattention

QKV, OUT, FFN, RANDOM = "query, key, value", "out", "feed-forward", "random directions"
BALLAST = "ballast"
ROLES = (QKV, OUT, FFN, RANDOM, BALLAST)
BEGIN = 16  # positions at the beginning of a block that are not looked at: little can be read there
DIRECTIONS = 64  # random ones in each layer
Key = tuple[str, int]  # role and layer


@torch.no_grad()
def activations(model: Any, ids: Tensor) -> dict[Key, Tensor]:
    """Of every role and layer the activations, [positions, units]."""
    found: dict[tuple[str, str, int], list[Tensor]] = {}

    def note(key: tuple[str, str, int], rows: Tensor) -> None:
        found.setdefault(key, []).append(rows[:, BEGIN:].flatten(0, 1))

    with reading(model, note):
        for batch in ids.split(32):
            model(input_ids=batch, use_cache=False)
    by_role: dict[Key, list[Tensor]] = {}
    for (name, role, layer), parts in found.items():
        rows = torch.cat(parts)
        ballast = ballast_of(model, name) if role != RANDOM else torch.zeros(rows.shape[1], dtype=torch.bool)
        by_role.setdefault((role, layer), []).append(rows[:, ~ballast])
        if ballast.any():
            by_role.setdefault((BALLAST, layer), []).append(rows[:, ballast])
    return {key: torch.cat(parts, dim=1) for key, parts in sorted(by_role.items())}


def ballast_of(model: Any, name: str) -> Tensor:
    """Which tokens of a place only keep the norm of an adopted layer: their values are zero. Rows are none of them."""
    module = model.get_submodule(name)
    if isinstance(module, Pattention):
        return (module.value_tokens == 0).all(1)
    return torch.zeros(module.in_features if name.endswith("4h_to_h") else module.out_features, dtype=torch.bool)


@contextmanager
def reading(model: Any, note: Callable[[tuple[str, str, int], Tensor], Any]) -> Iterator[None]:
    """Within the `with`, `note` gets the activations of all units by place, role and layer."""
    with ExitStack() as stack:
        for layer in range(model.config.num_hidden_layers):
            for name, role in token_places(model, layer).items():
                put = partial(_note_call, note, role, layer)
                stack.enter_context(watching(find_places(model, [name], "units", with_groups=False), put))
            for name, role, put in _module_places(model, layer):
                module = model.get_submodule(name)
                hook = module.register_forward_hook(partial(_note_rows, note, (name, role, layer), put))
                stack.callback(hook.remove)
        yield


def token_places(model: Any, layer: int) -> dict[str, str]:
    """Of a layer the places whose tokens are units, with their roles: Pattentions, and the neurons of a GPT-NeoX."""
    names = [name for name, module in model.named_modules() if isinstance(module, Pattention)]
    places = {name: _role(name) for name in names if f".layers.{layer}." in name}
    neurons = f"gpt_neox.layers.{layer}.mlp.dense_4h_to_h"
    if FFN not in places.values():
        places[neurons] = FFN
    return places


def row_places(model: Any, layer: int) -> dict[str, str]:
    """Of a layer the linear projections whose rows are units, with their roles."""
    if model.config.model_type == "tokenformer":
        return {}
    names = {f"gpt_neox.layers.{layer}.attention.query_key_value": QKV, f"gpt_neox.layers.{layer}.attention.dense": OUT}
    return {name: role for name, role in names.items() if not isinstance(model.get_submodule(name), Pattention)}


def _module_places(model: Any, layer: int) -> list[tuple[str, str, Any]]:
    generator = torch.Generator().manual_seed(layer)
    directions = torch.randn(model.config.hidden_size, DIRECTIONS, generator=generator)
    rows = [(name, role, lambda args, output: output) for name, role in row_places(model, layer).items()]
    ours = model.config.model_type == "tokenformer"
    entry = f"model.layers.{layer}.ffn" if ours else f"gpt_neox.layers.{layer}.mlp"
    return [*rows, (entry, RANDOM, lambda args, output: args[0] @ directions)]


def _role(name: str) -> str:
    end = name.rpartition(".")[2]
    return {"out": OUT, "ffn": FFN, "dense_h_to_4h": FFN}.get(end, QKV)


def _note_call(note: Any, role: str, layer: int, name: str, call: Call) -> None:
    note((name, role, layer), call.weights)


def _note_rows(note: Any, key: Any, put: Any, module: Any, args: Any, output: Any) -> None:
    note(key, put(args, output))
