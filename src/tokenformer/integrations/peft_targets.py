"""peft's usual spellings reach parameter tokens: target_modules="all-linear", names of layers, and the default.

    get_peft_model(model, LoraConfig(target_modules="all-linear"))

Enters: a model with Pattentions and peft's configuration. Leaves: the same configuration, in which the Pattentions that
`target_modules` means are named by their tokens in `target_parameters`, which is what peft can adapt: a low-rank
change to the keys and one to the values, that can be merged. It is saved that way, and loads without this file.
"""

from functools import wraps
from typing import Any

from torch import nn

from ..errors import BadRequestError
from ..models import Adopted, growth_records
from ..pattention import TOKENS, pattention_layers
from ..pattention.groups import layers_with_groups

# peft adapts tokens as parameters: it does not see their layer's input, and has nothing to drop, scale or select there.
NEEDS_INPUT = {"lora_dropout": "0", "use_dora": "False", "lora_bias": "False", "alora_invocation_tokens": "None"}
# What we use of peft's base class, and of its module, beside what is public.
PRIVATE_METHODS = ("_check_target_module_exists", "_inject_parameters", "_prepare_adapter_config")
PRIVATE = ("_maybe_include_all_linear_layers", "INCLUDE_LINEAR_LAYERS_SHORTHAND")


def reach_tokens(tuners: Any) -> None:
    """Let every tuner of peft (the module peft.tuners.tuners_utils) translate its targets before it looks for them."""
    tuner = getattr(tuners, "BaseTuner", None)
    if not all(hasattr(tuner, name) for name in PRIVATE_METHODS) or not all(hasattr(tuners, name) for name in PRIVATE):
        return  # a peft that cannot adapt parameters, or another one than we know: it works as it does without us
    inject_adapter, inject_parameters = tuners.BaseTuner.inject_adapter, tuners.BaseTuner._inject_parameters

    @wraps(inject_adapter)
    def inject_adapter_to_tokens(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        if any(layers_with_groups(model)):
            raise BadRequestError(
                "peft: the model has token groups, and adapters do not go on top of them; remove them first "
                "(remove_tokens), or merge_tokens those that should stay"
            )
        config = self.peft_config[adapter_name]
        if hasattr(config, "target_modules") and any(pattention_layers(model)):
            name_tokens(self, model, config, tuners)
        inject_adapter(self, model, adapter_name, *args, **kwargs)

    @wraps(inject_parameters)
    def inject_parameters_as_they_lie(self: Any, peft_config: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not any(pattention_layers(model)):
            return inject_parameters(self, peft_config, model, *args, **kwargs)
        # GPT-2's linear layers are transposed, and peft notes that for all targets. Tokens are not.
        transposed, peft_config.fan_in_fan_out = peft_config.fan_in_fan_out, False
        try:
            return inject_parameters(self, peft_config, model, *args, **kwargs)
        finally:
            peft_config.fan_in_fan_out = transposed

    tuners.BaseTuner.inject_adapter = inject_adapter_to_tokens
    tuners.BaseTuner._inject_parameters = inject_parameters_as_they_lie


def name_tokens(tuner: Any, model: nn.Module, config: Any, tuners: Any) -> None:
    """Name the tokens of every Pattention that `config.target_modules` means, and keep the other modules it means."""
    # An adapter that is already there has put the layer into a wrapper.
    layers = [name.replace(".base_layer", "") for name, _ in pattention_layers(model)]
    named = getattr(config, "target_parameters", None) or []
    if config.target_modules is None:
        config.target_modules = _default(tuner, model, config, tuners, named)
    if str(config.target_modules).lower() == tuners.INCLUDE_LINEAR_LAYERS_SHORTHAND:
        tuners._maybe_include_all_linear_layers(config, model)  # lists those of torch, without the head
        config.target_modules = {*config.target_modules, *layers}
    taken_over = _taken_over(model, layers)
    meant = [name for name in layers if _means(tuner, config, name)]
    meant += [layer for name, layer in taken_over.items() if layer not in meant and _means(tuner, config, name)]
    ends = tuple(f".{name}" for name in named)  # as peft compares them
    _check(config, [*meant, *(name for name in _tokens_of(layers) if f".{name}".endswith(ends))])
    if not meant:
        return
    modules = [name for name, _ in model.named_modules() if name and name not in layers and name not in taken_over]
    config.target_modules = {name for name in modules if _means(tuner, config, name)} or []
    config.target_parameters = sorted({*named, *_tokens_of(meant)})
    for patterns in (config.rank_pattern, config.alpha_pattern):
        # What is said of a layer holds for its tokens, by whose names peft looks for it from now on.
        patterns.update({rf"({layer})\.({'|'.join(TOKENS)})": value for layer, value in patterns.items()})


def _taken_over(model: nn.Module, layers: list[str]) -> dict[str, str]:
    """Of adopted models: the modules of the host whose work a Pattention does, which are identities now, with its name.

    The Pattention is in place of the first linear of a feed-forward network; usual targets name the second one too.
    """
    removed = {
        id(part.base_model.get_submodule(name))
        for part, record in growth_records(model)
        if isinstance(record, Adopted)
        for name in record.removed
    }
    found, last = {}, ""
    for name, module in model.named_modules():
        if name in layers:
            last = name
        elif id(module) in removed and last:
            found[name] = last
    return found


def _default(tuner: Any, model: nn.Module, config: Any, tuners: Any, named: list[str]) -> Any:
    """What target_modules stands for when it is not given."""
    if named:
        return []  # only what is named; peft would add its own default
    model_config = tuner.get_model_config(model)
    if config.peft_type == "LORA" and model_config.get("model_type") not in tuner.target_module_mapping:
        return tuners.INCLUDE_LINEAR_LAYERS_SHORTHAND
    return tuner._prepare_adapter_config(config, model_config).target_modules


def _tokens_of(layers: list[str]) -> list[str]:
    return [f"{name}.{tokens}" for name in layers for tokens in TOKENS]


def _check(config: Any, meant: list[str]) -> None:
    """Refuse what peft cannot do to tokens, if any are meant."""
    if not meant:
        return
    if config.peft_type != "LORA":
        raise BadRequestError(
            f"peft: {config.peft_type.value} cannot adapt parameter tokens ({meant[0]}); use LoRA, or name only layers "
            "without tokens in target_modules"
        )
    for option, off in NEEDS_INPUT.items():
        if getattr(config, option, None):
            raise BadRequestError(
                f"peft: {option}={getattr(config, option)} does not work on parameter tokens ({meant[0]}); set it to "
                f"{off}"
            )
    if isinstance(config.init_lora_weights, str) and config.init_lora_weights != "gaussian":
        raise BadRequestError(
            f"peft: init_lora_weights={config.init_lora_weights!r} does not work on parameter tokens ({meant[0]}); use "
            "True or 'gaussian'"
        )


def _means(tuner: Any, config: Any, name: str) -> bool:
    """Whether peft would take the module called `name` for a target."""
    # What peft returns for an excluded module is false in a condition.
    return bool(config.target_modules) and bool(tuner._check_target_module_exists(config, name))
