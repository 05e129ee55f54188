"""The blocks of a model, for growth in depth: where they are, what they write, and which comes from which.

A block adds what its last layers put out to the stream of hidden states. With these layers at zero it adds nothing, so
that a block more, whatever else is in it, leaves the model as it was. That holds for pre-norm blocks, ours and those of
the families below; in a post-norm block, such as BERT's, a norm follows the sum.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from ..errors import BadRequestError

NewBlocksAt = Literal["after_each", "top"]
NEW_BLOCKS_AT: tuple[str, ...] = get_args(NewBlocksAt)
NewBlocks = Literal["copy", "fresh"]
NEW_BLOCKS: tuple[str, ...] = get_args(NewBlocks)


@dataclass(frozen=True)
class Blocks:
    """Where a model's blocks are.

    stack: the name of their list in the base model.
    writers: what adds to the stream, by names within a block: of each, all names that it may have. Adopted, the first
        linear of a feed-forward network is the whole of it, and an identity is in place of the second.
    """

    stack: str
    writers: tuple[tuple[str, ...], ...]

    def writers_in(self, block: nn.Module) -> list[nn.Module]:
        """The modules of a block that add to the stream."""
        modules = dict(block.named_modules())
        return [
            next(modules[name] for name in names if name in modules and not isinstance(modules[name], nn.Identity))
            for names in self.writers
        ]


_LLAMA = Blocks("layers", (("self_attn.o_proj",), ("mlp.down_proj",)))
_VIT = Blocks("layers", (("attention.o_proj",), ("mlp.fc2", "mlp.fc1")))
# Of adopted models, by transformers' model types.
HOST_BLOCKS: dict[str, Blocks] = {
    "gpt_neox": Blocks("layers", (("attention.dense",), ("mlp.dense_4h_to_h", "mlp.dense_h_to_4h"))),
    "gpt2": Blocks("h", (("attn.c_proj",), ("mlp.c_proj", "mlp.c_fc"))),
    "phi": Blocks("layers", (("self_attn.dense",), ("mlp.fc2", "mlp.fc1"))),
    "vit": _VIT,
    "deit": _VIT,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}
# Settings of hosts with which a block does more than add, or depends on its place.
_REFUSED = {"add_cross_attention": True, "scale_attn_by_inverse_layer_idx": True}


def host_blocks(config: Any) -> Blocks:
    """The blocks of a host, or a one-line error if no block can be added to it exactly."""
    blocks = HOST_BLOCKS.get(config.model_type)
    if blocks is None:
        raise BadRequestError(
            f"grow: depth= was given for an adopted {config.model_type}, to which no block can be added exactly; "
            f"the families that can grow in depth are {', '.join(HOST_BLOCKS)}"
        )
    for setting, value in _REFUSED.items():
        if getattr(config, setting, None) == value:
            raise BadRequestError(
                f"grow: depth= was given for a model with {setting}={value}, where a new block would change the output"
            )
    return blocks


@dataclass(frozen=True)
class BlockGrowth:
    """More blocks: how many, what new ones are made from, and where they are placed.

    new_blocks: copy, or fresh, with random numbers of the same size.
    new_blocks_at: after_each, spread evenly, each made from the block before it; or top, after the last one, made from
        the last ones in their order, so that a doubled model is stacked on itself.
    """

    before: int
    after: int
    new_blocks: NewBlocks
    new_blocks_at: NewBlocksAt

    @property
    def origins(self) -> list[tuple[int, bool]]:
        """Of every block of the grown model: the old block that it is or is made from, and whether it is new."""
        old, added = self.before, self.after - self.before
        if self.new_blocks_at == "top":
            return [(i, False) for i in range(old)] + [((old - added + i) % old, True) for i in range(added)]
        return [
            (block, copy > 0)
            for block in range(old)
            for copy in range(1 + (block + 1) * added // old - block * added // old)
        ]

    def moved(self, name: str, stack: str) -> str:
        """What a module of an old block is called after growth, where the list of blocks is called `stack`."""
        if not name.startswith(f"{stack}."):
            return name
        block, _, rest = name.removeprefix(f"{stack}.").partition(".")
        return f"{stack}.{self.origins.index((int(block), False))}.{rest}"


def record_depth(config: Any, growth: BlockGrowth) -> None:
    """Have a configuration say how many blocks there are; what it says of each follows."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        config.layer_types = [types[block] for block, _ in growth.origins]
    config.num_hidden_layers = growth.after
