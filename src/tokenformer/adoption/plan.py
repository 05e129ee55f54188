"""What adoption will replace, found and checked before a number moves.

Enters: a model and a request (parts, a form of ballast). Leaves: every norm concerned, with its output and the
layers that follow it (`Site`); or a one-line error, with the model untouched.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import BadRequestError, did_you_mean
from ..models.adopted import BALLASTS, record_of
from ..pattention import pattention_layers
from ..pattention.functional import ACTIVATIONS
from .families import PARTS, Family, Fed, family_of
from .fold import NormOutput

# A linear on normalised rows can be written with any of the kinds that normalise first: the paper's.
LINEAR_KIND = "l2_gelu"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Layer:
    """One Pattention to be, by names in the base model: a linear, or two with an activation between them."""

    name: str
    linear: Any
    kind: str = LINEAR_KIND
    activation: str | None = None
    last: str = ""
    last_linear: Any = None

    def __post_init__(self) -> None:
        self.last, self.last_linear = self.last or self.name, self.last_linear or self.linear

    @property
    def is_ffn(self) -> bool:
        return self.activation is not None

    @property
    def removed(self) -> list[str]:
        """The modules whose work it does as well."""
        return [] if self.activation is None else [self.activation, self.last]


@dataclass
class Site:
    """A norm, its output, and the layers that read it."""

    norm: str
    module: Any
    rows: NormOutput
    layers: list[Layer] = field(default_factory=list)
    dropped: bool = False  # whether the family knows of dropout between the norm and the layers


def plan_adoption(
    model: Any, parts: Iterable[str] | None, *, ballast: str, slack: float, tolerance: float | None
) -> list[Site]:
    """Check a request against a model and find all that is to be replaced. The arguments are those of `adopt`."""
    _check_arguments(model, ballast, slack, tolerance)
    family = family_of(model.config.model_type)
    chosen = check_parts(model.config, family, parts)
    base = model.base_model
    blocks = _module(base, family.blocks)
    sites: list[Site] = []
    for i in range(len(blocks)):  # type: ignore[arg-type]
        for fed in family.feds:
            layers = _layers(base, f"{family.blocks}.{i}", fed, chosen)
            if layers:
                _check_dropout(base, fed)
                sites.append(_site(base, family, fed, i, layers, chosen, ballast))
    names = [name for site in sites for layer in site.layers for name in (layer.name, *layer.removed)]
    _check_own(model, base, names + [site.norm for site in sites if not site.rows.kept])
    return sites


def _check_arguments(model: Any, ballast: str, slack: float, tolerance: float | None) -> None:
    if not isinstance(model, PreTrainedModel):
        raise BadRequestError(
            f"adopt: a {type(model).__name__} was given; a transformers model is needed (merge adapters first)"
        )
    check_settings(ballast, slack, tolerance)
    built_anew = record_of(model.config) is not None and not any(pattention_layers(model))  # from its configuration
    if not built_anew:
        check_whole_weights(model.config)
    if ballast == "single" and model.dtype == torch.float16:
        raise BadRequestError(
            "adopt: ballast='single' was asked for a model in fp16, whose range is too small for it; use 'spread', or "
            "load the model in fp32 or bf16"
        )


def check_settings(ballast: str, slack: float, tolerance: float | None) -> None:
    """Refuse names and numbers that no model could be adopted with."""
    if ballast not in BALLASTS:
        raise BadRequestError(f"adopt: ballast={ballast!r} is not known; {did_you_mean(ballast, BALLASTS)}")
    numbers = {"slack": slack} if tolerance is None else {"slack": slack, "tolerance": tolerance}
    for name, number in numbers.items():
        if not (isinstance(number, Real) and 0 <= number < math.inf):
            raise BadRequestError(f"adopt: {name}={number!r} was given; a number of at least 0 is needed")


def check_whole_weights(config: Any) -> None:
    """Refuse a model that was adopted already, or whose weights are quantised."""
    if record_of(config) is not None:
        raise BadRequestError("adopt: the model is adopted already; grow it, or load the original one")
    found = getattr(config, "quantization_config", None)
    if found is not None:
        method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
        raise BadRequestError(
            f"adopt: the model's weights are quantised ({getattr(method, 'value', method)}); one in full precision is "
            "needed"
        )


def check_parts(config: Any, family: Family, parts: Iterable[str] | None) -> tuple[str, ...]:
    for setting, value in family.refused.items():
        if getattr(config, setting, None) == value:
            raise BadRequestError(f"adopt: a {config.model_type} with {setting}={value} was given; it is not supported")
    if parts is None:
        return family.parts
    if not isinstance(parts, Iterable):
        raise BadRequestError(f"adopt: parts={parts!r} was given; names are needed, of {', '.join(family.parts)}")
    chosen = (parts,) if isinstance(parts, str) else tuple(parts)
    if not chosen:
        raise BadRequestError(f"adopt: no part was named; a {config.model_type} has {', '.join(family.parts)}")
    for part in chosen:
        if part not in family.parts:
            raise BadRequestError(
                f"adopt: {part!r} of a {config.model_type} cannot be adopted; it has {', '.join(family.parts)}"
            )
    return chosen


def _layers(base: nn.Module, block: str, fed: Fed, parts: tuple[str, ...]) -> list[Layer]:
    layers = []
    if "qkv" in parts:
        layers += [Layer(name, _linear(base, name)) for name in (f"{block}.{name}" for name in fed.qkv)]
    if "ffn" in parts and fed.ffn is not None:
        first, activation, second = (f"{block}.{name}" for name in fed.ffn)
        kind = activation_kind(activation, _module(base, activation))
        layers.append(Layer(first, _linear(base, first), kind, activation, second, _linear(base, second)))
    return layers


def _site(
    base: nn.Module, family: Family, fed: Fed, i: int, layers: list[Layer], parts: tuple[str, ...], ballast: str
) -> Site:
    norm = f"{family.blocks}.{i if fed.first is None else i - 1}.{fed.norm}"
    if fed.first is not None and i == 0:
        norm = fed.first
    only_ours = not fed.shared and all(part in parts for part in PARTS if getattr(fed, part))
    module = _module(base, norm)
    rows = _rows(norm, module, kept=not only_ours or ballast == "single")
    return Site(norm, module, rows, layers, dropped=bool(fed.dropout) and i == 0)


def _module(base: nn.Module, name: str) -> nn.Module:
    try:
        return base.get_submodule(name)
    except AttributeError as error:
        raise BadRequestError(
            f"adopt: {type(base).__name__} has no module {name}, which its family names (see docs/adopting.md)"
        ) from error


def _linear(base: nn.Module, name: str) -> nn.Module:
    """A linear whose weights can be read, or a refusal."""
    module: Any = _module(base, name)
    if type(module) not in (nn.Linear, Conv1D):
        raise BadRequestError(
            f"adopt: {name} is a {type(module).__name__}; nn.Linear and Conv1D are supported (load the model in full "
            "precision, and merge adapters first)"
        )
    if module.weight.is_meta or isinstance(module.weight, DTensor):
        where = "is on the meta device or offloaded" if module.weight.is_meta else "is sharded over devices"
        raise BadRequestError(f"adopt: {name}.weight {where}; load the whole model into memory first")
    if module.weight.dtype not in DTYPES:
        raise BadRequestError(f"adopt: {name}.weight is {module.weight.dtype}; fp64, fp32, bf16 and fp16 are supported")
    _check_finite(name, module)
    return module


def _check_finite(name: str, module: nn.Module) -> None:
    for key, parameter in module.named_parameters():
        if not parameter.isfinite().all():
            raise BadRequestError(f"adopt: {name}.{key} has entries that are not finite; the model is broken")


def activation_kind(name: str, module: nn.Module) -> str:
    """The kind whose activation a module computes, found by trying: transformers has several names for most of them."""
    u = torch.linspace(-40, 40, 4001, dtype=torch.float64)
    if next(module.parameters(), None) is None:
        given = module(u)
        for kind, activation in ACTIVATIONS.items():
            if (given - activation(u)).abs().max() < 1e-8:
                return kind
    raise BadRequestError(
        f"adopt: {name} is a {type(module).__name__}; GELU (exact and tanh), SiLU and ReLU are supported"
    )


def _rows(name: str, norm: Any, kept: bool) -> NormOutput:
    """The output of a norm, from its weights."""
    if isinstance(norm, nn.LayerNorm) and len(norm.normalized_shape) == 1:
        width, centred = norm.normalized_shape[0], True
    elif type(norm).__name__.endswith("RMSNorm") and isinstance(norm.weight, Tensor):
        width, centred = len(norm.weight), False
    else:
        raise BadRequestError(f"adopt: {name} is a {type(norm).__name__}; LayerNorm and RMSNorm are supported")
    _check_finite(name, norm)
    weight, bias = norm.weight, getattr(norm, "bias", None)
    ones = torch.ones(width, dtype=torch.float64)
    return NormOutput(
        ones if weight is None else weight.detach().double().cpu(),
        0 * ones if bias is None else bias.detach().double().cpu(),
        centred,
        kept,
    )


def _check_dropout(base: nn.Module, fed: Fed) -> None:
    for name in fed.dropout:
        dropout: Any = _module(base, name)
        if dropout.training and dropout.p > 0:
            raise BadRequestError(
                f"adopt: the model is in training mode, and {name} drops {dropout.p:g} of a norm's output; call "
                "model.eval(), or set it to 0"
            )


def _check_own(model: nn.Module, base: nn.Module, names: list[str]) -> None:
    """What is replaced must be used in one place only, with weights of its own."""
    places: dict[int, list[str]] = {}
    owners: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(path)
        for key, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(f"{path}.{key}")
    for name in names:
        module = base.get_submodule(name)
        for holders in (places[id(module)], *(owners[id(parameter)] for parameter in module.parameters())):
            if len(holders) > 1:
                raise BadRequestError(f"adopt: {holders[0]} and {holders[1]} are one and the same; untie them first")


def check_conditioned(site: Site, tolerance: float, dtype: torch.dtype) -> None:
    """Where a norm stays, z is read back from its output, which a weight near zero makes impossible.

    A tolerance that rounding alone exceeds is not refused here: the comparison will name the layer.
    """
    smallest, largest = site.rows.weight.abs().min().item(), site.rows.bias.abs().max().item()
    rounding = torch.finfo(dtype).eps
    if smallest == 0 or site.rows.amplified * rounding > tolerance >= rounding:
        raise BadRequestError(
            f"adopt: {site.norm} has a weight of {smallest:.2g} beside biases up to {largest:.2g}, so its input cannot "
            f"be read back within {tolerance:g}; use ballast='single', or leave this part out"
        )
