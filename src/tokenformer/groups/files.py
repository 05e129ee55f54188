"""save_tokens and load_tokens: a token group as a small folder, apart from the model it belongs to.

    adapter_config.json     what it is, its layers with their numbers of tokens, and which base it was trained beside
    tokens.safetensors      keys, values and tau, by the names that they have in the model
    README.md               for the Hub

Enters: a model with groups, or such a folder, or its name on the Hub. Leaves: the folder, or the model with one more
group; or a one-line error, with nothing changed. Pickles are not read.
"""

import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..errors import BadFileError, BadRequestError, did_you_mean
from ..growth.plan import find_stack
from ..io import check_new, read_json, replace_file, write_new
from ..models import growth_records
from ..models.blocks import BlockGrowth
from ..models.kept_groups import check_name, kept_names
from ..models.loading import local_folder
from ..pattention.groups import NORMS, Norm, Switch, TokenGroup, layers_with_groups, switch_of
from .change import check_free_of_adapters, check_known, check_shares, put_group, train_only
from .places import place_of

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "adapter_config.json", "tokens.safetensors", "model.safetensors.index.json"
TYPE = "TOKENS"
PARTS = ("key_tokens", "value_tokens", "tau")
# Entries of the embedding that tell one base from another, and how far they may differ: casting rounds them.
ROWS, COLUMNS = (1, 2, 3, 5, 8, 13, 21, 34), 8
TOLERANCE = 2**-6
CARD = """\
# {name}

{count:,} parameter tokens that were learnt beside {base}, which they leave as it is.

```python
import tokenformer

tokenformer.load_tokens(model, "path/to/this/folder")  # or its name on the Hub
```
"""


def save_tokens(model: nn.Module, name: str, folder: str | os.PathLike) -> Path:
    """Write one group to a new folder."""
    check_known(model, [name])
    target = Path(folder)
    check_new(target)
    with write_new(target) as (partial,):
        partial.mkdir()
        _write(model, name, partial, _tensors(model, name))
    return target


def save_groups(model: Any, folder: str | os.PathLike, state_dict: Mapping[str, Tensor] | None, *, write: bool) -> None:
    """What `save_pretrained` and Trainer write: the groups that are on, or all if none is.

    `state_dict` is the model's, gathered by those who trained it on several devices. The index beside several, or one,
    is how Trainer finds weights when it resumes.
    """
    switch = switch_of(model)
    assert switch is not None
    kept, every = kept_names(model), (name for _, groups in layers_with_groups(model) for name in groups.names())
    apart = [name for name in dict.fromkeys(every) if name not in kept]
    names = [name for name in apart if name in switch.on] or apart
    places: dict[str, str] = {}
    for name in names if write else ():
        target = Path(folder) if len(names) == 1 else Path(folder) / name
        target.mkdir(parents=True, exist_ok=True)
        tensors = _tensors(model, name, state_dict)
        _write(model, name, target, tensors)
        places |= dict.fromkeys(tensors, str((target / WEIGHTS_FILE).relative_to(folder)))
    if write:
        index = {"metadata": {"format": "pt"}, "weight_map": places}
        replace_file(Path(folder) / INDEX_FILE, json.dumps(index, indent=2) + "\n")


