"""adapt: train a token group beside a saved model, and keep the group alone.

    tokenformer adapt models/mine adapters/law --data "law/*.txt" --tokens 16

Enters: the folder of a TokenFormer, or of a causal language model of any family of transformers, and data. Leaves: the
group, as `save_tokens` writes it; beside it its run (OUT.run), so that the same command goes on where it was stopped.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import BadRequestError, did_you_mean
from ..groups import save_tokens
from ..io import check_new
from ..models import TokenFormerBaseConfig, TokenFormerVisionConfig
from ..models.loading import local_folder, read_config, read_model
from .beside import train_beside
from .recipe import load_recipe
from .run import train

WHERE: dict[str, tuple[str, ...]] = {
    "ffn": ("ffn",),
    "mlp": ("ffn",),
    "qkv": ("qkv",),
    "out": ("out",),
    "attention": ("qkv", "out"),
    "all": ("qkv", "out", "ffn"),
}
LONGEST_BLOCK = 256


def adapt_folder(
    source: str | os.PathLike,
    target: str | os.PathLike,
    data: Sequence[str],
    *,
    name: str | None = None,
    tokens: int = 16,
    where: str = "ffn",
    steps: int = 500,
    learning_rate: float = 3e-3,
    overrides: Iterable[str] = (),
) -> Path:
    """Train a group of so many tokens in each layer and write it to `target`, by whose last part it is called.

    overrides: what differs from the recipe, as `training.weight_decay=0.1`.
    """
    target = Path(target)
    check_new(target)
    if where not in WHERE:
        raise BadRequestError(f"where={where!r} is not known; {did_you_mean(where, WHERE)}")
    folder = local_folder(source)
    config = read_config(folder)
    ours = isinstance(config, TokenFormerBaseConfig)
    name = name or target.name
    stage = {"group": name, "num_tokens": dict.fromkeys(WHERE[where], tokens), "steps": steps}
    values: dict[str, Any] = {
        "model": {"checkpoint": str(folder)},
        "data": _data(folder, config, list(data)),
        "training": {
            "learning_rate": learning_rate,
            "weight_decay": 0.0,
            "output_dir": str(target.with_name(f"{target.name}.run")),
            **({} if ours else {"rates": "equal"}),
        },
        "growth": {"stages": [stage], "warmup_steps": min(100, max(1, steps // 5))},
    }
    recipe = load_recipe(target, overrides, values)
    trained = read_model(train(recipe)) if ours else train_beside(recipe)
    trained.config.name_or_path = str(source)
    return save_tokens(trained, name, target)


def _data(folder: Path, config: Any, sources: list[str]) -> dict[str, Any]:
    """The data section: text in the model's tokens, or images."""
    if isinstance(config, TokenFormerVisionConfig):
        return {"images": sources if len(sources) > 1 else sources[0]}
    # A TokenFormer without a tokenizer reads bytes; no other model does.
    own = not isinstance(config, TokenFormerBaseConfig) or (folder / "tokenizer.json").is_file()
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or LONGEST_BLOCK
    return {
        "train": sources,
        "block_length": min(LONGEST_BLOCK, longest),
        **({"tokenizer": str(folder)} if own else {}),
    }
