"""What a growth step will do, decided and checked before a number moves.

Enters: a model and a request (a factor, token counts, or the name of a preset). Leaves: a Growth, which names
every layer with its token counts before and after; or a one-line error, with the model untouched.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import BadRequestError, did_you_mean
from ..models import TokenFormerBaseConfig, growth_records
from ..pattention import Pattention, pattention_layers
from ..pattention.functional import ACTIVATIONS

Method = Literal["zero", "split", "rotate", "random"]
METHODS: tuple[str, ...] = get_args(Method)
# Of one layer: beyond any memory, and below what overflows.
MOST_TOKENS = 2**31


@dataclass(frozen=True)
class LayerGrowth:
    """One layer: every old token is repeated `copies` times, then new tokens fill up to `after`.

    `rotated`: the keys of the new tokens are rotations of the old ones, instead of zero.
    """

    before: int
    after: int
    copies: int
    rotated: bool = False

    @classmethod
    def by(cls, method: str, before: int, after: int, key_size: int) -> "LayerGrowth":
        """How `method` gets from `before` tokens to `after`. Too few new keys cannot be rotations."""
        rotated = method == "rotate" and after - before >= min(before, key_size)
        return cls(before, after, copies=after // before if method == "split" else 1, rotated=rotated)

    @property
    def appended(self) -> int:
        return self.after - self.copies * self.before


@dataclass(frozen=True)
class Growth:
    """One growth step of a model. `noise` is the size of split's random parts, in units of the values' scale."""

    method: str
    seed: int
    noise: float
    layers: dict[str, LayerGrowth]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Growth":
        """The inverse of `to_dict`."""
        layers = {name: LayerGrowth(**layer) for name, layer in data["layers"].items()}
        return cls(data["method"], data["seed"], data["noise"], layers)


def plan_growth(
    model: nn.Module,
    factor: float | None = None,
    *,
    num_tokens: Mapping[str, int] | int | None = None,
    to: str | None = None,
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
    check_growable(model, method)
    layers = dict(pattention_layers(model))
    if not layers:
        raise BadRequestError(f"grow: {type(model).__name__} has no Pattention layer")
    targets = _targets(model, layers, factor, num_tokens, to)
    return Growth(
        method, seed, noise, {name: _plan_layer(name, layers[name], n, method) for name, n in targets.items()}
    )


def best_method(model: nn.Module) -> str:
    """The exact method after which a model trains best: rotate or, where that is not exact, split."""
    kinds = {layer.kind for _, layer in pattention_layers(model)}
    recorded = {record.growth_method for _, record in growth_records(model)}
    return "rotate" if kinds <= ACTIVATIONS.keys() and recorded <= {"rotate"} else "split"


def check_growable(model: nn.Module, method: str) -> None:
    """Refuse what no request can change: adapters on tokens, shards, shared tokens, records that do not fit."""
    owners: dict[int, str] = {}
    for name, layer in pattention_layers(model):
        if name.endswith(".base_layer"):  # peft's name for what it wraps; its own matrices would not grow
            raise BadRequestError(
                f"grow: {name.partition('.base_layer')[0]} has an adapter on its tokens; merge it first "
                "(merge_and_unload), or grow the model without it"
            )
        for key, tokens in layer.named_parameters(recurse=False):
            if isinstance(tokens, DTensor):
                raise BadRequestError(
                    f"grow: {name}.{key} is sharded over devices; grow the full model or a checkpoint of it"
                )
            owner = owners.setdefault(id(tokens), name)
            if owner != name:
                raise BadRequestError(f"grow: {name}.{key} is shared with {owner}; untie them first")
    for part, record in growth_records(model):
        record.check_growth(part, method)


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


def _targets(
    model: nn.Module,
    layers: dict[str, Pattention],
    factor: float | None,
    num_tokens: Mapping[str, int] | int | None,
    to: str | None,
) -> dict[str, int]:
    """The new token count of each layer; layers that keep theirs are left out."""
    given = [name for name, value in (("factor", factor), ("num_tokens", num_tokens), ("to", to)) if value is not None]
    if len(given) != 1:
        raise BadRequestError(
            f"grow: {' and '.join(given) or 'no size'} was given; give one of factor=2, num_tokens={{…}}, to='354m'"
        )
    if factor is not None:
        if not factor > 1:
            raise BadRequestError(f"grow: factor={factor} was given; it must be larger than 1")
        if factor == math.inf:
            raise BadRequestError(f"grow: factor={factor} was given; a finite factor is needed")
        return {name: round(layer.num_tokens * factor) for name, layer in layers.items()}
    config = find_config(model)
    if to is not None:
        num_tokens = _preset_tokens(config, to)
    if isinstance(num_tokens, int):
        return dict.fromkeys(layers, num_tokens)
    assert num_tokens is not None
    if not num_tokens:
        raise BadRequestError("grow: num_tokens is empty; name at least one size")
    targets: dict[str, int] = {}
    for key, count in num_tokens.items():
        for name in layers_called(key, layers, config):
            targets[name] = count
    return targets


def _preset_tokens(config: TokenFormerBaseConfig | None, to: str) -> dict[str, int]:
    """The counts that a preset changes, if it has this model's width and depth."""
    if config is None:
        raise BadRequestError(f"grow: to={to!r} needs a TokenFormer model; give factor= or num_tokens= instead")
    target = type(config).preset(to)
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        have, want = getattr(config, field), getattr(target, field)
        if have != want:
            raise BadRequestError(
                f"grow: preset {to!r} has {field}={want}, this model has {have}; growth only adds tokens, so choose a "
                "preset of the same width and depth"
            )
    changed = {role: n for role, n in target.num_tokens.items() if n != config.num_tokens[role]}
    if not changed:
        raise BadRequestError(f"grow: the model already has the token counts of preset {to!r}")
    return changed


def layers_called(key: str, layers: dict[str, Pattention], config: TokenFormerBaseConfig | None) -> list[str]:
    """The layers a key of num_tokens means: by role in a TokenFormer, by name or pattern in any other module.

    A name may leave out its first parts: `layers.0.mlp` also means `gpt_neox.layers.0.mlp`.
    """
    if config is not None:
        if key not in config.token_roles:
            raise BadRequestError(f"grow: num_tokens has the key {key!r}; {did_you_mean(key, config.token_roles)}")
        return [name for name in layers if name.rpartition(".")[2] in config.token_roles[key]]
    names = [name for name in layers if fnmatchcase(name, key)]
    names = names or [name for name in layers if fnmatchcase(name, f"*.{key}")]
    if not names:
        raise BadRequestError(f"grow: no Pattention layer is called {key!r}; {did_you_mean(key, layers)}")
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
    growth = LayerGrowth.by(method, before, after, key_size(layer))
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
