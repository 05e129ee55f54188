"""Reading a model folder, with one line for whatever can be wrong with it.

Enters: a folder that `save_pretrained` wrote, or a name on the Hub, which `local_folder` fetches. Leaves: its
configuration (`read_config`), or the model with every weight read (`read_model`) or with none (`empty_model`). Nothing
that is missing is drawn at random.
"""

import copy
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification
from transformers.quantizers import AutoHfQuantizer

from ..errors import BadFileError, BadRequestError, innermost, one_line
from ..io import read_json
from ..memory import check_fits, machine_memory
from .adopted import record_of
from .adopted_classes import PREFIX, AdoptedConfigMixin, AdoptedModel, adopted_class
from .base import TokenFormerPreTrainedModel
from .card import CARD_FILE, HUB_NAME
from .config import MOST_LAYERS, TokenFormerBaseConfig, TokenFormerConfig, TokenFormerVisionConfig
from .language import TokenFormerForCausalLM
from .prefixes import prefix_config
from .side_files import GIVE_THE_OPTION, TOKENIZER_FILES, refuse_foreign_code
from .vision import TokenFormerForImageClassification

# In config.json, the method of quantisation of models whose tokens are integers (quantisation/).
INTEGERS = "tokenformer_tokens"
HUB_FILES = ("*.json", "*.safetensors", CARD_FILE)
MOST_LABELS = 2**20  # transformers makes a name for each
# The model with its head, by kind of configuration.
MODELS: dict[type[TokenFormerBaseConfig], type[TokenFormerPreTrainedModel]] = {
    TokenFormerConfig: TokenFormerForCausalLM,
    TokenFormerVisionConfig: TokenFormerForImageClassification,
}
# What messages call the kind of model that is needed, by our configuration and by transformers' Auto class.
CALLED: dict[Any, str] = {
    TokenFormerConfig: "a causal language model",
    AutoModelForCausalLM: "a causal language model",
    TokenFormerVisionConfig: "an image classifier",
    AutoModelForImageClassification: "an image classifier",
}


def local_folder(name: str | os.PathLike, *, trust_remote_code: bool = False) -> Path:
    """The folder of a model: the local one of that name, or else the Hub's, downloaded; its code only if trusted."""
    folder = Path(name)
    if folder.exists() or not HUB_NAME.fullmatch(str(name)):
        return folder
    files = [*HUB_FILES, *TOKENIZER_FILES, *(["*.py"] if trust_remote_code else [])]
    try:
        folder = Path(snapshot_download(str(name), allow_patterns=files))
        if not any(folder.glob("*.safetensors")):  # an old model, in torch's own format
            folder = Path(snapshot_download(str(name), allow_patterns=[*files, "*.bin"]))
    except Exception as error:  # the Hub's client and the HTTP library below it share no base class
        raise BadRequestError(
            f"{name} does not exist here, and no model of that name could be fetched from the Hub: "
            f"{one_line(error).split('. ')[0]}"
        ) from error
    return folder


