"""The model, training and growth sections of a recipe: every key with its type, its bounds and its default.

The data sections stand with the data, in data/text/settings.py and data/images/settings.py. The training section takes
any field of transformers' TrainingArguments, except those that the ladder decides, and a few of our own. A recipe for
text and one for images differ in the model's fields, in what a stage's budget counts, and in what validation counts.
"""

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import Field, create_model, field_validator, model_validator
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames
from typing_extensions import Self

from ..data.base import ONLY_FOR_IMAGES, ONLY_FOR_TEXT
from ..growth.step import Method
from ..models import TokenFormerConfig, TokenFormerVisionConfig
from ..models.blocks import NewBlocks, NewBlocksAt
from ..schema import (
    Count,
    CountFromZero,
    NotNegative,
    Positive,
    Probability,
    ProcessesFromZero,
    Section,
    Seed,
    Share,
    Text,
)

SectionT = TypeVar("SectionT", bound=Section)

# Fields of TrainingArguments that the ladder decides, and what to do instead.
DECIDED = {
    "lr_scheduler_type": "use growth.schedule",
    "lr_scheduler_kwargs": "use growth.schedule",
    "warmup_steps": "use growth.warmup_steps",
    "warmup_ratio": "use growth.warmup_steps",
    "num_train_epochs": "use training.max_steps, or epochs in a stage",
    "save_strategy": "use training.save_steps",
    "eval_strategy": "use training.eval_steps",
    "eval_on_start": "validation at growth is always measured",
    "logging_strategy": "use training.logging_steps",
    "logging_nan_inf_filter": "a loss that is not finite stops the run",
    "save_total_limit": "use training.keep_checkpoints",
    "save_only_model": "every stage's model is saved by itself",
    "fsdp": "use training.parallel=fsdp",
    "fsdp_config": "use training.parallel=fsdp",
    "deepspeed": "use training.parallel=fsdp",
    "ddp_find_unused_parameters": "all parameters are used",
    "auto_find_batch_size": "use training.global_batch and gradient_accumulation_steps",
    "resume_from_checkpoint": "use the same command again: it resumes by itself",
    "train_sampling_strategy": "use data.seed",
    "data_seed": "use data.seed",
    "use_cpu": "set CUDA_VISIBLE_DEVICES= to hide the GPUs",
    "load_best_model_at_end": "use the stages' models",
    "disable_tqdm": "write to a log file instead of a terminal",
    "ignore_data_skip": "use data.streaming",
    "prediction_loss_only": "validation keeps no predictions",
    "remove_unused_columns": "the data has none",
    "hub_token": "log in with `hf auth login`: a recipe is copied into the run",
}
ADAMW = ("adamw_torch", "adamw_torch_fused")
# Optimizers that keep a row of state for each token, so that it grows as the tokens do.
GROWING_OPTIMIZERS = (*ADAMW, "sgd")


class ModelSettings(Section):
    """A preset or a checkpoint, and the fields of a configuration, which checks their values itself."""

    preset: str | None = None
    checkpoint: str | None = None


class _TextModel(ModelSettings):
    @classmethod
    def keys_of_other_recipes(cls) -> dict[str, str]:
        return dict.fromkeys(ImageModel.model_fields, ONLY_FOR_IMAGES)


class _ImageModel(ModelSettings):
    num_labels: Any = None

    @classmethod
    def keys_of_other_recipes(cls) -> dict[str, str]:
        return dict.fromkeys(TextModel.model_fields, ONLY_FOR_TEXT)


def _extended(section: type[SectionT], hints: Mapping[str, Any]) -> type[SectionT]:
    """The section with more keys, of these types; they need not be given."""
    fields: dict[str, Any] = {name: (hint, None) for name, hint in hints.items()}
    return create_model(section.__name__.removeprefix("_"), __base__=section, **fields)


