"""`pattention`: one function in front of three forms of the same computation, and how one of them is chosen.

    reference   plain torch, the specification (functional.py)
    fused       few passes over [rows, n], one array of it kept for backward or none (fused.py)
    triton      streams over tokens, for GPUs (triton_kernels.py); only on request until it has been timed on one

Enters: rows x [..., d_in], tokens, biases, tau. Leaves: [..., d_out]. The environment variable TOKENFORMER_PATTENTION,
read at every call, overrides the argument `form`; "auto" is `fused` wherever that is possible.

The fast forms are a torch operator, tokenformer::pattention, with shapes for tracing, a backward operator, an
autocast rule and a FLOP count: torch.compile, FSDP and gradient checkpointing treat it as they treat a matrix product.
"""

import os
from typing import Any, Literal, Sequence, get_args  # noqa: UP035 - collections.abc's is new to torch's operators

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.flop_counter import register_flop_formula

from ..errors import BadRequestError, did_you_mean, require
from . import fused
from .functional import KINDS, hold, reference, wide

Form = Literal["auto", "reference", "fused", "triton"]
FORMS: tuple[str, ...] = get_args(Form)
VARIABLE = "TOKENFORMER_PATTENTION"

# x, key tokens, value tokens, key bias, bias.
Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def pattention(
    x: Tensor,
    key_tokens: Tensor,
    value_tokens: Tensor,
    tau: float | Tensor,
    kind: str = "l2_gelu",
    *,
    key_bias: Tensor | None = None,
    bias: Tensor | None = None,
    form: str = "auto",
    recompute: bool = False,
    frozen: int = 0,
    segments: Sequence[int] = (),
    mask: Tensor | None = None,
) -> Tensor:
    """Attention of the rows of x over parameter tokens: [..., d_in] to [..., d_out].

    Args:
        x: the rows, [..., d_in].
        key_tokens: [n, d_in].
        value_tokens: [n, d_out].
        tau: the scale of the normalised scores.
        kind: how scores become weights, one of `KINDS`.
        key_bias: [n], added to the scores.
        bias: [d_out], added to the output.
        form: auto, reference, fused or triton: how it is computed, not what.
        recompute: keep no array of [rows, n] for the backward pass; compute the scores again there.
        frozen: how many tokens, from the first, get no gradient; computing it is skipped.
        segments: how many tokens each part has, of parts with a normaliser and a tau of their own: tau is then a tensor
            with a number for each. Their outputs are added.
        mask: [..., n] or what broadcasts to it; False where a row does not attend to a token.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not known; choose one of {', '.join(KINDS)}")
    if torch.jit.is_tracing():
        raise BadRequestError(
            "torch.jit.trace and torch.onnx.export(dynamo=False) cannot record a Pattention; use torch.export.export "
            "or torch.onnx.export(dynamo=True)"
        )
    if segments:
        _check_segments(segments, key_tokens, tau)
    chosen = chosen_form(form)
    tensors = (x, key_tokens, value_tokens, key_bias, bias)
    if chosen == "reference" or not _can_be_fast(tensors, tau):
        return _plain(tensors, tau, kind, frozen, segments, mask)
    if chosen == "triton":
        _check_triton(kind, key_bias, bias, segments, mask)
    rows = x.reshape(-1, x.shape[-1])  # [rows, d_in]
    if mask is not None:
        n = key_tokens.shape[0]
        mask = mask.expand(*x.shape[:-1], n).reshape(-1, n)  # [rows, n]
    if not isinstance(tau, Tensor):
        tau = torch.tensor(tau, dtype=wide(key_tokens.dtype), device=x.device)
    if chosen != "triton" and _keeps_nothing(tensors):
        out = fused.attend(rows, key_tokens, value_tokens, key_bias, bias, tau, kind, segments, mask)
    else:
        keep = not recompute and chosen != "triton"
        how = (kind, chosen, keep, frozen, list(segments), mask)
        out = _operator(rows, key_tokens, value_tokens, key_bias, bias, tau, *how)[0]
    return out.view(*x.shape[:-1], value_tokens.shape[1])


def _check_segments(segments: Sequence[int], key_tokens: Tensor, tau: float | Tensor) -> None:
    if sum(segments) != key_tokens.shape[0] or min(segments) < 1:
        raise ValueError(f"segments={list(segments)} must be positive and add up to {key_tokens.shape[0]} tokens")
    if not isinstance(tau, Tensor) or tau.shape != (len(segments),):
        raise ValueError(f"tau must be a tensor with {len(segments)} numbers, one for every segment")


def check_form(form: str, given: str) -> None:
    """Refuse an unknown form; `given` says where it came from."""
    if form not in FORMS:
        raise BadRequestError(f"{given}={form!r} is not known; {did_you_mean(form, FORMS)}")


@torch.compiler.assume_constant_result
def chosen_form(form: str) -> str:
    form = os.environ.get(VARIABLE) or form
    if form not in FORMS:
        check_form(form, VARIABLE)
    if form == "triton":
        _triton()
    return "fused" if form == "auto" else form


def _triton() -> Any:
    require("the Pattention form 'triton' (fused does without it)", "triton")
    from . import triton_kernels

    return triton_kernels


def _check_triton(
    kind: str, key_bias: Tensor | None, bias: Tensor | None, segments: Sequence[int], mask: Tensor | None
) -> None:
    """The kernels know the paper's kinds, and no biases, segments and masks."""
    more = {"biases": key_bias is not None or bias is not None, "segments": bool(segments), "a mask": mask is not None}
    asked = " and ".join(name for name, given in more.items() if given)
    if kind in _triton().TRITON_KINDS and not asked:
        return
    given = f"kind={kind!r}{f' with {asked}' if asked else ''}"
    known = ", ".join(_triton().TRITON_KINDS)
    raise BadRequestError(
        f"the triton form was asked for {given}; it knows {known} without biases, segments and masks; choose the form "
        "fused"
    )


