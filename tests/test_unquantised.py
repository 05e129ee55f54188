"""torch's own quantisation reaches linear layers; what it leaves of a TokenFormer, it says."""

import pytest
import torch
from torch import nn

from conftest import make_tiny
from hosts import make_host
from tokenformer import adopt

LEFT = r"(\d+) of \1 tensors of parameter tokens \([\d,]+ numbers\) as they were\. .*quantize.* docs/quantisation\.md"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [make_tiny, lambda: adopt(make_host("gpt2"))], ids=["native", "adopted"])
def test_dynamic_quantisation_says_what_it_left(make):
    with pytest.warns(UserWarning, match=f"^torch.ao.quantization quantises .* it left {LEFT}") as told:
        torch.ao.quantization.quantize_dynamic(make(), {nn.Linear}, dtype=torch.qint8)
    assert sum("parameter tokens" in str(warning.message) for warning in told) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models_without_tokens_are_quantised_in_silence(recwarn):
    torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear}, dtype=torch.qint8)
    assert not any("parameter tokens" in str(warning.message) for warning in recwarn)
