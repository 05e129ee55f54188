"""peft's usual spellings reach parameter tokens, in our models and in adopted ones; what cannot is one line."""

import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from conftest import make_tiny
from hosts import make_host
from tokenformer import BadRequestError, TokenFormerForSequenceClassification, adopt, grow, pattention_layers
from tokenformer.integrations.peft_targets import PRIVATE_METHODS, reach_tokens

peft = pytest.importorskip("peft")

IDS = torch.randint(0, 97, (3, 16), generator=torch.Generator().manual_seed(0))


def adopted(family):
    model = make_host(family)
    adopt(model)
    return model


MODELS = {
    "native": make_tiny,
    "gpt2": lambda: adopted("gpt2"),
    "gpt_neox": lambda: adopted("gpt_neox"),
    "llama": lambda: adopted("llama"),
}
ALL_MODELS = {**MODELS, **{family: partial(adopted, family) for family in ("phi", "bert", "distilbert")}}


def adapted_tokens(model) -> set[str]:
    """The tokens that have an adapter, by their names in the model without it."""
    found = set()
    for name, module in model.get_base_model().named_modules():
        if type(module).__name__ == "ParamWrapper":
            found.add(f"{name.replace('.base_layer', '')}.{module.parameter_name}")
    return found


def tokens_of(model, *ends: str) -> set[str]:
    layers = [name for name, _ in pattention_layers(model) if name.endswith(ends)]
    assert layers
    return {f"{name}.{tokens}" for name in layers for tokens in ("key_tokens", "value_tokens")}


def lora(model, **settings):
    return peft.get_peft_model(model, peft.LoraConfig(**{"r": 2, "task_type": "CAUSAL_LM", **settings}))


@pytest.mark.parametrize("family", MODELS)
def test_all_linear_means_every_pattention_and_every_linear(family):
    model = MODELS[family]()
    expected = tokens_of(model, "")
    head = model.get_output_embeddings()
    linears = sum(type(each).__name__ in ("Linear", "Conv1D") and each is not head for each in model.modules())
    with_adapter = lora(model, target_modules="all-linear")
    assert adapted_tokens(with_adapter) == expected
    found = [each for each in with_adapter.modules() if isinstance(each, peft.tuners.lora.Linear)]
    assert len(found) == linears


