"""What lies beside the weights: a model card, a loader for programs that do not import tokenformer, and the files of
what prepares inputs.

The card says what the model is, how it grew and how to load it. The loader is a file of imports that transformers runs
for `from_pretrained(folder, trust_remote_code=True)`, so that any program finds our classes where they are installed.
"""

import os
import shutil
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..pattention import pattention_layers
from .config import TokenFormerBaseConfig

TEMPLATE = """\
---
library_name: transformers
tags:
- tokenformer
---
# {kind.title}

Every linear projection in the blocks of this model is an attention over learnable parameter tokens (Pattention), so it
can be grown by appending tokens without changing what it computes.

| | |
|---|---|
| parameters | {parameters:,} |
| width, layers, heads | {width}, {layers}, {heads} |
| parameter tokens (each of query, key, value / output / feed-forward) | {qkv} / {out} / {ffn} |
| Pattention | {theta}, tau {tau} |
{inputs}

## Use
```python
import tokenformer  # registers the model with transformers
from transformers import {kind.auto}

model = {kind.auto}.from_pretrained("path/to/this/folder")
```
To grow it: `tokenformer.grow(model, factor=2)`.

## How it grew
{growth}
"""


TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "*.model",
)

LOADER = "load_tokenformer"
LOADER_TEXT = """\
# Lets transformers find the classes of this model in the installed package tokenformer.
from tokenformer import {}
"""


@dataclass(frozen=True)
class Kind:
    """What the card and the loader say of one kind of model, beside what they say of all."""

    title: str
    classes: dict[str, str]  # by the Auto class that stands for each
    inputs: str

    @property
    def auto(self) -> str:
        """The Auto class of the model with its head."""
        return list(self.classes)[-1]


KINDS = {
    "tokenformer": Kind(
        "A TokenFormer language model",
        {
            "AutoConfig": "TokenFormerConfig",
            "AutoModel": "TokenFormerModel",
            "AutoModelForCausalLM": "TokenFormerForCausalLM",
        },
        "| vocabulary, context | {config.vocab_size}, {config.max_position_embeddings} |",
    ),
    "tokenformer_vision": Kind(
        "A TokenFormer vision model",
        {
            "AutoConfig": "TokenFormerVisionConfig",
            "AutoModel": "TokenFormerVisionModel",
            "AutoModelForImageClassification": "TokenFormerForImageClassification",
        },
        "| image, patch, classes | {config.image_size} pixels, {config.patch_size} pixels, {config.num_labels} |",
    ),
}


def auto_map(config: TokenFormerBaseConfig) -> dict[str, str]:
    """For config.json: which class of the loader is which Auto class."""
    return {auto: f"{LOADER}.{name}" for auto, name in KINDS[config.model_type].classes.items()}


def write_beside_weights(model: PreTrainedModel, folder: str | os.PathLike) -> None:
    """Write the loader, and the card unless one is there that we did not write."""
    names = sorted(KINDS[model.config.model_type].classes.values())
    (Path(folder) / f"{LOADER}.py").write_text(LOADER_TEXT.format(", ".join(names)))
    path = Path(folder) / "README.md"
    if not path.exists() or "- tokenformer\n---" in path.read_text(errors="replace"):
        path.write_text(render_card(model))


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a folder that belong to its tokenizer."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and any(fnmatchcase(path.name, name) for name in TOKENIZER_FILES)
    )


def copy_beside_weights(source: Path, target: Path) -> None:
    """Copy what prepares a model's inputs, the files of its tokenizer or image processor, as they are."""
    for path in (*tokenizer_files(source), *source.glob("*processor_config.json")):
        shutil.copyfile(path, target / path.name)


def render_card(model: PreTrainedModel) -> str:
    """The card's text."""
    config: Any = model.config
    kind = KINDS[config.model_type]
    taus = sorted({round(layer.tau.item(), 2) for _, layer in pattention_layers(model) if not layer.tau.is_meta})
    steps = [f"{i}. {step}" for i, step in enumerate(growth_steps(config), start=1)]
    return TEMPLATE.format(
        kind=kind,
        parameters=model.num_parameters(),
        width=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        **config.num_tokens,
        theta=config.pattention_kind,
        tau=", ".join(f"{tau:g}" for tau in taus) or "as saved",
        inputs=kind.inputs.format(config=config),
        growth="\n".join(steps) or "It has not: trained at this size from the start.",
    )


def growth_steps(config: TokenFormerBaseConfig) -> list[str]:
    """One line a growth step: how, and the token counts before and after."""
    return [
        f"{step['method']} (seed {step['seed']}): {_counts(config, step['before'])} -> {_counts(config, step['after'])}"
        for step in config.growth_history or []
    ]


def _counts(config: TokenFormerBaseConfig, tokens: dict[str, int]) -> str:
    # config.json has its keys in the order of the alphabet, and the card's table has them in ours.
    return "/".join(str(tokens[role]) for role in config.token_roles)
