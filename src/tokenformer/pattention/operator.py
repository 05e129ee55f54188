"""`pattention`: one function before three forms of the same thing, and how one of them is chosen.

    reference   plain torch, the specification (functional.py)
    fused       few passes over [rows, n], one array of it kept for backward or none (fused.py)
    triton      streams over tokens, for GPUs (triton_kernels.py); not chosen by itself until it has been timed on one

Enters: rows x [..., d_in], tokens, tau. Leaves: [..., d_out]. The environment variable TOKENFORMER_PATTENTION, read at
every call, goes before the argument `form`; "auto" is `fused` wherever that can be.

The fast forms are a torch operator, tokenformer::pattention, with shapes for tracing, a backward operator, an
autocast rule and a FLOP count: torch.compile, FSDP and gradient checkpointing treat it as they treat a matrix product.
"""

import os
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import register_flop_formula

from ..errors import BadRequestError, did_you_mean
from . import fused
from .functional import KINDS, reference, wide

Form = Literal["auto", "reference", "fused", "triton"]
FORMS: tuple[str, ...] = get_args(Form)
VARIABLE = "TOKENFORMER_PATTENTION"


def pattention(
    x: Tensor,
    key_tokens: Tensor,
    value_tokens: Tensor,
    tau: float | Tensor,
    kind: str = "l2_gelu",
    *,
    form: str = "auto",
    recompute: bool = False,
    frozen: int = 0,
) -> Tensor:
    """Attention of the rows of x over parameter tokens.

    recompute: keep no array of [rows, n] for backward; compute the scores again there.
    frozen: the first so many tokens get no gradient, and its cost is saved.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not known; choose one of {', '.join(KINDS)}")
    chosen = _chosen_form(form)
    if chosen == "reference" or not _can_be_fast(x, key_tokens, value_tokens, tau):
        return reference(x, _hold(key_tokens, frozen), _hold(value_tokens, frozen), tau, kind)
    rows = x.reshape(-1, x.shape[-1])  # [rows, d_in]
    if not isinstance(tau, Tensor):
        tau = torch.tensor(tau, dtype=wide(key_tokens.dtype), device=x.device)
    if chosen != "triton" and _keeps_nothing(x, key_tokens, value_tokens):
        out = fused.attend(rows, key_tokens, value_tokens, tau, kind)
    else:
        keep = not recompute and chosen != "triton"
        out = _operator(rows, key_tokens, value_tokens, tau, kind, chosen, keep, frozen)[0]
    return out.view(*x.shape[:-1], value_tokens.shape[1])


def check_form(form: str, given: str) -> None:
    """Refuse a form that is not there, with a word to the person who gave it."""
    if form not in FORMS:
        raise BadRequestError(f"{given}={form!r} is not known; {did_you_mean(form, FORMS)}")


@torch.compiler.assume_constant_result
def _chosen_form(form: str) -> str:
    form = os.environ.get(VARIABLE) or form
    if form not in FORMS:
        check_form(form, VARIABLE)
    if form == "triton":
        _triton()
    return "fused" if form == "auto" else form


def _triton() -> Any:
    try:
        from . import triton_kernels
    except ImportError as error:
        raise BadRequestError(
            "the form 'triton' was asked for, but triton is not installed; "
            "install tokenformer[triton], or choose fused or reference"
        ) from error
    return triton_kernels


def _can_be_fast(x: Tensor, key_tokens: Tensor, value_tokens: Tensor, tau: float | Tensor) -> bool:
    """Not for tokens that are spread over devices, nor in torch.func's transforms, nor in an exported program, which
    should run where this library is not installed.
    """
    if torch.compiler.is_exporting() or isinstance(key_tokens, DTensor) or x.dim() == 0:
        return False
    if torch._C._functorch.maybe_current_level() is not None:
        return False
    if key_tokens.dtype != value_tokens.dtype or not (x.dtype == key_tokens.dtype or _autocasts(x.device.type)):
        return False
    return not (isinstance(tau, Tensor) and tau.requires_grad)


def _keeps_nothing(x: Tensor, key_tokens: Tensor, value_tokens: Tensor) -> bool:
    """In plain inference the operator's bookkeeping is left out: one token at a time it is a good part of the work."""
    if torch.compiler.is_compiling() or _autocasts(x.device.type):
        return False
    wants_gradient = x.requires_grad or key_tokens.requires_grad or value_tokens.requires_grad
    return not (wants_gradient and torch.is_grad_enabled())


