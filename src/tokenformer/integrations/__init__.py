"""Hooks into other people's tools, so that they reach parameter tokens.

Importing this imports none of them: each hook runs when the tool itself is imported.
"""

from .on_import import on_import
from .peft_groups import name_groups
from .peft_targets import reach_tokens
from .quantisation import watch_function, watch_torch, watch_torchao

on_import("peft.tuners.tuners_utils", reach_tokens)
on_import("peft.mapping", name_groups)
on_import("torch.ao.quantization.quantize", watch_torch)
on_import("torchao.quantization.quant_api", watch_torchao)
# The function below convert_to_float8_training, which may have been imported by its name before this library was.
on_import(
    "torchao.float8.float8_linear_utils", watch_function("swap_linear_layers", "torchao's convert_to_float8_training")
)
on_import("optimum.quanto.quantize", watch_function("quantize", "quanto's quantize"))
