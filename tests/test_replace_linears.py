"""replace_linears on models that are not ours: chosen layers only, same scale, and no half-done surgery."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPTNeoXConfig, GPTNeoXForCausalLM

from tokenformer import BadRequestError, Pattention, grow, pattention_layers, replace_linears


def mlp():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def names(model):
    return [name for name, _ in pattention_layers(model)]


def test_by_name_pattern_and_predicate():
    assert names(replace_linears(mlp(), ["0"], 16)) == ["0"]
    assert names(replace_linears(mlp(), "*", 16)) == ["0", "2"]
    assert names(replace_linears(mlp(), lambda name, linear: linear.out_features == 4, 16)) == ["2"]


def test_number_of_tokens():
    assert replace_linears(mlp(), "0", 16)[0].num_tokens == 16
    assert replace_linears(mlp(), "0", lambda linear: linear.out_features * 2)[0].num_tokens == 64
    same_size = replace_linears(nn.Sequential(nn.Linear(96, 96, bias=False)), "0")[0]
    assert sum(p.numel() for p in same_size.parameters()) == 96 * 96


@pytest.mark.parametrize("kind", ["l2_gelu", "gelu_l2", "softmax"])
@pytest.mark.parametrize("std", [0.02, 0.3])
def test_outputs_keep_their_scale(kind, std):
    linear = nn.Linear(64, 64, bias=False)
    nn.init.normal_(linear.weight, std=std)
    x = torch.randn(2048, 64)
    before = linear(x).square().mean().sqrt()
    after = replace_linears(nn.Sequential(linear), "0", 256, kind=kind)(x).square().mean().sqrt()
    assert 0.8 < after / before < 1.25


def test_dtype_device_and_mode_are_kept():
    model = mlp().to(torch.bfloat16).eval()
    replace_linears(model, "*", 16)
    assert model[0].key_tokens.dtype == torch.bfloat16
    assert not model[0].training
    with torch.device("meta"):
        empty = mlp()
    assert replace_linears(empty, "*", 16)[0].key_tokens.is_meta


def test_a_linear_used_twice_stays_one_layer():
    model = mlp()
    model.append(model[0])
    replace_linears(model, "*", 16)
    assert model[3] is model[0]
    assert isinstance(model[0], Pattention)


def test_a_hugging_face_model_trains_and_grows_after_the_swap():
    config = GPTNeoXConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    model = replace_linears(GPTNeoXForCausalLM(config), "*.mlp.*", 48)
    assert len(names(model)) == 4
    ids = torch.randint(0, 64, (2, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    model.eval()
    torch.testing.assert_close(grow(model, 2)(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("model", "which", "message"),
    [
        (mlp(), "fc1", r"no nn.Linear is named 'fc1'; choose one of 0, 2"),
        (nn.ModuleDict({"proj_in": nn.Linear(4, 4)}), "proj_on", r"did you mean 'proj_in'\?"),
        (mlp(), [], r"no name was given"),
        (mlp(), lambda name, linear: False, r"chose none of the model's 2 linears"),
        (nn.Sequential(nn.ReLU()), "0", r"the model has no nn.Linear"),
        (nn.Linear(4, 4), "", r"the model itself is an nn.Linear"),
        (nn.TransformerEncoderLayer(8, 2), "self_attn.out_proj", r"inside nn.MultiheadAttention"),
    ],
)
def test_bad_requests_change_nothing(model, which, message):
    with pytest.raises(BadRequestError, match=message):
        replace_linears(model, which, 16)
    assert names(model) == []


def test_a_tied_output_layer_is_refused():
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=32))
    with pytest.raises(BadRequestError, match=r"'lm_head' shares its weight with 'transformer.wte.weight'"):
        replace_linears(model, "lm_head", 16)
