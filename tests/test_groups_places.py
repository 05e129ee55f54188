"""Where groups of tokens go: beside the feed-forward networks of any family, and beside nothing that is not called."""

import pytest
import torch
import transformers
from accelerate import cpu_offload
from torch import nn

from conftest import make_tiny, relative_error
from test_groups import GROUPED, IDS, TEXT, learnt, logits, make
from tokenformer import (
    BadRequestError,
    add_tokens,
    adopt,
    load_tokens,
    remove_tokens,
    replace_linears,
    save_tokens,
    token_groups,
    tokens_by_row,
    use_tokens,
)
from tokenformer.groups.places import device_of, places

TRANSLATION = {"vocab_size": 64, "d_model": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TWO_STACKS = {
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")},
}
EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
# By model type: what the configuration needs, and what a feed-forward network is called there, in which stacks.
FAMILIES = {
    "opt": ({**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}, ["decoder.layers.{}.fc2"]),
    "electra": ({**TEXT, "embedding_size": 32}, ["encoder.layer.{}.output.dense"]),
    "deberta-v2": (TEXT, ["encoder.layer.{}.output.dense"]),
    "whisper": (
        {**TRANSLATION, **TWO_STACKS, "num_mel_bins": 8, "max_source_positions": 8, "decoder_start_token_id": 1},
        ["encoder.layers.{}.fc2", "decoder.layers.{}.fc2"],
    ),
    "t5": (
        {**TRANSLATION, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        ["encoder.block.{}.layer.1.DenseReluDense", "decoder.block.{}.layer.2.DenseReluDense"],
    ),
    "mixtral": (EXPERTS, ["layers.{}.mlp"]),
    "qwen3_moe": ({**EXPERTS, "moe_intermediate_size": 16}, ["layers.{}.mlp"]),
    "gpt_oss": (EXPERTS, ["layers.{}.mlp"]),
    "granitemoe": (EXPERTS, ["layers.{}.block_sparse_moe"]),
}
SOUND = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0))


def of_family(family):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family][0])
    return transformers.AutoModel.from_config(config).eval()


def hidden_states(model, **kwargs):
    inputs = {"input_ids": IDS, **({"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {})}
    if model.main_input_name == "input_features":
        inputs = {"input_features": SOUND, "decoder_input_ids": IDS}
    with torch.no_grad():
        return model(**inputs, **kwargs)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_feed_forward_network_of_any_family(family):
    model = of_family(family)
    expected = [name.format(i) for name in FAMILIES[family][1] for i in range(2)]
    before = hidden_states(model)
    for where in ("mlp", "all"):
        add_tokens(model, "law", 4, where=where)
        layers = token_groups(model)[0].layers
        assert set(layers) >= set(expected) if where == "all" else sorted(layers) == sorted(expected)
        assert any("att" in name.lower() for name in layers) == (where == "all")
        assert torch.equal(hidden_states(model), before)
        on = hidden_states(learnt(model, "law"))
        assert relative_error(on, before) > 1e-4
        mixed = hidden_states(model, adapter_names=["law", "__base__", "law"])
        assert relative_error(mixed[[0, 2]], on[[0, 2]]) < 1e-5
        assert relative_error(mixed[1], before[1]) < 1e-5
        assert torch.equal(hidden_states(use_tokens(model)), before)
        remove_tokens(model, "law")


def test_a_group_adds_to_the_branch_of_its_network():
    """Beside fc2 of OPT, the group's output is part of what the block adds to the stream."""
    model = of_family("opt")
    add_tokens(model, "law", 4, where="mlp")
    learnt(model, "law")
    block = model.decoder.layers[0]
    x = torch.randn(1, 5, 64)
    added = block.fc2(x) - nn.functional.linear(x, block.fc2.weight, block.fc2.bias)
    assert relative_error(added, block.fc2.token_groups(x)) < 1e-5


def test_an_adopted_bert_has_one_pattention_for_both_linears():
    model = adopt(make("bert"), ["ffn"])
    assert list(places(model, "mlp")) == [f"bert.encoder.layer.{i}.intermediate.dense" for i in range(2)]


def test_torch_s_own_layers():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(3, 5, 8)
    before = model(x)
    add_tokens(model, "law", 3, where="mlp")
    assert list(token_groups(model)[0].layers) == ["layers.0.linear2", "layers.1.linear2"]
    assert relative_error(model(x), before) < 1e-5
    assert relative_error(learnt(model, "law")(x), before) > 1e-3
    with tokens_by_row(model, ["__base__", "law", "law"]):
        assert relative_error(model(x)[0], before[0]) < 1e-5


def of_state_spaces():
    return transformers.MambaModel(transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64))


@pytest.mark.parametrize(
    ("make_model", "where", "message"),
    [
        (
            lambda: make("llama"),
            "model.layers",
            "'model.layers' is a ModuleList, which is never called; give one of ffn",
        ),
        (lambda: make("llama"), "model", r"'model' is a whole model \(LlamaModel\); give one of ffn"),
        (lambda: make("bert"), "bert.encoder", "'bert.encoder' holds whole blocks"),
        (lambda: make("bert"), "bert.embeddings", "'bert.embeddings' holds an embedding, which takes ids"),
        (
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2),
            "layers.0.self_attn.out_proj",
            "is inside nn.MultiheadAttention, which reads its weight without calling it",
        ),
        (
            of_state_spaces,
            "all",
            "where='all' was given, and no layers were recognised as a feed-forward network in a M",
        ),
        (make_tiny, 3, "where=3 was given; give one of ffn"),
        (make_tiny, [], r"where=\[\] was given; give one of ffn"),
        (make_tiny, ["ffn", 3], r"where=\['ffn', 3\] was given"),
    ],
)
def test_what_is_not_called_with_rows_is_refused(make_model, where, message):
    model = make_model()
    with pytest.raises(BadRequestError, match=message) as error:
        places(model, where)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: replace_linears(model, "*dense_4h_to_h"),
            "token groups stand beside '.*0.mlp.dense_4h_to_h', and",
        ),
        (adopt, "adopt: the model has token groups, which were learnt beside the layers that adoption replaces"),
    ],
)
def test_layers_with_groups_are_not_replaced(change, message):
    model = learnt(add_tokens(make("gpt_neox"), "law", 4, where="*dense_4h_to_h"), "law")
    before = logits(model)
    with pytest.raises(BadRequestError, match=message) as error:
        change(model)
    assert "\n" not in str(error.value)
    assert torch.equal(logits(model), before)
    change(remove_tokens(model, "law"))


class BuffersOnly(nn.Module):
    """A linear layer as GPTQ and AWQ have it: nothing of it is a parameter."""

    def __init__(self, linear, device="cpu"):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.qweight = nn.Buffer((linear.weight.detach() * 64).round().to(torch.int8).to(device))

    def forward(self, x):
        return x @ (self.qweight.to(x.dtype) / 64).mT


class TestDevice:
    def test_of_what_has_buffers_only(self):
        assert device_of(BuffersOnly(nn.Linear(4, 3), "meta")) == torch.device("meta")
        assert device_of(nn.Linear(4, 3)) == torch.device("cpu")
        assert device_of(nn.GELU()) is None

    def test_of_what_accelerate_brings_there(self, tmp_path):
        folder = save_tokens(learnt(add_tokens(make("llama"), "law", 4), "law"), "law", tmp_path / "law")
        expected = logits(load_tokens(make("llama"), folder))
        model = cpu_offload(make("llama"), execution_device="cpu")
        assert {p.device.type for p in model.parameters()} == {"meta"}
        load_tokens(model, folder)
        assert torch.equal(logits(model), expected)
