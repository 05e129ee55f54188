"""tokenformer.nn against torch.nn: where torch accepts a call, so do we, and masks mean the same."""

import inspect
import math
import pickle

import pytest
import torch
from torch import nn

import tokenformer.nn as tnn
from conftest import relative_error
from tokenformer import BadRequestError, grow

CAUSAL = nn.Transformer.generate_square_subsequent_mask(6)
PAIRS = [
    (tnn.TransformerEncoderLayer, nn.TransformerEncoderLayer),
    (tnn.TransformerDecoderLayer, nn.TransformerDecoderLayer),
    (tnn.MultiheadAttention, nn.MultiheadAttention),
]
DIFFERENT = {tnn.MultiheadAttention: {"bias"}}  # defaults that are not torch's


@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_the_arguments_are_torchs(ours, torchs):
    """Names and order; ours has more, by keyword only."""
    for method in ("__init__", "forward"):
        mine, theirs = (inspect.signature(getattr(c, method)).parameters for c in (ours, torchs))
        shared = [p for p in mine.values() if p.kind is not p.KEYWORD_ONLY]
        assert [p.name for p in shared] == list(theirs)
        different = {p.name for p in shared if p.default != theirs[p.name].default}
        assert different <= DIFFERENT.get(ours, {"activation"})


def equal_but_for_pattention(ours: nn.Module, theirs: nn.Module) -> None:
    """Make torch's layer compute what ours does: its projections are replaced by ours, called the same way."""
    for name in ("self_attn", "multihead_attn"):
        if hasattr(ours, name):
            getattr(theirs, name).forward = _torch_attention_over(getattr(ours, name))
    theirs.linear1, theirs.linear2, theirs.activation = ours.ffn, nn.Identity(), nn.Identity()
    for norm in ("norm1", "norm2", "norm3"):
        if hasattr(theirs, norm):
            getattr(theirs, norm).load_state_dict(getattr(ours, norm).state_dict())


def _torch_attention_over(ours: tnn.MultiheadAttention):
    """torch's own multi-head attention with identity projections, fed with our projected inputs."""
    d = ours.embed_dim
    plain = nn.MultiheadAttention(d, ours.num_heads, bias=False, batch_first=ours.batch_first)
    with torch.no_grad():
        plain.in_proj_weight.copy_(torch.eye(d).repeat(3, 1))
        plain.out_proj.weight.copy_(torch.eye(d))

    def forward(query, key, value, **kwargs):
        if kwargs.get("is_causal") and kwargs.get("attn_mask") is None:
            kwargs["attn_mask"] = CAUSAL  # torch wants the mask beside the hint
        attended, weights = plain(ours.query(query), ours.key(key), ours.value(value), **kwargs)
        return ours.out(attended), weights

    return forward


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("shape", ["batched", "unbatched"])
@pytest.mark.parametrize(
    "mask", ["none", "bool", "float", "per head", "padding", "both", "is_causal", "causal and padding"]
)
def test_the_encoder_layer_computes_what_torchs_would(norm_first, batch_first, shape, mask):
    ours = tnn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first, norm_first=norm_first).eval()
    theirs = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first, norm_first=norm_first).train()
    for module in theirs.modules():
        if isinstance(module, nn.Dropout):
            # In train mode torch does not leave for its fused path, which reads weights directly.
            module.p = 0.0
    equal_but_for_pattention(ours, theirs)
    x = torch.randn(6, 8) if shape == "unbatched" else torch.randn(*((3, 6) if batch_first else (6, 3)), 8)
    batch = () if shape == "unbatched" else (3,)
    padding = torch.zeros(*batch, 6, dtype=torch.bool)
    padding[..., 4:] = True
    arguments = {
        "none": {},
        "bool": {"src_mask": CAUSAL.isinf()},
        "float": {"src_mask": torch.randn(6, 6)},
        "per head": {"src_mask": torch.randn(2 * math.prod(batch), 6, 6)},
        "padding": {"src_key_padding_mask": padding},
        "both": {"src_mask": CAUSAL.isinf(), "src_key_padding_mask": padding},
        "is_causal": {"is_causal": True},
        "causal and padding": {"is_causal": True, "src_mask": CAUSAL.isinf(), "src_key_padding_mask": padding},
    }[mask]
    assert relative_error(ours(x, **arguments), theirs(x, **arguments)) < 1e-5


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mask", ["none", "causal", "memory", "padding"])
def test_the_decoder_layer_computes_what_torchs_would(norm_first, mask):
    ours = tnn.TransformerDecoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first).eval()
    theirs = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first).eval()
    equal_but_for_pattention(ours, theirs)
    x, memory = torch.randn(3, 6, 8), torch.randn(3, 5, 8)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[:, 3:] = True
    arguments = {
        "none": {},
        "causal": {"tgt_is_causal": True},
        "memory": {"memory_mask": torch.randn(6, 5)},
        "padding": {"memory_key_padding_mask": padding, "tgt_mask": CAUSAL},
    }[mask]
    assert relative_error(ours(x, memory, **arguments), theirs(x, memory, **arguments)) < 1e-5


