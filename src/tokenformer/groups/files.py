"""save_tokens and load_tokens: a token group as a small folder, apart from the model it belongs to.

    adapter_config.json     what it is, its layers with their numbers of tokens, and which base it was trained beside
    tokens.safetensors      keys, values and tau, by the names that they have in the model
    README.md               for the Hub

Enters: a model with groups, or such a folder, or its name on the Hub. Leaves: the folder, or the model with one more
group; or a one-line error, with nothing changed. Pickles are not read.
"""

import json
import os
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import BadFileError, BadRequestError, did_you_mean
from ..io import check_new, read_json, replace_file, write_new
from ..models.kept_groups import check_name
from ..models.loading import local_folder
from ..pattention.groups import Norm, Switch, TokenGroup, layers_with_groups, switch_of
from .base import called_now, note_base, refuse_another_base
from .change import check_free_of_adapters, check_known, check_shares, put_group, token_groups, train_tokens
from .places import device_of, place_of
from .reading import CONFIG_FILE, KEY_BIAS, PARTS, TYPE, WEIGHTS_FILE, read_facts, read_tensors, tensor_name

CARD_FILE, INDEX_FILE = "README.md", "model.safetensors.index.json"
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
        _write(model, name, partial, group_tensors(model, name))
    return target


def save_groups(
    model: Any,
    folder: str | os.PathLike,
    state_dict: Mapping[str, Tensor] | None = None,
    *,
    write: bool = True,
    push_to_hub: bool = False,
) -> None:
    """What `save_pretrained` and Trainer write: the group that trains; if none does, those that are on, or all.

    `state_dict` is the model's, gathered by those who trained it on several devices. The index beside several, or one,
    is how Trainer finds weights when it resumes.
    """
    target = Path(folder)
    if push_to_hub:
        raise BadRequestError("save_pretrained: save the groups, and upload their folder: hf upload NAME FOLDER")
    groups = [facts for facts in token_groups(model) if not facts.kept]
    names = [facts.name for facts in groups if facts.trains] or [facts.name for facts in groups if facts.on]
    names = names or [facts.name for facts in groups]
    _check_free(target, names)
    if not write:
        return
    if hasattr(model, "last_growth"):
        warnings.warn(
            "save_pretrained: the model has grown since it was loaded, and only its token groups are saved; to save it "
            "too, copy it, remove_tokens its groups and save_pretrained the copy elsewhere",
            stacklevel=3,
        )
    before = _saved_before(target)
    places: dict[str, str] = {}
    for name in names:
        own = target if len(names) == 1 else target / name
        own.mkdir(parents=True, exist_ok=True)
        tensors = group_tensors(model, name, state_dict)
        _write(model, name, own, tensors)
        places |= dict.fromkeys(tensors, (own / WEIGHTS_FILE).relative_to(target).as_posix())
    index = {"metadata": {"format": "pt"}, "weight_map": places}
    replace_file(target / INDEX_FILE, json.dumps(index, indent=2) + "\n")
    for weights in before - set(places.values()):
        _remove_group((target / weights).parent)


