"""Which norm feeds which linears, by family of models: plain data, for transformers' model types.

Enters: a model type. Leaves: the names of norms, linears and activations in every block. To add a family:

    from tokenformer.adoption import Family, Fed, register_family

    qkv = Fed("input_layernorm", qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
    ffn = Fed("post_attention_layernorm", ffn=("mlp.c_fc", "mlp.act", "mlp.c_proj"))
    register_family("starcoder2", Family("layers", (qkv, ffn)))

A mistake in an entry does not stay hidden: `adopt` compares every layer and the logits, and undoes everything.
"""

from dataclasses import dataclass, field
from typing import Any

from ..errors import BadRequestError
from ..models import TokenFormerConfig, TokenFormerVisionConfig

PARTS = ("ffn", "qkv")


@dataclass(frozen=True)
class Fed:
    """A norm and what reads its output, by their names within a block.

    qkv: linears. ffn: a linear, the activation and a second linear, called one after the other, nothing between them.
    first: `norm` belongs to the previous block; the first block has this one instead, by its name in the base model.
    shared: something else reads the output too, for example a residual that starts after the norm.
    dropout: what lies between the norm and the linears, by names in the base model.
    """

    norm: str
    qkv: tuple[str, ...] = ()
    ffn: tuple[str, str, str] | None = None
    first: str | None = None
    shared: bool = False
    dropout: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """Where the blocks are in the base model, what is in each, and settings with which a model cannot be adopted."""

    blocks: str
    feds: tuple[Fed, ...]
    refused: dict[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[str, ...]:
        """What can be adopted, of PARTS."""
        return tuple(part for part in PARTS if any(getattr(fed, part) for fed in self.feds))


def register_family(model_type: str, family: Family) -> None:
    """Let `adopt` know a family, or replace what it knows."""
    FAMILIES[model_type] = family


def family_of(model_type: str) -> Family:
    """The family of a model type, or a one-line error that lists the supported ones."""
    if model_type in (TokenFormerConfig.model_type, TokenFormerVisionConfig.model_type):
        raise BadRequestError(f"adopt: a {model_type} model was given, which consists of Pattentions already; grow it")
    if model_type not in FAMILIES:
        raise BadRequestError(
            f"adopt: a {model_type} model was given; the supported families are {', '.join(sorted(FAMILIES))}; "
            "docs/adopting.md says how to add one"
        )
    return FAMILIES[model_type]


_SELF_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# SwiGLU multiplies two linears, so it is not a Pattention.
_LLAMA = Family("layers", (Fed("input_layernorm", qkv=_SELF_ATTENTION),))
_VIT = Family(
    "layers",
    (
        Fed("layernorm_before", qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj")),
        Fed("layernorm_after", ffn=("mlp.fc1", "mlp.activation_fn", "mlp.fc2")),
    ),
)
_EMBEDDING: dict[str, Any] = {"first": "embeddings.LayerNorm", "dropout": ("embeddings.dropout",)}
_BERT = Family(
    "encoder.layer",
    (
        Fed(
            "output.LayerNorm",
            qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
            shared=True,
            **_EMBEDDING,
        ),
        Fed(
            "attention.output.LayerNorm",
            ffn=("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"),
            shared=True,
        ),
    ),
    refused={"add_cross_attention": True},
)

FAMILIES: dict[str, Family] = {
    "gpt_neox": Family(
        "layers",
        (
            Fed("input_layernorm", qkv=("attention.query_key_value",)),
            Fed("post_attention_layernorm", ffn=("mlp.dense_h_to_4h", "mlp.act", "mlp.dense_4h_to_h")),
        ),
    ),
    "gpt2": Family(
        "h",
        (
            Fed("ln_1", qkv=("attn.c_attn",)),
            Fed("ln_2", ffn=("mlp.c_fc", "mlp.act", "mlp.c_proj")),
        ),
    ),
    "phi": Family(
        "layers",
        (Fed("input_layernorm", qkv=_SELF_ATTENTION, ffn=("mlp.fc1", "mlp.activation_fn", "mlp.fc2")),),
    ),
    "vit": _VIT,
    "deit": _VIT,
    "bert": _BERT,
    "roberta": _BERT,
    "distilbert": Family(
        "transformer.layer",
        (
            Fed(
                "output_layer_norm",
                qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
                shared=True,
                **_EMBEDDING,
            ),
            Fed("sa_layer_norm", ffn=("ffn.lin1", "ffn.activation", "ffn.lin2"), shared=True),
        ),
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}
