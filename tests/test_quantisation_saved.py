"""Quantised models are saved, loaded, quantised as they load, and handled by the command line."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments

import tokenformer
from command import ended, run
from conftest import make_tiny, make_tiny_vision, relative_error
from hosts import make_host
from pages import scripts
from tokenformer import TokenFormerQuantConfig, adopt, dequantize, grow, pattention_layers, quantize
from tokenformer.models.loading import empty_model, read_config, read_model
from tokenformer.pattention.quantised import BITS
from tokenformer.pattention.quantised_linear import plainly

IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
SMALL = {"hidden_size": 32, "qkv_tokens": 32, "out_tokens": 32, "ffn_tokens": 64}


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("make", [lambda: make_tiny(**SMALL), lambda: adopt(make_host("gpt2"))])
@pytest.mark.parametrize("bits", BITS)
def test_a_folder_holds_integers_and_loads_as_it_was(tmp_path, make, bits):
    model = quantize(make().eval(), bits)
    for folder in (tmp_path / "at once", tmp_path / "grown"):
        model.save_pretrained(folder)
        saved = load_file(folder / "model.safetensors")
        codes = [tensor for name, tensor in saved.items() if name.endswith("_codes")]
        assert codes
        assert {tensor.dtype for tensor in codes} == {torch.int8 if bits == "int8" else torch.uint8}
        settings = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert (settings["quant_method"], settings["dtype"]) == ("tokenformer_tokens", bits)
        for loaded in (AutoModelForCausalLM.from_pretrained(folder), read_model(folder)):
            assert torch.equal(logits(loaded), logits(model))
        assert empty_model(read_config(folder)).num_parameters() == model.num_parameters()
        grow(model, 2, inplace=True)
    dequantize(loaded).save_pretrained(tmp_path / "whole")
    assert "quantization_config" not in json.loads((tmp_path / "whole" / "config.json").read_text())
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "whole")), logits(loaded))


@pytest.mark.parametrize("bits", BITS)
def test_quantised_while_it_loads(tmp_path, bits, recwarn):
    model = make_tiny(**SMALL)
    model.save_pretrained(tmp_path / "fp32")
    quantize(model, bits)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", quantization_config=TokenFormerQuantConfig(bits))
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "integers")
    headless = AutoModel.from_pretrained(tmp_path / "integers")
    assert headless.layers[0].ffn.num_quantised == 64
    assert not any("parameter tokens" in str(warning.message) for warning in recwarn)


def test_a_vision_model_and_token_groups_are_saved_too(tmp_path):
    model = quantize(grow(make_tiny_vision(), 2, as_group="more"))
    model.save_pretrained(tmp_path / "vision")
    loaded = tokenformer.TokenFormerForImageClassification.from_pretrained(tmp_path / "vision")
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded(pixels).logits, model(pixels).logits)


def test_a_record_that_does_not_fit_is_one_line(tmp_path):
    quantize(make_tiny(**SMALL)).save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    settings = json.loads(path.read_text())
    settings["quantization_config"]["layers"]["layers.0.ffn"] = 65
    path.write_text(json.dumps(settings))
    with pytest.raises(tokenformer.BadFileError, match=r"65 quantised tokens in layers\.0\.ffn"):
        read_model(tmp_path / "model")


def test_transformers_trainer_trains_what_is_not_quantised(tmp_path):
    model = grow(quantize(make_tiny(**SMALL)), 2)
    codes = model.model.layers[0].ffn.quantised.key_codes.clone()
    new = model.model.layers[0].ffn.key_tokens.detach().clone()
    data = [{"input_ids": row, "labels": row} for row in IDS]
    arguments = TrainingArguments(
        tmp_path / "run", max_steps=2, learning_rate=1e-2, use_cpu=True, report_to=[], save_strategy="no"
    )
    Trainer(model, arguments, train_dataset=data).train()
    layer = model.model.layers[0].ffn
    assert torch.equal(layer.quantised.key_codes, codes)
    assert not torch.equal(layer.key_tokens, new)


@pytest.fixture
def source(tmp_path):
    make_tiny(**SMALL, max_position_embeddings=32).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("A text that has some words in it, and then é again. " * 20)
    return tmp_path / "model"


def test_the_command(tmp_path, source):
    result = run("quantize", source, tmp_path / "int8", "--to", "int8", "--text", tmp_path / "text.txt")
    assert (result.exit_code, result.stderr) == (0, "")
    before, after, ratio = (line.split() for line in result.stdout.splitlines()[2:5])
    assert (before[0], after[0], ratio[0]) == ("before", "after", "ratio")
    assert 0.25 < float(ratio[1]) < 0.29
    assert abs(float(ratio[3]) - 1) < 0.05
    tokens = sum(layer.num_tokens for _, layer in pattention_layers(read_model(source)))
    assert f"int8: {tokens:,} tokens are int8" in run("info", tmp_path / "int8").stdout.replace("\n", "")
    assert run("eval", tmp_path / "int8", "--text", tmp_path / "text.txt").exit_code == 0
    assert run("generate", tmp_path / "int8", "A text", "--max-new-tokens", 3).exit_code == 0
    assert run("grow", tmp_path / "int8", tmp_path / "grown", "--factor", 2).exit_code == 0
    assert read_model(tmp_path / "grown").config.ffn_tokens == 128


def test_the_command_refuses_in_one_line(tmp_path, source):
    ended(run("quantize", source, tmp_path / "out", "--to", "int5"), 2, "int8 or int4")
    ended(run("quantize", source, source), 2, "exists")
    ended(run("quantize", source, tmp_path / "out", "--text", tmp_path / "none.txt"), 2, "none.txt")
    run("quantize", source, tmp_path / "int4", "--to", "int4")
    ended(run("quantize", tmp_path / "int4", tmp_path / "out"), 2, "quantised already")
    ended(run("grow", tmp_path / "int4", tmp_path / "out", "--depth", 4), 2, "grow in depth first")
    ended(
        run("shrink", tmp_path / "int4", tmp_path / "out", "--factor", 0.5, "--text", tmp_path / "text.txt"),
        2,
        "shrink first",
    )
    assert not (tmp_path / "out").exists()


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for script in scripts("quantisation.md").values():
        exec(script, {})


@pytest.mark.parametrize("bits", BITS)
def test_exported_and_compiled(bits):
    """Both hold the plain form."""
    model = grow(quantize(make_tiny(**SMALL), bits), 2)
    with torch.no_grad():
        expected = logits(model)
        program = torch.export.export(model, (), {"input_ids": IDS, "use_cache": False})
        exported = program.module()(input_ids=IDS, use_cache=False).logits
    assert relative_error(exported, expected) < 1e-3
    layer = model.model.layers[0].ffn
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 20, 32, requires_grad=True)
    with plainly(model):
        (expected,) = torch.autograd.grad(layer(x).sum(), x)
    (gradient,) = torch.autograd.grad(compiled(x).sum(), x)
    assert relative_error(gradient, expected) < 1e-4