def _tensors(model: nn.Module, name: str, state_dict: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Those of a group, by their names in the model."""
    found = state_dict
    if found is None:
        found = {
            f"{layer}.token_groups.{name}.{part}": tensor
            for layer, groups in layers_with_groups(model)
            if name in groups
            for part, tensor in groups[name].state_dict().items()
        }
    sign = f".token_groups.{name}."
    return {key: tensor.detach().cpu().contiguous() for key, tensor in found.items() if sign in key}


def _write(model: nn.Module, name: str, folder: Path, tensors: dict[str, Tensor]) -> None:
    groups = {layer: each[name] for layer, each in layers_with_groups(model) if name in each}
    config, first = getattr(model, "config", None), next(iter(groups.values()))
    facts = {
        "peft_type": TYPE,
        "library_name": "tokenformer",
        "version": version("tokenformer"),
        "base_model_name_or_path": getattr(config, "name_or_path", "") or None,
        "base": {
            "model_type": getattr(config, "model_type", None),
            "blocks": getattr(config, "num_hidden_layers", None),
            "fingerprint": fingerprint(model),
        },
        "name": name,
        "norm": first.norm,
        "layers": {layer: group.num_tokens for layer, group in groups.items()},
        "kinds": {layer: group.kind for layer, group in groups.items()},
        "inference_mode": True,
    }
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    replace_file(folder / CONFIG_FILE, json.dumps(facts, indent=2) + "\n")
    count, base = sum(group.num_tokens for group in groups.values()), facts["base_model_name_or_path"]
    card = ModelCardData(library_name="tokenformer", base_model=_on_hub(base), tags=["token-group"])
    text = CARD.format(name=name, count=count, base=base or f"a {facts['base']['model_type']} model")  # type: ignore[index]
    replace_file(folder / "README.md", str(ModelCard(f"---\n{card.to_yaml()}\n---\n\n{text}")))


def _on_hub(base: Any) -> str | None:
    return base if isinstance(base, str) and base.count("/") == 1 and not Path(base).exists() else None


@torch.no_grad()
def fingerprint(model: nn.Module) -> list[float] | None:
    """A few entries of the embedding; None if there is none, or it is quantised or has no numbers."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    weight = getattr(embedding, "weight", None)
    if weight is None or weight.is_meta or not weight.is_floating_point() or weight.dim() < 2:
        return None
    flat = weight.detach().flatten(1)
    rows = [row for row in ROWS if row < flat.shape[0]]
    step = max(1, flat.shape[1] // COLUMNS)
    return [float(f"{value:.5g}") for value in flat[rows, ::step][:, :COLUMNS].double().flatten().tolist()]


def load_tokens(
    model: nn.Module,
    folder: str | os.PathLike,
    name: str | None = None,
    *,
    trainable: bool = False,
    check_base: bool = True,
) -> nn.Module:
    """Put a saved group beside the layers of a model, in place, and switch it on with those that are.

    Args:
        model: the base that it was trained beside, also one that has grown since, or is quantised.
        folder: what `save_tokens` wrote; or its name on the Hub.
        name: what to call it here; as it was called unless given.
        trainable: let it, and nothing else, learn.
        check_base: refuse a model whose embedding is another than that of the base.
    """
    source = local_folder(folder)
    facts = read_facts(source)
    name = facts["name"] if name is None else name
    check_name(model, name)
    check_free_of_adapters(model)
    tensors = _read_tensors(source, facts)
    if check_base:
        _check_base(model, source, facts)
    now = {layer: _called_now(model, layer, facts) for layer in facts["layers"]}
    groups = {now[layer]: _group(model, layer, now[layer], source, facts, tensors) for layer in facts["layers"]}
    switch = switch_of(model) or Switch()
    for layer, group in groups.items():
        put_group(model, layer, name, group, switch)
    switch.on = (*switch.on, name)
    if trainable:
        train_only(model, name)
    return model


def read_facts(folder: Path) -> dict[str, Any]:
    """What a saved group says of itself."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise BadRequestError(f"{folder} is not a token group: it has no {CONFIG_FILE}; save_tokens writes one")
    facts = read_json(path)
    if not isinstance(facts, dict) or facts.get("peft_type") != TYPE:
        kind = facts.get("peft_type") if isinstance(facts, dict) else None
        raise BadRequestError(f"{path} is of a {kind or 'foreign'} adapter, not of a token group; load it with peft")
    layers, name = facts.get("layers"), facts.get("name")
    whole = isinstance(layers, dict) and layers and all(type(n) is int and n > 0 for n in layers.values())
    if not whole or not isinstance(name, str) or facts.get("norm") not in NORMS:
        raise BadFileError(f"{path} is damaged: name, norm or layers are missing; save the group again")
    return facts


def _read_tensors(folder: Path, facts: Mapping[str, Any]) -> dict[str, Tensor]:
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        pickles = [each.name for each in folder.glob("*") if each.suffix in (".bin", ".pt", ".pth", ".pkl")]
        why = f"; {pickles[0]} is a pickle, which can run any program and is not read" if pickles else ""
        raise BadFileError(f"{folder} has no {WEIGHTS_FILE}{why}")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise BadFileError(f"{path} cannot be read: {error}") from error
    for layer in facts["layers"]:
        for part in PARTS:
            if _key(layer, facts, part) not in tensors:
                raise BadFileError(f"{path} is damaged: {_key(layer, facts, part)} is missing; save the group again")
    return tensors


def _key(layer: str, facts: Mapping[str, Any], part: str) -> str:
    return f"{layer}.token_groups.{facts['name']}.{part}"


def _check_base(model: nn.Module, folder: Path, facts: Mapping[str, Any]) -> None:
    """Refuse another family, and another model of the family."""
    base = facts.get("base") or {}
    ours = getattr(getattr(model, "config", None), "model_type", None)
    if base.get("model_type") != ours:
        raise BadRequestError(
            f"{folder} was trained beside a {base.get('model_type')} model, and this is a {ours} model; load that one"
        )
    theirs, here = base.get("fingerprint"), fingerprint(model)
    if theirs is None or here is None:
        return
    largest = max(map(abs, theirs), default=0.0)
    if len(theirs) != len(here) or any(abs(a - b) > TOLERANCE * largest for a, b in zip(theirs, here, strict=True)):
        raise BadRequestError(
            f"{folder} was trained beside another base: the embedding of this model is not its; load that one, or pass "
            "check_base=False if it was trained on"
        )


def _called_now(model: nn.Module, layer: str, facts: Mapping[str, Any]) -> str:
    """What a layer is called in a model that has grown in depth since."""
    blocks = (facts.get("base") or {}).get("blocks")
    for _, record in growth_records(model):
        for step in record.growth_history or []:
            growth = BlockGrowth(**step["blocks"]) if "blocks" in step else None
            if growth is not None and growth.before == blocks:
                layer, blocks = growth.moved(layer, find_stack(model)[0]), growth.after
    return layer


def _group(
    model: nn.Module, saved: str, layer: str, folder: Path, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> TokenGroup:
    """A group of the numbers that were saved for one layer, which may have another name now, and that fits it."""
    modules = dict(model.named_modules())
    if layer not in modules:
        raise BadRequestError(
            f"{folder} has tokens for {layer!r}, which this model does not have; {did_you_mean(layer, modules)}"
        )
    module, place = modules[layer], place_of(model, layer)
    keys, values = (tensors[_key(saved, facts, part)] for part in PARTS[:2])
    count = facts["layers"][saved]
    if keys.shape != (count, place.d_in) or values.shape != (count, place.d_out):
        raise BadRequestError(
            f"{folder} has keys {tuple(keys.shape)} and values {tuple(values.shape)} for {layer!r}, which is "
            f"{place.d_in} to {place.d_out} wide here; it belongs to another model"
        )
    kind = facts.get("kinds", {}).get(saved, place.kind)
    norm: Norm = "shared" if facts["norm"] == "shared" else "own"
    if norm == "shared":
        check_shares(layer, module, place.kind)
        if kind != place.kind:
            raise BadRequestError(f"{folder} shares the normaliser of kind {kind}, and {layer!r} is of {place.kind}")
    first = next(module.parameters(), None)
    with torch.device("cpu" if first is None else first.device):
        group = TokenGroup(place.d_in, place.d_out, count, kind, norm, dtype=keys.dtype)
    group.load_state_dict({part: tensors[_key(saved, facts, part)] for part in PARTS})
    return group.requires_grad_(False)
