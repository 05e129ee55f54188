"""The fused form of Pattention against its specification: outputs, gradients, what it keeps, who sees through it."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from coarse_kernels import CoarseKernels
from conftest import ODD_SHAPES, make_tiny, relative_error
from tokenformer import KINDS, BadRequestError, Pattention, TokenFormerConfig
from tokenformer.pattention import fused, pattention
from tokenformer.pattention.functional import LARGEST_ENTRY, SMALLEST_EXPONENT, default_tau, reference, row_scale

# Both forms round every product of the chain once, in another order: a few ulps. In half precision the normalised
# scores are rounded once more than in the specification, which holds them in fp32.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def leaves(shape, d_in, d_out, n, dtype=torch.float32, size=1.0, biased=False):
    """Rows, keys and values that want gradients, and if asked for a key bias and a bias."""
    x = torch.randn(*shape, d_in, dtype=torch.float64) * size
    keys, values = torch.randn(n, d_in, dtype=torch.float64) * 0.3, torch.randn(n, d_out, dtype=torch.float64)
    biases = [torch.randn(n), torch.randn(d_out)] if biased else []
    return [tensor.to(dtype).requires_grad_() for tensor in (x, keys, values, *biases)]


def called(function, inputs, *args, **kwargs):
    """The output for rows, keys, values and, if there are any, biases."""
    return function(*inputs[:3], *args, **dict(zip(("key_bias", "bias"), inputs[3:], strict=False)), **kwargs)


def run(function, inputs, grad, *args, **kwargs):
    """The output and the gradients of all that is given."""
    out = called(function, inputs, *args, **kwargs)
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


@pytest.fixture(autouse=True)
def _no_forced_form(monkeypatch):
    monkeypatch.delenv("TOKENFORMER_PATTENTION", raising=False)


@pytest.mark.parametrize("kind", KINDS)
@given(
    **ODD_SHAPES,
    dtype=st.sampled_from(list(TOLERANCE)),
    size=st.sampled_from([1e-4, 1.0, 40.0]),
    recompute=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_outputs_and_gradients_are_the_specifications(
    kind, shape, d_in, d_out, n, dtype, size, recompute, biased, seed
):
    torch.manual_seed(seed)
    inputs = leaves(shape, d_in, d_out, n, dtype, size, biased)
    grad, tau = torch.randn(*shape, d_out, dtype=torch.float64), default_tau(n, kind)
    given = run(pattention, inputs, grad, tau, kind, form="fused", recompute=recompute)
    # The specification itself is computed wide, from the same rounded inputs.
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = run(reference, exact, grad.to(dtype).double(), tau, kind)
    for given_, true, size in zip(given, expected, sizes(exact, grad, tau, kind), strict=True):
        assert given_.dtype == dtype
        true = true.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
        assert (given_.double() - true).norm() <= TOLERANCE[dtype] * size


def sizes(inputs, grad, tau, kind):
    """How large output and gradients would be if no terms cancelled: what rounding errors are measured against.

    With one token, or rows of one number, the gradients of the L2 kinds cancel to zero. A key bias is the keys' entry
    for a channel that is 1.
    """
    x, keys, values, *biases = (tensor.detach() for tensor in inputs)
    if biases:
        x = torch.cat([x, torch.ones_like(x[..., :1])], -1)
        keys = torch.cat([keys, biases[0][:, None]], 1)
    scores = x @ keys.mT
    normed = torch.nn.functional.gelu(scores) if kind == "gelu_l2" else scores
    # How much faster weights change than scores: the row that is divided by least decides. No row by less than this.
    steepness = tau if kind == "softmax" else 1 / (normed.norm(dim=-1) / tau).min().clamp(min=2.0**-26)
    # GeLU of a score far below 0 is what is left of 1 - 1, and then divided by next to nothing.
    silenced = 1 + scores.abs().max() * steepness / tau if kind == "gelu_l2" else 1
    through_values = grad.norm() * values.norm() * steepness * silenced
    weights = tau * silenced
    of_tensors = through_values * keys.norm(), through_values * x.norm(), grad.norm() * weights
    of_output = weights * values.norm() + sum(bias.norm() for bias in biases[1:])
    of_biases = (through_values * x.norm(), grad.norm() * grad[..., 0].numel() ** 0.5) if biases else ()
    return of_output, *of_tensors, *of_biases


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-6, 3e4, 1e12, 1e30, 3e38])
@pytest.mark.parametrize("biased", [False, True])
def test_rows_of_every_size_beside_ordinary_ones(kind, dtype, size, biased):
    size = min(size, torch.finfo(dtype).max / 4)
    inputs = leaves((6,), 16, 8, 24, dtype, biased=biased)
    with torch.no_grad():
        inputs[0][::2] *= torch.tensor(size, dtype=torch.float64).to(dtype)
        inputs[0].clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    grad, tau = torch.randn(6, 8), default_tau(24, kind)
    given = run(pattention, inputs, grad, tau, kind, form="fused")
    plain = run(reference, inputs, grad, tau, kind)
    for given_, expected in zip(given, plain, strict=True):
        assert given_.isfinite().all()
        rows = (torch.atleast_2d(tensor.double()) for tensor in (given_, expected))  # the gradient of a bias is one row
        for row, expected_row in zip(*rows, strict=True):
            assert (row - expected_row).norm() <= 4 * TOLERANCE[dtype] * expected_row.norm() + 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_no_kernel_is_asked_for_what_another_cpus_cannot_give(kind, dtype, biased):
    """Kernels of one make of CPU overflow where those of another do not: see coarse_kernels.py."""
    largest, tau = torch.finfo(dtype).max, default_tau(24, kind)
    inputs = leaves((7,), 16, 8, 24, dtype, biased=biased)
    with torch.no_grad():
        for row, size in enumerate((largest, largest / 3, largest**0.5, 1e3, torch.finfo(dtype).tiny)):
            inputs[0][row] = inputs[0][row].sign() * size
    grad = torch.randn(7, 8, dtype=dtype)
    rows, keys, values, *biases = (tensor.detach() for tensor in inputs)
    key_bias, bias = biases or (None, None)
    scale = torch.tensor(tau, dtype=torch.promote_types(dtype, torch.float32))
    with CoarseKernels():
        plain = run(reference, inputs, grad, tau, kind)
        for kept in (True, False):
            out, scores, stats = fused.forward(rows, keys, values, key_bias, bias, scale, kind, kept)
            needs = (True, True, True, biased, biased)
            gradients = fused.backward(grad, rows, keys, values, key_bias, scale, kind, scores, stats, 0, needs)
            assert all(tensor.isfinite().all() for tensor in (out, *gradients[: len(inputs)]))
        alone = fused.attend(rows, keys, values, key_bias, bias, scale, kind)
    assert all(tensor.isfinite().all() for tensor in plain)
    for given_ in (out, alone):
        assert (given_ - plain[0]).norm() <= 4 * TOLERANCE[dtype] * plain[0].norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_scaled_by_exact_powers_of_two(dtype):
    """Whatever library computes the logarithm and the power."""
    info = torch.finfo(dtype)
    exponents = torch.arange(round(math.log2(info.tiny)) // 2, round(math.log2(info.max)) - 1)
    rows = torch.tensor([[1.5 * 2.0**exponent] for exponent in exponents.tolist()], dtype=dtype)
    scale = row_scale(rows)
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
    small = scale == 2.0**SMALLEST_EXPONENT
    assert ((rows / scale <= LARGEST_ENTRY) & (small | (rows / scale > LARGEST_ENTRY / 2))).all()


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_score_nothing_pass_no_gradient_through_the_norm(kind):
    inputs = leaves((4,), 6, 5, 7, torch.float64)
    with torch.no_grad():
        inputs[1] *= 1e-9
    grad = torch.randn(4, 5, dtype=torch.float64)
    for given_, expected in zip(
        run(pattention, inputs, grad, 2.0, kind, form="fused"), run(reference, inputs, grad, 2.0, kind), strict=True
    ):
        assert relative_error(given_, expected) < 1e-12


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", [0, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_many_rows_are_taken_in_parts(kind, recompute, frozen, biased, monkeypatch):
    monkeypatch.setattr(fused, "NUMBERS_AT_ONCE", 1)
    monkeypatch.setattr(fused, "FEWEST_ROWS", 4)
    inputs = leaves((11,), 6, 5, 7, torch.float64, biased=biased)
    grad = torch.randn(11, 5, dtype=torch.float64)
    inputs[0].data[5] *= 1e60  # its part is scaled, the others are not
    inputs[0].data[9] *= 1e-9
    parts = run(pattention, inputs, grad, 2.0, kind, form="fused", recompute=recompute, frozen=frozen)
    expected = run(pattention, inputs, grad, 2.0, kind, form="reference", frozen=frozen)
    for given_, plain in zip(parts, expected, strict=True):
        assert relative_error(given_, plain) < 1e-12
    with torch.no_grad():
        assert relative_error(called(pattention, inputs, 2.0, kind, form="fused"), expected[0]) < 1e-12


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keeps_one_array_of_scores_or_none(kind, dtype, recompute):
    """Beside the inputs. In the tokens' own dtype, so half as large in bf16."""
    inputs = leaves((50,), 16, 8, 300, dtype, biased=True)
    own, kept = {tensor.data_ptr() for tensor in inputs}, {}

    def keep(tensor):
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        called(pattention, inputs, default_tau(300, kind), kind, recompute=recompute)
    stats = 50 * 3 * 4 + 4
    assert sum(tensor.nbytes for tensor in kept.values()) == stats + (0 if recompute else 50 * 300 * dtype.itemsize)