def _autocasts(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _hold(tokens: Tensor, frozen: int) -> Tensor:
    return torch.cat([tokens[:frozen].detach(), tokens[frozen:]]) if frozen else tokens


@torch.library.custom_op("tokenformer::pattention", mutates_args=())
def _operator(
    x: Tensor, key_tokens: Tensor, value_tokens: Tensor, tau: Tensor, kind: str, form: str, keep: bool, frozen: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and for backward: an array of [rows, n] (empty unless `keep`) and three numbers a row."""
    if form == "triton":
        out, stats = _triton().forward(x, key_tokens, value_tokens, tau, kind)
        return out, x.new_empty(0), stats
    out, kept, stats = fused.forward(x, key_tokens, value_tokens, tau, kind, keep)
    return out, key_tokens.new_empty(0) if kept is None else kept, stats


@_operator.register_fake
def _(
    x: Tensor, key_tokens: Tensor, value_tokens: Tensor, tau: Tensor, kind: str, form: str, keep: bool, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    rows, n = x.shape[0], key_tokens.shape[0]
    out = value_tokens.new_empty(rows, value_tokens.shape[1])
    kept = key_tokens.new_empty((rows, n) if keep else 0)
    return out, kept, x.new_empty(rows, 3, dtype=wide(x.dtype))


@torch.library.custom_op("tokenformer::pattention_backward", mutates_args=())
def _backward_operator(
    grad: Tensor,
    x: Tensor,
    key_tokens: Tensor,
    value_tokens: Tensor,
    tau: Tensor,
    kept: Tensor,
    stats: Tensor,
    kind: str,
    form: str,
    keep: bool,
    frozen: int,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, keys and values; an empty tensor for one that is not needed, as operators return no None."""
    if form == "triton":
        gradients = _triton().backward(grad, x, key_tokens, value_tokens, tau, kind, stats, frozen, needs)
    else:
        kept_scores = kept if keep else None
        gradients = fused.backward(grad, x, key_tokens, value_tokens, tau, kind, kept_scores, stats, frozen, needs)
    grad_x, grad_keys, grad_values = (x.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return grad_x, grad_keys, grad_values


@_backward_operator.register_fake
def _(grad: Tensor, x: Tensor, key_tokens: Tensor, value_tokens: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    needs = rest[-1]
    grad_x, grad_keys, grad_values = (
        torch.empty_like(tensor, memory_format=torch.contiguous_format) if needed else x.new_empty(0)
        for tensor, needed in zip((x, key_tokens, value_tokens), needs, strict=True)
    )
    return grad_x, grad_keys, grad_values


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, key_tokens, value_tokens, tau, *ctx.how = inputs
    _, kept, stats = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(kept, stats)
    ctx.save_for_backward(x, key_tokens, value_tokens, tau, kept, stats)


def _backward(ctx: Any, grad: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:3]
    gradients: Sequence[Tensor | None] = (None, None, None)
    if grad is not None and torch.is_grad_enabled():
        # Somebody wants the gradient's gradient: only the specification has one.
        gradients = _differentiable_gradients(ctx, grad, needs)
    elif grad is not None:
        gradients = _backward_operator(grad, *ctx.saved_tensors, *ctx.how, needs)
    needed = (gradient if need else None for gradient, need in zip(gradients, needs, strict=True))
    return (*needed, None, None, None, None, None)


def _differentiable_gradients(ctx: Any, grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    *inputs, tau, _, _ = ctx.saved_tensors
    kind, _, _, frozen = ctx.how
    x, key_tokens, value_tokens = inputs
    out = reference(x, _hold(key_tokens, frozen), _hold(value_tokens, frozen), tau, kind)
    wanted = [tensor for tensor, need in zip(inputs, needs, strict=True) if need]
    gradients = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(gradients) if need else None for need in needs]


torch.library.register_autograd(_operator, _backward, setup_context=_keep_for_backward)


def _register_autocast(device: str) -> None:
    """Under autocast the tokens are cast; rows are cast by the operator itself, after they are scaled.

    Within both operators autocast is off: they choose the dtype of every product themselves.
    """
    library = torch.library.Library("tokenformer", "FRAGMENT")
    key = f"Autocast{device.upper()}"
    here = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def forward(x: Tensor, key_tokens: Tensor, value_tokens: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        # As torch's own rule for products: fp64 stays what it is.
        dtype = key_tokens.dtype if key_tokens.dtype == torch.float64 else torch.get_autocast_dtype(device)
        with torch._C._ExcludeDispatchKeyGuard(here):
            return torch.ops.tokenformer.pattention(x, key_tokens.to(dtype), value_tokens.to(dtype), *rest)

    def backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._ExcludeDispatchKeyGuard(here):
            return torch.ops.tokenformer.pattention_backward(*arguments)

    library.impl("pattention", forward, key)
    library.impl("pattention_backward", backward, key)
    _LIBRARIES.append(library)


# A registration ends with its Library object.
_LIBRARIES: list[torch.library.Library] = []
for _device in ("cpu", "cuda"):
    _register_autocast(_device)


@register_flop_formula(torch.ops.tokenformer.pattention)
def _forward_flops(x: Any, keys: Any, values: Any, *_: Any, **__: Any) -> int:
    return 2 * x[0] * keys[0] * (keys[1] + values[1])


@register_flop_formula(torch.ops.tokenformer.pattention_backward)
def _backward_flops(grad: Any, x: Any, keys: Any, values: Any, *rest: Any, **__: Any) -> int:
    keep, frozen, (needs_x, needs_keys, needs_values) = rest[5], rest[6], rest[7]
    a_key_product, a_value_product = 2 * x[0] * keys[0] * keys[1], 2 * x[0] * keys[0] * values[1]
    trained = 1 - frozen / keys[0]
    flops = 0 if keep else a_key_product
    flops += (needs_x or needs_keys) * a_value_product + needs_x * a_key_product
    return int(flops + trained * (needs_keys * a_key_product + needs_values * a_value_product))
