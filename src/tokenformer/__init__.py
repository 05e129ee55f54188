"""Neural networks whose parameters are tokens. `import tokenformer` registers the models with transformers.

pattention, Pattention, replace_linears    the layer, and the swap that puts it into any torch model
tokenformer.nn                             torch's Transformer layers with Pattention inside
TokenFormerConfig, TokenFormerForCausalLM  the language model
TokenFormerVisionConfig,
TokenFormerForImageClassification          the vision model
grow, grow_optimizer                       a larger model that computes exactly what the smaller one did
adopt                                      a Transformer of transformers becomes a TokenFormer that computes the same
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
# Parts that come when they are first asked for: `tokenformer.cost` needs no import of its own.
_PARTS = ("cost", "data", "evaluation", "official", "report", "training")

if TYPE_CHECKING or "tokenformer_command" not in sys.modules:
    from .api import *  # noqa: F403
    from .api import __all__ as __all__

if not TYPE_CHECKING:  # to a type checker every name would exist

    def __getattr__(name: str) -> Any:
        if name in _PARTS:
            return import_module(f".{name}", __name__)
        if "tokenformer_command" not in sys.modules:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # In the script (see src/tokenformer_command.py) all other names come when they are first asked for, too.
        api = import_module(".api", __name__)
        value = getattr(api, name)
        globals().update({known: getattr(api, known) for known in api.__all__})
        return value
