"""Requests for adoption that cannot be met: one line that says what is supported, and a model that is untouched."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    BloomConfig,
    BloomForCausalLM,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
    XGLMConfig,
    XGLMForCausalLM,
)

from conftest import make_tiny
from hosts import make_host
from tokenformer import BadRequestError, adopt, grow
from tokenformer.adoption import FAMILIES, Family, Fed
from tokenformer.errors import BadResultError
from tokenformer.models.adopted import record_of
from tokenformer.models.sample import relative_difference, sample_inputs, sample_output
from tokenformer.pattention import pattention_layers

SMALL_BERT = {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL_BERT |= {"intermediate_size": 32}


def opt():
    return OPTForCausalLM(
        OPTConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, ffn_dim=32, num_attention_heads=2)
    )


def tied():
    model = make_host("gpt2")
    model.transformer.h[1].mlp.c_fc = model.transformer.h[0].mlp.c_fc
    return model


def tied_weight():
    model = make_host("gpt2")
    model.transformer.h[1].attn.c_attn.weight = model.transformer.h[0].attn.c_attn.weight
    return model


def quantised():
    model = make_host("gpt2")
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    return model


def wrapped():
    """As adapters and quantised layers stand in a model: a class of their own, derived from the linear."""
    model = make_host("gpt_neox")

    class LoraLinear(nn.Linear):
        pass

    model.gpt_neox.layers[1].mlp.dense_4h_to_h = LoraLinear(50, 36)
    return model


def fp8():
    model = make_host("gpt_neox")
    linear = model.gpt_neox.layers[1].mlp.dense_4h_to_h
    linear.weight = nn.Parameter(linear.weight.to(torch.float8_e4m3fn), requires_grad=False)
    return model


def on_meta():
    with torch.device("meta"):
        return make_host("gpt2").to("meta")


def broken(what):
    model = make_host("gpt2")
    model.get_parameter(f"transformer.h.1.{what}").data[0] = torch.nan
    return model


def dead_weight():
    model = make_host("bert")
    model.bert.encoder.layer[0].attention.output.LayerNorm.weight.data[3] = 0
    return model


def other_norm():
    model = make_host("gpt_neox")
    model.gpt_neox.layers[0].input_layernorm = nn.BatchNorm1d(36)
    return model


@pytest.mark.parametrize(
    ("make", "request_", "message"),
    [
        (lambda: nn.Linear(4, 4), {}, r"a Linear was given; a transformers model is needed"),
        (make_tiny, {}, r"a tokenformer model was given, which consists of Pattentions already; grow it"),
        (opt, {}, r"a opt model was given; the supported families are .* docs/adopting.md says how to add one"),
        (lambda: make_host("gpt2"), {"parts": "fnn"}, r"'fnn' of a gpt2 cannot be adopted; it has ffn, qkv"),
        (lambda: make_host("gpt2"), {"parts": []}, r"no part was named; a gpt2 has ffn, qkv"),
        (lambda: make_host("llama"), {"parts": ("ffn", "qkv")}, r"'ffn' of a llama cannot be adopted; it has qkv"),
        (lambda: make_host("gpt2"), {"ballast": "singel"}, r"ballast='singel' is not known; did you mean 'single'\?"),
        (lambda: make_host("gpt2"), {"slack": float("nan")}, r"slack=nan was given; a number of at least 0"),
        (lambda: make_host("gpt2"), {"slack": None}, r"slack=None was given; a number of at least 0"),
        (lambda: make_host("gpt2"), {"tolerance": -1}, r"tolerance=-1 was given"),
        (lambda: make_host("gpt2"), {"tolerance": "1e-5"}, r"tolerance='1e-5' was given; a number of at least 0"),
        (lambda: make_host("gpt2"), {"parts": 5}, r"parts=5 was given; names are needed, of ffn, qkv"),
        (
            lambda: make_host("gpt2"),
            {"inputs": torch.zeros(1, 3, dtype=torch.long)},
            r"inputs is a Tensor; the model's arguments by name are needed, such as inputs=\{'input_ids': …\}",
        ),
        (
            lambda: make_host("gpt_neox", hidden_act="quick_gelu"),
            {},
            r"layers.0.mlp.act is a QuickGELUActivation; GELU \(exact and tanh\), SiLU and ReLU are supported",
        ),
        (
            lambda: make_host("bert").train(),
            {},
            r"in training mode, and embeddings.dropout drops 0.1 of a norm's output; call model.eval\(\)",
        ),
        (
            lambda: make_host("bert", is_decoder=True, add_cross_attention=True),
            {},
            r"a bert with add_cross_attention=True was given; it is not supported",
        ),
        (quantised, {}, r"the model's weights are quantised \(gptq\); one in full precision is needed"),
        (wrapped, {}, r"layers.1.mlp.dense_4h_to_h is a LoraLinear; nn.Linear and Conv1D are supported"),
        (fp8, {}, r"layers.1.mlp.dense_4h_to_h.weight is torch.float8_e4m3fn; fp64, fp32, bf16 and fp16"),
        (on_meta, {}, r"h.0.attn.c_attn.weight is on the meta device or offloaded; load the whole model"),
        (tied, {}, r"transformer.h.0.mlp.c_fc and transformer.h.1.mlp.c_fc are one and the same; untie them first"),
        (tied_weight, {}, r"transformer.h.0.attn.c_attn.weight and transformer.h.1.attn.c_attn.weight are one and the"),
        (lambda: broken("mlp.c_fc.weight"), {}, r"h.1.mlp.c_fc.weight has entries that are not finite"),
        (lambda: broken("ln_1.bias"), {}, r"h.1.ln_1.bias has entries that are not finite"),
        (dead_weight, {}, r"attention.output.LayerNorm has a weight of 0 beside biases up to .*; use ballast='single'"),
        (other_norm, {}, r"layers.0.input_layernorm is a BatchNorm1d; LayerNorm and RMSNorm are supported"),
        (lambda: make_host("gpt2").half(), {"ballast": "single"}, r"in fp16, whose range is too small for it"),
    ],
)
def test_bad_requests(make, request_, message):
    model = make()
    modules, written = list(model.modules()), [(id(p), p._version) for p in model.parameters()]
    with pytest.raises(BadRequestError, match=message) as error:
        adopt(model, **request_)
    assert "\n" not in str(error.value)
    assert list(model.modules()) == modules
    assert [(id(p), p._version) for p in model.parameters()] == written


def test_a_replaced_norm_may_have_weights_of_zero():
    """Nothing is read back from its output."""
    model = make_host("gpt_neox")
    model.gpt_neox.layers[0].input_layernorm.weight.data[3] = 0
    before = sample_output(model, sample_inputs(model))
    assert relative_difference(sample_output(adopt(model), sample_inputs(model)), before) < 1e-5


def test_once_is_enough():
    model = adopt(make_host("gpt2"))
    with pytest.raises(BadRequestError, match="is adopted already; grow it, or load the original one"):
        adopt(model)


def test_a_configuration_that_several_models_share(tmp_path):
    """The record goes into a copy of it, of which the other models know nothing."""
    config = make_host("gpt2").config
    model, other = GPT2LMHeadModel(config).eval(), GPT2LMHeadModel(config).eval()
    adopt(model)
    assert record_of(config) is record_of(other.config) is None
    assert all(module.config is model.config for module in model.modules() if hasattr(module, "config"))
    other.save_pretrained(tmp_path / "other")
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "other")
    assert torch.equal(*(sample_output(m, sample_inputs(m)) for m in (again, other)))
    # Built from an adopted model's configuration it has the record, and no such layers.
    assert len(list(pattention_layers(adopt(GPT2LMHeadModel(model.config))))) == 4


def test_layers_that_were_taken_out_are_missed_before_anything_grows():
    model = adopt(make_host("gpt2"))
    model.transformer.h = model.transformer.h[:1]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BadRequestError, match=r"grow: h.1.\S+ was adopted, and nothing is in its place now"):
        grow(model, 2, inplace=True)
    assert unchanged(model, before)


def test_dropout_elsewhere_stays_where_it_was_and_a_model_may_be_in_training():
    """GPT-2's are behind the layers that are replaced: they are the host's business before and after."""
    model = make_host("gpt2").train()
    assert model.config.resid_pdrop == 0.1
    adopt(model)
    assert all(module.training for module in model.modules())
    assert model.transformer.h[0].mlp.dropout.p == 0.1


def test_weights_that_are_not_trained_are_not_trained_after():
    model = make_host("gpt2")
    model.transformer.h[0].requires_grad_(False)
    adopt(model)
    trained = {name.split(".")[2] for name, p in model.named_parameters() if ".h." in name and p.requires_grad}
    assert trained == {"1"}


def unchanged(model, before):
    return all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP = ("mlp.dense_h_to_4h", "mlp.act", "mlp.dense_4h_to_h")


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        # The norm is not the one before the linear: seen in the layer itself.
        ("gpt_neox", Fed("input_layernorm", ffn=MLP), r"layers.\d.mlp.dense_h_to_4h"),
        # The norm feeds the MLP too, which the entry does not say: seen in the logits only.
        ("phi", Fed("input_layernorm", qkv=QKV), r"PhiForCausalLM's output would differ from the original by"),
    ],
)
def test_a_wrong_family_is_found_out_and_everything_put_back(monkeypatch, name, wrong, message):
    model = make_host(name)
    modules, before = list(model.modules()), copy.deepcopy(model.state_dict())
    monkeypatch.setitem(FAMILIES, model.config.model_type, Family("layers", (wrong,)))
    with pytest.raises(BadResultError, match=message):
        adopt(model)
    assert list(model.modules()) == modules
    assert unchanged(model, before)
    assert "quantization_config" not in model.config.to_dict()


def test_a_family_that_names_what_is_not_there(monkeypatch):
    monkeypatch.setitem(FAMILIES, "gpt2", Family("h", (Fed("ln_3", qkv=("attn.c_attn",)),)))
    with pytest.raises(BadRequestError, match=r"GPT2Model has no module h.0.ln_3, which its family names"):
        adopt(make_host("gpt2"))


def xglm(dropout):
    config = XGLMConfig(
        vocab_size=97, d_model=16, ffn_dim=32, num_layers=2, attention_heads=2, activation_dropout=dropout
    )
    return XGLMForCausalLM(config)


def test_dropout_within_an_ffn_is_found_out(monkeypatch):
    """In evaluation mode, in which layers are compared, there is none; in training one layer would do without it."""
    entry = Fed("final_layer_norm", ffn=("fc1", "activation_fn", "fc2"))
    monkeypatch.setitem(FAMILIES, "xglm", Family("layers", (entry,)))
    drawn = torch.get_rng_state()
    for model in (xglm(0.5), xglm(0.5).eval()):
        before = copy.deepcopy(model.state_dict())
        torch.set_rng_state(drawn)
        with pytest.raises(BadRequestError, match=r"layers.0.fc2 does not read the output of layers.0.activation_fn"):
            adopt(model)
        assert unchanged(model, before)
        assert torch.equal(torch.get_rng_state(), drawn)
    assert len(list(pattention_layers(adopt(xglm(0.0))))) == 2


def test_a_model_without_a_table_of_positions(monkeypatch):
    entry = Fed("input_layernorm", qkv=("self_attention.query_key_value",))
    monkeypatch.setitem(FAMILIES, "bloom", Family("h", (entry,)))
    model = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=16, n_layer=2, n_head=2))
    assert len(list(pattention_layers(adopt(model)))) == 2


def test_given_inputs_are_compared_too():
    model = make_host("gpt2")
    seen = []
    model.transformer.wte.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].shape))
    adopt(model, inputs={"input_ids": torch.zeros(1, 3, dtype=torch.long)})
    assert seen == [(1, 38), (1, 3), (1, 3), (1, 38), (1, 3)]  # before, in training mode, after
    with pytest.raises(BadResultError, match=r"would differ from the original by nan of its largest entry"):
        adopt(make_host("gpt2"), inputs={"inputs_embeds": torch.full((1, 3, 36), torch.nan)})
    with pytest.raises(BadRequestError, match=r"GPT2LMHeadModel could not be called with pixels .*: You have to"):
        adopt(make_host("gpt2"), inputs={"pixels": 1})


def test_a_model_that_takes_no_random_inputs_is_compared_on_given_ones():
    """One that chooses among sequences takes ids [batch, choices, length]. Labels would make a loss of the output."""
    model = BertForMultipleChoice(BertConfig(**SMALL_BERT)).eval()
    with pytest.raises(
        BadRequestError,
        match=r"BertForMultipleChoice could not be called .*; give adopt\(inputs=…\) what",
    ):
        adopt(model)
    ids = torch.randint(97, (2, 3, 5))
    before = model(ids).logits
    adopt(model, inputs={"input_ids": ids, "labels": torch.zeros(2, dtype=torch.long)})
    torch.testing.assert_close(model(ids).logits, before, atol=1e-5, rtol=1e-4)


def test_a_model_that_classifies_sequences_without_a_padding_token():
    config = LlamaConfig(**{**SMALL_BERT, "max_position_embeddings": 40}, pad_token_id=None)
    assert adopt(LlamaForSequenceClassification(config).eval()).config.adopted.layers
