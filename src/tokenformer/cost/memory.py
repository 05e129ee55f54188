"""Memory of a training step, an estimate. Enters: a configuration and a batch. Leaves: bytes, by what they are for.

What the blocks keep is worked out from what autograd keeps of the fused Pattention, and of transformers' GPT-NeoX with
sdpa, the exact GELU and no dropout; tests hold it to within 2 % of that. The few numbers a row that norms and
attention keep as statistics are left out.
"""

from dataclasses import dataclass

from ..errors import BadRequestError, did_you_mean
from ..models.config import TokenFormerConfig
from ..models.language import LOSS_CHUNK
from .counts import Config, parameters, width_and_layers

# Numbers that an optimizer keeps for each parameter.
OPTIMIZER_STATES = {"adamw": 2, "sgd": 0}

# Numbers in fp32 or wider that a Pattention keeps for each row, beside its scores.
ROW_STATS = 3


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes that a training step needs at its fullest, by what they are for."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def training_memory(
    config: Config,
    batch: int,
    length: int,
    bytes_per_number: int = 4,
    *,
    optimizer: str = "adamw",
    gradient_checkpointing: bool = False,
    chunked_loss: bool | None = None,
) -> TrainingMemory:
    """An estimate of what a training step on one device needs.

    Counted: weights, gradients and optimizer states, all of `bytes_per_number`; what autograd keeps of every block; and
    the logits with their log-probabilities and gradients, of LOSS_CHUNK rows with `chunked_loss`, which is on for a
    TokenFormer and off for a GPT-NeoX, whose class has none, unless you say otherwise. Not counted: the optimizer's and
    the kernels' scratch space, the allocator's gaps, the framework itself.
    """
    if optimizer not in OPTIMIZER_STATES:
        raise BadRequestError(f"optimizer={optimizer!r} is not known; {did_you_mean(optimizer, OPTIMIZER_STATES)}")
    if chunked_loss is None:
        chunked_loss = isinstance(config, TokenFormerConfig)
    rows = batch * length
    weights = parameters(config).total * bytes_per_number
    kept = activation_bytes_per_token(config, bytes_per_number, gradient_checkpointing=gradient_checkpointing)
    logit_rows = min(rows, LOSS_CHUNK) if chunked_loss else rows
    return TrainingMemory(
        weights=weights,
        gradients=weights,
        optimizer=weights * OPTIMIZER_STATES[optimizer],
        activations=rows * kept,
        logits=logit_rows * config.vocab_size * (bytes_per_number + 2 * max(4, bytes_per_number)),
    )


def activation_bytes_per_token(
    config: Config, bytes_per_number: int = 4, *, gradient_checkpointing: bool = False
) -> int:
    """Bytes that autograd keeps of a forward pass for one token, the logits left out.

    The same at every length, with attention that never holds its [length, length] weights. With
    `gradient_checkpointing` every block keeps its input only, and one block at a time is computed again.
    """
    width, layers = width_and_layers(config)
    block = _block_activations(config, bytes_per_number)
    kept = layers * width * bytes_per_number + block if gradient_checkpointing else layers * block
    return kept + 2 * width * bytes_per_number  # the final norm and the output layer keep their inputs


def _block_activations(config: Config, bytes_per_number: int) -> int:
    """Bytes that autograd keeps of one block for one token."""
    width = config.hidden_size * bytes_per_number
    if isinstance(config, TokenFormerConfig):
        scores = 0 if config.pattention_recompute else bytes_per_number
        pattentions = sum(
            len(names) * (config.num_tokens[role] * scores + ROW_STATS * max(4, bytes_per_number))
            for role, names in config.token_roles.items()
        )
        # The inputs of the two norms and what they give; query, key, value and output of the attention.
        return pattentions + 8 * width
    # The input of the norms, which a parallel residual lets them share, and what they give; query, key and value in one
    # array, of which value is a view; query and key once more, rotated; the output of the attention, and a copy of it
    # with its heads side by side; what enters and what leaves the MLP's activation.
    norms = 3 if config.use_parallel_residual else 4
    return (norms + 3 + 2 + 2) * width + 2 * config.intermediate_size * bytes_per_number
