"""What follows from a recipe for its run: folder, first configuration, batch, and whether it is the same run.

Enters: a recipe, a tokenizer's vocabulary, the number of processes. Leaves: what `run` and `dry_run` need of them.
"""

from pathlib import Path
from typing import Protocol

import yaml
from huggingface_hub.errors import StrictDataclassError

from ..errors import BadRequestError, one_line
from ..models import TokenFormerConfig
from .recipe import Recipe

# What may differ when a run is carried on: it does not change what is computed.
MAY_CHANGE = {
    "data.workers",
    "data.cache",
    "training.parallel",
    "training.per_device_train_batch_size",
    "training.per_device_eval_batch_size",
    "training.gradient_accumulation_steps",
    "training.keep_checkpoints",
    "training.save_steps",
    "training.eval_steps",
    "training.logging_steps",
    "training.report_to",
    "training.output_dir",
}


def run_folder(recipe: Recipe) -> Path:
    """Where a run writes: training.output_dir, or runs/NAME."""
    return Path(recipe.training.get("output_dir") or Path("runs") / recipe.name)


class Vocabulary(Protocol):
    """What a model has to know of a tokenizer. Prepared data is one."""

    vocab_size: int
    eos_token_id: int


def first_config(recipe: Recipe, vocabulary: Vocabulary | None) -> TokenFormerConfig:
    """The configuration of the first stage's model. What the recipe leaves open follows from the tokenizer."""
    section = dict(recipe.model)
    preset, checkpoint = section.pop("preset", None), section.pop("checkpoint", None)
    if checkpoint is not None:
        if not (Path(checkpoint) / "config.json").is_file():
            raise BadRequestError(
                f"model.checkpoint is {checkpoint}, which is not a model folder: it has no config.json"
            )
        config = TokenFormerConfig.from_pretrained(checkpoint)
    else:
        section.setdefault("max_position_embeddings", max(recipe.data.block_length, 512))
        if vocabulary is not None:
            section.setdefault("vocab_size", _padded(vocabulary.vocab_size))
            section.setdefault("bos_token_id", vocabulary.eos_token_id)
            section.setdefault("eos_token_id", vocabulary.eos_token_id)
        try:
            config = TokenFormerConfig.preset(preset, **section) if preset else TokenFormerConfig(**section)
        except StrictDataclassError as error:
            # The sentence of the innermost error is for people; what is around it is not.
            raise BadRequestError(f"model: {one_line(error).rpartition('Error: ')[2]}") from error
    if config.max_position_embeddings < recipe.data.block_length:
        raise BadRequestError(
            f"data.block_length is {recipe.data.block_length}; the model reads {config.max_position_embeddings} "
            "(model.max_position_embeddings)"
        )
    if vocabulary is not None and config.vocab_size < vocabulary.vocab_size:
        raise BadRequestError(
            f"model.vocab_size is {config.vocab_size}; the tokenizer has {vocabulary.vocab_size} entries"
        )
    config.chunked_loss = True
    return config


def _padded(entries: int) -> int:
    """Rows of the embedding: large ones are padded to a multiple of 128, as the authors do (50,277 to 50,304)."""
    return entries if entries < 1000 else -(-entries // 128) * 128


def check_data(recipe: Recipe) -> None:
    """Refuse what the data cannot do."""
    if recipe.data.streaming and recipe.training.get("dataloader_num_workers"):
        raise BadRequestError(
            "training.dataloader_num_workers is given and data.streaming is true; a stream has one place only: leave "
            "it at 0"
        )


def passed_over(recipe: Recipe) -> list[str]:
    """The keys of the model section that a checkpoint decides instead."""
    return [key for key in recipe.model if key != "checkpoint"] if recipe.model.get("checkpoint") else []


def tokens_per_step(recipe: Recipe, processes: int) -> int:
    """Tokens of one optimizer step over all processes."""
    accumulation = recipe.training.get("gradient_accumulation_steps", 1)
    return local_batch(recipe, processes) * processes * accumulation * recipe.data.block_length


def local_batch(recipe: Recipe, processes: int) -> int:
    """Blocks that one process reads at a time."""
    wanted = recipe.training["global_batch"]
    if wanted is None:
        return recipe.training["per_device_train_batch_size"]
    share = processes * recipe.training.get("gradient_accumulation_steps", 1)
    if wanted % share:
        raise BadRequestError(
            f"training.global_batch is {wanted}; with {processes} processes and accumulation it must divide by {share}"
        )
    return wanted // share


def check_same_recipe(recipe: Recipe, folder: Path) -> None:
    """A run that has started is not carried on with another recipe."""
    if not (folder / "stage-1" / "start.json").exists():
        return
    before, now = yaml.safe_load((folder / "recipe.yaml").read_text()), yaml.safe_load(recipe.to_yaml())
    for section in ("model", "data", "training", "growth"):
        for key in sorted({*before[section], *now[section]}):
            old, new = before[section].get(key), now[section].get(key)
            if old != new and f"{section}.{key}" not in MAY_CHANGE:
                raise BadRequestError(
                    f"{folder} was started with {section}.{key}={old!r}, and now it is {new!r}; give another "
                    "training.output_dir, or the old value"
                )
