"""Learning rates that follow the size of a layer, so that growth is smooth in training as well as exact.

    optimizer = torch.optim.AdamW(tokenformer.parameter_groups(model, lr=2e-3, weight_decay=0.1))

Adam moves every number by about the rate in a step. An output sums over n value tokens and a score over the d_in
entries of a key, so a step moves the output by n times the rate and a score by d_in times the rate: what was right for
a small layer is too much for a large one. Here values have the rate lr · n₀ / n, keys and linear layers lr · d₀ / d_in,
and all others (biases, norms, positions, an embedding that is not the output layer too) the rate lr. n₀ and d₀ are the
base shape, at which every rate is lr: the shape that a model was made with, unless another one is given.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import BadRequestError, did_you_mean
from ..models import TokenFormerBaseConfig
from ..pattention import pattention_layers
from .plan import find_config, layers_called
from .step import Growth

# The key of a parameter group of value tokens, whose rate follows their number.
BY_TOKENS = "rate_by_tokens"
WIDTH = "hidden_size"

Shape = Mapping[str, int]


def shape_at_birth(config: TokenFormerBaseConfig) -> dict[str, int]:
    """The width, and the tokens by role before the first growth step."""
    history = config.growth_history or []
    return {WIDTH: config.hidden_size, **(history[0]["before"] if history else config.num_tokens)}


def base_shape(model: nn.Module, base: Shape | str | None) -> dict[str, int]:
    """The width and token counts at which every rate is the same. None: those the model was made with.

    base: a preset, or numbers by name: hidden_size, and tokens by role in a TokenFormer, by layer in any other module.
    """
    config = find_config(model)
    born = {} if config is None else shape_at_birth(config)
    if base is None:
        return born
    if isinstance(base, str):
        if config is None:
            raise BadRequestError(f"base={base!r} names a preset, which only a TokenFormer has; give numbers by layer")
        return shape_at_birth(type(config).preset(base))
    if config is not None:
        for key in base:
            if key not in born:
                raise BadRequestError(f"base has the key {key!r}; {did_you_mean(key, born)}")
    for key, number in base.items():
        if not isinstance(number, int) or number < 1:
            raise BadRequestError(f"base has {key}={number!r}; a whole number of at least 1 is needed")
    return {**born, **base}


def rate_shares(model: nn.Module, base: Shape | str | None = None) -> dict[str, float]:
    """The share of the learning rate that every parameter of a model gets, by name."""
    shape, layers = base_shape(model, base), dict(pattention_layers(model))
    config = find_config(model)
    tokens = {
        name: number for key, number in shape.items() if key != WIDTH for name in layers_called(key, layers, config)
    }
    shares = dict.fromkeys((name for name, _ in model.named_parameters()), 1.0)
    for name, layer in layers.items():
        shares[f"{name}.value_tokens"] = tokens.get(name, layer.num_tokens) / layer.num_tokens
    width = shape.get(WIDTH)
    if width is not None:
        for name, d_in in _summed_over(model).items():
            shares[name] = width / d_in
    return shares


def _summed_over(model: nn.Module) -> dict[str, int]:
    """By parameter, the width that its products are sums over. A tied embedding is the weight of the output layer."""
    widths: dict[Tensor, int] = {}
    for _, layer in pattention_layers(model):
        widths[layer.key_tokens] = layer.d_in
    for module in model.modules():
        if isinstance(module, nn.Linear):
            widths[module.weight] = module.in_features
    return {name: widths[p] for name, p in model.named_parameters() if p in widths}


def parameter_groups(
    model: nn.Module, lr: float, *, weight_decay: float = 0.0, base: Shape | str | None = None
) -> list[dict[str, Any]]:
    """The groups of an optimizer, with rates that follow the size of each layer; `grow_optimizer` keeps them so.

    Args:
        model: any module that contains Pattention layers.
        lr: the rate of a model of the base shape.
        weight_decay: of everything but biases, norms and what the model spares.
        base: the shape for which `lr` was tuned: a preset, or numbers as {"hidden_size": 128, "ffn": 512}. What is left
            out, and None, is the shape that the model was made with.

    A scheduler keeps the rates it was made with. After growth in place, tell it of the new ones:
    `scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]`.
    """
    shares, config = rate_shares(model, base), find_config(model)
    spared = getattr(model, "no_decay", ())
    groups: dict[Any, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        layer, _, kind = name.rpartition(".")
        by_tokens = kind == "value_tokens"
        # Layers that may grow apart from each other are groups of their own.
        part = _role(layer, config) if by_tokens else None
        decays = parameter.ndim > 1 and kind not in spared
        group = {"params": [], "lr": lr * shares[name], "weight_decay": weight_decay if decays else 0.0}
        if by_tokens:
            group[BY_TOKENS] = True
        groups.setdefault((part, shares[name], decays), group)["params"].append(parameter)
    return list(groups.values())


def _role(layer: str, config: TokenFormerBaseConfig | None) -> str:
    last = layer.rpartition(".")[2]
    roles = {} if config is None else config.token_roles
    return next((role for role, names in roles.items() if last in names), layer)


def rates_follow(optimizer: Optimizer, names: Mapping[Tensor, str], growth: Growth) -> None:
    """Lower the rates of an optimizer's groups of value tokens as their number has grown."""
    for group in optimizer.param_groups:
        steps = [growth.layers.get(names[p].rpartition(".")[0]) for p in group["params"] if group.get(BY_TOKENS)]
        if steps and steps[0] is not None:
            for key in group.keys() & {"lr", "initial_lr"}:
                group[key] *= steps[0].before / steps[0].after
