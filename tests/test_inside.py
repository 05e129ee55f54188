"""Looking inside a model: what its tokens do, and what it does without them."""

import copy

import pytest
import torch

import tokenformer
from conftest import make_tiny, make_tiny_vision, relative_error
from hosts import make_host
from inside_models import CLOSE, IDS, outputs_of, with_groups
from tokenformer import KINDS, BadRequestError, Pattention, ablate, pattention_layers, watch
from tokenformer.growth.layer import kept_rows

MODELS = {
    "ours": lambda: (make_tiny(), {"input_ids": IDS}),
    "vision": lambda: (make_tiny_vision(), {"pixel_values": torch.randn(2, 3, 32, 32)}),
    "adopted": lambda: (tokenformer.adopt(make_host("gpt_neox")), {"input_ids": IDS}),
    "groups, own": lambda: (with_groups(make_tiny(), "own"), {"input_ids": IDS}),
    "groups, shared": lambda: (with_groups(make_tiny(), "shared"), {"input_ids": IDS}),
    "groups beside a host": lambda: (with_groups(make_host("gpt2"), "own"), {"input_ids": IDS}),
}


@pytest.mark.parametrize("model", MODELS)
def test_contributions_add_up_to_the_output(model):
    model, inputs = MODELS[model]()
    with watch(model) as seen:
        expected = model(**inputs).logits
    outputs = outputs_of(model, lambda: model(**inputs))
    assert torch.equal(model(**inputs).logits, expected)
    for name, _ in pattention_layers(model):
        parts = [part for part in seen if (part == name or part.startswith(f"{name}.")) and seen[part].calls]
        assert relative_error(sum(seen[part].total() for part in parts), outputs[name]) < CLOSE
        layer = seen[name]
        assert relative_error(layer.contributions(3, -1).norm(dim=-1), layer.norms[..., [3, -1]]) < CLOSE


def test_of_a_linear_layer_the_tokens_are_its_inputs():
    model = make_host("gpt_neox")
    with watch(model, "*.dense_4h_to_h") as seen:
        model(IDS)
    outputs = outputs_of(model, lambda: model(IDS))
    for name, layer in seen.items():
        assert relative_error(layer.total(), outputs[name]) < CLOSE


def test_a_group_has_its_own_name_and_is_seen_while_it_is_on():
    for norm in ("own", "shared"):
        model = with_groups(make_tiny(), norm)
        with watch(model, "layers.0.ffn") as seen:
            model(IDS)
        law = seen["ffn.token_groups.law"]
        assert law.weights.shape == (2, 12, 3)
        assert law.weights.any()
        assert seen["layers.0.ffn"].weights.shape[-1] == model.model.layers[0].ffn.num_tokens
        with pytest.raises(BadRequestError, match="was not called"):
            _ = seen["layers.0.ffn.token_groups.off"].weights


def test_plain_hooks_reach_the_same_numbers(tiny):
    ffn, found = tiny.model.layers[1].ffn, []
    hook = ffn.register_forward_hook(lambda layer, args, output: found.append(layer.token_weights(args[0])))
    with watch(tiny, "layers.1.ffn") as seen:
        tiny(IDS)
    hook.remove()
    assert torch.equal(seen["layers.1.ffn"].weights, found[0])


