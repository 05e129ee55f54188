"""An adopted model computes what it did: every family, both forms of ballast, gradients, generation and growth."""

import copy
import math
import re
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers.activations import ACT2FN

from conftest import relative_error, whole_floats
from hosts import HOSTS, POST_NORM, RMS_NORM, SIZES, embedded, make_host
from tokenformer import BadRequestError, adopt, cost, grow, grow_optimizer, pattention_layers
from tokenformer.adoption import FAMILIES, families
from tokenformer.adoption.fold import NormOutput, ffn_tokens, linear_tokens
from tokenformer.adoption.plan import activation_kind
from tokenformer.errors import BadResultError
from tokenformer.models.adopted import EqualLength
from tokenformer.models.sample import relative_difference, sample_inputs, sample_output
from tokenformer.pattention.functional import ACTIVATIONS, reference

ROOT = Path(__file__).parent.parent
# Rounding only.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
# In float64 two things can be seen. The eps of norms that stay: 1e-12 over twice a variance of about 1e-3. And that
# transformers' RMSNorm computes in fp32, whatever it is given.
AFTER_EPS, AFTER_RMS_NORM = 5e-9, 1e-5


def tolerance_in_float64(name):
    return AFTER_EPS if name in POST_NORM else AFTER_RMS_NORM if name in RMS_NORM else TOLERANCE[torch.float64]


def record(model):
    return model.config.adopted


@pytest.mark.parametrize(("size", "ballast"), [(SIZES[0], "spread"), (SIZES[1], "spread"), (SIZES[1], "single")])
@pytest.mark.parametrize("name", HOSTS)
def test_outputs_and_gradients_are_the_hosts(name, size, ballast):
    model = make_host(name, size).double()
    tolerance = tolerance_in_float64(name) if ballast == "spread" else TOLERANCE[torch.float64]
    inputs = embedded(model)
    (entered,) = inputs.values()

    def run():
        out = model(**inputs).logits
        return out.detach(), *torch.autograd.grad(out.square().sum(), entered)

    expected, parameters = run(), model.num_parameters()
    assert adopt(model, ballast=ballast, tolerance=tolerance) is model
    assert isinstance(model, HOSTS[name][0])
    assert model.num_parameters() > parameters
    assert [name for name, _ in pattention_layers(model.base_model)] == list(record(model).layers)
    for given_, true in zip(run(), expected, strict=True):
        assert relative_error(given_, true) < tolerance


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", HOSTS)
def test_in_fp32_too(name, size):
    """Where the embeddings' variance is 4e-4, and the norms' eps of up to 1e-5 is not small beside it."""
    model = make_host(name, size)
    inputs = sample_inputs(model)
    before = sample_output(model, inputs)
    adopt(model)
    assert relative_error(sample_output(model, inputs), before) < TOLERANCE[torch.float32]
    assert all(layer["error"] < 2e-6 for layer in record(model).layers.values())


@pytest.mark.parametrize(
    ("dtype", "ballast", "error"),
    [(torch.bfloat16, "spread", 3e-2), (torch.bfloat16, "single", 3e-2), (torch.float16, "spread", 4e-3)],
)
def test_in_half_precision(dtype, ballast, error):
    model = make_host("gpt_neox").to(dtype)
    inputs = sample_inputs(model)
    before = sample_output(model, inputs)
    adopt(model, ballast=ballast)
    layer = model.gpt_neox.layers[0].mlp.dense_h_to_4h
    assert (layer.key_tokens.dtype, layer.tau.dtype) == (dtype, torch.float32)
    assert relative_error(sample_output(model, inputs), before) < error


