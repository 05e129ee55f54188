"""What a model costs: the formulas against real models, torch's own FLOP counter and what autograd keeps."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig

from conftest import kept_for_backward, make_tiny
from tokenformer import KINDS, PRESETS, BadRequestError, TokenFormerConfig, adopt, cost, grow
from tokenformer.models.language import LOSS_CHUNK

# Odd sizes: every dimension that could be mistaken for another has its own number.
ODD = {"vocab_size": 71, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
ODD |= {"qkv_tokens": 5, "out_tokens": 7, "ffn_tokens": 13}
NEOX = {
    "usual": {},
    "tied": {"tie_word_embeddings": True},
    "odd": {"vocab_size": 71, "hidden_size": 60, "num_hidden_layers": 3, "num_attention_heads": 5}
    | {"intermediate_size": 97},
    "odd, tied, no bias, one residual after the other": {"vocab_size": 83, "hidden_size": 33, "num_hidden_layers": 1}
    | {"num_attention_heads": 1, "intermediate_size": 7, "tie_word_embeddings": True}
    | {"attention_bias": False, "use_parallel_residual": False},
}


def neox(name="usual", **changes) -> GPTNeoXConfig:
    usual = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    usual |= {"intermediate_size": 256, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None}
    return GPTNeoXConfig(**{**usual, **NEOX[name], **changes})


def on_meta(config, **options):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **options)


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_presets(name):
    config = TokenFormerConfig.preset(name)
    assert cost.parameters(config).total == on_meta(config).num_parameters()


@pytest.mark.parametrize("changes", [{}, {"parametric_norm": True}, {"tie_word_embeddings": False}])
def test_parameters_by_role(changes):
    config = TokenFormerConfig.preset("tiny", **ODD, **changes)
    model, counted = on_meta(config), cost.parameters(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}

    def total(*parts):
        return sum(size for name, size in sizes.items() if any(part in name for part in parts))

    assert counted.qkv == total(".query.", ".key.", ".value.")
    assert counted.out == total(".out.")
    assert counted.ffn == total(".ffn.")
    assert counted.norm == total("norm.")
    assert counted.embedding == total("embed_tokens")
    assert counted.head == total("lm_head")
    assert counted.total == sum(sizes.values()) == model.num_parameters()
    assert counted.non_embedding == counted.total - total("embed_tokens", "lm_head")


@pytest.mark.parametrize("name", NEOX)
def test_parameters_of_a_gpt_neox(name):
    model, counted = on_meta(neox(name)), cost.parameters(neox(name))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}

    def total(part):
        return sum(size for name, size in sizes.items() if part in name)

    assert counted.qkv == total(".query_key_value.")
    assert counted.out == total(".attention.dense.")
    assert counted.ffn == total(".mlp.")
    assert counted.norm == total("norm.")
    assert counted.embedding == total("embed_in")
    assert counted.head == total("lm_head")
    assert counted.total == sum(sizes.values()) == model.num_parameters()


def test_parameters_of_the_largest_gpt_neox():
    assert cost.parameters(GPTNeoXConfig()).total == on_meta(GPTNeoXConfig()).num_parameters()


def counted_flops(model, length, training):
    """FLOPs per token by torch's counter. It knows no fused attention of the CPU's, so sdpa takes its plain form."""
    ids = torch.zeros(2, length, dtype=torch.long, device=model.device)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss = model(ids, labels=ids).loss
        if training:
            loss.backward()
    return counter.get_total_flops() / ids.numel()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("length", [3, 64, 301])
@pytest.mark.parametrize("changes", [{}, ODD, {**ODD, "pattention_kind": "softmax", "tie_word_embeddings": False}])
def test_flops_are_those_that_torch_counts(changes, length, attention):
    config = TokenFormerConfig.preset("tiny", **changes)
    model = on_meta(config, attn_implementation=attention)
    forward, training = cost.forward_flops_per_token(config, length), cost.training_flops_per_token(config, length)
    assert forward == pytest.approx(counted_flops(model, length, training=False), rel=0.01)
    assert training == pytest.approx(counted_flops(model, length, training=True), rel=0.01)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("length", [3, 301])
@pytest.mark.parametrize("name", NEOX)
def test_flops_of_a_gpt_neox(name, length, attention):
    config = neox(name)
    model = on_meta(config, attn_implementation=attention)
    forward, training = cost.forward_flops_per_token(config, length), cost.training_flops_per_token(config, length)
    assert forward == pytest.approx(counted_flops(model, length, training=False), rel=0.01)
    assert training == pytest.approx(counted_flops(model, length, training=True), rel=0.01)


@pytest.mark.parametrize("config", [TokenFormerConfig.preset("tiny"), neox()], ids=["tokenformer", "gpt_neox"])
def test_torch_counts_nothing_for_the_fused_attention_of_a_cpu(config):
    """Which is why `counted_flops` asks for the plain one. When this fails, torch has learnt it and may be let."""
    model, ids = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"), torch.zeros(2, 40).long()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        model(ids)
    # Close, not equal: older transformers compute the angles of positions by a product, of 160 FLOPs here.
    assert counter.get_total_flops() / ids.numel() == pytest.approx(cost.forward_flops_per_token(config, 0), rel=1e-4)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids)
    assert counter.get_total_flops() / ids.numel() == pytest.approx(cost.forward_flops_per_token(config, 40), rel=1e-4)


def test_flops_of_a_computed_and_of_a_large_model():
    tiny = make_tiny()
    assert cost.training_flops_per_token(tiny.config, 50) == pytest.approx(counted_flops(tiny, 50, True), rel=0.01)
    large = on_meta(TokenFormerConfig.preset("354m"))
    assert cost.forward_flops_per_token(large.config, 1024) == pytest.approx(
        counted_flops(large, 1024, False), rel=0.01
    )


def test_growth_costs_parameters_and_flops_but_no_cache():
    small = on_meta(TokenFormerConfig.preset("tiny", **ODD))
    large = grow(small, num_tokens={"qkv": 10, "ffn": 40}, method="split")
    assert cost.parameters(large.config).total == large.num_parameters() > small.num_parameters()
    for training, flops in ((False, cost.forward_flops_per_token), (True, cost.training_flops_per_token)):
        assert flops(large.config, 33) == pytest.approx(counted_flops(large, 33, training), rel=0.01)
        # Four FLOPs for each number in the new key and value tokens, two matrices of them.
        new_numbers = large.num_parameters() - small.num_parameters()
        assert flops(large.config, 33) - flops(small.config, 33) == (3 if training else 1) * 2 * new_numbers
    assert cost.kv_cache_bytes(large.config, 100) == cost.kv_cache_bytes(small.config, 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [TokenFormerConfig.preset("tiny"), neox()], ids=["tokenformer", "gpt_neox"])
def test_kv_cache_is_what_generation_keeps(config, dtype):
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    cache = model(torch.zeros(3, 17, dtype=torch.long), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert cost.kv_cache_bytes(config, 17, batch=3, bytes_per_number=dtype.itemsize) == held


def kept_by_autograd(model, batch, length, loss=True) -> int:
    ids = torch.randint(model.config.vocab_size, (batch, length))

    def work():
        out = model.train()(ids, labels=ids if loss else None, use_cache=False)
        return out.loss if loss else out.logits

    return kept_for_backward(model, work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_what_autograd_keeps(kind, dtype):
    model = make_tiny(chunked_loss=True, pattention_kind=kind, ffn_tokens=300).to(dtype)
    estimate = cost.training_memory(model.config, 3, 90, dtype.itemsize)
    assert estimate.activations == pytest.approx(kept_by_autograd(model, 3, 90), rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("changes", [{}, {"use_parallel_residual": False}, {"intermediate_size": 91}])
def test_activations_of_a_gpt_neox_are_what_autograd_keeps(changes, dtype):
    config = neox(hidden_size=96, num_hidden_layers=4, attn_implementation="sdpa", **changes)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    kept = kept_by_autograd(model, 3, 90, loss=False)
    estimate = cost.training_memory(config, 3, 90, dtype.itemsize)
    assert estimate.activations == 3 * 90 * cost.activation_bytes_per_token(config, dtype.itemsize)
    assert estimate.activations == pytest.approx(kept, rel=0.02)
    # The loss of transformers keeps log-probabilities in fp32. The logits and a gradient come on top: three arrays.
    log_probabilities = kept_by_autograd(model, 3, 90) - kept
    assert log_probabilities == pytest.approx(3 * 90 * config.vocab_size * 4, rel=0.02)
    if dtype == torch.float32:
        assert estimate.logits == pytest.approx(3 * log_probabilities, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("ballast", ["spread", "single"])
@pytest.mark.parametrize("parts", [("ffn",), ("qkv",), ("ffn", "qkv")], ids="+".join)
def test_an_adopted_gpt_neox_is_counted_as_a_whole(parts, ballast, parallel, dtype):
    config = neox(hidden_size=96, num_hidden_layers=3, attn_implementation="sdpa", use_parallel_residual=parallel)
    model = adopt(AutoModelForCausalLM.from_config(config).to(dtype), parts, ballast=ballast)
    model = grow(model, num_tokens={"layers.1.*": 700}, method="zero")  # blocks need not be alike
    config = model.config
    assert cost.parameters(config).total == model.num_parameters()
    assert cost.kv_cache_bytes(config, 90) == cost.kv_cache_bytes(neox(hidden_size=96, num_hidden_layers=3), 90)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model.eval()(torch.randint(config.vocab_size, (3, 90)), use_cache=False)
    assert cost.forward_flops_per_token(config, 90) * 270 == pytest.approx(counter.get_total_flops(), rel=0.01)
    estimate = cost.training_memory(config, 3, 90, dtype.itemsize)
    assert estimate.activations == pytest.approx(kept_by_autograd(model, 3, 90, loss=False), rel=0.02)


@pytest.mark.parametrize("kind", ["tokenformer", "gpt_neox"])
def test_checkpointing_keeps_the_input_of_every_block(kind):
    def config_of(layers):
        if kind == "gpt_neox":
            return neox(num_hidden_layers=layers)
        return TokenFormerConfig.preset("tiny", chunked_loss=True, num_hidden_layers=layers)

    kept, estimated = [], []
    for layers in (2, 6):
        model = AutoModelForCausalLM.from_config(config_of(layers))
        model.gradient_checkpointing_enable()
        kept.append(kept_by_autograd(model, 2, 64, loss=kind == "tokenformer"))
        estimated.append(cost.training_memory(model.config, 2, 64, gradient_checkpointing=True).activations)
    assert estimated[1] - estimated[0] == kept[1] - kept[0] == 4 * 2 * 64 * model.config.hidden_size * 4
    # One block at a time is computed again, and then kept whole.
    whole = [cost.training_memory(config_of(layers), 2, 64).activations for layers in (2, 3)]
    assert estimated[0] - kept[0] == pytest.approx(whole[1] - whole[0], rel=0.1)


def test_training_memory_by_part():
    config = TokenFormerConfig.preset("124m")
    weights = cost.parameters(config).total * 4
    adam, sgd = (cost.training_memory(config, 2, 1024, optimizer=name) for name in ("adamw", "sgd"))
    assert (adam.weights, adam.gradients, adam.optimizer) == (weights, weights, 2 * weights)
    assert sgd.optimizer == 0
    assert adam.total - sgd.total == 2 * weights
    whole = cost.training_memory(config, 2, 1024, chunked_loss=False)
    assert whole.logits == adam.logits * 2048 // LOSS_CHUNK
    assert whole.activations == adam.activations
    with pytest.raises(BadRequestError, match="did you mean 'adamw'"):
        cost.training_memory(config, 2, 1024, optimizer="adam")
    with pytest.raises(BadRequestError, match="batch=0 was given; at least 1 is needed"):
        cost.training_memory(config, 0, 1024)
    with pytest.raises(BadRequestError, match="length=-1 was given; at least 0 is needed"):
        cost.kv_cache_bytes(config, -1)


def test_a_gpt_neox_holds_all_logits_unless_told_otherwise():
    default, chunked, whole = (cost.training_memory(neox(), 4, 500, chunked_loss=on) for on in (None, True, False))
    assert default == whole
    assert whole.logits == chunked.logits * 2000 // LOSS_CHUNK


@pytest.mark.parametrize(
    "ask",
    [
        cost.parameters,
        lambda config: cost.training_flops_per_token(config, 10),
        lambda config: cost.kv_cache_bytes(config, 10),
        cost.activation_bytes_per_token,
    ],
)
def test_other_models_are_refused(ask):
    with pytest.raises(BadRequestError, match="cost of a llama cannot be counted; give a TokenFormerConfig"):
        ask(LlamaConfig())
