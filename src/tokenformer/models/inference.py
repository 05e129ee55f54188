"""Models made ready to generate: `for_inference`, and `for_training`, which takes it back.

Enters: a model. Leaves: the same model, whose layers have other classes. Parameters keep their names and values, so
that whatever is saved is what it was; nothing is held twice. In attention the keys of query, key and value lie side by
side in memory, as one matrix, wherever each of them has the same shape and no other tensor shares its memory.

Layers that want gradients, are compiled, exported or spread over devices compute what they always did.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..pattention import Pattention
from ..pattention.inference import InferenceLinear, InferencePattention, attend, can_attend
from ..pattention.quantised import QuantisedPattention
from ..pattention.quantised_inference import InferenceQuantisedPattention, Integers
from ..pattention.quantised_inference import attend as attend_integers
from ..pattention.quantised_inference import can_attend as can_attend_integers
from .layers import TokenFormerAttention

Model = TypeVar("Model", bound=nn.Module)
# What of query's, key's and value's integers is read as one.
BESIDE = ("key_codes", "key_scales", "value_scales")


class InferenceAttention(TokenFormerAttention):
    """Attention whose query, key and value are computed together, as long as their keys stand side by side."""

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layers = (self.query, self.key, self.value)
        outputs = self._together(hidden_states, layers) if all(map(_is_plain, layers)) else None
        if outputs is None:
            return TokenFormerAttention.project(self, hidden_states)
        query, key, value = (out.view(*hidden_states.shape[:-1], -1) for out in outputs)
        return query, key, value

    def _together(self, hidden_states: Tensor, layers: Sequence[Any]) -> list[Tensor] | None:
        """What the layers compute, or None where they have to do it one by one."""
        first, rows = layers[0], hidden_states.reshape(-1, hidden_states.shape[-1])
        if any(type(layer) is not type(first) or layer.kind != first.kind for layer in layers):
            return None
        if type(first) is InferencePattention:
            keys = _side_by_side([layer.key_tokens for layer in layers])
            if keys is None or not can_attend(hidden_states, first, keys, first.value_tokens, None, None):
                return None
            tau = torch.stack([layer.tau for layer in layers])
            return attend(rows, keys, [layer.value_tokens for layer in layers], tau, first.kind)
        if any(len(layer.key_tokens) or not can_attend_integers(hidden_states, layer) for layer in layers):
            return None
        joined = [_side_by_side([getattr(layer.quantised, name) for layer in layers]) for name in BESIDE]
        found = [each for each in joined if each is not None]
        if len(found) < len(BESIDE):
            return None
        codes, key_scales, value_scales = found
        by_layer, values = (len(layers), -1), [layer.quantised.value_codes for layer in layers]
        integers = Integers(codes, key_scales.view(by_layer), value_scales.view(by_layer), values)
        return attend_integers(rows, integers, torch.stack([layer.tau for layer in layers]).view(-1, 1), first.kind)


# The class of a layer for inference, by its own.
CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    Pattention: InferencePattention,
    QuantisedPattention: InferenceQuantisedPattention,
    nn.Linear: InferenceLinear,
    TokenFormerAttention: InferenceAttention,
}
ORDINARY = {new: old for old, new in CLASSES.items()}


def for_inference(model: Model) -> Model:
    """Let a model compute faster where no gradient is wanted, and return it. `for_training` takes it back."""
    _change_classes(model, CLASSES)
    for attention in model.modules():
        if isinstance(attention, InferenceAttention):
            for tensors in _kept_together((attention.query, attention.key, attention.value)):
                _put_side_by_side(tensors)
    return model


def for_training(model: Model) -> Model:
    """Take `for_inference` back, and return the model. One that was not for inference stays as it is."""
    for attention in model.modules():
        if isinstance(attention, InferenceAttention):
            for tensors in _kept_together((attention.query, attention.key, attention.value)):
                _put_apart(tensors)
    _change_classes(model, ORDINARY)
    return model


@contextmanager
def while_inferring(model: nn.Module) -> Iterator[None]:
    """Faster layers within the `with`, no parameter moved. For a model that is for inference it does nothing.

    Nor for a compiled one, which would be compiled again. What is changed by one thread may serve another meanwhile.
    """
    changed = [] if getattr(model, "_compiled_call_impl", None) is not None else _change_classes(model, CLASSES)
    try:
        yield
    finally:
        for module in changed:
            module.__class__ = ORDINARY.get(type(module), type(module))


def _change_classes(model: nn.Module, classes: dict[type[nn.Module], type[nn.Module]]) -> list[nn.Module]:
    """Give the layers of these very classes others; those that were changed."""
    changed = [module for module in model.modules() if type(module) in classes]
    for module in changed:
        module.__class__ = classes[type(module)]
    return changed


def _kept_together(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """The tensors of layers that can lie side by side: their keys, and what quantised ones have in place of them."""
    if not all(isinstance(layer, Pattention) for layer in layers):
        return
    yield [layer.key_tokens for layer in layers]  # type: ignore[misc]
    if all(isinstance(layer, QuantisedPattention) for layer in layers):
        for name in BESIDE:
            yield [getattr(layer.quantised, name) for layer in layers]


def _put_side_by_side(tensors: Sequence[Tensor]) -> None:
    """Move tensors into one piece of memory."""
    if len({(each.shape, each.dtype, each.device) for each in tensors}) > 1 or not tensors[0].numel():
        return
    if any(is_traceable_wrapper_subclass(each) or each.is_meta for each in tensors):
        return
    if len({each.untyped_storage().data_ptr() for each in tensors}) < len(tensors):  # tied, or there already
        return
    joined = torch.cat([each.detach() for each in tensors])
    for each, place in zip(tensors, joined.chunk(len(tensors)), strict=True):
        each.data = place


def _put_apart(tensors: Sequence[Tensor]) -> None:
    for each in tensors:
        if each.untyped_storage().nbytes() > each.nbytes:
            each.data = each.detach().clone()


def _is_plain(layer: Any) -> bool:
    """Whether a layer computes what its tokens say and nothing else belongs to it."""
    if type(layer) not in (InferencePattention, InferenceQuantisedPattention) or "token_groups" in layer._modules:
        return False
    if layer._forward_hooks or layer._forward_pre_hooks or layer.__dict__.keys() & {"forward", "_tokens"}:
        return False
    if layer.top_k is not None or (layer.training and layer.nested):
        return False
    if layer.sizes is not None and layer.sizes.parts:
        return False
    return layer.key_bias is None and layer.bias is None


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors as one, along their first dimension, if they lie so in memory.

    They are asked for at every call: whatever moved a parameter, a cast or growth, has ended this.
    """
    first = tensors[0]
    size = first.numel() * first.element_size()
    for position, each in enumerate(tensors):
        if each.shape != first.shape or each.data_ptr() != first.data_ptr() + position * size:
            return None
    if first.untyped_storage().nbytes() < len(tensors) * size:  # neighbours by chance
        return None
    return first.as_strided((len(tensors) * first.shape[0], *first.shape[1:]), first.stride())
