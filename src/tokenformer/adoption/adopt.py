"""adopt(): an existing Transformer becomes a TokenFormer that computes the same.

Enters: a transformers model of a known family. Leaves: the same object, with Pattentions in place of linears and
feed-forward networks. Its class becomes a subclass of the host's, which saves and loads it; its forward pass, cache,
generation and training are the host's.

    model = AutoModelForCausalLM.from_pretrained("EleutherAI/pythia-160m")
    tokenformer.adopt(model)
    bigger = tokenformer.grow(model, 1.5)

Everything is checked, and every new layer compared with what it replaces, before the first module is put in place.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import BadRequestError
from ..models.adopted import Adopted, EqualLength, fits_no_host, forget_plans
from ..models.adopted_classes import become_adopted
from ..models.sample import tolerance_of
from ..pattention import Pattention
from ..pattention.groups import layers_with_groups
from ..pattention.module import set_submodule
from .fold import NormOutput, Tokens, ffn_tokens, linear_tokens
from .plan import Layer, Site, check_conditioned, plan_adoption
from .verify import check_training_mode, compare_layers, compare_outputs, watch

Model = TypeVar("Model", bound=PreTrainedModel)

# Share of the squared norm that left-out ballast may make up: below float64's own rounding of a result.
SLACK = 1e-13


def adopt(
    model: Model,
    parts: Iterable[str] | None = None,
    *,
    ballast: str = "spread",
    slack: float = SLACK,
    verify: bool = True,
    inputs: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
) -> Model:
    """Replace linears and feed-forward networks that follow a norm with Pattentions that compute the same, in place.

    The record of what was done is in `model.config`, and is saved and loaded with the model. Make the optimizer
    afterwards: one that was made before holds parameters that are gone.

    Args:
        model: of a family that docs/adopting.md lists.
        parts: ffn, qkv or both; all that the family has unless given.
        ballast: how the norm of a layer's scores is kept constant. "spread" adds about as many tokens as the model is
            wide, and the norm keeps its role; "single" adds one token, which fixes the norm for good.
        slack: share of a squared norm that may be left out to save ballast; values up to the default change nothing
            measurable.
        verify: compare every layer, and the logits, before and after.
        inputs: arguments of the model to compare on, beside random ones.
        tolerance: largest relative difference; 1e-5 in fp32, 1e-10 in fp64 and 5e-2 in half precision unless given.
            Beyond it nothing is changed, and a BadResultError names the layer.
    """
    if any(layers_with_groups(model)):
        raise BadRequestError(
            "adopt: the model has token groups, which were learnt beside the layers that adoption replaces; "
            "remove_tokens them, adopt, and add groups then"
        )
    sites = plan_adoption(model, parts, ballast=ballast, slack=slack, tolerance=tolerance)
    if inputs is not None and not isinstance(inputs, Mapping):
        raise BadRequestError(
            f"adopt: inputs is a {type(inputs).__name__}; the model's arguments by name are needed, such as "
            f"inputs={{'{model.main_input_name}': …}}"
        )
    allowed = tolerance_of(model.dtype) if tolerance is None else tolerance
    if ballast != "single":
        for site in sites:
            if site.rows.kept:
                check_conditioned(site, allowed, model.dtype)
    base = model.base_model
    seen = watch(model, base, sites, inputs) if verify else None
    if seen is not None:
        check_training_mode(model, base, sites, seen)

    tokens = {layer.name: _fold(site.rows, layer, ballast, slack) for site in sites for layer in site.layers}
    new: dict[str, nn.Module] = {site.norm: _equal_length(site) for site in sites if not site.rows.kept}
    for site in sites:
        for layer in site.layers:
            new[layer.name] = _pattention(layer, tokens[layer.name])
            new |= {name: nn.Identity() for name in layer.removed}
    errors = {} if seen is None else compare_layers(sites, new, seen, allowed)

    old = {name: base.get_submodule(name) for name in new}
    _put(base, new)
    try:
        if seen is not None:
            compare_outputs(model, seen, allowed)
    except BaseException:
        _put(base, old)
        raise
    forget_plans(model)
    _own_config(model)
    become_adopted(model, _record(sites, new, tokens, errors, ballast))
    return model


def _fold(rows: NormOutput, layer: Layer, ballast: str, slack: float) -> Tokens:
    weight, bias = _weights(layer.linear)
    single = torch.finfo(layer.linear.weight.dtype).eps if ballast == "single" else None
    if not layer.is_ffn:
        return linear_tokens(rows, weight, bias, single=single)
    return ffn_tokens(rows, (weight, bias), _weights(layer.last_linear), slack=slack, single=single)


def _weights(linear: Any) -> tuple[Tensor, Tensor]:
    """Weight [out, in] and bias [out] in float64; zeros if it has no bias."""
    weight = linear.weight.detach().double().cpu()
    weight = weight.mT if isinstance(linear, Conv1D) else weight
    return weight, weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.detach().double().cpu()


def _pattention(layer: Layer, tokens: Tokens) -> Pattention:
    """The layer, in the dtype and on the device of what it replaces, without zero biases that the host did not have."""
    weight, last = layer.linear.weight, layer.last_linear
    key_bias = tokens.key_bias
    if key_bias is not None and not key_bias.any() and not (layer.is_ffn and layer.linear.bias is not None):
        key_bias = None
    bias = tokens.bias if tokens.bias.any() or last.bias is not None else None
    values = {"key_tokens": tokens.keys, "value_tokens": tokens.values, "key_bias": key_bias, "bias": bias}
    new = Pattention(
        tokens.keys.shape[1],
        tokens.values.shape[1],
        len(tokens.keys),
        layer.kind,
        tokens.tau,
        key_bias=key_bias is not None,
        bias=bias is not None,
        device=weight.device,
        dtype=weight.dtype,
    )
    with torch.no_grad():
        for name, value in values.items():
            if value is not None:
                getattr(new, name).copy_(value)
    new.requires_grad_(weight.requires_grad or last.weight.requires_grad)
    return fits_no_host(new).train(layer.linear.training)


def _equal_length(site: Site) -> EqualLength:
    norm = site.module
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    eps = torch.finfo(norm.weight.dtype).eps if eps is None else eps  # as torch's RMSNorm
    return EqualLength(len(site.rows.weight), eps, site.rows.centred).train(norm.training)


def _own_config(model: PreTrainedModel) -> None:
    """Give the model a configuration of its own: other models may have been built from the same object."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        if id(getattr(module, "config", None)) in copies:
            module.config = copies[id(module.config)]


def _put(base: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    for name, module in modules.items():
        set_submodule(base, name, module)


def _record(
    sites: list[Site],
    new: Mapping[str, Any],
    tokens: Mapping[str, Tokens],
    errors: Mapping[str, float],
    ballast: str,
) -> Adopted:
    layers, norms, removed = {}, {}, []
    for site in sites:
        if not site.rows.kept:
            norm = new[site.norm]
            norms[site.norm] = {"width": norm.width, "eps": norm.eps, "centred": norm.centred}
        for layer in site.layers:
            made = new[layer.name]
            linears = [layer.linear, layer.last_linear] if layer.is_ffn else [layer.linear]
            layers[layer.name] = {
                "d_in": made.d_in,
                "d_out": made.d_out,
                "num_tokens": made.num_tokens,
                "kind": made.kind,
                "key_bias": made.key_bias is not None,
                "bias": made.bias is not None,
                "ballast": tokens[layer.name].ballast,
                "replaced": sum(linear.weight.numel() for linear in linears),
                "error": errors.get(layer.name),
            }
            removed += layer.removed
    return Adopted(layers, norms, removed, ballast)