def test_generated_tokens_are_seen_one_after_the_other(tiny):
    with watch(tiny, "*.ffn") as seen:
        text = tiny.generate(IDS, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    layer = seen["layers.1.ffn"]
    assert [tuple(call.shape[:2]) for call in layer.calls] == [(2, 12), (2, 1), (2, 1), (2, 1)]
    with watch(tiny, "*.ffn") as again:
        tiny(text[:, :-1])
    assert relative_error(layer.weights, again["layers.1.ffn"].weights) < CLOSE


def test_the_top_tokens_are_those_that_add_most(tiny):
    with watch(tiny, "layers.0.ffn") as seen:
        tiny(IDS)
    (layer,) = seen.values()
    top = layer.top(5)
    assert top.tokens.shape == (2, 12, 5)
    assert torch.equal(top.norms, layer.norms.topk(5, dim=-1).values)
    assert torch.equal(top.weights, layer.weights.gather(-1, top.tokens))
    assert torch.equal(layer.top(3, by="weight").weights.abs(), layer.weights.abs().topk(3).values)


def test_nothing_stays_behind(tiny):
    before = {name: dict(module.__dict__) for name, module in tiny.named_modules()}
    with pytest.raises(ZeroDivisionError), watch(tiny), ablate(tiny, {"*.ffn": [1]}):
        _ = 1 / 0
    for name, module in tiny.named_modules():
        assert module.__dict__.keys() == before[name].keys()
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_compiled_model_is_seen_and_ablated_without_a_new_compilation(tiny):
    compiled = torch.compile(tiny, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        tiny(IDS)  # transformers notes in the configuration that it ran, for which a compiled model is compiled again
        plain = compiled(IDS).logits
        with ablate(tiny, {"layers.1.ffn": [2]}):
            expected = tiny(IDS).logits
        torch.compiler.set_stance("fail_on_recompile")
        try:
            with watch(compiled) as seen, ablate(compiled, {"layers.1.ffn": [2]}):
                found = compiled(IDS).logits
            assert torch.equal(compiled(IDS).logits, plain)
        finally:
            torch.compiler.set_stance("default")
    assert relative_error(found, expected) < CLOSE
    assert not torch.equal(found, plain)
    assert seen["layers.1.ffn"].weights[..., 2].eq(0).all()


def without(model, layer, tokens):
    """A copy whose rows are really gone."""
    smaller = copy.deepcopy(model)
    module = smaller.get_submodule(layer)
    kept = [token for token in range(module.num_tokens) if token not in tokens]
    for parameter, rows in kept_rows(module, kept):
        parameter.data = rows
    return smaller


@pytest.mark.parametrize("kind", KINDS)
def test_an_ablated_token_is_as_if_its_row_were_deleted(kind):
    model = make_tiny(pattention_kind=kind)
    for layer in ("model.layers.0.attention.query", "model.layers.1.ffn"):
        gone = [0, 5, 17]
        with ablate(model, {layer: gone}):
            found = model(IDS).logits
            cached = model.generate(IDS, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        smaller = without(model, layer, gone)
        assert relative_error(found, smaller(IDS).logits) < CLOSE
        assert torch.equal(cached, smaller.generate(IDS, max_new_tokens=3, min_new_tokens=3, do_sample=False))
        assert relative_error(model(IDS).logits, found) > CLOSE


def test_adopted_and_trained_models_lose_rows_alike():
    model = tokenformer.adopt(make_host("gpt_neox"))
    layer = next(name for name, _ in pattention_layers(model) if "dense_h_to_4h" in name)
    with ablate(model, {layer: [3, 4]}):
        found = model(IDS).logits
    assert relative_error(found, without(model, layer, [3, 4])(IDS).logits) < CLOSE


@pytest.mark.parametrize("norm", ["own", "shared"])
def test_a_token_of_a_group_can_be_ablated(norm):
    model = with_groups(make_tiny(), norm)
    smaller = copy.deepcopy(model)
    group = smaller.model.layers[0].ffn.token_groups["law"]
    for parameter in group.parameters():
        parameter.data = parameter.data[[0, 2]]
    with ablate(model, {"layers.0.ffn.token_groups.law": [1]}):
        assert relative_error(model(IDS).logits, smaller(IDS).logits) < CLOSE
    with ablate(model, {"*.token_groups.law": [0, 1, 2]}):
        found = model(IDS).logits
    tokenformer.use_tokens(model)
    assert relative_error(found, model(IDS).logits) < CLOSE


def test_each_row_of_a_batch_keeps_its_groups():
    model = with_groups(make_tiny(), "own")
    with ablate(model, {"layers.0.ffn": [1]}):
        both = model(input_ids=IDS, adapter_names=["law", "__base__"]).logits
        tokenformer.use_tokens(model)
        assert relative_error(both[1:], model(IDS[1:]).logits) < CLOSE


def test_scaled_tokens_add_more_and_leave_the_others(tiny):
    name = "model.layers.1.ffn"
    plain = outputs_of(tiny, lambda: tiny(IDS))[name]
    with watch(tiny, name) as seen:
        tiny(IDS)
    added = seen[name].contributions(4, 7)  # [batch, length, 2, d]
    for tokens, options, factors in (
        ([4, 7], {"scale": 2.5}, [1.5, 1.5]),
        ([4, 7], {"keep_norm": True}, [-1, -1]),
        ({4: 0, 7: 3.0}, {}, [-1, 2]),
    ):
        with ablate(tiny, {name: tokens}, **options):
            found = outputs_of(tiny, lambda: tiny(IDS))[name]
        assert relative_error(found, plain + (added * torch.tensor(factors).view(2, 1)).sum(-2)) < CLOSE


def test_nested_ablations_end_in_any_order(tiny):
    first, second = ablate(tiny, {"layers.0.ffn": [1]}), ablate(tiny, {"layers.0.ffn": [2]})
    plain = tiny(IDS).logits
    first.__enter__()
    second.__enter__()
    both = tiny(IDS).logits
    first.__exit__(None, None, None)
    last = tiny(IDS).logits
    second.__exit__(None, None, None)
    assert torch.equal(tiny(IDS).logits, plain)
    with ablate(tiny, {"layers.0.ffn": [2, 1]}):
        assert torch.equal(tiny(IDS).logits, both)
    with ablate(tiny, {"layers.0.ffn": [2]}):
        assert torch.equal(tiny(IDS).logits, last)


def test_gradients_flow_past_what_is_ablated(tiny):
    with ablate(tiny, {"layers.0.ffn": [1]}):
        tiny(IDS, labels=IDS).loss.backward()
    ffn = tiny.model.layers[0].ffn
    assert not ffn.value_tokens.grad[1].any()
    assert not ffn.key_tokens.grad[1].any()
    assert ffn.value_tokens.grad[2].any()


def test_neurons_of_another_model_are_ablated_by_their_number():
    model = make_host("gpt_neox")
    linear = model.gpt_neox.layers[1].mlp.dense_4h_to_h
    with ablate(model, {"layers.1.mlp.dense_4h_to_h": [2]}):
        found = model(IDS).logits
    with torch.no_grad():
        linear.weight[:, 2] = 0
    assert relative_error(found, model(IDS).logits) < CLOSE


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (lambda model: watch(model, "layers.0.fnn"), r"no layer is called 'layers.0.fnn'; did you mean 'layers.0.ffn'"),
        (lambda model: watch(model, ["*.mlp"]), r"no layer is called '\*.mlp'"),
        (lambda model: watch(model, [3]), r"layers=\[3\] was given"),
        (lambda model: watch(torch.nn.Linear(2, 2)), "has no Pattention layer"),
        (lambda model: ablate(model, [3]), "give them by layer"),
        (lambda model: ablate(model, {"layers.0.ffn": 3}), "give a list of token numbers"),
        (lambda model: ablate(model, {"layers.0.ffn": [999]}), "has 256 tokens, 0 to 255, and 999 was asked for"),
        (lambda model: ablate(model, {"layers.0.ffn": [0.5]}), "tokens are whole numbers"),
        (lambda model: ablate(model, {"layers.0.ffn": [0]}, scale=2, keep_norm=True), "exclude each other"),
        (lambda model: ablate(model, {"layers.0.ffn": [0]}, scale=float("nan")), "cannot be multiplied"),
        (lambda model: ablate(model, {"layers.0.ffn": [0]}, mean={}), "token_statistics"),
    ],
)
def test_a_bad_request_is_one_line(tiny, asked, said):
    with pytest.raises(BadRequestError, match=said) as caught, asked(tiny):
        pass
    assert "\n" not in str(caught.value)


def test_a_name_that_fits_several_layers_is_refused(tiny):
    with watch(tiny) as seen:
        pass
    with pytest.raises(BadRequestError, match="'ffn' fits 2 layers"):
        _ = seen["ffn"]
    assert isinstance(seen["layers.1.ffn"].place.layer, Pattention)


@torch.no_grad()
def test_a_model_for_inference_is_ablated_and_watched_alike(tiny):
    query = {"layers.0.attention.query": [1, 5]}
    with ablate(tiny, query), watch(tiny, "attention.query") as seen:
        expected = tiny(IDS).logits
    tokenformer.for_inference(tiny)
    with ablate(tiny, query):  # also where query, key and value would be computed together
        assert relative_error(tiny(IDS).logits, expected) < CLOSE
    with ablate(tiny, query), watch(tiny, "attention.query") as again:
        tiny(IDS)
    for name in seen:
        assert relative_error(again[name].weights, seen[name].weights) < CLOSE


def test_integers_are_not_looked_into(tiny):
    tokenformer.quantize(tiny)
    for look in (lambda: watch(tiny), lambda: ablate(tiny, {"layers.0.ffn": [1]})):
        with pytest.raises(BadRequestError, match=r"are quantised; give dequantize\(copy.deepcopy\(model\)\)"), look():
            pass