@pytest.mark.parametrize("mode", [nn.Module.train, nn.Module.eval])
def test_inside_torchs_encoder_and_decoder(mode):
    encoder = nn.TransformerEncoder(
        tnn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    )
    decoder = nn.TransformerDecoder(tnn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 2)
    mode(encoder), mode(decoder)
    x = torch.randn(3, 6, 8)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[:, 5] = True
    memory = encoder(x, mask=CAUSAL.isinf(), src_key_padding_mask=padding, is_causal=True)
    out = decoder(x, memory, tgt_mask=CAUSAL, memory_key_padding_mask=padding)
    assert out.shape == x.shape
    assert out.isfinite().all()
    if mode is nn.Module.train:
        out.sum().backward()
        assert all(p.grad is not None for p in (*encoder.parameters(), *decoder.parameters()))


def test_causal_means_causal():
    layer = tnn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(1, 6, 8)
    changed = x.clone()
    changed[:, 4:] = 9.0
    a, b = layer(x, is_causal=True), layer(changed, is_causal=True)
    assert torch.equal(a[:, :4], b[:, :4])
    assert not torch.equal(a[:, 4:], b[:, 4:])


def test_attention_weights():
    attention = tnn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(3, 6, 8)
    out, weights = attention(x, x, x)
    fast, none = attention(x, x, x, need_weights=False)
    assert none is None
    torch.testing.assert_close(out, fast)
    assert weights.shape == (3, 6, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 6))
    assert attention(x, x, x, average_attn_weights=False)[1].shape == (3, 2, 6, 6)


@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
@pytest.mark.parametrize("extra", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "bias": True}])
def test_keys_and_values_that_no_input_stands_behind(extra, mask):
    ours = tnn.MultiheadAttention(8, 2, batch_first=True, **extra).eval()
    assert (ours.query.bias is not None) == ("bias" in extra)
    plain = nn.MultiheadAttention(8, 2, batch_first=True, **{**extra, "bias": False}).eval()
    with torch.no_grad():
        plain.in_proj_weight.copy_(torch.eye(8).repeat(3, 1))
        plain.out_proj.weight.copy_(torch.eye(8))
        for layer in (ours.query, ours.key, ours.value, ours.out):
            if layer.bias is not None:
                layer.bias.normal_()
    plain.bias_k, plain.bias_v = ours.bias_k, ours.bias_v
    x = torch.randn(3, 6, 8)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[:, 4:] = True
    masks = {"none": {}, "causal": {"attn_mask": CAUSAL.isinf()}, "padding": {"key_padding_mask": padding}}[mask]
    attended, weights = plain(ours.query(x), ours.key(x), ours.value(x), **masks)
    for need_weights in (True, False):
        out, mine = ours(x, x, x, need_weights=need_weights, **masks)
        torch.testing.assert_close(out, ours.out(attended))
        if need_weights:
            torch.testing.assert_close(mine, weights)


def test_other_widths_for_keys_and_values():
    attention = tnn.MultiheadAttention(8, 2, kdim=5, vdim=3, batch_first=True)
    out, _ = attention(torch.randn(2, 6, 8), torch.randn(2, 4, 5), torch.randn(2, 4, 3))
    assert out.shape == (2, 6, 8)


def test_layers_grow_pickle_and_cast():
    layer = tnn.TransformerDecoderLayer(8, 2, 16, batch_first=True, num_tokens=12, dtype=torch.float64).eval()
    x, memory = torch.randn(3, 6, 8, dtype=torch.float64), torch.randn(3, 5, 8, dtype=torch.float64)
    for method in ("zero", "split"):
        grown = grow(layer, 2, method=method)
        assert grown.ffn.num_tokens == 32
        assert grown.multihead_attn.query.num_tokens == 24
        assert relative_error(grown(x, memory), layer(x, memory)) < 1e-10
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x, memory), layer(x, memory))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tnn.MultiheadAttention(10, 3), r"embed_dim=10 is not divisible by num_heads=3"),
        (lambda: tnn.TransformerEncoderLayer(8, 2, activation="relu"), r"activation='relu' was given; .* GeLU"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(BadRequestError, match=message):
        make()