@pytest.mark.parametrize(
    ("family", "settings", "ends"),
    [
        ("native", {}, [""]),
        ("native", {"target_modules": ["query", "ffn"]}, ["query", "ffn"]),
        ("native", {"target_modules": r".*\.1\.ffn"}, ["1.ffn"]),
        ("native", {"target_modules": "all-linear", "exclude_modules": ["ffn"]}, ["query", "key", "value", "out"]),
        ("native", {"target_modules": ["ffn"], "layers_to_transform": [1]}, ["1.ffn"]),
        ("gpt2", {}, ["c_attn"]),
        ("gpt_neox", {}, ["query_key_value"]),
        ("gpt_neox", {"target_modules": ["query_key_value", "attention.dense"]}, ["query_key_value"]),
        ("llama", {}, ["q_proj", "v_proj"]),
        # The host's second linear is an identity now; the layer in place of the first does its work.
        ("gpt2", {"target_modules": ["c_attn", "c_proj"]}, ["c_attn", "c_fc"]),
        ("gpt2", {"target_modules": ["mlp.c_proj"]}, ["c_fc"]),
        (
            "gpt_neox",
            {"target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]},
            ["query_key_value", "dense_h_to_4h"],
        ),
        ("phi", {"target_modules": ["q_proj", "v_proj", "fc1", "fc2"]}, ["q_proj", "v_proj", "fc1"]),
        ("bert", {"target_modules": ["query", "dense"], "task_type": None}, ["query", "intermediate.dense"]),
        ("distilbert", {"target_modules": ["q_lin", "lin2"], "task_type": None}, ["q_lin", "lin1"]),
    ],
)
def test_names_and_the_default(family, settings, ends):
    """The default is peft's own for the host's family, and everything in ours."""
    model = ALL_MODELS[family]()
    expected = tokens_of(model, *ends)
    assert adapted_tokens(lora(model, **settings)) == expected


def test_tokens_by_name_alone():
    """The line of docs/adopting.md, with the default parts: peft's default modules are not added."""
    with_adapter = lora(MODELS["gpt_neox"](), target_parameters=["mlp.dense_h_to_4h.value_tokens"])
    expected = {f"gpt_neox.layers.{i}.mlp.dense_h_to_4h.value_tokens" for i in range(2)}
    assert adapted_tokens(with_adapter) == expected


@pytest.mark.parametrize("family", MODELS)
def test_trained_saved_loaded_merged_and_grown(family, tmp_path):
    model = lora(MODELS[family](), target_modules="all-linear").train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(10):
        losses.append(model(input_ids=IDS, labels=IDS).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    model.eval()
    expected = model(input_ids=IDS).logits
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(MODELS[family](), tmp_path).eval()
    torch.testing.assert_close(again(input_ids=IDS).logits, expected)
    merged = again.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(BadRequestError, match="has an adapter on its tokens; merge it first"):
        grow(model.get_base_model(), 2)
    bigger = grow(merged, 2, method="split")
    torch.testing.assert_close(bigger(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # peft compares them with modules only
def test_ranks_and_alphas_of_layers_hold_for_their_tokens(tmp_path):
    settings = {"target_modules": ["query", "ffn"], "rank_pattern": {"ffn": 5}, "alpha_pattern": {r"0\.ffn": 10}}
    model = lora(make_tiny(), lora_alpha=2, **settings)
    model.save_pretrained(tmp_path)
    for found in (model, peft.PeftModel.from_pretrained(make_tiny(), tmp_path)):
        wrappers = {name: each for name, each in found.named_modules() if type(each).__name__ == "ParamWrapper"}
        ranks = {name: each.r["default"] for name, each in wrappers.items()}
        assert {rank for name, rank in ranks.items() if "ffn" in name} == {5}
        assert {rank for name, rank in ranks.items() if "query" in name} == {2}
        assert {each.lora_alpha["default"] for name, each in wrappers.items() if "0.ffn" in name} == {10}
        assert {each.lora_alpha["default"] for name, each in wrappers.items() if "0.ffn" not in name} == {2}


def test_a_second_adapter():
    model = lora(make_tiny(), target_modules=["query"])
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["query"], task_type="CAUSAL_LM"))
    model.set_adapter("other")
    assert adapted_tokens(model) == tokens_of(make_tiny(), "query")
    assert model(input_ids=IDS).logits.isfinite().all()


@pytest.mark.parametrize("method", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens_train(method):
    config = getattr(peft, method)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(make_tiny(), config)
    model(input_ids=IDS, labels=IDS).loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained
    assert all(p.grad.ne(0).any() for p in trained)
    assert model.generate(input_ids=IDS, max_new_tokens=3, do_sample=False).shape[0] == 3


def test_the_adapter_of_transformers_own_method_can_be_switched_off():
    model = make_tiny()
    plain = model(IDS).logits
    model.add_adapter(peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    assert not torch.allclose(model(IDS).logits, plain)
    model.disable_adapters()
    torch.testing.assert_close(model(IDS).logits, plain, rtol=0, atol=0)


def test_other_methods_reach_the_linear_layers_that_adoption_kept():
    config = peft.IA3Config(target_modules=["attention.dense"], feedforward_modules=[])
    model = peft.get_peft_model(MODELS["gpt_neox"](), config)
    found = [name for name, each in model.named_modules() if isinstance(each, peft.tuners.ia3.Linear)]
    assert [name.split(".")[-2:] for name in found] == [["attention", "dense"]] * 2


def test_a_classifier_keeps_its_head():
    model = TokenFormerForSequenceClassification(make_tiny(num_labels=3).config)
    with_adapter = lora(model, target_modules="all-linear", task_type="SEQ_CLS")
    assert adapted_tokens(with_adapter) == tokens_of(TokenFormerForSequenceClassification(model.config), "")
    assert with_adapter.base_model.model.score.modules_to_save.default.weight.requires_grad


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (peft.LoraConfig(lora_dropout=0.1), r"lora_dropout=0.1 does not work on parameter tokens .* set it to 0"),
        (peft.LoraConfig(use_dora=True), r"use_dora=True does not work on parameter tokens .* set it to False"),
        (peft.LoraConfig(init_lora_weights="pissa"), r"init_lora_weights='pissa' .* use True or 'gaussian'"),
        (peft.LoraConfig(target_parameters=["ffn.key_tokens"], lora_dropout=0.1), r"lora_dropout=0.1 .*ffn.key_tokens"),
        (peft.LoraConfig(target_parameters=["ffn.key_tokens"], init_lora_weights="pissa"), "init_lora_weights="),
        (peft.LoraConfig(alora_invocation_tokens=[1], task_type="CAUSAL_LM"), r"alora_invocation_tokens=\[1\] .* None"),
        (peft.IA3Config(target_modules=["query"], feedforward_modules=[]), "IA3 cannot adapt parameter tokens"),
        (peft.IA3Config(target_modules="all-linear", feedforward_modules=[]), "IA3 cannot adapt parameter tokens"),
        (peft.LoHaConfig(target_modules=["ffn"]), "LOHA cannot adapt parameter tokens"),
    ],
)
def test_what_cannot_work_is_one_line_and_changes_nothing(config, message):
    model = make_tiny()
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(BadRequestError, match=message) as error:
        peft.get_peft_model(model, config)
    assert "\n" not in str(error.value)
    assert [name for name, _ in model.named_modules()] == names


@pytest.mark.parametrize("order", ["tokenformer, peft", pytest.param("peft, tokenformer", marks=pytest.mark.slow)])
def test_the_order_of_imports_does_not_matter(order):
    code = f"import {order}\n"
    code += "model = tokenformer.TokenFormerForCausalLM(tokenformer.TokenFormerConfig.preset('tiny'))\n"
    code += "print(peft.get_peft_model(model, peft.LoraConfig(r=2)).get_nb_trainable_parameters()[0])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "6656\n", run.stderr


def test_a_peft_that_cannot_adapt_parameters_is_left_alone():
    class BaseTuner:
        def inject_adapter(self, model, adapter_name):
            """As peft 0.15 has it."""

    before = dict(vars(BaseTuner))
    reach_tokens(SimpleNamespace(BaseTuner=BaseTuner))
    assert dict(vars(BaseTuner)) == before
    assert all(hasattr(peft.tuners.tuners_utils.BaseTuner, method) for method in PRIVATE_METHODS)


def test_other_models_are_left_to_peft():
    model = lora(make_host("gpt_neox"), lora_dropout=0.1, target_modules="all-linear")
    assert not adapted_tokens(model)
    assert model.peft_config["default"].target_parameters is None
