"""What a model costs: parameters, FLOPs, cache and memory, worked out from its configuration alone.

Enters: the configuration of a TokenFormer, of a GPT-NeoX or of a ViT and, where it matters, the length of the sequences
or the size of the images. Leaves: plain numbers, or the configuration of a Transformer with as many parameters; no
model is built.

    tokenformer info 124m models/mine --length 4096
    tokenformer info b16 models/mine --image-size 384

Conventions. A multiply-add is 2 FLOPs, and only matrix products are counted, as FlopCounterMode of
torch.utils.flop_counter does. Causal attention counts in full, future positions included: 4 · length · width per
layer and token, as in the paper. A Pattention of n tokens has 2 · n · width parameters and takes 4 · n · width FLOPs
per token. Memory is in bytes. docs/cost.md has the formulas. `adopted_layers` counts the replaced layers of an adopted
model, from the record in its configuration.
"""

from .counts import (
    OPTIMIZER_STATES,
    Parameters,
    TrainingMemory,
    activation_bytes_per_image,
    activation_bytes_per_token,
    forward_flops_per_image,
    forward_flops_per_token,
    kv_cache_bytes,
    parameters,
    tokens_per_image,
    training_flops_per_image,
    training_flops_per_token,
    training_memory,
)
from .peer import (
    crossing_length,
    equal_neox,
    equal_vit,
    flops_ratio,
    image_flops_ratio,
    neox_parameters,
    neox_width,
)
from .shapes import (
    ROW_STATS,
    Config,
    LanguageConfig,
    LayerCosts,
    VisionConfig,
    adopted_layers,
    layer_numbers,
    layer_parameters,
)

__all__ = [
    "OPTIMIZER_STATES",
    "ROW_STATS",
    "Config",
    "LanguageConfig",
    "LayerCosts",
    "Parameters",
    "TrainingMemory",
    "VisionConfig",
    "activation_bytes_per_image",
    "activation_bytes_per_token",
    "adopted_layers",
    "crossing_length",
    "equal_neox",
    "equal_vit",
    "flops_ratio",
    "forward_flops_per_image",
    "forward_flops_per_token",
    "image_flops_ratio",
    "kv_cache_bytes",
    "layer_numbers",
    "layer_parameters",
    "neox_parameters",
    "neox_width",
    "parameters",
    "tokens_per_image",
    "training_flops_per_image",
    "training_flops_per_token",
    "training_memory",
]
