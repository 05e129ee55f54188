"""ONNX, by torch's exporter: prompts of other lengths than the exported one, computed by onnxruntime."""

import pytest
import torch

from conftest import make_tiny, relative_error
from hosts import make_host
from tokenformer import adopt

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")


class Logits(torch.nn.Module):
    """Only tensors enter and leave a graph."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids, use_cache=False).logits


@pytest.mark.parametrize("make", [make_tiny, lambda: adopt(make_host("gpt2"))], ids=["native", "adopted"])
def test_onnx_computes_the_same(tmp_path, make):
    model, path = make(), tmp_path / "model.onnx"
    ids = torch.randint(97, (2, 12))
    length = {"input_ids": {1: torch.export.Dim("length", min=2, max=40)}}
    torch.onnx.export(Logits(model).eval(), (ids,), path, dynamo=True, dynamic_shapes=length)
    longer = torch.randint(97, (2, 30))
    (logits,) = onnxruntime.InferenceSession(path).run(None, {"input_ids": longer.numpy()})
    assert relative_error(torch.from_numpy(logits), model(longer).logits) < 1e-5