def read_config(
    folder: str | os.PathLike,
    kind: type | None = None,
    or_adopted: bool = False,
    *,
    trust_remote_code: bool = False,
    foreign_code: str = GIVE_THE_OPTION,
) -> Any:
    """The configuration of a folder, for any model that transformers knows. Weights are not read.

    Python code in the folder is run only with `trust_remote_code`, and nobody is asked; `foreign_code` is what an error
    advises about it.

    With `kind`, such as TokenFormerConfig, any other is refused; with `or_adopted`, an adopted model passes too.
    """
    folder = Path(folder)
    if not folder.exists():
        raise BadRequestError(f"{folder} does not exist; check the path")
    if not (folder / "config.json").is_file():
        raise BadRequestError(f"{folder} is not a model folder: it has no config.json")
    _check_counts(folder / "config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # a broken file, a value of the wrong type, a model unknown to transformers
        refuse_foreign_code(f"the model in {folder}", error, foreign_code)
        raise BadFileError(f"{folder / 'config.json'} cannot be read: {innermost(error)}") from error
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers > MOST_LAYERS:  # of other families; ours refuse it themselves
        raise BadFileError(
            f"{folder / 'config.json'} cannot be read: num_hidden_layers={layers} was given; at most {MOST_LAYERS} are "
            "possible"
        )
    if kind is not None and not isinstance(config, kind) and not (or_adopted and record_of(config) is not None):
        called = f", {CALLED[kind]}," if kind in CALLED else ""
        way_out = "; tokenformer adopt makes one of the families in docs/adopting.md" if or_adopted else ""
        raise BadRequestError(
            f"{folder} holds a {config.model_type} model, but a TokenFormer{called} is needed{way_out}"
        )
    return config


def _check_counts(path: Path) -> None:
    """Refuse what transformers would make lists of, until no memory is left, before it sees that anything is wrong."""
    try:
        settings = read_json(path)
    except BadFileError as error:
        raise BadFileError(f"{path} cannot be read: {one_line(error).removeprefix(f'{path} ')}") from error
    if not isinstance(settings, dict):
        return
    for part in (settings, *(value for value in settings.values() if isinstance(value, dict))):  # as text_config
        for key, most in (("num_labels", MOST_LABELS), ("num_hidden_layers", MOST_LAYERS)):
            given = part.get(key)
            if isinstance(given, int) and given > most:
                raise BadFileError(f"{path} cannot be read: {key}={given} was given; at most {most} are possible")


def read_model(
    folder: str | os.PathLike,
    device: str | None = "cpu",
    auto: Any = None,
    *,
    trust_remote_code: bool = False,
    **options: Any,
) -> Any:
    """The model of a folder in its saved dtype, in evaluation mode. A device of None is the fastest there is.

    It has the class that its config.json names, or the one that the Auto class `auto` chooses, if the caller
    needs a model for its purpose: AutoModelForCausalLM or AutoModelForImageClassification. `options` are a dtype or a
    configuration for from_pretrained, or a token_fraction.
    """
    config = read_config(folder, trust_remote_code=trust_remote_code)
    if options.get("token_fraction") is None:
        options.pop("token_fraction", None)
    else:
        config = prefix_config(config, options["token_fraction"], folder)
    foreign = getattr(config, "auto_map", None) or {} if trust_remote_code else {}
    if auto is not None and type(config) not in auto._model_mapping and auto.__name__ not in foreign:
        raise BadRequestError(f"{folder} holds a {config.model_type} model, but {CALLED[auto]} is needed")
    target = _device(device)
    kind: Any = MODELS.get(type(config)) or auto or _named_class(config, foreign)
    settings = {"dtype": "auto", "local_files_only": True, "output_loading_info": True, **options}
    settings["ignore_mismatched_sizes"] = True  # to name them below; transformers would point to a table in its log
    settings["trust_remote_code"] = trust_remote_code
    if not foreign:
        _check_memory(folder, kind, config, options.get("dtype"))
    try:
        model, info = kind.from_pretrained(folder, **settings)
    except Exception as error:  # for a broken file safetensors, transformers and torch each raise their own
        refuse_foreign_code(f"the model in {folder}", error)
        raise BadFileError(f"the weights in {folder} cannot be read: {one_line(error)}") from error
    # transformers only warns about these, and draws what is missing at random. Unexpected weights do no harm in models
    # that are not ours: old checkpoints hold masks and the like.
    for name, saved, needed in sorted(info["mismatched_keys"])[:1]:
        raise BadFileError(
            f"{folder} has {name} of shape {list(saved)}, and its config.json makes it {list(needed)}; do the weights "
            "belong to it?"
        )
    wrong = wrong_keys(info["missing_keys"], info["unexpected_keys"] if type(config) in MODELS else [])
    if wrong:
        raise BadFileError(f"{folder} {wrong}; do the weights belong to its config.json?")
    return model.to(target)


def read_generator(
    folder: str | os.PathLike,
    device: str | None = None,
    *,
    any_family: bool = False,
    trust_remote_code: bool = False,
    **options: Any,
) -> Any:
    """The model of a folder, if it generates text: ours or an adopted one, or of any family. Else as read_model."""
    if not any_family:
        read_config(folder, TokenFormerBaseConfig, or_adopted=True, trust_remote_code=trust_remote_code)
    model = read_model(folder, device, trust_remote_code=trust_remote_code, **options)
    if not model.can_generate():
        raise BadRequestError(f"{folder} holds a {type(model).__name__}, which does not generate text")
    return model


def check_finite(model: torch.nn.Module, folder: str | os.PathLike) -> None:
    """Refuse weights, of the model or of groups beside it, that would only generate noise."""
    for name, weights in model.named_parameters():
        if not weights.isfinite().all():
            raise BadFileError(f"{folder} has weights that are NaN or infinite, in {name}; take an earlier checkpoint")


def _check_memory(folder: str | os.PathLike, kind: Any, config: Any, dtype: Any) -> None:
    """Refuse a model that this machine cannot hold, before the system ends the process for trying.

    A class of ours that cannot be built is a fault of ours; in others whatever it is, loading says it better.
    """
    try:
        with torch.device("meta"):
            model = (kind.from_config if hasattr(kind, "from_config") else kind)(copy.deepcopy(config))
            quantised = _make_integers(model, config)
    except Exception:
        if type(config) in MODELS:
            raise
        return
    dtype = dtype if isinstance(dtype, torch.dtype) else config.dtype or torch.float32
    said = f"the model in {folder}, of {model.num_parameters():,} parameters,"
    needed = model.get_memory_footprint() if quantised else model.num_parameters() * dtype.itemsize
    check_fits(said, needed, machine_memory(), "is its config.json right?")


def empty_model(config: Any) -> Any:
    """The model of a configuration as `read_model` makes it, adopted layers in place, on the meta device."""
    kind = MODELS.get(type(config)) or _named_class(config)
    with torch.device("meta"):
        model = kind(config)
        record = record_of(config)
        if record is not None and not isinstance(model, AdoptedModel):  # of a folder of version 0.1
            record.put_into(model)
        _make_integers(model, config)
    return model


def _make_integers(model: Any, config: Any) -> bool:
    """Make the layers integers that are so in a folder with this configuration; whether there are any."""
    entry = integers_in(config)
    if entry is not None:
        AutoHfQuantizer.from_config(entry, pre_quantized=True).preprocess_model(model)
    return entry is not None


def integers_in(config: Any) -> dict[str, Any] | None:
    """What the configuration of a saved model says of tokens that are integers; None if none are."""
    entry = getattr(config, "quantization_config", None)
    return entry if isinstance(entry, dict) and entry.get("quant_method") == INTEGERS else None


def _named_class(config: Any, foreign: Mapping[str, str] = MappingProxyType({})) -> Any:
    """The class that config.json names, or the Auto class that finds it in the folder's own code."""
    name, *_ = config.architectures or [""]
    adopted = isinstance(config, AdoptedConfigMixin)
    name = name.removeprefix(PREFIX) if adopted else name
    for auto, reference in foreign.items():
        if reference.rpartition(".")[2] == name and hasattr(transformers, auto):
            return getattr(transformers, auto)
    if not hasattr(transformers, name):
        # The model without its head would load, and nobody would notice.
        raise BadRequestError(
            f"{config.name_or_path}/config.json names {name or 'no class'} under architectures, and transformers has "
            "no such class; load the model with your own code, and use adopt() or grow()"
        )
    kind = getattr(transformers, name)
    return adopted_class(kind) if adopted else kind


def wrong_keys(missing: Collection[Any], unexpected: Collection[Any]) -> str:
    """The part of an error message that names them; empty if there are none."""
    problems = (("lacks", missing), ("has the unexpected", unexpected))
    return " and ".join(f"{problem} {_listed(keys)}" for problem, keys in problems if keys)


def _listed(keys: Collection[Any], most: int = 6) -> str:
    # By number first, so that layer 10 follows layer 9.
    ordered = sorted(map(str, keys), key=lambda key: ([int(number) for number in re.findall(r"\d+", key)], key))
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if name == "meta":
        raise BadRequestError("device 'meta' cannot be used: it holds shapes and no numbers")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # a name torch does not know, or hardware that is not here
        raise BadRequestError(f"device {name!r} cannot be used: {one_line(error)[:100]}") from error