def _can_be_fast(tensors: Tensors, tau: float | Tensor) -> bool:
    """Not for tokens that are spread over devices or quantised, nor in torch.func's transforms, nor in an exported
    program, which should run where this library is not installed.
    """
    x, key_tokens, value_tokens, key_bias, bias = tensors
    if torch.compiler.is_exporting() or is_traceable_wrapper_subclass(key_tokens) or x.dim() == 0:
        return False
    if torch._C._functorch.maybe_current_level() is not None:
        return False
    dtype = key_tokens.dtype
    if value_tokens.dtype != dtype or not (x.dtype == dtype or _autocasts(x.device.type)):
        return False
    if (key_bias is not None and key_bias.dtype != dtype) or (bias is not None and bias.dtype != dtype):
        return False
    return not (isinstance(tau, Tensor) and tau.requires_grad)


def _keeps_nothing(tensors: Tensors) -> bool:
    """In plain inference the operator's bookkeeping is left out: one token at a time it is a good part of the work."""
    x, key_tokens, value_tokens, key_bias, bias = tensors
    if torch.compiler.is_compiling() or _autocasts(x.device.type):
        return False
    wants_gradient = x.requires_grad or key_tokens.requires_grad or value_tokens.requires_grad
    wants_gradient |= (key_bias is not None and key_bias.requires_grad) or (bias is not None and bias.requires_grad)
    return not (wants_gradient and torch.is_grad_enabled())


