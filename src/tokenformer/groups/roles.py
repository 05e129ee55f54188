"""Which modules of a model are its feed-forward networks, and which its attentions, told by their names and widths.

Enters: any torch model. Leaves: by role, the names of what groups of tokens may stand beside:

    ffn    a module called mlp, ffn or the like, also of experts; in a block without one, the second of two linear
           layers, which goes back from the width that the first one led to, as fc2 of OPT and output.dense of BERT
    qkv    the linear layers of an attention, but for
    out    the one behind it

Only what is in a numbered block counts, which embeddings and heads are not.
"""

import re

from torch import nn

from ..pattention import Pattention

# What libraries call a feed-forward network, and the part of a path that tells attention.
FFN_NAME = re.compile(
    r"(shared_)?(mlp|ffn?)(_block)?\d?|feed_?forward\d?|(block_sparse_|sparse_)?moe|dense(relu|gatedact)dense"
)
ATTENTION_NAMES = ("attn", "attention")
OUT_NAMES = ("o", "o_proj", "c_proj", "out", "dense", "out_proj", "out_lin", "proj")
LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def parts_of(model: nn.Module) -> dict[str, set[str]]:
    """The names of the layers of every role."""
    blocks = blocks_of(model)
    found: dict[str, set[str]] = {"ffn": set(), "qkv": set(), "out": set()}
    linears: dict[str, list[str]] = {block: [] for block in blocks}  # of each block, those of no attention
    named: set[str] = set()  # blocks that have a feed-forward network by its name
    for name, module in model.named_modules():
        block = _innermost(name, blocks)
        if block is None or within_groups(name) or any(name.startswith(f"{ffn}.") for ffn in found["ffn"]):
            continue
        if _is_ffn(name, module):
            found["ffn"].add(name)
            named.add(block)
        elif widths(module) is not None and not reads_weights(model, name):
            if in_attention(name):
                found["out" if name.rpartition(".")[2] in OUT_NAMES else "qkv"].add(name)
            else:
                linears[block].append(name)
    for block in blocks - named:
        found["ffn"] |= _seconds_of_two(model, linears[block])
    return found


def blocks_of(model: nn.Module) -> set[str]:
    """The modules that are numbered and have members: blocks, and in some families parts of them."""
    return {
        name
        for name, module in model.named_modules()
        if name.rpartition(".")[2].isdigit() and any(module.children()) and not isinstance(module, LISTS)
    }


def _innermost(name: str, blocks: set[str]) -> str | None:
    """The block that a module is in."""
    path = name.split(".")
    return next((block for i in range(len(path) - 1, 0, -1) if (block := ".".join(path[:i])) in blocks), None)


def called_ffn(name: str) -> bool:
    """Whether a module has the name of a feed-forward network."""
    return FFN_NAME.fullmatch(name.rpartition(".")[2].lower()) is not None


def _is_ffn(name: str, module: nn.Module) -> bool:
    if not called_ffn(name) or isinstance(module, LISTS):
        return False
    own = widths(module)
    # A linear layer of such a name is the whole network only if it comes back to the width it began with.
    return own[0] == own[1] if own is not None else len(list(module.children())) > 1


def _seconds_of_two(model: nn.Module, linears: list[str]) -> set[str]:
    """Of a block's linear layers, those that go back from the width of one before; and Pattentions, which are both.

    If there are several such widths, as where a bottleneck is around all of a block, the largest counts.
    """
    found: dict[str, int] = {}
    seen: set[tuple[int, int]] = set()
    for name in linears:
        module = model.get_submodule(name)
        own = widths(module)
        assert own is not None
        if own[::-1] in seen or (isinstance(module, Pattention) and own[0] == own[1]):
            found[name] = own[0]
        if own[0] != own[1]:
            seen.add(own)
    return {name for name, width in found.items() if width == max(found.values())}


def in_attention(name: str) -> bool:
    """Whether a module is a part of an attention."""
    return any(sign in part.lower() for part in name.split(".")[:-1] for sign in ATTENTION_NAMES)


def reads_weights(model: nn.Module, name: str) -> bool:
    """Whether a module is not called, because the one that it is in reads its weight."""
    return isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention)


def within_groups(name: str) -> bool:
    """Whether a module is, or belongs to, groups of tokens."""
    return "token_groups" in name.split(".")


def widths(module: nn.Module) -> tuple[int, int] | None:
    """Input and output of a linear layer, also one that is quantised or transposed, and of a Pattention."""
    if isinstance(module, Pattention):
        return module.d_in, module.d_out
    for d_in, d_out in (("in_features", "out_features"), ("nx", "nf")):
        if isinstance(getattr(module, d_in, None), int) and isinstance(getattr(module, d_out, None), int):
            return getattr(module, d_in), getattr(module, d_out)
    return None
