"""A training step of the language model against its own matrix products run bare.

    python benchmarks/matmul_limit.py [--quick] [--repeats N] [--out FOLDER]

Bare are: of every Pattention the two products of forward and the four of backward, of the attention between tokens
its two and four, of the output layer its one and two, with the step's shapes, into arrays that are there before.
Leaves: the share of their speed that a whole step reaches (1 would mean that nothing else takes time), counted in two
ways: with attention as full batched products (torch.bmm), which do twice what causal attention needs, and with the
fused causal attention itself; benchmarks/results/matmul_limit.json.
"""

import torch
from models import TrainingStep, build, shape_of, token_former
from products import Products, one_after_the_other, with_gradients
from suite import Figure, Options, figure, run
from timing import in_turns
from torch.nn import functional as F

from tokenformer import TokenFormerConfig

SHAPES = [((768, 2, 768), 2, 1024, 0.85), ((256, 6, 256), 2, 1024, 0.65)]  # model, batch, context, target
QUICK_SHAPES = [((64, 2, 64), 1, 32, None)]


def of_pattentions(config: TokenFormerConfig, rows: int) -> list[Products]:
    """Scores and outputs of every Pattention; each has tokens of its own, as in the model."""
    width = config.hidden_size
    x, scores = torch.randn(rows, width), {n: torch.randn(rows, n) for n in set(config.num_tokens.values())}
    products = []
    for _ in range(config.num_hidden_layers):
        for role, names in config.token_roles.items():
            n = config.num_tokens[role]
            for _ in names:
                keys, values = torch.randn(n, width), torch.randn(n, width)
                products += with_gradients(x, keys.T) + with_gradients(scores[n], values)
    return products


def of_attention(config: TokenFormerConfig, batch: int, context: int) -> list[Products]:
    """Query with key and weights with value, head by head, future positions included."""
    heads = batch * config.num_attention_heads
    query, key, value = (torch.randn(heads, context, config.hidden_size // config.num_attention_heads) for _ in "qkv")
    weights = torch.randn(heads, context, context)
    return (with_gradients(query, key.mT) + with_gradients(weights, value)) * config.num_hidden_layers


def of_output_layer(config: TokenFormerConfig, rows: int) -> list[Products]:
    """The logits."""
    return with_gradients(torch.randn(rows, config.hidden_size), torch.randn(config.vocab_size, config.hidden_size).T)


def fused_attention(config: TokenFormerConfig, batch: int, context: int) -> list[Products]:
    """The kernel that the model calls, forward and backward."""
    head = config.hidden_size // config.num_attention_heads
    inputs = [torch.randn(batch, config.num_attention_heads, context, head, requires_grad=True) for _ in "qkv"]
    gradient = torch.randn_like(inputs[0])

    def work() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(*inputs, is_causal=True), inputs, gradient)

    return [work] * config.num_hidden_layers


def measure(options: Options) -> list[Figure]:
    """The whole step beside its parts, at every shape."""
    figures = []
    for shape, batch, context, target in QUICK_SHAPES if options.quick else SHAPES:
        config = token_former(*shape, context)
        step, rows = TrainingStep(build(config), batch, context), batch * context
        linear = of_pattentions(config, rows) + of_output_layer(config, rows)
        work = {
            "step": step,
            "matmuls": one_after_the_other(linear + of_attention(config, batch, context)),
            "matmuls and fused attention": one_after_the_other(linear + fused_attention(config, batch, context)),
        }
        times = in_turns(work, options.repeats)
        details = {"shape": shape_of(step.model, batch, context), "median_seconds": times.medians}
        details["phase_seconds"] = step.phase_medians(options.repeats)
        at = f"training step, d {shape[0]}, {shape[1]} layers: share of the speed of its matmuls"
        figures += [
            figure(
                f"{at}, attention in full as bmm",
                times.speedup("step", over="matmuls"),
                at_least=target,
                attention="full, not causal, torch.bmm by head",
                **details,
            ),
            figure(
                f"{at}, attention as fused sdpa",
                times.speedup("step", over="matmuls and fused attention"),
                attention="causal scaled_dot_product_attention, forward and backward",
                **details,
            ),
        ]
    return figures


if __name__ == "__main__":
    run(measure, __doc__, repeats=9)
