"""Training on text: a language model on blocks of tokens. task.py says what each method is for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from .. import cost
from ..data import BlockStream, DataConfig, PreparedData, load_tokenizer, prepare
from ..data.config import as_list, check_config
from ..errors import BadRequestError
from ..models import TokenFormerConfig, TokenFormerForCausalLM
from ..models.loading import read_tokenformer
from .checkpoint import checkpoint_step
from .order import STREAM_FILE, OrderedBlocks, StreamedBlocks
from .task import Task


@dataclass
class Vocabulary:
    """What a model has to know of a tokenizer. Prepared data has it too."""

    vocab_size: int
    eos_token_id: int


class TextTask(Task):
    """Blocks of tokens."""

    kind = "a text recipe"
    mark = "data.images is not given"
    unit = "tokens"
    one_unit = "a token"
    budgets = ("steps", "tokens")
    settings = {"validation_blocks": 256}  # the most that one validation looks at
    decided = {}
    data_class = DataConfig
    config_class = TokenFormerConfig
    model_class = TokenFormerForCausalLM
    model_keys = ()

    def __init__(self, section: DataConfig) -> None:
        self.section = section

    @property
    def samples(self) -> str:
        return f"blocks of {self.section.block_length}"

    @property
    def units_per_sample(self) -> int:
        return self.section.block_length

    @property
    def sources(self) -> list[str]:
        return [*as_list(self.section.train or []), *as_list(self.section.validation or [])]

    def check(self, training: dict[str, Any], batch: int) -> None:
        check_config(self.section)
        if self.section.streaming and training.get("dataloader_num_workers"):
            raise BadRequestError(
                "training.dataloader_num_workers is given and data.streaming is true; a stream has one place only: "
                "leave it at 0"
            )

    def foresee(self, epochs: bool) -> Vocabulary | None:
        """The tokenizer, if it need not be fetched."""
        name = self.section.tokenizer
        if name != "bytes" and not Path(name).exists():
            return None
        tokenizer = load_tokenizer(name, self.section.eos_token)
        return Vocabulary(len(tokenizer), tokenizer.eos_token_id)

    def prepare(self, console: Any) -> PreparedData:
        return prepare(self.section, console=console)

    def implied(self, model: dict[str, Any], data: Vocabulary | PreparedData | None) -> dict[str, Any]:
        # No further: positions that were never trained on cost a model more than what it reads there can give.
        fields = {"max_position_embeddings": self.section.block_length}
        if data is not None:
            fields["vocab_size"] = _padded(data.vocab_size)
            fields["bos_token_id"] = fields["eos_token_id"] = data.eos_token_id
        return fields

    def refitted(self) -> dict[str, Any]:
        return {}

    def settle(self, config: TokenFormerConfig, data: Vocabulary | PreparedData | None) -> None:
        if config.max_position_embeddings < self.section.block_length:
            raise BadRequestError(
                f"data.block_length is {self.section.block_length}; the model reads {config.max_position_embeddings} "
                "(model.max_position_embeddings)"
            )
        if data is not None and config.vocab_size < data.vocab_size:
            raise BadRequestError(
                f"model.vocab_size is {config.vocab_size}; the tokenizer has {data.vocab_size} entries: leave it out, "
                f"or widen a checkpoint first with model.resize_token_embeddings({data.vocab_size})"
            )
        config.chunked_loss = True

    def first_model(self, config: TokenFormerConfig, checkpoint: str | None) -> tuple[TokenFormerForCausalLM, bool]:
        if checkpoint is None:
            return TokenFormerForCausalLM(config), False
        return read_tokenformer(checkpoint, config=config, dtype=torch.float32), True

    def for_use(self, config: TokenFormerConfig) -> None:
        config.chunked_loss = False

    def arguments(self, data: PreparedData, training: dict[str, Any]) -> dict[str, Any]:
        # A stream starts at its place; of prepared data Trainer passes over what has been used.
        return {"ignore_data_skip": self.section.streaming}

    def ordered(self, data: PreparedData, steps: int, samples_per_step: int, checkpoint: Path) -> Dataset:
        if not isinstance(data.train, BlockStream):
            return OrderedBlocks(data.train, steps * samples_per_step, self.section.seed)
        path = checkpoint / STREAM_FILE
        state = torch.load(path, weights_only=True) if path.exists() else None
        return StreamedBlocks(data.train, samples_per_step, checkpoint_step(checkpoint), state)

    def collate(self, data: PreparedData) -> None:
        return None

    def held_out(self, data: PreparedData, training: dict[str, Any]) -> Dataset | None:
        if data.validation is None:
            return None
        return Subset(data.validation, range(min(len(data.validation), training["validation_blocks"])))

    def score(self, model: nn.Module, batch: Any) -> dict[str, float]:
        return {"loss": model(**batch).loss.item() * len(batch["input_ids"])}

    def save_beside(self, data: PreparedData, folder: Path) -> None:
        data.tokenizer.save_pretrained(folder)

    def bad_samples(self, data: PreparedData) -> list[str]:
        return []  # text that cannot be read was dealt with when the data was prepared

    def assumed(self, config: TokenFormerConfig, data: Vocabulary | None) -> dict[str, str]:
        if data is not None:
            return {}
        return {"vocabulary": f"{config.vocab_size:,} is assumed: the tokenizer {self.section.tokenizer} is not here"}

    def flops(self, config: TokenFormerConfig) -> tuple[float, float]:
        length = self.section.block_length
        return cost.forward_flops_per_token(config, length), cost.training_flops_per_token(config, length)

    def memory(self, config: TokenFormerConfig, batch: int, gradient_checkpointing: bool) -> cost.TrainingMemory:
        return cost.training_memory(
            config, batch, self.section.block_length, gradient_checkpointing=gradient_checkpointing
        )


def _padded(entries: int) -> int:
    """Rows of the embedding: large ones are padded to a multiple of 128, as the authors do (50,277 to 50,304)."""
    return entries if entries < 1000 else -(-entries // 128) * 128
