"""What a TokenFormer costs: parameters, FLOPs, cache and memory, worked out from its configuration alone.

Enters: a TokenFormerConfig and, where it matters, the length of the sequences. Leaves: plain numbers; no model is
built.

    tokenformer info 124m models/mine --length 4096

Conventions. A multiply-add is 2 FLOPs, and only matrix products are counted, as FlopCounterMode of
torch.utils.flop_counter does. Causal attention counts in full, future positions included: 4 · length · width a layer
and token, as in the paper. A Pattention of n tokens has 2 · n · width parameters and takes 4 · n · width FLOPs a token.
Memory is in bytes.
"""

from dataclasses import dataclass

from .errors import BadRequestError, did_you_mean
from .models.config import TokenFormerConfig
from .models.language import LOSS_CHUNK

# Numbers that an optimizer keeps for each parameter.
OPTIMIZER_STATES = {"adamw": 2, "sgd": 0}

# Numbers in fp32 or wider that a Pattention keeps for each row, beside its scores.
ROW_STATS = 3


@dataclass(frozen=True)
class Parameters:
    """How many numbers a model holds, by role. `head` is 0 when the output layer is tied to the embedding."""

    embedding: int
    qkv: int
    out: int
    ffn: int
    norm: int
    head: int

    @property
    def non_embedding(self) -> int:
        """Without the embedding and without an output layer of its own."""
        return self.qkv + self.out + self.ffn + self.norm

    @property
    def total(self) -> int:
        return self.embedding + self.non_embedding + self.head


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


def parameters(config: TokenFormerConfig) -> Parameters:
    """The parameters of a model, counted as the model holds them: keys and values are two matrices."""
    width, layers = config.hidden_size, config.num_hidden_layers
    tokens = {
        role: layers * len(names) * 2 * config.num_tokens[role] * width for role, names in config.token_roles.items()
    }
    norms = 1 + (2 * layers if config.parametric_norm else 0)
    rows = config.vocab_size * width
    return Parameters(embedding=rows, **tokens, norm=norms * 2 * width, head=0 if config.tie_word_embeddings else rows)


def forward_flops_per_token(config: TokenFormerConfig, length: int) -> int:
    """FLOPs of one forward pass over sequences of `length` tokens, logits included, divided by the tokens."""
    width, layers = config.hidden_size, config.num_hidden_layers
    pattentions = sum(4 * len(names) * config.num_tokens[role] * width for role, names in config.token_roles.items())
    return layers * (pattentions + 4 * length * width) + 2 * config.vocab_size * width


def training_flops_per_token(config: TokenFormerConfig, length: int) -> int:
    """Three times the forward pass: backward takes two products for each of forward's.

    What gradient checkpointing or a fused attention computes a second time is not counted.
    """
    return 3 * forward_flops_per_token(config, length)


def kv_cache_bytes(config: TokenFormerConfig, length: int, batch: int = 1, bytes_per_number: int = 2) -> int:
    """The keys and values of `length` tokens, which generation keeps. Parameter tokens add nothing to it."""
    return 2 * config.num_hidden_layers * config.hidden_size * length * batch * bytes_per_number


def training_memory(
    config: TokenFormerConfig,
    batch: int,
    length: int,
    bytes_per_number: int = 4,
    *,
    optimizer: str = "adamw",
    gradient_checkpointing: bool = False,
    chunked_loss: bool = True,
) -> TrainingMemory:
    """An estimate of what a training step on one device needs.

    Counted: weights, gradients and optimizer states, all of `bytes_per_number`; what autograd keeps of every block,
    with attention that never holds its [length, length] weights; and the logits with their log-probabilities and
    gradients, of LOSS_CHUNK rows with `chunked_loss`. With `gradient_checkpointing` every block keeps its input only,
    and one block at a time is computed again. Not counted: the optimizer's and the kernels' scratch space, the
    allocator's gaps, the framework itself.
    """
    if optimizer not in OPTIMIZER_STATES:
        raise BadRequestError(f"optimizer={optimizer!r} is not known; {did_you_mean(optimizer, OPTIMIZER_STATES)}")
    rows, width, layers = batch * length, config.hidden_size, config.num_hidden_layers
    weights = parameters(config).total * bytes_per_number
    block = _block_activations(config, bytes_per_number)
    kept = layers * width * bytes_per_number + block if gradient_checkpointing else layers * block
    ends = 2 * width * bytes_per_number  # the final norm and the output layer keep their inputs
    logit_rows = min(rows, LOSS_CHUNK) if chunked_loss else rows
    return TrainingMemory(
        weights=weights,
        gradients=weights,
        optimizer=weights * OPTIMIZER_STATES[optimizer],
        activations=rows * (kept + ends),
        logits=logit_rows * config.vocab_size * (bytes_per_number + 2 * max(4, bytes_per_number)),
    )


def _block_activations(config: TokenFormerConfig, bytes_per_number: int) -> int:
    """Bytes that autograd keeps of one block for one token, with Pattention in its fused form."""
    width, scores = config.hidden_size * bytes_per_number, 0 if config.pattention_recompute else bytes_per_number
    pattentions = sum(
        len(names) * (config.num_tokens[role] * scores + ROW_STATS * max(4, bytes_per_number))
        for role, names in config.token_roles.items()
    )
    # The inputs of the two norms and what they give; query, key, value and output of the attention.
    return pattentions + 8 * width