def test_inference_keeps_nothing():
    layer, x = Pattention(16, 8, 300), torch.randn(50, 16)

    def refuse(tensor):
        raise AssertionError("kept")

    with torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
        with torch.no_grad():
            out = layer(x)
        with torch.inference_mode():
            assert torch.equal(layer(x), out)
        assert torch.equal(layer.requires_grad_(False)(x), out)
    assert not out.requires_grad


@pytest.mark.parametrize("form", ["reference", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_tokens_get_no_gradient_and_the_others_their_own(kind, form):
    inputs, grad = leaves((9,), 6, 5, 11, torch.float64, biased=True), torch.randn(9, 5, dtype=torch.float64)
    whole = run(pattention, inputs, grad, 2.0, kind, form=form)
    held = run(pattention, inputs, grad, 2.0, kind, form=form, frozen=4)
    for index in (0, 1, 5):  # the output, and the gradients of x and the bias
        assert relative_error(held[index], whole[index]) < 1e-14
    for index in (2, 3, 4):
        assert held[index][:4].eq(0).all()
        assert relative_error(held[index][4:], whole[index][4:]) < 1e-14


def test_frozen_tokens_and_unneeded_gradients_cost_no_products():
    def flops(frozen=0, needs=(True, True, True)):
        inputs = [tensor.requires_grad_(need) for tensor, need in zip(leaves((20,), 16, 16, 40), needs, strict=True)]
        with FlopCounterMode(display=False) as counter:
            pattention(*inputs, 2.0, frozen=frozen).sum().backward()
        return counter.get_total_flops() / (2 * 20 * 16 * 40)

    assert flops() == 6
    assert flops(frozen=20) == 5
    assert flops(frozen=40) == 4
    assert flops(needs=(True, False, False)) == 4
    assert flops(needs=(False, False, True)) == 3
    assert flops(needs=(False, True, False)) == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("keep", "biased"), [(True, False), (False, True)])
def test_the_operator_passes_torchs_own_checks(kind, keep, biased):
    """Schema, shapes for tracing, autograd registration, and tracing with changing sizes."""
    inputs = leaves((7,), 6, 5, 11, biased=biased) + ([] if biased else [None, None])
    torch.library.opcheck(
        torch.ops.tokenformer.pattention, (*inputs, torch.tensor(2.0), kind, "fused", keep, 3, [], None)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_it_is_one_graph_with_the_same_gradients(kind):
    inputs, grad = leaves((2, 5), 16, 8, 24, biased=True), torch.randn(2, 5, 8)
    expected = run(pattention, inputs, grad, 4.0, kind)
    torch.compiler.reset()  # of one function only so many forms are compiled
    compiled = torch.compile(pattention, fullgraph=True, backend="aot_eager")
    for given_, plain in zip(run(compiled, inputs, grad, 4.0, kind), expected, strict=True):
        assert relative_error(given_, plain) < 1e-6


def test_an_exported_program_holds_plain_torch_only():
    layer = Pattention(6, 5, 11, key_bias=True, bias=True)
    program = torch.export.export(layer, (torch.randn(3, 6),))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not any("tokenformer" in name for name in names)
    x = torch.randn(3, 6)
    assert relative_error(program.module()(x), layer(x)) < 1e-6


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    inputs, grad = leaves((5,), 6, 5, 11, torch.float64, biased=True), torch.randn(5, 5, dtype=torch.float64)

    def recomputed(*tensors):
        return checkpoint(lambda *args: called(pattention, args, 2.0), *tensors, use_reentrant=reentrant)

    out = recomputed(*inputs)
    out.backward(grad)
    for tensor, expected in zip(inputs, run(pattention, inputs, grad, 2.0)[1:], strict=True):
        assert torch.equal(tensor.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_casts_as_for_plain_products(kind, dtype):
    inputs, grad = leaves((6,), 16, 8, 24, biased=True), torch.randn(6, 8)
    tau = default_tau(24, kind)
    with torch.autocast("cpu", dtype=dtype):
        given = run(pattention, inputs, grad, tau, kind, form="fused")
        plain = run(pattention, inputs, grad, tau, kind, form="reference")
    for given_, expected in zip(given, plain, strict=True):
        assert given_.dtype == expected.dtype
        assert relative_error(given_, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_pass_within_autocast_keeps_the_dtype_of_its_forward_pass(kind, recompute, dtype):
    inputs, grad = leaves((6,), 16, 8, 24, dtype, biased=True), torch.randn(6, 8)
    expected = run(pattention, inputs, grad, 4.0, kind, recompute=recompute)
    out = called(pattention, inputs, 4.0, kind, recompute=recompute)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gradients = torch.autograd.grad(out, inputs, grad.to(dtype))
    for given_, plain in zip(gradients, expected[1:], strict=True):
        assert torch.equal(given_, plain)


def test_autocast_leaves_fp64_alone():
    inputs = leaves((6,), 16, 8, 24, torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = pattention(*inputs, 4.0)
        assert out.dtype == pattention(*inputs, 4.0, form="reference").dtype == torch.float64
    assert torch.equal(out, pattention(*inputs, 4.0))


def test_per_sample_gradients_by_torch_func():
    layer = Pattention(6, 5, 11, key_bias=True, bias=True, dtype=torch.float64)
    x = torch.randn(4, 6, dtype=torch.float64)
    tokens = dict(layer.named_parameters())

    def loss(tokens, row):
        return torch.func.functional_call(layer, tokens, row).square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(tokens, x)
    layer(x[2]).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert relative_error(gradients[name][2], parameter.grad) < 1e-12


def test_an_empty_batch():
    inputs = [torch.empty(0, 6, requires_grad=True), *leaves((1,), 6, 5, 11)[1:]]
    out = pattention(*inputs, 2.0)
    assert out.shape == (0, 5)
    out.sum().backward()
    assert inputs[1].grad.eq(0).all()


@pytest.mark.parametrize("form", ["reference", "fused"])
def test_the_form_can_be_forced(form, monkeypatch):
    x = torch.randn(3, 64)
    with FlopCounterMode(display=False) as counter:
        make_tiny(pattention_form=form)(torch.zeros(1, 5, dtype=torch.long)).logits.sum().backward()
    assert any("tokenformer" in str(op) for op in counter.get_flop_counts()["Global"]) == (form == "fused")
    monkeypatch.setenv("TOKENFORMER_PATTENTION", form)
    with FlopCounterMode(display=False) as counter:
        Pattention(64, 64, 8, form="fused" if form == "reference" else "reference")(x).sum().backward()
    assert any("tokenformer" in str(op) for op in counter.get_flop_counts()["Global"]) == (form == "fused")


def test_biases_of_another_dtype_take_the_specification():
    inputs = leaves((3,), 6, 5, 11, torch.bfloat16, biased=True)
    with torch.no_grad():
        mixed = [*inputs[:3], *(bias.float() for bias in inputs[3:])]
        assert torch.equal(called(pattention, mixed, 2.0), called(reference, mixed, 2.0))


def test_the_triton_form_knows_no_biases_and_the_papers_kinds_only():
    pytest.importorskip("triton")
    refusal = "; it knows l2_gelu, gelu_l2, softmax without biases, segments, masks and top_k; choose the form fused"
    for kind, biased, given_ in (("l2_silu", False, "kind='l2_silu'"), ("softmax", True, "kind='softmax' with biases")):
        with pytest.raises(BadRequestError, match=f"the triton form was asked for {given_}{refusal}"):
            called(pattention, leaves((3,), 6, 5, 11, biased=biased), 2.0, kind, form="triton")


def test_a_form_that_is_not_there_is_named(monkeypatch):
    with pytest.raises(BadRequestError, match="form='fussed' is not known; did you mean 'fused'"):
        Pattention(4, 4, 4, form="fussed")
    with pytest.raises(Exception, match="pattention_form='cuda' is not known; choose one of auto, reference"):
        TokenFormerConfig(pattention_form="cuda")
    monkeypatch.setenv("TOKENFORMER_PATTENTION", "Fused")
    with pytest.raises(BadRequestError, match="TOKENFORMER_PATTENTION='Fused' is not known"):
        Pattention(4, 4, 4)(torch.randn(2, 4))


def test_a_model_trains_the_same_in_both_forms():
    """Three steps of Adam: the forms part by rounding only."""
    models = [make_tiny(pattention_form=form) for form in ("reference", "fused")]
    models[1].load_state_dict(copy.deepcopy(models[0].state_dict()))
    ids = torch.randint(models[0].config.vocab_size, (2, 33))
    losses = []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            loss = model(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
