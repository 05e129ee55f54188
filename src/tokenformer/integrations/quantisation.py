"""Functions that quantise any torch model: they look for linear layers, so a warning says what they left.

Enters: the module of such a function. Leaves: the same, with a warning after its work. What transformers quantises
while it loads is seen in models/base.py.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from ..models.unquantised import warn_of_unquantised_tokens, warn_of_zeros_made_nan


def watch_torch(quantize: Any) -> None:
    """torch.ao.quantization.quantize: `quantize_dynamic` and the other ways there all end in `convert`."""
    convert = quantize.convert

    @wraps(convert)
    def convert_and_tell(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        converted = convert(module, *args, **kwargs)
        warn_of_unquantised_tokens(converted, "torch.ao.quantization")
        return converted

    quantize.convert = convert_and_tell


def watch_torchao(quant_api: Any) -> None:
    """torchao.quantization.quant_api: `quantize_`, by the function with which it walks over a model.

    `quantize_` itself may have been imported by its name before this library was.
    """
    walk = getattr(quant_api, "_replace_with_custom_fn_if_matches_filter", None)
    if walk is None:  # in another version of torchao
        return

    @wraps(walk)
    def walk_and_tell(model: nn.Module, change: Any, filter_fn: Any, name: str = "", *args: Any, **kwargs: Any) -> Any:
        replaced = walk(model, change, filter_fn, name, *args, **kwargs)
        if not name:  # it calls itself for every part of the model
            warn_of_unquantised_tokens(model, "torchao's quantize_")
        return replaced

    quant_api._replace_with_custom_fn_if_matches_filter = walk_and_tell
    by_name = getattr(quant_api, "_fqn_to_config_handler", None)
    if by_name is None:
        return

    @wraps(by_name)
    def quantise_and_look(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        replaced = by_name(module, *args, **kwargs)
        warn_of_zeros_made_nan(replaced, "torchao's quantize_")
        return replaced

    quant_api._fqn_to_config_handler = quantise_and_look


def watch_function(name: str, tool: str) -> Callable[[Any], None]:
    """A hook for a module whose function `name` takes a model and quantises it in place."""

    def watch(module: Any) -> None:
        quantise = getattr(module, name, None)
        if quantise is None:  # in another version
            return

        @wraps(quantise)
        def quantise_and_tell(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = quantise(model, *args, **kwargs)
            warn_of_unquantised_tokens(model, tool)
            return result

        setattr(module, name, quantise_and_tell)

    return watch