def _autocasts(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _plain(
    tensors: Tensors, tau: float | Tensor, kind: str, frozen: int, segments: Sequence[int], mask: Tensor | None
) -> Tensor:
    """The specification, with the first `frozen` tokens held."""
    x, key_tokens, value_tokens, key_bias, bias = tensors
    key_tokens, value_tokens = hold(key_tokens, frozen), hold(value_tokens, frozen)
    key_bias = None if key_bias is None else hold(key_bias, frozen)
    tokens = (key_tokens, value_tokens, tau, kind)
    return reference(x, *tokens, key_bias=key_bias, bias=bias, segments=segments, mask=mask)


@torch.library.custom_op("tokenformer::pattention", mutates_args=())
def _operator(
    x: Tensor,
    key_tokens: Tensor,
    value_tokens: Tensor,
    key_bias: Tensor | None,
    bias: Tensor | None,
    tau: Tensor,
    kind: str,
    form: str,
    keep: bool,
    frozen: int,
    segments: Sequence[int],
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and for backward: an array of [rows, n] (empty unless `keep`) and a few numbers per row."""
    if form == "triton":
        out, stats = _triton().forward(x, key_tokens, value_tokens, tau, kind)
        return out, x.new_empty(0), stats
    out, kept, stats = fused.forward(x, key_tokens, value_tokens, key_bias, bias, tau, kind, keep, segments, mask)
    return out, key_tokens.new_empty(0) if kept is None else kept, stats


@_operator.register_fake
def _(x: Tensor, key_tokens: Tensor, value_tokens: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, n, keep, segments = x.shape[0], key_tokens.shape[0], rest[-4], rest[-2]
    out = value_tokens.new_empty(rows, value_tokens.shape[1])
    kept = key_tokens.new_empty((rows, n) if keep else 0)
    return out, kept, x.new_empty(rows, fused.stats_width(segments), dtype=wide(x.dtype))


@torch.library.custom_op("tokenformer::pattention_backward", mutates_args=())
def _backward_operator(
    grad: Tensor,
    x: Tensor,
    key_tokens: Tensor,
    value_tokens: Tensor,
    key_bias: Tensor | None,
    tau: Tensor,
    kept: Tensor,
    stats: Tensor,
    kind: str,
    form: str,
    keep: bool,
    frozen: int,
    segments: Sequence[int],
    mask: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, keys, values and biases; an empty tensor for one not needed, as operators return no None."""
    gradients: Sequence[Tensor | None]
    if form == "triton":
        gradients = _triton().backward(grad, x, key_tokens, value_tokens, tau, kind, stats, frozen, needs[:3])
        gradients = (*gradients, None, None)
    else:
        kept_scores = kept if keep else None
        gradients = fused.backward(
            *(grad, x, key_tokens, value_tokens, key_bias, tau, kind),
            *(kept_scores, stats, frozen, needs, segments, mask),
        )
    grad_x, grad_keys, grad_values, grad_key_bias, grad_bias = (
        x.new_empty(0) if gradient is None else gradient for gradient in gradients
    )
    return grad_x, grad_keys, grad_values, grad_key_bias, grad_bias


@_backward_operator.register_fake
def _(
    grad: Tensor, x: Tensor, key_tokens: Tensor, value_tokens: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    likes = (x, key_tokens, value_tokens, key_tokens[:, 0], value_tokens[0])
    grad_x, grad_keys, grad_values, grad_key_bias, grad_bias = (
        like.new_empty(like.shape) if needed else x.new_empty(0) for like, needed in zip(likes, rest[-1], strict=True)
    )
    return grad_x, grad_keys, grad_values, grad_key_bias, grad_bias


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, key_tokens, value_tokens, key_bias, bias, tau, *ctx.how, mask = inputs
    _, kept, stats = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(kept, stats)
    # No gradient depends on the value of the output's bias; it is kept for the second derivative, at no memory.
    ctx.save_for_backward(x, key_tokens, value_tokens, key_bias, bias, tau, kept, stats, mask)


def _backward(ctx: Any, grad: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:5]
    gradients: Sequence[Tensor | None] = (None,) * 5
    if grad is not None and torch.is_grad_enabled():
        # A second derivative was asked for: only the specification has one.
        gradients = _differentiable_gradients(ctx, grad, needs)
    elif grad is not None:
        x, key_tokens, value_tokens, key_bias, _, tau, kept, stats, mask = ctx.saved_tensors
        how = (*ctx.how, mask, needs)
        gradients = _backward_operator(grad, x, key_tokens, value_tokens, key_bias, tau, kept, stats, *how)
    needed = (gradient if need else None for gradient, need in zip(gradients, needs, strict=True))
    return (*needed, *(None,) * 7)  # the rest: tau, and how it is computed


def _differentiable_gradients(ctx: Any, grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    *inputs, tau, _, _, mask = ctx.saved_tensors
    kind, _, _, frozen, segments = ctx.how
    out = _plain(tuple(inputs), tau, kind, frozen, segments, mask)
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

    def forward(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        parameters, (tau, *how) = rest[:4], rest[4:]
        # As in torch's own rule for products, fp64 stays fp64.
        wider = parameters[0].dtype == torch.float64
        dtype = within = torch.float64 if wider else torch.get_autocast_dtype(device)
        if dtype == torch.float16 and parameters[2] is not None:
            within = torch.float32  # a key bias may exceed fp16's range: that of a single ballast token does
        cast = [parameter if parameter is None else parameter.to(within) for parameter in parameters]
        with torch._C._ExcludeDispatchKeyGuard(here):
            out, kept, stats = torch.ops.tokenformer.pattention(x, *cast, tau, *how)
            return out.to(dtype), kept, stats

    def backward(*arguments: Any) -> tuple[Tensor, ...]:
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
    keep, frozen, _, _, (needs_x, needs_keys, needs_values, needs_key_bias, _) = rest[-5:]
    a_key_product, a_value_product = 2 * x[0] * keys[0] * keys[1], 2 * x[0] * keys[0] * values[1]
    trained = 1 - frozen / keys[0]
    flops = 0 if keep else a_key_product
    flops += (needs_x or needs_keys or needs_key_bias) * a_value_product + needs_x * a_key_product
    return int(flops + trained * (needs_keys * a_key_product + needs_values * a_value_product))