def test_what_it_costs_in_tokens():
    """With width d: 2d tokens for a linear that gives at least d; the FFN's own and at most d more, or one."""
    spread, single = adopt(make_host("gpt_neox")), adopt(make_host("gpt_neox"), ballast="single")
    tokens = {name.rpartition(".")[2]: (n["num_tokens"], n["ballast"]) for name, n in record(spread).layers.items()}
    assert tokens == {"query_key_value": (2 * 36, 0), "dense_h_to_4h": (50 + 36, 36)}
    tokens = {name.rpartition(".")[2]: (n["num_tokens"], n["ballast"]) for name, n in record(single).layers.items()}
    assert tokens == {"query_key_value": (2 * 36 + 1, 1), "dense_h_to_4h": (50 + 1, 1)}
    # Heads that share keys and values: d + d_out tokens, and one for what eps leaves out of an RMSNorm.
    llama = record(adopt(make_host("llama"))).layers["layers.0.self_attn.k_proj"]
    assert (llama["num_tokens"], llama["ballast"]) == (36 + 12 + 1, 36 - 12 + 1)
    # LayerNorm's rows have no mean, so a direction is free where the norm stays.
    assert record(adopt(make_host("bert"))).layers["encoder.layer.0.intermediate.dense"]["ballast"] == 35


@pytest.mark.parametrize("name", ["gpt_neox", "vit", "llama"])
def test_the_cost_model_counts_them(name):
    model = make_host(name)
    inputs = sample_inputs(model)

    def flops():
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(**inputs)
        return counter.get_total_flops()

    before = flops()
    adopt(model)
    costs = cost.adopted_layers(record(model))
    layers = [layer for _, layer in pattention_layers(model)]
    assert costs.parameters == sum(p.numel() for layer in layers for p in layer.parameters())
    rows = inputs[model.main_input_name].numel() if name != "vit" else 2 * 5  # four patches and the class token
    more = rows * (costs.flops_per_token - costs.replaced_flops_per_token)
    assert before + more == flops()


@pytest.mark.parametrize("ballast", ["spread", "single"])
def test_weights_of_zero(ballast):
    """As of layers that start without an effect, and of a first linear that gives the same for every row."""
    model = make_host("gpt2")
    for mlp in (model.transformer.h[0].mlp, model.transformer.h[1].mlp):
        nn.init.zeros_(mlp.c_proj.weight)
        nn.init.zeros_(mlp.c_proj.bias)
    nn.init.zeros_(model.transformer.h[0].mlp.c_fc.weight)
    nn.init.zeros_(model.transformer.h[1].attn.c_attn.weight)
    for parameter in model.transformer.h[1].mlp.c_fc.parameters():
        nn.init.zeros_(parameter)
    adopt(model, ballast=ballast)
    assert {record(model).layers[f"h.{i}.mlp.c_fc"]["error"] for i in (0, 1)} == {0}


def test_one_token_of_ballast_leaves_an_ffn_as_it_was():
    """Its bias is so large that the norm does not move, and its own weight is zero. What remains is rounding: a product
    with one more column may be added up in another order."""
    model = make_host("gpt_neox")
    ids = sample_inputs(model)
    before = sample_output(model, ids)
    adopt(model, "ffn", ballast="single")
    assert relative_difference(sample_output(model, ids), before) < 1e-6
    assert model.gpt_neox.layers[0].post_attention_layernorm.weight.ndim == 1  # the norm stays


@pytest.mark.parametrize("parts", ["ffn", "qkv"])
def test_a_part_alone(parts):
    model = make_host("gpt_neox")
    adopt(model, [parts])
    layer = model.gpt_neox.layers[0]
    replaced = {"ffn": layer.post_attention_layernorm, "qkv": layer.input_layernorm}
    for part, norm in replaced.items():
        assert isinstance(norm, EqualLength) == (part == parts)


