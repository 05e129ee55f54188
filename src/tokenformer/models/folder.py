"""What is written beside the weights: a model card, and a loader for programs that do not import tokenformer.

The card says what the model is, how it grew and how to load it. The loader is a file of imports that transformers runs
for `from_pretrained(folder, trust_remote_code=True)`, so that any program finds our classes where they are installed.
"""

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..pattention import pattention_layers
from .config import TokenFormerConfig

TEMPLATE = """\
---
library_name: transformers
tags:
- tokenformer
---
# A TokenFormer language model

Every linear projection of this model is an attention over learnable parameter tokens (Pattention), so it can be
grown by appending tokens without changing what it computes.

| | |
|---|---|
| parameters | {parameters:,} |
| width, layers, heads | {width}, {layers}, {heads} |
| parameter tokens (each of query, key, value / output / feed-forward) | {qkv} / {out} / {ffn} |
| Pattention | {kind}, tau {tau} |
| vocabulary, context | {vocabulary}, {context} |

## Use
```python
import tokenformer  # registers the model with transformers
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
```
To grow it: `tokenformer.grow(model, factor=2)`.

## How it grew
{growth}
"""


LOADER = "load_tokenformer"
LOADER_TEXT = """\
# Lets transformers find the classes of this model in the installed package: pip install tokenformer
from tokenformer import TokenFormerConfig, TokenFormerForCausalLM, TokenFormerModel
"""
AUTO_MAP = {
    "AutoConfig": f"{LOADER}.TokenFormerConfig",
    "AutoModel": f"{LOADER}.TokenFormerModel",
    "AutoModelForCausalLM": f"{LOADER}.TokenFormerForCausalLM",
}


def write_beside_weights(model: PreTrainedModel, folder: str | os.PathLike) -> None:
    """Write the loader, and the card unless one is there that we did not write."""
    (Path(folder) / f"{LOADER}.py").write_text(LOADER_TEXT)
    path = Path(folder) / "README.md"
    if not path.exists() or "- tokenformer\n---" in path.read_text(errors="replace"):
        path.write_text(render_card(model))


def render_card(model: PreTrainedModel) -> str:
    """The card's text."""
    config: Any = model.config
    taus = sorted({round(layer.tau.item(), 2) for _, layer in pattention_layers(model) if not layer.tau.is_meta})
    steps = [f"{i}. {step}" for i, step in enumerate(growth_steps(config), start=1)]
    return TEMPLATE.format(
        parameters=model.num_parameters(),
        width=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        **config.num_tokens,
        kind=config.pattention_kind,
        tau=", ".join(f"{tau:g}" for tau in taus) or "as saved",
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        growth="\n".join(steps) or "It has not: trained at this size from the start.",
    )


def growth_steps(config: TokenFormerConfig) -> list[str]:
    """One line a growth step: how, and the token counts before and after."""
    return [
        f"{step['method']} (seed {step['seed']}): {_counts(config, step['before'])} -> {_counts(config, step['after'])}"
        for step in config.growth_history or []
    ]


def _counts(config: TokenFormerConfig, tokens: dict[str, int]) -> str:
    # config.json has its keys in the order of the alphabet, and the card's table has them in ours.
    return "/".join(str(tokens[role]) for role in config.token_roles)