TextModel, ImageModel = (
    _extended(section, dict.fromkeys((field.name for field in dataclasses.fields(config)), Any))
    for section, config in ((_TextModel, TokenFormerConfig), (_ImageModel, TokenFormerVisionConfig))
)


class StageSettings(Section):
    """One stage: how the model grows into it (not for the first), its budget, and what differs from the ladder's.

    factor, to, num_tokens, depth: how large the model becomes, as `tokenformer.grow` takes them.
    group: a token group of this name, with `num_tokens` in each layer, is all that the stage trains.
    data: for a group, keys of the data section that differ in this stage, such as train.
    learning_rate: from this stage on; as before if None.
    """

    budgets: ClassVar[tuple[str, ...]]  # the keys that say how long the stage is

    factor: float | None = None
    to: str | None = None
    num_tokens: dict[str, int] | None = None
    depth: Count | None = None
    group: Text | None = None
    data: dict[str, Any] | None = None
    steps: Count | None = None
    method: Method | None = None
    new_blocks: NewBlocks | None = None
    new_blocks_at: NewBlocksAt | None = None
    adam: Literal["carry", "reset"] | None = None
    trains: Literal["all", "new"] | None = None
    learning_rate: Positive | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        given = [key for key in self.budgets if getattr(self, key) is not None]
        if len(given) != 1:
            known = f"{', '.join(self.budgets[:-1])} and {self.budgets[-1]}"
            raise ValueError(
                f"{' and '.join(given) or 'no budget'} given; set one of {known}, as steps=100, with the others left "
                "out or null"
            )
        if self.group is None and self.data is not None:
            raise ValueError("data is given, which only a stage that trains a group may have of its own; add group")
        if self.group is not None:
            others = ("factor", "to", "depth", "method", "new_blocks", "new_blocks_at", "trains")
            beside = [key for key in others if getattr(self, key) is not None]
            if beside or not self.num_tokens:
                rule = f"{' and '.join(beside)} beside it" if beside else "no num_tokens, as {ffn: 64}"
                raise ValueError(f"group is given, with {rule}; a group has a name, num_tokens and a budget")
        return self


class TextStage(StageSettings):
    """A stage of training on text."""

    budgets = ("steps", "tokens")
    tokens: Positive | None = None

    @classmethod
    def keys_of_other_recipes(cls) -> dict[str, str]:
        return dict.fromkeys(ImageStage.budgets, f"{ONLY_FOR_IMAGES}; use steps or tokens")


class ImageStage(StageSettings):
    """A stage of training on images."""

    budgets = ("steps", "images", "epochs")
    images: Positive | None = None
    epochs: Positive | None = None

    @classmethod
    def keys_of_other_recipes(cls) -> dict[str, str]:
        return dict.fromkeys(TextStage.budgets, f"{ONLY_FOR_TEXT}; use steps, images or epochs")


