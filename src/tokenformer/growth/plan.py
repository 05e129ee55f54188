"""What a growth step will do, decided and checked before a number moves.

Enters: a model and a request (a factor, token counts, a depth, or the name of a preset). Leaves: a Growth, which names
every layer with its token counts before and after, and says which blocks are new; or a one-line error, with the model
untouched.
"""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import BadRequestError, did_you_mean
from ..models import TokenFormerBaseConfig, growth_records
from ..models.adopted import blocks_of
from ..models.blocks import NEW_BLOCKS, NEW_BLOCKS_AT, NewBlocks, NewBlocksAt
from ..models.config import MOST_LAYERS
from ..pattention import Pattention, pattention_layers
from ..pattention.functional import ACTIVATIONS
from .growable import check_growable
from .step import METHODS, DepthGrowth, Growth, LayerGrowth

# Of one layer: beyond any memory, and below what overflows.
MOST_TOKENS = 2**31


def plan_growth(
    model: nn.Module,
    factor: float | None = None,
    *,
    num_tokens: Mapping[str, int] | int | None = None,
    to: str | None = None,
    depth: int | None = None,
    new_blocks: str = "copy",
    new_blocks_at: str = "after_each",
    method: str | None = None,
    seed: int = 0,
    noise: float = 1.0,
    exact: bool = True,
) -> Growth:
    """Check a request against a model and work it out layer by layer. The arguments are those of `grow`."""
    method = method or best_method(model)
    if method not in METHODS:
        raise BadRequestError(f"grow: method={method!r} is not known; {did_you_mean(method, METHODS)}")
    if method == "random" and exact:
        raise BadRequestError(
            "grow: method='random' changes what the model computes; say exact=False to accept that, or use 'zero', "
            "'split' or 'rotate'"
        )
    if not 0 <= noise < math.inf:
        raise BadRequestError(f"grow: noise={noise} was given; a number from 0 on is needed")
    if not -(2**63) <= seed < 2**63:
        raise BadRequestError(f"grow: seed={seed} was given; it has at most 64 bits")
    _check_sizes(factor=factor, num_tokens=num_tokens, to=to, depth=depth)
    check_growable(model, method)
    layers = dict(pattention_layers(model))
    if not layers:
        raise BadRequestError(f"grow: {type(model).__name__} has no Pattention layer")
    if to is not None:
        depth, num_tokens = _preset_sizes(find_config(model), to)
    targets = _targets(model, layers, factor, num_tokens)
    deeper = None if depth is None else _plan_depth(model, depth, new_blocks, new_blocks_at)
    planned = {name: _plan_layer(name, layers[name], n, method) for name, n in targets.items()}
    return Growth(method, seed, noise, planned, deeper)


def best_method(model: nn.Module) -> str:
    """The exact method after which a model trains best: rotate or, where that is not exact, split.

    Of a quantised model zero, as split would change its old tokens.
    """
    kinds = {layer.kind for _, layer in pattention_layers(model)}
    recorded = {record.growth_method for _, record in growth_records(model)}
    if kinds <= ACTIVATIONS.keys() and recorded <= {"rotate"}:
        return "rotate"
    return "zero" if any(layer.num_quantised for _, layer in pattention_layers(model)) else "split"


def key_size(layer: Pattention) -> int:
    """The entries of a key, its bias included."""
    return layer.d_in + (layer.key_bias is not None)


def find_config(model: nn.Module) -> TokenFormerBaseConfig | None:
    """The TokenFormer configuration of a model, also inside a wrapper."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, TokenFormerBaseConfig):
            return config
    return None


def _check_sizes(*, depth: int | None, **tokens: Any) -> None:
    """Refuse a request that says no size, or two for the same thing."""
    given = [name for name, value in tokens.items() if value is not None]
    if len(given) > 1 or (not given and depth is None) or (given == ["to"] and depth is not None):
        given += ["depth"] * (depth is not None)
        raise BadRequestError(
            f"grow: {' and '.join(given) or 'no size'} was given; give one of factor=2, num_tokens={{…}}, to='354m', "
            "depth=8; depth may stand beside one of the first two"
        )


def find_stack(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of a model's blocks with its name, or a one-line error if no block can be added exactly."""
    records = growth_records(model)
    if len(records) != 1:
        found = f"{type(model).__name__} holds {len(records)} of them" if records else f"{type(model).__name__} is none"
        raise BadRequestError(f"grow: depth= is for one TokenFormer or adopted model, and {found}; grow its tokens")
    ((part, record),) = records
    stack = part.base_model.get_submodule(blocks_of(part, record).stack)
    return next(name for name, module in model.named_modules() if module is stack), stack


def _targets(
    model: nn.Module,
    layers: dict[str, Pattention],
    factor: float | None,
    num_tokens: Mapping[str, int] | int | None,
) -> dict[str, int]:
    """The new token count of each layer; layers that keep theirs are left out."""
    if factor is not None:
        if not factor > 1:
            raise BadRequestError(f"grow: factor={factor} was given; it must be larger than 1")
        if factor == math.inf:
            raise BadRequestError(f"grow: factor={factor} was given; a finite factor is needed")
        return {name: round(layer.num_tokens * factor) for name, layer in layers.items()}
    if num_tokens is None:
        return {}
    if isinstance(num_tokens, int):
        return dict.fromkeys(layers, num_tokens)
    if not num_tokens:
        raise BadRequestError("grow: num_tokens is empty; name at least one size")
    config = find_config(model)
    targets: dict[str, int] = {}
    for key, count in num_tokens.items():
        for name in layers_called(key, layers, config):
            targets[name] = count
    return targets