def test_a_norm_that_others_read_stays_and_its_eps_shows():
    """In Phi one norm feeds both. With the FFN alone it must stay, and the error is up to eps / (2 · variance)."""
    model = make_host("phi")
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(BadResultError, match=r"layers.0.mlp.fc1 .*1e-05 is allowed; nothing was changed") as refused:
        adopt(model, "ffn")
    assert "\n" not in str(refused.value)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not list(pattention_layers(model))
    adopt(model, "ffn", tolerance=0.1)
    eps, variance = model.config.layer_norm_eps, model.model.embed_tokens.weight.var(dim=1, correction=0).min().item()
    first = record(model).layers["layers.0.mlp.fc1"]["error"]
    assert 1e-4 < first < eps / (2 * variance)  # less, because of what the norm's bias adds to the scores
    assert record(adopt(make_host("phi"), "ffn", ballast="single")).norms == {}
    # RoBERTa's checkpoints have this eps, and the norm of the embeddings sees small rows.
    roberta = {"name": "roberta", "layer_norm_eps": 1e-5}
    with pytest.raises(BadResultError, match=r"layer.0.attention.self.\w+ .*ballast='single'"):
        adopt(make_host(**roberta))
    assert record(adopt(make_host(**roberta), ballast="single")).norms == {}
    assert record(adopt(make_host("phi"))).norms.keys() == {f"layers.{i}.input_layernorm" for i in (0, 1)}


@pytest.mark.parametrize("name", [name for name, (kind, *_) in HOSTS.items() if kind.can_generate()])
def test_cached_generation(name):
    model = make_host(name)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    ids = torch.randint(97, (2, 5))
    expected = model.generate(ids, use_cache=False, **options)
    adopt(model)
    assert torch.equal(model.generate(ids, use_cache=True, **options), expected)
    grown = grow(model, 1.5)
    assert torch.equal(grown.generate(ids, use_cache=True, **options), expected)


@pytest.mark.parametrize("method", ["zero", "split", "rotate"])
@pytest.mark.parametrize("name", HOSTS)
def test_growth_is_exact(name, method):
    model = adopt(make_host(name).double(), tolerance=tolerance_in_float64(name))
    inputs = sample_inputs(model)
    before = sample_output(model, inputs)
    for factor in (2, 1.5):
        model = grow(model, factor, method=method)
        assert relative_error(sample_output(model, inputs), before) < 1e-10
    assert [step["method"] for step in record(model).growth] == [method, method]
    for layer, entry in record(model).layers.items():
        assert entry["num_tokens"] == model.base_model.get_submodule(layer).num_tokens


def test_growth_of_some_layers_and_with_one_token_of_ballast():
    model = adopt(make_host("gpt2"), ballast="single")
    inputs = sample_inputs(model)
    before = sample_output(model, inputs)
    grown = grow(model, num_tokens={"*.mlp.c_fc": 200}, method="split")
    assert {n["num_tokens"] for n in record(grown).layers.values()} == {200, 73}
    assert record(model).layers["h.0.mlp.c_fc"]["num_tokens"] == 51
    assert relative_error(sample_output(grown, inputs), before) < 1e-5
    with pytest.raises(BadRequestError, match=r"ballast='single' has a token whose large bias rotate would spread"):
        grow(model, 2, method="rotate")


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_one_token_of_ballast_under_autocast_to_fp16(name):
    """Its bias is beyond fp16."""
    host = make_host(name)
    model = adopt(copy.deepcopy(host), ballast="single")
    with torch.autocast("cpu", torch.float16):
        outputs = [sample_output(one, sample_inputs(host)) for one in (host, model)]
    assert relative_error(outputs[1], outputs[0]) < 5e-3