def _check_free(folder: Path, names: list[str]) -> None:
    """Refuse a folder where groups would be in the way of something else, or something else in theirs."""
    weights = [*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin")]
    if weights and (folder / "config.json").exists():
        raise BadRequestError(
            f"{folder} holds a model, which could not be loaded any more with its token groups beside it; save them in "
            f"another folder, as {folder / names[0]}"
        )
    if len(names) > 1 and (folder / CONFIG_FILE).exists() and WEIGHTS_FILE not in _saved_before(folder):
        raise BadRequestError(
            f"{folder} holds an adapter, and {len(names)} token groups cannot be saved in it; choose another folder"
        )


def _saved_before(folder: Path) -> set[str]:
    """The files of weights that an earlier `save_groups` wrote in a folder."""
    try:
        named = set(read_json(folder / INDEX_FILE)["weight_map"].values())
    except (BadFileError, KeyError, TypeError, AttributeError):  # there is none, or it is of something else
        return set()
    # Looked for here, not where the index says, which may be anywhere.
    found = [path for depth in (WEIGHTS_FILE, f"*/{WEIGHTS_FILE}") for path in folder.glob(depth)]
    return {path.relative_to(folder).as_posix() for path in found} & named


def _remove_group(folder: Path) -> None:
    for name in (CONFIG_FILE, WEIGHTS_FILE, CARD_FILE):
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def group_tensors(model: nn.Module, name: str, state_dict: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Those of a group, by their names in the model."""
    found = state_dict
    if found is None:
        found = {
            tensor_name(layer, name, part): tensor
            for layer, groups in layers_with_groups(model)
            if name in groups
            for part, tensor in groups[name].state_dict().items()
        }
    sign = f".token_groups.{name}."
    return {key: tensor.detach().cpu().contiguous() for key, tensor in found.items() if sign in key}


def _write(model: nn.Module, name: str, folder: Path, tensors: dict[str, Tensor]) -> None:
    groups = {layer: each[name] for layer, each in layers_with_groups(model) if name in each}
    config, first, base = getattr(model, "config", None), next(iter(groups.values())), note_base(model, name)
    facts = {
        "peft_type": TYPE,
        "library_name": "tokenformer",
        "version": version("tokenformer"),
        "base_model_name_or_path": getattr(config, "name_or_path", "") or None,
        "base": base,
        "name": name,
        "norm": first.norm,
        "layers": {layer: group.num_tokens for layer, group in groups.items()},
        "kinds": {layer: group.kind for layer, group in groups.items()},
        "inference_mode": True,
    }
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    replace_file(folder / CONFIG_FILE, json.dumps(facts, indent=2) + "\n")
    count, source = sum(group.num_tokens for group in groups.values()), facts["base_model_name_or_path"]
    card = ModelCardData(library_name="tokenformer", base_model=_on_hub(source), tags=["token-group"])
    text = CARD.format(name=name, count=count, base=source or f"a {base['model_type']} model")
    replace_file(folder / CARD_FILE, str(ModelCard(f"---\n{card.to_yaml()}\n---\n\n{text}")))


def _on_hub(base: Any) -> str | None:
    return base if isinstance(base, str) and base.count("/") == 1 and not Path(base).exists() else None


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
        check_base: refuse a model with other blocks, other groups that are part of it, or other numbers than the base.
    """
    source = local_folder(folder)
    facts = read_facts(source)
    name = facts["name"] if name is None else name
    check_name(model, name)
    check_free_of_adapters(model)
    tensors = read_tensors(source, facts)
    if check_base:
        refuse_another_base(model, source, facts["base"])
    now = {layer: called_now(model, layer, facts["base"]) for layer in facts["layers"]}
    groups = {now[layer]: _group(model, layer, now[layer], source, facts, tensors) for layer in facts["layers"]}
    switch = switch_of(model) or Switch()
    for layer, group in groups.items():
        put_group(model, layer, name, group, switch)
    switch.turn_on(name)
    if trainable:
        train_tokens(model, name)
    return model


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
    keys, values = (tensors[tensor_name(saved, facts["name"], part)] for part in PARTS[:2])
    count = facts["layers"][saved]
    if keys.shape != (count, place.d_in) or values.shape != (count, place.d_out):
        raise BadRequestError(
            f"{folder} has keys {tuple(keys.shape)} and values {tuple(values.shape)} for {layer!r}, which is "
            f"{place.d_in} to {place.d_out} wide here; it belongs to another model"
        )
    kind = facts["kinds"][saved]
    norm: Norm = "shared" if facts["norm"] == "shared" else "own"
    if norm == "shared":
        check_shares(layer, module, place.kind)
        if kind != place.kind:
            raise BadRequestError(f"{folder} shares the normaliser of kind {kind}, and {layer!r} is of {place.kind}")
    parts = {part: tensors[tensor_name(saved, facts["name"], part)] for part in PARTS}
    bias = tensors.get(tensor_name(saved, facts["name"], KEY_BIAS))
    if bias is not None:
        parts[KEY_BIAS] = bias
    with torch.device(device_of(module) or "cpu"):
        group = TokenGroup(place.d_in, place.d_out, count, kind, norm, key_bias=bias is not None, dtype=keys.dtype)
    group.load_state_dict(parts)
    return group.requires_grad_(False)
