"""Parameters, FLOPs and KV cache of a TokenFormer or a GPT-NeoX. Enters: a configuration. Leaves: whole numbers.

Both kinds are matrices in blocks, attention between tokens, and an embedding; only the blocks' matrices differ.
"""

from dataclasses import dataclass

from transformers import GPTNeoXConfig

from ..errors import BadRequestError
from ..models import TokenFormerConfig, record_of

Config = TokenFormerConfig | GPTNeoXConfig


@dataclass(frozen=True)
class Parameters:
    """How many numbers a model holds, by role. `head` is 0 when the output layer is tied to the embedding.

    Of a GPT-NeoX, qkv is query_key_value, out is attention.dense, ffn is both layers of the MLP, each with its bias.
    """

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


def width_and_layers(config: Config) -> tuple[int, int]:
    """Of either kind; any other is refused."""
    if not isinstance(config, TokenFormerConfig | GPTNeoXConfig):
        kind = getattr(config, "model_type", type(config).__name__)
        raise BadRequestError(f"the cost of a {kind} is not known; give a TokenFormerConfig or a GPTNeoXConfig")
    if record_of(config) is not None:
        raise BadRequestError(
            "the cost of an adopted model is not known as a whole; cost.adopted_layers counts its layers"
        )
    return config.hidden_size, config.num_hidden_layers


def parameters(config: Config) -> Parameters:
    """The parameters of a model, counted as the model holds them: keys and values are two matrices."""
    width, layers = width_and_layers(config)
    matrices, biases = _matrices(config), _biases(config)
    affine = isinstance(config, GPTNeoXConfig) or config.parametric_norm
    norms = 1 + (2 * layers if affine else 0)
    rows = config.vocab_size * width
    return Parameters(
        embedding=rows,
        **{role: matrices[role] + biases.get(role, 0) for role in matrices},
        norm=norms * 2 * width,
        head=0 if config.tie_word_embeddings else rows,
    )


def forward_flops_per_token(config: Config, length: int) -> int:
    """FLOPs of one forward pass over sequences of `length` tokens, logits included, divided by the tokens."""
    width, layers = width_and_layers(config)
    return 2 * sum(_matrices(config).values()) + 4 * length * width * layers + 2 * config.vocab_size * width


def training_flops_per_token(config: Config, length: int) -> int:
    """Three times the forward pass: backward takes two products for each of forward's.

    What gradient checkpointing or a fused attention computes a second time is not counted.
    """
    return 3 * forward_flops_per_token(config, length)


def kv_cache_bytes(config: Config, length: int, batch: int = 1, bytes_per_number: int = 2) -> int:
    """The keys and values of `length` tokens, which generation keeps. Parameter tokens add nothing to it."""
    width, layers = width_and_layers(config)
    return 2 * layers * width * length * batch * bytes_per_number


def _matrices(config: Config) -> dict[str, int]:
    """Numbers in the matrices of all blocks, by role. Each is multiplied once a token: two FLOPs."""
    width, layers = width_and_layers(config)
    if isinstance(config, TokenFormerConfig):
        return {
            role: layers * len(names) * 2 * config.num_tokens[role] * width
            for role, names in config.token_roles.items()
        }
    return {
        "qkv": layers * 3 * width**2,
        "out": layers * width**2,
        "ffn": layers * 2 * width * config.intermediate_size,
    }


def _biases(config: Config) -> dict[str, int]:
    """Numbers in the biases of all blocks, by role. Parameter tokens have none."""
    if isinstance(config, TokenFormerConfig):
        return {}
    width, layers = width_and_layers(config)
    attention = layers * width if config.attention_bias else 0
    return {"qkv": 3 * attention, "out": attention, "ffn": layers * (config.intermediate_size + width)}