def test_ballast_learns_from_the_first_step_and_moments_follow_growth():
    model = adopt(make_host("gpt_neox"))
    ids = torch.randint(97, (4, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = model(ids, labels=ids).loss
        loss.backward()
        if not losses:
            ffn = model.gpt_neox.layers[0].mlp.dense_h_to_4h
            assert ffn.value_tokens[-36:].eq(0).all()
            assert ffn.value_tokens.grad[-36:].ne(0).any(dim=1).all()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    grown = grow(model, 2, method="split")
    new = grow_optimizer(optimizer, model, grown)
    grown(ids, labels=ids).loss.backward()
    new.step()
    del grown.last_growth  # as in a model that was loaded: its record remembers the step
    again = grow_optimizer(optimizer, model, grown)
    key = grown.gpt_neox.layers[0].mlp.dense_h_to_4h.key_bias
    assert again.state[key]["exp_avg"].shape == (2 * 86,)


@given(
    d=st.integers(2, 20),
    ffn=st.integers(1, 30),
    out=st.integers(1, 30),
    centred=st.booleans(),
    kept=st.booleans(),
    with_bias=st.booleans(),
    kind=st.sampled_from(list(ACTIVATIONS)),
    log_scale=whole_floats(-3, 3),
    seed=st.integers(0, 2**16),
)
def test_the_algebra(d, ffn, out, centred, kept, with_bias, kind, log_scale, seed):
    """Tokens of any shape, behind any norm, in float64: the host's own formula, to rounding."""
    torch.manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    gain = draw(d).sign() * (0.2 + 3 * torch.rand(d, dtype=torch.float64))
    shift = draw(d) * (with_bias and centred)
    rows = NormOutput(gain, shift, centred, kept)
    first, second = (draw(ffn, d), draw(ffn) * with_bias), (draw(out, ffn), draw(out))
    linear = draw(out, d), draw(out) * with_bias
    x, eps = 10**log_scale * draw(7, d), 0.0 if kept else 1e-5
    z = F.layer_norm(x, (d,), eps=eps) if centred else F.rms_norm(x, (d,), eps=eps)
    entered = z * gain + shift if kept else EqualLength(d, eps, centred)(x)
    y = z * gain + shift
    hidden = F.linear(y, *first)
    for single in (None, 2e-16) if kept else (None,):
        tokens = ffn_tokens(rows, first, second, slack=0.0, single=single)
        given_ = apply(tokens, entered, kind)
        # Sums of terms that may cancel: errors are measured against their size.
        size = ACTIVATIONS[kind](hidden).abs() @ second[0].abs().mT + hidden.norm(dim=-1, keepdim=True) * d
        assert ((given_ - F.linear(ACTIVATIONS[kind](hidden), *second)).abs() <= 1e-11 * (1 + size)).all()
        assert tokens.values[len(tokens.values) - tokens.ballast :].eq(0).all()
        assert tokens.ballast == 1 if single else tokens.ballast <= rows.width - (centred and kept)
        tokens = linear_tokens(rows, *linear, single=single)
        size = y.abs() @ linear[0].abs().mT + tokens.values.abs().sum(0)
        assert ((apply(tokens, entered, kind) - F.linear(y, *linear)).abs() <= 1e-11 * (1 + size)).all()
        assert len(tokens.keys) == (2 * min(d, out) + 1 if single else rows.width + min(d, out))


def apply(tokens, rows, kind):
    more = {"key_bias": tokens.key_bias, "bias": tokens.bias}
    return reference(rows, tokens.keys, tokens.values, tokens.tau, kind, **more)


def test_a_flat_matrix_needs_no_ballast_and_a_nearly_flat_one_little():
    d, ffn = 16, 40
    weight = torch.linalg.qr(torch.randn(ffn, d, dtype=torch.float64)).Q  # WᵀW = I
    rows = NormOutput(torch.ones(d, dtype=torch.float64), torch.zeros(d, dtype=torch.float64), centred=False, kept=True)
    nothing, second = weight.new_zeros(ffn), (torch.randn(5, ffn, dtype=torch.float64), weight.new_zeros(5))
    x = F.rms_norm(torch.randn(50, d, dtype=torch.float64), (d,))
    assert ffn_tokens(rows, (weight, nothing), second, slack=1e-13).ballast == 0
    nearly = weight * torch.linspace(1, 1 + 1e-4, d, dtype=torch.float64)
    expected = F.gelu(x @ nearly.mT) @ second[0].mT
    errors, ballasts = [], []
    for slack in (1e-13, 3e-5, 1e-2):
        tokens = ffn_tokens(rows, (nearly, nothing), second, slack=slack)
        errors.append(relative_error(apply(tokens, x, "l2_gelu"), expected))
        ballasts.append(tokens.ballast)
        # A share of the squared norm is half of it in the norm, and so in the scores; GeLU is at most 1.13 as steep.
        assert errors[-1] < 1e-14 + 2 * slack
    assert ballasts[0] == d - 1 > ballasts[1] > ballasts[2] == 0


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_equal_length(centred, dtype):
    """From rows that are all eps to rows in which eps is nothing; and the norm's own rows but for what was added."""
    norm = EqualLength(12, 1e-5, centred)
    x = (torch.logspace(-9, 6, 16)[:, None] * torch.randn(16, 12)).to(dtype)
    x[0] = 3 if centred else 0
    out = norm(x)
    assert out.dtype == dtype
    assert out.shape == (16, 12 + (not centred))
    torch.testing.assert_close(out.float().norm(dim=-1), torch.full((16,), math.sqrt(12)), rtol=1e-2, atol=0)
    if dtype == torch.float32:
        torch.testing.assert_close(out.norm(dim=-1), torch.full((16,), math.sqrt(12)), rtol=1e-6, atol=0)
        host = F.layer_norm(x, (12,), eps=1e-5) if centred else F.rms_norm(x, (12,), eps=1e-5)
        ours = out - out.mean(-1, keepdim=True) if centred else out[:, :12]
        torch.testing.assert_close(ours, host, rtol=1e-4, atol=1e-5)
    assert "12, eps=1e-05" in repr(norm)


def test_activations_are_known_by_what_they_compute():
    kinds = {}
    for name in ACT2FN:
        if name not in ("xielu", "prelu"):
            try:
                kinds[name] = activation_kind("act", ACT2FN[name])
            except BadRequestError as error:
                assert str(error).endswith("GELU (exact and tanh), SiLU and ReLU are supported")  # noqa: PT017
    assert kinds == {
        "gelu": "l2_gelu",
        "gelu_python": "l2_gelu",
        "gelu_accurate": "l2_gelu_tanh",
        "gelu_fast": "l2_gelu_tanh",
        "gelu_new": "l2_gelu_tanh",
        "gelu_python_tanh": "l2_gelu_tanh",
        "gelu_pytorch_tanh": "l2_gelu_tanh",
        "relu": "l2_relu",
        "silu": "l2_silu",
        "swish": "l2_silu",
    }
    with pytest.raises(BadRequestError, match="act is a PReLU"):
        activation_kind("act", nn.PReLU())


EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adopting.md").read_text(), re.DOTALL)


def test_the_example_of_the_docs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(EXAMPLES[0].replace("GPTNeoXConfig(", "GPTNeoXConfig(vocab_size=97, intermediate_size=80, "), names)
    assert names["again"].config.adopted.layers["layers.0.mlp.dense_h_to_4h"]["num_tokens"] == 1.5 * 144 - 2


def test_a_family_can_be_added_as_the_docs_say(monkeypatch):
    from transformers import Starcoder2Config, Starcoder2ForCausalLM

    monkeypatch.setattr("tokenformer.adoption.families.FAMILIES", dict(FAMILIES))
    exec(EXAMPLES[1])
    assert textwrap.indent(EXAMPLES[1].partition("\n\n")[2], "    ") in families.__doc__
    shape = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = Starcoder2Config(vocab_size=97, num_key_value_heads=2, **shape, bos_token_id=None, eos_token_id=None)
    model = adopt(Starcoder2ForCausalLM(config))
    assert len(record(model).layers) == 4
    assert {n["kind"] for n in record(model).layers.values()} == {"l2_gelu", "l2_gelu_tanh"}
