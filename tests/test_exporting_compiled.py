"""`tokenformer export --to aoti`, which needs no package but torch; tests/integrations has ONNX."""

import pytest
import torch

from command import ended, run
from conftest import make_tiny, make_tiny_vision, relative_error
from exported import SMALL, run_readme, said_by, sure_of_itself
from hosts import make_host
from tokenformer import adopt
from tokenformer.exporting import export_folder
from tokenformer.exporting.compare import largest_difference
from tokenformer.exporting.graph import graph_of

MODELS = {"native": make_tiny, "images": make_tiny_vision} | {
    name: lambda name=name: adopt(make_host(name)) for name in ("gpt2", "qwen3", "bert")
}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_the_function_that_is_exported_is_the_model(name):
    """Prompts with padding in a batch, and a token behind each, against the model called once with all of it."""
    model = MODELS[name]()
    graph = graph_of(model)
    for call, counts in graph.comparisons():
        out = graph.module(**call)["logits"]
        if name == "images":
            assert torch.equal(out, model(**call).logits)
            continue
        for row, kept in enumerate(counts):
            if graph.cache is None and not kept.all():
                continue  # BERT's positions count padding
            alone = call["input_ids"][row : row + 1, kept]
            assert relative_error(out[row][kept], model(alone).logits[0]) < 1e-5
            if graph.cache is not None:
                step = graph.next_step(call, graph.module(**call)["present"])
                longer = torch.cat([alone, step["input_ids"][row : row + 1]], 1)
                assert relative_error(graph.module(**step)["logits"][row], model(longer).logits[0, -1:]) < 1e-5
    assert largest_difference(graph, lambda inputs: graph.module(**inputs)) == 0


def test_without_a_compiler(tmp_path, monkeypatch):
    make_tiny(**SMALL).save_pretrained(tmp_path / "model")
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    ended(run("export", tmp_path / "model", tmp_path / "out", "--to", "aoti"), 2, "install g++")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow  # a compiler runs for a minute
def test_a_compiled_package(tmp_path):
    """It runs with torch alone, at sizes that it was not compiled with, and says what the model says."""
    model = sure_of_itself(make_tiny(**SMALL))
    model.save_pretrained(tmp_path / "model")
    exported = export_folder(tmp_path / "model", tmp_path / "out", "aoti")
    assert exported.difference < 1e-4
    assert "model.pt2" in exported.files
    assert run_readme(tmp_path / "out", ("tokenformer", "transformers", "onnxruntime")) == said_by(model)
