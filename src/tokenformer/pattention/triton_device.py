"""The Triton programs of Pattention: what runs on the GPU. `triton_kernels.py` launches them and says why they are so.

Enters: pointers to contiguous [rows or tokens, width] arrays, per-row stats [rows, 3] (see `triton_kernels.py`), tau.
Leaves: sums a row, the output, the gradients. Scores exist only as tiles [BLOCK_ROWS, BLOCK_TOKENS] in registers.

Tokens and rows beyond the end are read as zeros: a zero key scores 0 and a zero row has a zero gradient, so only the
softmax of the forward pass needs to know about them.
"""

# Triton's custom: what is known at compile time is in capitals, and nothing else has a type.
# ruff: noqa: N803
# mypy: allow-untyped-defs

import triton
import triton.language as tl

LARGEST_SCALE = tl.constexpr(2.0**64)  # as in functional.py


@triton.jit
def sum_of_squares(
    x, keys, stats, sums, num_rows, num_tokens, d_in, tokens_a_split,
    BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_INNER: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """sums[split, row] = the sum of the squared scores of the row over the split's tokens."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first = tl.program_id(1) * tokens_a_split
    _, inverse_scale = _row_scale(stats, rows, num_rows)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in range(first, min(first + tokens_a_split, num_tokens), BLOCK_TOKENS):
        tokens = start + tl.arange(0, BLOCK_TOKENS)
        scores = _scores(x, keys, rows, tokens, inverse_scale, num_rows, num_tokens, d_in, BLOCK_INNER, UPCAST)
        total += tl.sum(scores * scores, 1)
    tl.store(sums + tl.program_id(1).to(tl.int64) * num_rows + rows, total, mask=rows < num_rows)


@triton.jit
def attend(
    x, keys, values, tau, stats, squares, out, num_rows, num_tokens, d_in, d_out,
    KIND: tl.constexpr, FLOOR: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_INNER: tl.constexpr, BLOCK_OUTER: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A tile of the output; the programs of the first tile also complete the rows' stats."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.program_id(1) * BLOCK_OUTER + tl.arange(0, BLOCK_OUTER)
    scale, inverse_scale = _row_scale(stats, rows, num_rows)
    tau_value = tl.load(tau)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    if KIND == "l2_gelu":
        total = tl.load(squares + rows, mask=rows < num_rows, other=0.0)
    factor, pull = _normalise(total, tau_value, FLOOR)
    accumulated = tl.zeros([BLOCK_ROWS, BLOCK_OUTER], tl.float32)
    for start in range(0, num_tokens, BLOCK_TOKENS):
        tokens = start + tl.arange(0, BLOCK_TOKENS)
        scores = _scores(x, keys, rows, tokens, inverse_scale, num_rows, num_tokens, d_in, BLOCK_INNER, UPCAST)
        if KIND == "l2_gelu":
            weights = _gelu(scores * factor[:, None])
        elif KIND == "gelu_l2":
            weights = _scaled_gelu(scores, scale)
            total += tl.sum(weights * weights, 1)
        else:
            true_scores = tl.where((tokens < num_tokens)[None, :], _true_scores(scores, scale), float("-inf"))
            larger = tl.maximum(largest, tl.max(true_scores, 1))
            weights = tl.exp(true_scores - larger[:, None])
            shrink = tl.exp(largest - larger)
            total = total * shrink + tl.sum(weights, 1)
            accumulated *= shrink[:, None]
            largest = larger
        block = _load(values, tokens, cols, num_tokens, d_out)
        accumulated = _dot(weights.to(block.dtype), block, accumulated, UPCAST)
    if KIND == "gelu_l2":
        factor, pull = _normalise(total, tau_value, FLOOR)
        accumulated *= factor[:, None]
    if KIND == "softmax":
        accumulated *= (tau_value / total)[:, None]
        factor, pull = largest + tl.log(total), tl.full([BLOCK_ROWS], 1.0, tl.float32)
    _store(out, accumulated, rows, cols, num_rows, d_out)
    if tl.program_id(1) == 0:
        tl.store(stats + rows.to(tl.int64) * 3 + 1, factor, mask=rows < num_rows)
        tl.store(stats + rows.to(tl.int64) * 3 + 2, pull, mask=rows < num_rows)


@triton.jit
def row_products(
    grad, x, keys, values, stats, sums, num_rows, num_tokens, d_in, d_out, tokens_a_split,
    KIND: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_INNER: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """sums[split, row] = the row's normalised scores times their gradients, over the split's tokens.

    For softmax the probabilities times the gradients of the weights: where one is 1 the two cancel exactly, and no
    rounding error is multiplied by a large scale.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first = tl.program_id(1) * tokens_a_split
    scale, inverse_scale = _row_scale(stats, rows, num_rows)
    factor = _row_factor(stats, rows, num_rows)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in range(first, min(first + tokens_a_split, num_tokens), BLOCK_TOKENS):
        tokens = start + tl.arange(0, BLOCK_TOKENS)
        scores = _scores(x, keys, rows, tokens, inverse_scale, num_rows, num_tokens, d_in, BLOCK_INNER, UPCAST)
        grad_weights = _products(grad, values, rows, tokens, num_rows, num_tokens, d_out, BLOCK_INNER, UPCAST)
        if KIND == "l2_gelu":
            normalised = scores * factor[:, None]
            total += tl.sum(grad_weights * _gelu_slope(normalised) * normalised, 1)
        else:
            total += tl.sum(grad_weights * _weights(scores, scale, factor, 1.0, KIND), 1)
    tl.store(sums + tl.program_id(1).to(tl.int64) * num_rows + rows, total, mask=rows < num_rows)


@triton.jit
def row_gradient(
    grad, x, keys, values, tau, stats, pulls, grad_x, num_rows, num_tokens, d_in, d_out,
    KIND: tl.constexpr, LARGEST: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_INNER: tl.constexpr, BLOCK_OUTER: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient of x."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.program_id(1) * BLOCK_OUTER + tl.arange(0, BLOCK_OUTER)
    scale, inverse_scale = _row_scale(stats, rows, num_rows)
    factor = _row_factor(stats, rows, num_rows)
    pull = tl.load(pulls + rows, mask=rows < num_rows, other=0.0)
    tau_value = tl.load(tau)
    accumulated = tl.zeros([BLOCK_ROWS, BLOCK_OUTER], tl.float32)
    for start in range(0, num_tokens, BLOCK_TOKENS):
        tokens = start + tl.arange(0, BLOCK_TOKENS)
        scores = _scores(x, keys, rows, tokens, inverse_scale, num_rows, num_tokens, d_in, BLOCK_INNER, UPCAST)
        grad_weights = _products(grad, values, rows, tokens, num_rows, num_tokens, d_out, BLOCK_INNER, UPCAST)
        grad_scores = _score_gradients(scores, grad_weights, scale, factor, pull, tau_value, KIND)
        block = _load(keys, tokens, cols, num_tokens, d_in)
        accumulated = _dot(grad_scores.to(block.dtype), block, accumulated, UPCAST)
    if KIND != "softmax":
        accumulated *= inverse_scale[:, None]
    accumulated = tl.clamp(accumulated, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    _store(grad_x, accumulated, rows, cols, num_rows, d_in)


@triton.jit
def key_gradient(
    grad, x, keys, values, tau, stats, pulls, sums, num_rows, num_tokens, d_in, d_out, frozen, rows_a_split,
    KIND: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_INNER: tl.constexpr,
    BLOCK_OUTER: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """sums[split] = a tile of the gradient of the keys after the first `frozen`, over the split's rows."""
    tokens = frozen + tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    cols = tl.program_id(1) * BLOCK_OUTER + tl.arange(0, BLOCK_OUTER)
    first = tl.program_id(2) * rows_a_split
    tau_value = tl.load(tau)
    accumulated = tl.zeros([BLOCK_TOKENS, BLOCK_OUTER], tl.float32)
    for start in range(first, min(first + rows_a_split, num_rows), BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        scale, inverse_scale = _row_scale(stats, rows, num_rows)
        factor = _row_factor(stats, rows, num_rows)
        pull = tl.load(pulls + rows, mask=rows < num_rows, other=0.0)
        scores = _scores(x, keys, rows, tokens, inverse_scale, num_rows, num_tokens, d_in, BLOCK_INNER, UPCAST)
        grad_weights = _products(grad, values, rows, tokens, num_rows, num_tokens, d_out, BLOCK_INNER, UPCAST)
        grad_scores = _score_gradients(scores, grad_weights, scale, factor, pull, tau_value, KIND)
        if KIND == "softmax":
            grad_scores *= scale[:, None]
        dtype = keys.dtype.element_ty
        block = (_load(x, rows, cols, num_rows, d_in).to(tl.float32) * inverse_scale[:, None]).to(dtype)
        accumulated = _dot(tl.trans(grad_scores.to(dtype)), block, accumulated, UPCAST)
    trained = num_tokens - frozen
    base = sums + tl.program_id(2).to(tl.int64) * trained * d_in
    _store(base, accumulated, tokens - frozen, cols, trained, d_in)


@triton.jit
def value_gradient(
    grad, x, keys, tau, stats, sums, num_rows, num_tokens, d_in, d_out, frozen, rows_a_split,
    KIND: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_INNER: tl.constexpr,
    BLOCK_OUTER: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """sums[split] = a tile of the gradient of the values after the first `frozen`, over the split's rows."""
    tokens = frozen + tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    cols = tl.program_id(1) * BLOCK_OUTER + tl.arange(0, BLOCK_OUTER)
    first = tl.program_id(2) * rows_a_split
    tau_value = tl.load(tau)
    accumulated = tl.zeros([BLOCK_TOKENS, BLOCK_OUTER], tl.float32)
    for start in range(first, min(first + rows_a_split, num_rows), BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        scale, inverse_scale = _row_scale(stats, rows, num_rows)
        factor = _row_factor(stats, rows, num_rows)
        scores = _scores(x, keys, rows, tokens, inverse_scale, num_rows, num_tokens, d_in, BLOCK_INNER, UPCAST)
        weights = _weights(scores, scale, factor, tau_value, KIND)
        block = _load(grad, rows, cols, num_rows, d_out)
        accumulated = _dot(tl.trans(weights.to(block.dtype)), block, accumulated, UPCAST)
    trained = num_tokens - frozen
    base = sums + tl.program_id(2).to(tl.int64) * trained * d_out
    _store(base, accumulated, tokens - frozen, cols, trained, d_out)


@triton.jit
def _scores(
    x, keys, rows, tokens, inverse_scale, num_rows, num_tokens, d_in,
    BLOCK_INNER: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Scores of the scaled rows, fp32. A scaled row is rounded to the tokens' dtype, as the specification does."""
    total = tl.zeros([rows.shape[0], tokens.shape[0]], tl.float32)
    for start in range(0, d_in, BLOCK_INNER):
        inner = start + tl.arange(0, BLOCK_INNER)
        right = _load(keys, tokens, inner, num_tokens, d_in)
        left = _load(x, rows, inner, num_rows, d_in).to(tl.float32) * inverse_scale[:, None]
        total = _dot(left.to(right.dtype), tl.trans(right), total, UPCAST)
    return total


@triton.jit
def _products(
    grad, values, rows, tokens, num_rows, num_tokens, d_out, BLOCK_INNER: tl.constexpr, UPCAST: tl.constexpr
):  # fmt: skip
    """The gradient of the weights, grad · valuesᵀ, fp32."""
    total = tl.zeros([rows.shape[0], tokens.shape[0]], tl.float32)
    for start in range(0, d_out, BLOCK_INNER):
        inner = start + tl.arange(0, BLOCK_INNER)
        right = _load(values, tokens, inner, num_tokens, d_out)
        left = _load(grad, rows, inner, num_rows, d_out)
        total = _dot(left, tl.trans(right), total, UPCAST)
    return total


@triton.jit
def _weights(scores, scale, factor, tau, KIND: tl.constexpr):
    """The weights again, from the scores and the rows' stats."""
    if KIND == "l2_gelu":
        weights = _gelu(scores * factor[:, None])
    elif KIND == "gelu_l2":
        weights = _scaled_gelu(scores, scale) * factor[:, None]
    else:
        weights = tl.exp(_true_scores(scores, scale) - factor[:, None]) * tau
    return weights


@triton.jit
def _score_gradients(scores, grad_weights, scale, factor, pull, tau, KIND: tl.constexpr):
    """The gradient of the scaled scores; of the true ones for softmax, as it times a large scale could overflow."""
    if KIND == "l2_gelu":
        normalised = scores * factor[:, None]
        gradient = (grad_weights * _gelu_slope(normalised) - pull[:, None] * normalised) * factor[:, None]
    else:
        weights = _weights(scores, scale, factor, tau, KIND)
        if KIND == "gelu_l2":
            gradient = (grad_weights - pull[:, None] * weights) * factor[:, None]
            gradient *= _gelu_slope(_true_scores(scores, scale))
        else:
            gradient = weights * (grad_weights - pull[:, None])
    return gradient


@triton.jit
def _normalise(squares, tau, FLOOR: tl.constexpr):
    """1 / rms, and how strongly the norm pulls at the gradient: not at all where the floor took its place."""
    smallest = FLOOR * tau * FLOOR * tau
    factor = tau / tl.sqrt(tl.maximum(squares, smallest, propagate_nan=tl.PropagateNan.ALL))
    return factor, tl.where(squares < smallest, 0.0, 1.0 / (tau * tau))


@triton.jit
def _row_scale(stats, rows, num_rows):
    """scale and 1 / scale, exact: it is a power of two. The plain division of a GPU is not."""
    scale = tl.load(stats + rows.to(tl.int64) * 3, mask=rows < num_rows, other=1.0)
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def _row_factor(stats, rows, num_rows):
    return tl.load(stats + rows.to(tl.int64) * 3 + 1, mask=rows < num_rows, other=0.0)


@triton.jit
def _true_scores(scores, scale):
    return scores * tl.minimum(scale, LARGEST_SCALE)[:, None]


@triton.jit
def _scaled_gelu(scores, scale):
    """GeLU of the true scores, divided by what they were multiplied by."""
    return _gelu(_true_scores(scores, scale)) * tl.div_rn(1.0, tl.minimum(scale, LARGEST_SCALE))[:, None]


@triton.jit
def _gelu(a):
    return 0.5 * a * (1.0 + tl.erf(a * 0.7071067811865476))


@triton.jit
def _gelu_slope(a):
    return 0.5 * (1.0 + tl.erf(a * 0.7071067811865476)) + a * 0.3989422804014327 * tl.exp(-0.5 * a * a)


@triton.jit
def _dot(left, right, total, UPCAST: tl.constexpr):
    if UPCAST:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, acc=total, input_precision="ieee")


@triton.jit
def _load(array, rows, cols, num_rows, num_cols):
    mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    return tl.load(array + rows[:, None].to(tl.int64) * num_cols + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _store(array, block, rows, cols, num_rows, num_cols):
    mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    at = array + rows[:, None].to(tl.int64) * num_cols + cols[None, :]
    tl.store(at, block.to(array.dtype.element_ty), mask=mask)
