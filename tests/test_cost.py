"""What a model costs: the formulas against real models, torch's own FLOP counter and what autograd keeps."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from conftest import make_tiny
from tokenformer import KINDS, PRESETS, BadRequestError, TokenFormerConfig, TokenFormerForCausalLM, cost, grow
from tokenformer.models.language import LOSS_CHUNK

# Odd sizes: every dimension that could be mistaken for another has its own number.
ODD = {"vocab_size": 71, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
ODD |= {"qkv_tokens": 5, "out_tokens": 7, "ffn_tokens": 13}


def on_meta(config, **options) -> TokenFormerForCausalLM:
    with torch.device("meta"):
        return TokenFormerForCausalLM._from_config(config, **options)


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


def counted_flops(model, length, training):
    """FLOPs a token by torch's counter. It knows no fused attention of the CPU's, so sdpa takes its plain form."""
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
def test_kv_cache_is_what_generation_keeps(tiny, dtype):
    cache = tiny.to(dtype)(torch.zeros(3, 17, dtype=torch.long), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert cost.kv_cache_bytes(tiny.config, 17, batch=3, bytes_per_number=dtype.itemsize) == held


def kept_by_autograd(model, batch, length) -> int:
    """Bytes of the tensors that a forward pass keeps for backward, each once, the model's own left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that its address is not used again
        return tensor

    ids = torch.randint(model.config.vocab_size, (batch, length))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model.train()(ids, labels=ids, use_cache=False).loss
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_what_autograd_keeps(kind, dtype):
    model = make_tiny(chunked_loss=True, pattention_kind=kind, ffn_tokens=300).to(dtype)
    estimate = cost.training_memory(model.config, 3, 90, dtype.itemsize)
    assert estimate.activations == pytest.approx(kept_by_autograd(model, 3, 90), rel=0.02)


def test_checkpointing_keeps_the_input_of_every_block():
    kept, estimated = [], []
    for layers in (2, 6):
        model = make_tiny(chunked_loss=True, num_hidden_layers=layers)
        model.gradient_checkpointing_enable()
        kept.append(kept_by_autograd(model, 2, 64))
        estimated.append(cost.training_memory(model.config, 2, 64, gradient_checkpointing=True).activations)
    assert estimated[1] - estimated[0] == kept[1] - kept[0] == 4 * 2 * 64 * model.config.hidden_size * 4
    # One block at a time is computed again, and then kept whole.
    whole = [cost.training_memory(TokenFormerConfig.preset("tiny", num_hidden_layers=n), 2, 64) for n in (2, 3)]
    assert estimated[0] - kept[0] == pytest.approx(whole[1].activations - whole[0].activations, rel=0.1)


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