class GrowthSettings(Section):
    """The ladder. Without stages the model trains for training.max_steps and does not grow.

    method: if None it becomes rotate, or split for the kinds of Pattention of which rotate is not exact.
    new_blocks, new_blocks_at: of growth in depth, as `tokenformer.grow` takes them.
    adam: whether Adam's moments are carried across growth or start afresh.
    trains: whether all tokens and blocks are trained after growth or only the new ones.
    new_token_warmup: steps after growth over which the rate of new tokens and blocks rises to that of the others.
    noise, seed: of the method, as `tokenformer.grow` takes them; each stage draws from a seed of its own.
    schedule: wsd, one warm-up, a constant rate and one decay over the ladder; or cosine, a warm-up and a decay for each
        stage. wsd for a ladder and cosine without growth if None.
    warmup_steps: of the ladder, or of each stage for cosine.
    decay_steps: of wsd: steps, or below 1 a fraction of the whole ladder; at most the last stage.
    min_lr_ratio: 0.1 for cosine and 0 for wsd if None.
    trigger: whether a stage ends with its budget, or before it when the validation loss has flattened: no gain of
        min_improvement in `patience` validations.
    max_parameters: a ladder that would grow beyond is refused.
    """

    stages: list[Any] = []
    method: Method | None = None
    noise: NotNegative = 1.0
    seed: Seed = 0
    new_blocks: NewBlocks = "copy"
    new_blocks_at: NewBlocksAt = "after_each"
    adam: Literal["carry", "reset"] = "carry"
    trains: Literal["all", "new"] = "all"
    new_token_warmup: CountFromZero = 50
    schedule: Literal["wsd", "cosine"] | None = None
    warmup_steps: CountFromZero = 100
    decay_steps: Positive = 0.2
    min_lr_ratio: Probability | None = None
    trigger: Literal["budget", "plateau"] = "budget"
    patience: Count = 3
    min_improvement: NotNegative = 0.002
    max_parameters: Positive | None = None

    @field_validator("stages", mode="before")
    @classmethod
    def _null_means_no_stages(cls, stages: Any) -> Any:
        return [] if stages is None else stages

    @model_validator(mode="after")
    def _check(self) -> Self:
        for i, stage in enumerate(self.stages):
            if stage.group is not None:
                continue
            sizes = [key for key in ("factor", "to", "num_tokens", "depth") if getattr(stage, key) is not None]
            beside = len(sizes) == 2 and "depth" in sizes and "to" not in sizes
            if sizes if i == 0 else len(sizes) != 1 and not beside:
                rule = "set one of factor, to, num_tokens, depth; depth may stand beside factor or num_tokens"
                rule = rule if i else "the first stage has the model's own size"
                raise ValueError(f"stages[{i}] has {' and '.join(sizes) or 'no size'}; {rule}")
        if self.trigger == "plateau" and len(self.stages) < 2:
            raise ValueError("trigger is plateau, and there is no second stage to grow into")
        self.schedule = self.schedule or ("wsd" if len(self.stages) > 1 else "cosine")
        if self.min_lr_ratio is None:
            self.min_lr_ratio = 0.0 if self.schedule == "wsd" else 0.1
        return self

    def only_stage(self, steps: int) -> StageSettings:
        """The stage of a recipe that names none."""
        raise NotImplementedError

    @property
    def in_epochs(self) -> bool:
        """Whether the length of the data must be known to say how long the ladder is."""
        return any(getattr(stage, "epochs", None) is not None for stage in self.stages)

    @property
    def carries_adam(self) -> bool:
        """Whether the optimizer's state has to grow with the model."""
        return any((stage.adam or self.adam) == "carry" for stage in self.stages[1:])


class TextGrowth(GrowthSettings):
    """The ladder of a recipe for text."""

    stages: list[TextStage] = []

    def only_stage(self, steps: int) -> TextStage:
        return TextStage(steps=steps)


class ImageGrowth(GrowthSettings):
    """The ladder of a recipe for images."""

    stages: list[ImageStage] = []

    def only_stage(self, steps: int) -> ImageStage:
        return ImageStage(steps=steps)


