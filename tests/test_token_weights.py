"""Which tokens a model uses: the weights of a layer, recorded in whole models."""

import subprocess
import sys
import threading

import pytest
import torch

from conftest import make_tiny, make_tiny_vision
from hosts import make_host
from tokenformer import KINDS, Pattention, adopt, grow, pattention_layers, record_token_weights


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_of_a_layer_give_its_output(kind, biased):
    layer = Pattention(6, 5, 11, kind, key_bias=biased, bias=biased)
    if biased:
        torch.nn.init.normal_(layer.key_bias)
        torch.nn.init.normal_(layer.bias)
    x = torch.randn(2, 3, 6)
    weights = layer.token_weights(x)
    assert weights.shape == (2, 3, 11)
    torch.testing.assert_close(weights @ layer.value_tokens + (layer.bias if biased else 0), layer(x))


def test_frozen_tokens_get_no_gradient_from_their_weights():
    layer = Pattention(6, 5, 11, key_bias=True)
    layer.frozen_tokens = 4
    layer.token_weights(torch.randn(3, 6)).square().sum().backward()
    for gradient in (layer.key_tokens.grad, layer.key_bias.grad):
        assert not gradient[:4].any()
        assert gradient[4:].any()


@pytest.mark.parametrize("make", [make_tiny, make_tiny_vision])
def test_a_model_gives_the_weights_of_all_its_layers(make):
    model = make()
    inputs = {"input_ids": torch.arange(6)[None]} if make is make_tiny else {"pixel_values": torch.randn(2, 3, 32, 32)}
    plain, out = model(**inputs), model(**inputs, output_token_weights=True)
    assert torch.equal(plain.logits, out.logits)
    layers = list(pattention_layers(model))
    assert [weights.shape[-1] for weights in out.token_weights] == [layer.num_tokens for _, layer in layers]
    assert "token_weights" not in plain
    assert not any(layer._forward_hooks for _, layer in layers)
    assert torch.equal(model(**inputs, output_token_weights=True, return_dict=False)[-1][0], out.token_weights[0])


def test_recorded_weights_are_those_that_were_used(tiny):
    """Replacing a layer's output by weights @ values leaves the logits as they were."""
    ids = torch.arange(12).reshape(2, 6)
    expected = tiny(ids)
    with record_token_weights(tiny) as weights:
        tiny(ids)
        tiny(ids[:1])
    ffn = tiny.model.layers[1].ffn
    recorded = weights["model.layers.1.ffn"]
    assert [len(calls) for calls in weights.values()] == [2] * len(weights)
    assert recorded[1].shape == (1, 6, ffn.num_tokens)
    ffn.register_forward_hook(lambda *_: recorded[0] @ ffn.value_tokens)
    torch.testing.assert_close(tiny(ids).logits, expected.logits)


def test_new_tokens_weigh_what_growth_gave_them(tiny):
    """Tokens appended with keys of zero score zero, so nothing uses them until they are trained."""
    grown = grow(tiny, 2, method="zero")
    out = grown(torch.arange(8)[None], output_token_weights=True)
    for weights, (_, layer) in zip(out.token_weights, pattention_layers(grown), strict=True):
        assert weights[..., : layer.num_tokens // 2].any()
        assert not weights[..., layer.num_tokens // 2 :].any()


def test_any_model_with_pattentions_in_it():
    model = adopt(make_host("gpt2"))
    ids = torch.arange(6)[None]
    with record_token_weights(model) as weights:
        model(ids)
    assert weights
    assert all(len(calls) == 1 and calls[0].isfinite().all() for calls in weights.values())
    out = model(ids, output_token_weights=True)
    torch.testing.assert_close(list(out.token_weights), [calls[0] for calls in weights.values()])


def test_a_layer_that_is_called_by_keyword():
    layer, x = Pattention(6, 5, 11), torch.randn(3, 6)
    with record_token_weights(layer) as weights:
        layer(x=x)
    assert torch.equal(weights[""][0], layer.token_weights(x))


def test_other_threads_are_not_recorded(tiny):
    ids = torch.arange(6)[None]
    with record_token_weights(tiny) as weights:
        other = threading.Thread(target=tiny, args=(ids,))
        other.start()
        other.join()
    assert not any(weights.values())


def test_training_with_gradient_checkpointing_and_a_penalty_on_weights(tiny):
    tiny.train().gradient_checkpointing_enable()
    out = tiny(torch.arange(6)[None], output_token_weights=True)
    sum(weights.square().mean() for weights in out.token_weights).backward()
    assert all(layer.key_tokens.grad.any() for _, layer in pattention_layers(tiny))


def test_a_compiled_model_records(tiny):
    ids = torch.arange(6)[None]
    expected = tiny(ids, output_token_weights=True)
    compiled = torch.compile(tiny, backend="aot_eager")
    compiled(ids)
    out = compiled(ids, output_token_weights=True)
    torch.testing.assert_close(out.token_weights, expected.token_weights)


def test_the_package_is_not_hidden_by_its_function():
    code = "import tokenformer.pattention.functional as f, tokenformer; assert tokenformer.pattention.functional is f"
    subprocess.run([sys.executable, "-c", code], check=True)
