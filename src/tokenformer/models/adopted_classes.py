"""The classes of adopted models: for GPT2LMHeadModel, AdoptedGPT2LMHeadModel, made when it is first needed.

Enters: a host's class, configuration or model. Leaves: its subclass, which puts the layers of the record
`config.adopted` in place when a model is built, so that transformers loads their weights like any others.

    import tokenformer
    AutoModelForCausalLM.from_pretrained("models/adopted")

config.json says `"model_type": "tokenformer_adopted"`, so that no program takes the folder for the host's: without
`import tokenformer`, transformers asks for `trust_remote_code=True`, with which the loader beside the weights imports
it. In memory a configuration keeps the host's model_type, by which other libraries know what to do with the model.
"""

import json
from functools import cache
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..errors import BadFileError, BadRequestError
from ..pattention import Pattention
from .adopted import OLD_METHOD, Adopted, EqualLength, fits_no_host, record_of
from .base import TokenModelMixin, name_in_transformers
from .inference import while_inferring

PREFIX = "Adopted"


class AdoptedConfig(PreTrainedConfig):
    """What AutoConfig finds for the model_type in config.json; it makes the configuration of the host's family."""

    model_type = "tokenformer_adopted"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        record = config_dict.get("adopted")
        host = str(record.get("host") if isinstance(record, dict) else record)
        if host not in CONFIG_MAPPING:
            raise BadFileError(
                f"the record of adopted layers in config.json names the family {host!r}, which this version of "
                "transformers does not have; import the package that registers it"
            )
        host_class: Any = CONFIG_MAPPING[host]
        return adopted_config(host_class).from_dict(config_dict, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing, as for the models: see base.py."""


class AdoptedConfigMixin:
    """A host's configuration with a record: what is read from config.json and written to it."""

    model_type: str
    host_class: Any

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        if "adopted" not in config_dict:
            raise BadFileError(
                f"config.json of a {cls.model_type} model has no record of adopted layers; load it with the class of "
                "its family, and use adopt()"
            )
        entries = {key: value for key, value in config_dict.items() if key != "adopted"}
        loaded = super().from_dict({**entries, "model_type": cls.model_type}, **kwargs)  # type: ignore[misc]
        config = loaded[0] if isinstance(loaded, tuple) else loaded  # with return_unused_kwargs
        config.adopted = Adopted.from_dict(config_dict["adopted"])
        _register(config.__class__)
        return loaded

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> Any:
        found, unused = super().get_config_dict(*args, **kwargs)  # type: ignore[misc]
        # transformers would warn that the folder is of another type.
        return ({**found, "model_type": cls.model_type} if "adopted" in found else found), unused

    def to_dict(self) -> dict[str, Any]:
        entries = super().to_dict()  # type: ignore[misc]
        record = record_of(self)
        if record is not None:
            entries["adopted"] = {"host": self.model_type, **record.to_dict()}
        return entries

    def to_json_string(self, use_diff: bool = True) -> str:
        entries = json.loads(super().to_json_string(use_diff))  # type: ignore[misc]
        if record_of(self) is not None:
            entries["model_type"] = AdoptedConfig.model_type
        return json.dumps(entries, indent=2, sort_keys=True) + "\n"


class AdoptedModel(TokenModelMixin):
    """A host's model that is built with the layers of the record in its configuration."""

    # Enough for all Auto classes: once the configuration is read, they find the model by it.
    loader_classes = {AutoConfig.__name__: AdoptedConfig.__name__}
    loader_module = __name__

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        record = record_of(config)
        if record is not None:
            record.put_into(self)  # type: ignore[arg-type]

    @classmethod
    def is_custom_code(cls) -> bool:
        """To transformers the model is its own: weights are renamed and initialised as the host's are."""
        return False


class AdoptedGenerator(AdoptedModel):
    """An adopted model that generates."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As the host does, by the layers of `for_inference`."""
        config = self.config  # type: ignore[attr-defined]
        layers = config.num_hidden_layers
        try:
            with while_inferring(self):  # type: ignore[arg-type]
                return super().generate(*args, **kwargs)  # type: ignore[misc]
        except IndexError as error:
            # With `assistant_early_exit` transformers lowers this number while it drafts, and GPT-2 and GPT-NeoX run
            # all their layers nevertheless.
            if config.num_hidden_layers == layers:
                raise
            config.num_hidden_layers = layers
            raise BadRequestError(
                f"assistant_early_exit: a {config.model_type} of transformers always runs all its layers; give an "
                "assistant_model instead"
            ) from error


def become_adopted(model: PreTrainedModel, record: Adopted) -> None:
    """Make a host's model, whose modules are replaced already, one of the adopted class, with its record."""
    config: Any = model.config
    config.__class__ = adopted_config(config.__class__)
    config.adopted = record
    _register(config.__class__)
    host: Any = model.__class__
    model.__class__ = adopted_class(host)


@cache
def adopted_class(host: Any) -> Any:
    """The class of adopted models for a host's class; transformers has it as an attribute, as it has the host's."""
    if issubclass(host, AdoptedModel):
        return host
    names = {"__module__": __name__, "config_class": adopted_config(host.config_class)}
    kind = AdoptedGenerator if host.can_generate() else AdoptedModel
    made = type(host)(f"{PREFIX}{host.__name__}", (kind, host), names)
    name_in_transformers(made)
    renamings = get_checkpoint_conversion_mapping(host.__name__)
    if renamings is not None:
        register_checkpoint_conversion_mapping(made.__name__, renamings, overwrite=True)
    return made


@cache
def adopted_config(host: Any) -> Any:
    """The class of configurations with a record, for the class of a host's configuration."""
    if issubclass(host, AdoptedConfigMixin):
        return host
    # transformers finds tokenizers and image processors by the name of this class, so that it stays the host's; pickle
    # goes by the qualified one.
    names = {"__module__": __name__, "__qualname__": f"{PREFIX}{host.__name__}", "host_class": host}
    return type(host)(host.__name__, (AdoptedConfigMixin, host), names)


@cache
def _register(config_class: Any) -> None:
    """Let the Auto classes that know the host find the adopted model by its configuration."""
    host = config_class.host_class
    for auto in vars(modeling_auto).values():
        mapping = getattr(auto, "_model_mapping", None) if isinstance(auto, type) else None
        if mapping is None or host not in mapping:
            continue
        found = mapping[host]
        kinds = tuple(map(adopted_class, found if isinstance(found, tuple) else (found,)))
        mapping.register(config_class, kinds if isinstance(found, tuple) else kinds[0], exist_ok=True)
        # The lists by which Trainer and pipelines see what a model is for.
        mapping._model_mapping[f"adopted_{host.model_type}"] = kinds[0].__name__


def __getattr__(name: str) -> Any:
    """The class of that name, for pickle: AdoptedGPT2LMHeadModel, AdoptedGPT2Config."""
    host: Any = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if not isinstance(host, type):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    adopted: Any = adopted_config if issubclass(host, PreTrainedConfig) else adopted_class
    return adopted(host)


@register_quantization_config(OLD_METHOD)
class OldRecord(QuantizationConfigMixin):
    """The record in a folder of version 0.1."""

    def __init__(self, **entries: Any) -> None:
        self.quant_method: Any = entries.pop("quant_method")
        self.record = Adopted.from_dict(entries)


@register_quantizer(OLD_METHOD)
class OldFolderLoader(HfQuantizer):
    """transformers' hook for quantised models, called with the model before its weights are loaded, and after.

    By it version 0.1 loaded adopted models. Saved again, they are as they are today.
    """

    quantization_config: OldRecord

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        # Up to 5.20 transformers does not cast what it renames, such as GPT-NeoX's output layer, if this is set.
        self.pre_quantized = False
        self.quantization_config.record.put_into(model, guard=0)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        # Nothing is quantised: without these traces the model casts, trains and compiles like any other.
        del model.hf_quantizer, model.quantization_method, model.config.quantization_config
        model.is_quantized = False
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.config.__dict__.pop("_is_quantized", None)
            if isinstance(module, Pattention | EqualLength):
                fits_no_host(module)
        become_adopted(model, self.quantization_config.record)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True