class TrainingSettings(Section):
    """How to train: our own keys, and those of TrainingArguments that we use or have other defaults for."""

    decided: ClassVar[dict[str, str]] = DECIDED

    parallel: Literal["ddp", "fsdp"] = "ddp"
    global_batch: Count | None = None  # blocks or images a step over all processes; overrides the batch of each
    license: Text | None = None  # of the saved models, for their cards, as the Hub abbreviates it: apache-2.0
    keep_checkpoints: Count = 2  # besides the one before the decay and every stage's model
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None  # the decay of the weights' moving average, as 0.9998
    rates: Literal["scaled", "equal"] = "scaled"  # whether a layer's rate follows its size, or all have the same
    rate_base: str | dict[str, Any] | None = None  # the size that learning_rate is for; None: the first stage's
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon has the keys and values, adamw then the rest
    nested: list[Annotated[float, Field(gt=0, le=1)]] | None = None  # shares of the tokens trained as models too
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0  # of the learning rate from block to block; 1: none

    # TrainingArguments' own, with the paper's optimizer, and nothing reported to anyone unasked.
    learning_rate: Positive = 6e-4
    weight_decay: NotNegative = 0.1
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.95
    adam_epsilon: Positive = 1e-8
    max_grad_norm: NotNegative = 1.0
    per_device_train_batch_size: Count = 8
    per_device_eval_batch_size: Count = 8
    gradient_accumulation_steps: Count = 1
    gradient_checkpointing: bool = False
    bf16: bool = False
    fp16: bool = False
    logging_steps: Count = 10
    eval_steps: Count = 100
    save_steps: Count = 100
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    report_to: str | list[str] = "none"
    output_dir: Text | None = None  # runs/NAME if None
    max_steps: Count | None = None  # without growth.stages
    dataloader_num_workers: ProcessesFromZero | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 are both true; choose one of them")
        if self.nested is not None and (1.0 not in self.nested or len({*self.nested}) < 2):
            raise ValueError(f"nested is {self.nested}; give 1 and at least one smaller share, as [0.25, 0.5, 1]")
        return self

    @classmethod
    def unknown_key_message(cls, key: str, where: str) -> str:
        if key in cls.decided:
            reason = f"{key!r} is not for a recipe to decide; {cls.decided[key]}"
            return f"{where}: {reason}" if where else reason
        return super().unknown_key_message(key, where)

    @property
    def most_held_out(self) -> int | None:
        """The most samples that one validation looks at; None: all of them."""
        raise NotImplementedError

    def resolved(self) -> dict[str, Any]:
        """The section with its defaults; those of TrainingArguments that are not declared here are left to it."""
        undeclared = type(self).model_fields.keys() & UNDECLARED
        return self.model_dump(exclude=undeclared - self.model_fields_set)

    def given_arguments(self) -> dict[str, Any]:
        """What TrainingArguments is given; null stands for its own default."""
        return {key: value for key, value in self.resolved().items() if key in ARGUMENTS and value is not None}


def _arguments() -> dict[str, Any]:
    """The fields of TrainingArguments with their types; one that YAML has no type for may be anything."""
    hints = get_type_hints(TrainingArguments)
    simple = (str, int, float, bool, dict, list, type(None), Any)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(TrainingArguments):
        hint = hints[field.name]
        leaves = [get_origin(leaf) or leaf for leaf in get_args(hint) or [hint]]
        known = all(leaf in simple or (isinstance(leaf, type) and issubclass(leaf, Enum)) for leaf in leaves)
        if field.init:
            found[field.name] = hint if known else Any
    return found | {"optim": Literal[tuple(name.value for name in OptimizerNames)]}


ARGUMENTS = _arguments()
UNDECLARED = ARGUMENTS.keys() - TrainingSettings.model_fields - DECIDED.keys()


class _TextTraining(TrainingSettings):
    validation_blocks: Count = 256  # the most that one validation looks at

    @property
    def most_held_out(self) -> int | None:
        return self.validation_blocks

    @classmethod
    def keys_of_other_recipes(cls) -> dict[str, str]:
        return {"validation_images": f"{ONLY_FOR_IMAGES}; use validation_blocks"}


class _ImageTraining(TrainingSettings):
    decided = {**DECIDED, "label_smoothing_factor": "use data.augment.label_smoothing"}

    validation_images: Count | None = None  # the most that one validation looks at

    @property
    def most_held_out(self) -> int | None:
        return self.validation_images

    @classmethod
    def keys_of_other_recipes(cls) -> dict[str, str]:
        return {"validation_blocks": f"{ONLY_FOR_TEXT}; use validation_images"}


TextTraining, ImageTraining = (
    _extended(section, {name: ARGUMENTS[name] for name in sorted(UNDECLARED - section.decided.keys())})
    for section in (_TextTraining, _ImageTraining)
)
