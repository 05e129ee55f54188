"""`tokenformer export`: the file computes what the model computes, in a process without tokenformer and torch."""

import re
from pathlib import Path

import pytest
import torch

import tokenformer
from command import ended, run
from conftest import make_tiny, make_tiny_vision
from exported import SMALL, run_readme, said_by, sure_of_itself
from hosts import make_host
from tokenformer import BadRequestError, add_tokens, adopt, tokens_by_row, use_tokens
from tokenformer.errors import BadResultError
from tokenformer.exporting import compare, export_folder, export_model, onnx_file
from tokenformer.exporting.graph import graph_of

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

GONE = ("tokenformer", "transformers", "torch")


def test_the_command_writes_a_folder_that_runs_alone(tmp_path):
    model = sure_of_itself(make_tiny(**SMALL))
    model.save_pretrained(tmp_path / "model")
    result = run("export", tmp_path / "model", tmp_path / "out", "--int8")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "difference" in result.stdout
    assert "in 8 bits" in result.stdout
    assert "auto_map" not in (tmp_path / "out" / "config.json").read_text()
    assert run_readme(tmp_path / "out", GONE)

    exported = export_folder(tmp_path / "model", tmp_path / "whole")
    assert exported.difference < 1e-5
    assert set(exported.files) == {"README.md", "config.json", "model.onnx", "tokenizer.json", "tokenizer_config.json"}
    assert exported.size > (tmp_path / "out" / "model.onnx").stat().st_size
    assert run_readme(tmp_path / "whole", GONE) == said_by(model)


def test_the_example_of_the_page(tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "inference.md"
    (example,) = re.findall(r"```python\n(import onnxruntime.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(example, {})


HOSTS = {
    "gpt2": {},
    "mistral": {"sliding_window": 3},  # the cache is exported whole, and the mask lets the window through
    "bert": {},
    "vit": {},
}


@pytest.mark.parametrize("family", HOSTS)
def test_adopted_models(tmp_path, family):
    model = adopt(make_host(family, num_hidden_layers=1, **HOSTS[family]))
    assert export_model(model, tmp_path / "out").difference < 1e-4
    shape = run_readme(tmp_path / "out", GONE)
    assert shape.strip()


def test_groups_that_are_on_are_part_of_it(tmp_path):
    model = make_tiny(**SMALL)
    for name in ("law", "code"):
        add_tokens(model, name, 3, where="all")
    for name, parameter in model.named_parameters():
        if "token_groups" in name:
            parameter.data.normal_()
    with tokens_by_row(model, ["law", "code"]), pytest.raises(BadRequestError, match="token groups of its own"):
        export_model(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    use_tokens(model, "law")
    assert export_model(model, tmp_path / "out").difference < 1e-4
    file, graph = onnx_file.run_onnx(tmp_path / "out" / "model.onnx"), graph_of(model)
    assert compare.largest_difference(graph, file) < 1e-4
    use_tokens(model)
    assert compare.largest_difference(graph, file) > 1e-2


def test_images(tmp_path):
    make_tiny_vision().save_pretrained(tmp_path / "model")
    exported = export_folder(tmp_path / "model", tmp_path / "out")
    assert exported.difference < 1e-4
    assert "preprocessor_config.json" in exported.files
    assert run_readme(tmp_path / "out", GONE).startswith("[")


def test_half_precision(tmp_path):
    """ONNX Runtime has no bf16 on CPUs: a folder is exported in fp32, which holds the same numbers."""
    model = make_tiny(**SMALL).bfloat16()
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(BadRequestError, match=r"export model.float\(\)"):
        export_model(model, tmp_path / "out")
    exported = export_folder(tmp_path / "model", tmp_path / "out")
    assert exported.dtype == torch.float32
    assert exported.difference < 1e-4


def test_a_wrong_file_is_not_left_behind(tmp_path, monkeypatch):
    model, right = make_tiny(**SMALL), compare.relative_difference
    monkeypatch.setattr(compare, "relative_difference", lambda *pair: right(*pair) + 0.01)
    with pytest.raises(BadResultError, match=r"differs from the model by 0\.01 of the largest entry"):
        export_model(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_possible_is_said_before_weights_are_read(tmp_path):
    make_tiny(**SMALL).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"broken")
    model, out = tmp_path / "model", tmp_path / "out"
    ended(run("export", model, out, "--to", "onx"), 2, "did you mean 'onnx'?")
    ended(run("export", model, out, "--to", "aoti", "--int8"), 2, "int8 is ONNX Runtime's")
    ended(run("export", model, model), 2, "exists already")
    ended(run("export", model, model / "inside"), 2, "is inside")
    ended(run("export", tmp_path / "modle", out), 2, "modle does not exist")
    ended(run("export", model, out), 1, "the weights in", "cannot be read")
    assert not out.exists()


@pytest.mark.skipif(not hasattr(tokenformer, "quantize"), reason="nothing quantises tokens yet")
def test_a_quantised_model(tmp_path):
    """Its plain form is made of torch's ordinary operators."""
    quantised = tokenformer.quantize(make_tiny(**SMALL), "int8")
    assert export_model(quantised, tmp_path / "out").difference < 1e-4