def _preset_sizes(config: TokenFormerBaseConfig | None, to: str) -> tuple[int | None, dict[str, int] | None]:
    """The depth and the token counts that a preset of this model's width changes; None of what it does not change."""
    if config is None:
        raise BadRequestError(f"grow: to={to!r} needs a TokenFormer model; give factor= or num_tokens= instead")
    target = type(config).preset(to)
    for field in ("hidden_size", "num_attention_heads"):
        have, want = getattr(config, field), getattr(target, field)
        if have != want:
            raise BadRequestError(
                f"grow: preset {to!r} has {field}={want}, this model has {have}; growth adds tokens and blocks, so "
                "choose a preset of the same width and heads"
            )
    depth = None if target.num_hidden_layers == config.num_hidden_layers else target.num_hidden_layers
    changed = {role: n for role, n in target.num_tokens.items() if n != config.num_tokens[role]}
    if not changed and depth is None:
        raise BadRequestError(f"grow: the model already has the size of preset {to!r}")
    return depth, changed or None


def _plan_depth(model: nn.Module, depth: int, new_blocks: str, new_blocks_at: str) -> DepthGrowth:
    for option, value, known in (
        ("new_blocks", new_blocks, NEW_BLOCKS),
        ("new_blocks_at", new_blocks_at, NEW_BLOCKS_AT),
    ):
        if value not in known:
            raise BadRequestError(f"grow: {option}={value!r} is not known; {did_you_mean(value, known)}")
    name, stack = find_stack(model)
    if not isinstance(depth, int) or depth < len(stack):
        raise BadRequestError(
            f"grow: the model has {len(stack)} blocks and depth={depth} was given; growth cannot shrink"
        )
    if depth == len(stack):
        raise BadRequestError(f"grow: the model already has {depth} blocks; ask for more, or leave depth out")
    if depth > MOST_LAYERS:
        raise BadRequestError(f"grow: depth={depth} was given; at most {MOST_LAYERS} blocks are possible")
    for inner, module in stack.named_modules():
        if isinstance(module, Pattention) and module.num_quantised:
            raise BadRequestError(
                f"grow: {name}.{inner} is quantised, and a copy of it could not learn; grow in depth first, then "
                "quantize, or tokenformer.dequantize(model) before"
            )
        if hasattr(module, "base_layer"):  # of peft, which knows its adapters by the names of what they are on
            raise BadRequestError(
                f"grow: {name}.{inner} has an adapter, which blocks cannot move; merge it first (merge_and_unload)"
            )
        for key, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                raise BadRequestError(
                    f"grow: {name}.{inner}.{key} is sharded over devices; grow the full model or a checkpoint of it"
                )
    return DepthGrowth(len(stack), depth, cast(NewBlocks, new_blocks), cast(NewBlocksAt, new_blocks_at), stack=name)


def layers_called(
    key: str, layers: dict[str, Pattention], config: TokenFormerBaseConfig | None, verb: str = "grow"
) -> list[str]:
    """The layers a key of num_tokens means: by role in a TokenFormer, by name or pattern in any other module.

    A name may leave out its first parts: `layers.0.mlp` also means `gpt_neox.layers.0.mlp`.
    """
    if config is not None:
        if key not in config.token_roles:
            raise BadRequestError(f"{verb}: num_tokens has the key {key!r}; {did_you_mean(key, config.token_roles)}")
        return [name for name in layers if name.rpartition(".")[2] in config.token_roles[key]]
    names = [name for name in layers if fnmatchcase(name, key)]
    names = names or [name for name in layers if fnmatchcase(name, f"*.{key}")]
    if not names:
        raise BadRequestError(f"{verb}: no Pattention layer is called {key!r}; {did_you_mean(key, layers)}")
    return names


def _plan_layer(name: str, layer: Pattention, after: int, method: str) -> LayerGrowth:
    before = layer.num_tokens
    if after < before:
        raise BadRequestError(f"grow: {name} has {before} tokens and {after} were asked for; growth cannot shrink")
    if after == before:
        raise BadRequestError(
            f"grow: {name} already has {before} tokens; ask for more, or leave it out to keep its size"
        )
    if after > MOST_TOKENS:
        raise BadRequestError(
            f"grow: {name} has {before} tokens and would have {after:,}, which no memory holds; ask for fewer"
        )
    growth = LayerGrowth.by(method, before, after, key_size(layer), layer.num_quantised)
    if layer.kind not in ACTIVATIONS and method == "rotate":
        raise BadRequestError(
            f"grow: {name} uses {layer.kind}, and rotate is exact for {', '.join(ACTIVATIONS)} only; use method='split'"
        )
    if layer.kind == "softmax" and method == "zero":
        raise BadRequestError(
            f"grow: {name} uses softmax, where a zero key still takes probability mass (e⁰ = 1), so method='zero' "
            "cannot be exact; use method='split'"
        )
    if layer.kind == "softmax" and method == "split" and growth.appended:
        multiples = [str(c * before) for c in (growth.copies, growth.copies + 1) if c > 1]
        raise BadRequestError(
            f"grow: {name} uses softmax, which split can only grow to a multiple of its {before} tokens, and {after} "
            f"is not one; ask for {' or '.join(multiples)}"
        )
    return growth
