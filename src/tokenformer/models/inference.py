"""Models made ready to generate: `for_inference`, and `for_training`, which takes it back.

Enters: a model. Leaves: the same model, whose layers have other classes. Parameters keep their names and values, so
that whatever is saved is what it was; nothing is held twice. In attention the keys of query, key and value lie side by
side in memory, as one matrix, wherever each of them has the same shape and no other tensor shares its memory.

Layers that want gradients, are compiled, exported or spread over devices compute what they always did.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..pattention import Pattention
from ..pattention.inference import InferenceLinear, InferencePattention, attend, can_attend
from .layers import TokenFormerAttention

Model = TypeVar("Model", bound=nn.Module)


class InferenceAttention(TokenFormerAttention):
    """Attention whose query, key and value are computed together, as long as their keys stand side by side."""

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layers = (self.query, self.key, self.value)
        keys = _side_by_side(layers)
        if keys is None or not can_attend(hidden_states, self.query, keys, self.query.value_tokens, None, None):
            return TokenFormerAttention.project(self, hidden_states)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        tau = torch.stack([layer.tau for layer in layers])
        outputs = attend(rows, keys, [layer.value_tokens for layer in layers], tau, self.query.kind)
        if outputs is None:
            return TokenFormerAttention.project(self, hidden_states)
        query, key, value = (out.view(*hidden_states.shape[:-1], -1) for out in outputs)
        return query, key, value


# The class of a layer for inference, by its own.
CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    Pattention: InferencePattention,
    nn.Linear: InferenceLinear,
    TokenFormerAttention: InferenceAttention,
}
ORDINARY = {new: old for old, new in CLASSES.items()}


def for_inference(model: Model) -> Model:
    """Let a model compute faster where no gradient is wanted, and return it. `for_training` takes it back."""
    _change_classes(model, CLASSES)
    for attention in model.modules():
        if isinstance(attention, InferenceAttention):
            _put_side_by_side((attention.query, attention.key, attention.value))
    return model


def for_training(model: Model) -> Model:
    """Take `for_inference` back, and return the model. One that was not for inference stays as it is."""
    for attention in model.modules():
        if isinstance(attention, InferenceAttention):
            _put_apart((attention.query, attention.key, attention.value))
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


def _put_side_by_side(layers: Sequence[Pattention]) -> None:
    """Move the keys of layers into one piece of memory."""
    keys = [layer.key_tokens for layer in layers if isinstance(layer, Pattention)]
    alike = len({(key.shape, key.dtype, key.device) for key in keys}) == 1 and len(keys) == len(layers)
    if not alike or any(is_traceable_wrapper_subclass(key) or key.is_meta for key in keys):
        return
    if len({key.untyped_storage().data_ptr() for key in keys}) < len(keys):  # tied, or there already
        return
    joined = torch.cat([key.detach() for key in keys])
    for key, place in zip(keys, joined.chunk(len(keys)), strict=True):
        key.data = place


def _put_apart(layers: Sequence[Pattention]) -> None:
    for layer in layers:
        key = layer.key_tokens
        if key.untyped_storage().nbytes() > key.nbytes:
            key.data = key.detach().clone()


def _side_by_side(layers: Sequence[Pattention]) -> Tensor | None:
    """The keys of all layers as one matrix, if they lie so in memory and nothing else belongs to the layers.

    They are asked for at every call: whatever moved a parameter, a cast or growth, has ended this.
    """
    first, keys = layers[0].key_tokens, [layer.key_tokens for layer in layers]
    size = first.numel() * first.element_size()
    for position, (layer, key) in enumerate(zip(layers, keys, strict=True)):
        if type(layer) is not InferencePattention or "token_groups" in layer._modules:
            return None
        if layer._forward_hooks or layer._forward_pre_hooks or layer.__dict__.keys() & {"forward", "_tokens"}:
            return None
        if layer.top_k is not None or (layer.training and layer.nested):
            return None
        if layer.sizes is not None and layer.sizes.parts:
            return None
        if layer.kind != layers[0].kind or layer.key_bias is not None or layer.bias is not None:
            return None
        if key.shape != first.shape or key.data_ptr() != first.data_ptr() + position * size:
            return None
    if first.untyped_storage().nbytes() < len(keys) * size:  # neighbours by chance
        return None
    return first.as_strided((len(keys) * first.shape[0], first.shape[1]), first.stride())
