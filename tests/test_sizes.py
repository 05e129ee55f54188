"""Any size from one file: what a share of the tokens reads, computes and says; the heaviest tokens of a row alone."""

import copy
import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

from command import ended, run
from conftest import make_small, make_sorted, make_tiny_vision, relative_error
from tokenformer import (
    KINDS,
    BadRequestError,
    Pattention,
    TokenFormerForCausalLM,
    add_tokens,
    grow,
    merge_tokens,
    pattention_layers,
    quantize,
    rank_tokens,
    shrink,
    sort_tokens,
    ungrow,
)
from tokenformer.models import prefixes
from tokenformer.models.prefixes import prefix_tau
from tokenformer.pattention import fused, pattention

IDS = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["l2_gelu", "gelu_l2", "softmax"])
def test_a_share_of_a_sorted_folder_is_the_shrunk_model(tmp_path, kind):
    model = make_sorted(IDS, pattention_kind=kind)
    model.save_pretrained(tmp_path)
    for share in (0.125, 0.5):
        expected = shrink(model, share, data=[IDS])
        for kind_of_model in (TokenFormerForCausalLM, AutoModelForCausalLM):
            part = kind_of_model.from_pretrained(tmp_path, token_fraction=share)
            assert type(part) is TokenFormerForCausalLM
            assert part.config.num_tokens == expected.config.num_tokens
            assert part.config.growth_history[-1]["method"] == "shrink"
            # Taus are kept with six decimals.
            assert relative_error(part(IDS).logits, expected(IDS).logits) < 1e-4
    whole = TokenFormerForCausalLM.from_pretrained(tmp_path, token_fraction=1)
    assert torch.equal(whole(IDS).logits, model(IDS).logits)
    again = tmp_path / "again"
    TokenFormerForCausalLM.from_pretrained(tmp_path, token_fraction=0.5).save_pretrained(again)
    quarter = TokenFormerForCausalLM.from_pretrained(again, token_fraction=0.5)
    direct = TokenFormerForCausalLM.from_pretrained(tmp_path, token_fraction=0.25)
    assert relative_error(quarter(IDS).logits, direct(IDS).logits) < 1e-5


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_no_other_rows_are_read(tmp_path, monkeypatch, max_shard_size):
    model = make_sorted(IDS)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors").exists() == (max_shard_size == "1GB")
    rows, whole = {}, set()

    class Counted:
        def __init__(self, *args, **options):
            self.file = safe_open(*args, **options)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *args):
            self.file.__exit__(*args)

        def keys(self):
            return self.file.keys()

        def get_tensor(self, name):
            whole.add(name.rpartition(".")[2])
            return self.file.get_tensor(name)

        def get_slice(self, name):
            file = self.file

            class Slice:
                def __getitem__(self, some):
                    rows[name] = some
                    return file.get_slice(name)[some]

            return Slice()

    monkeypatch.setattr(prefixes, "safe_open", Counted)
    part = TokenFormerForCausalLM.from_pretrained(tmp_path, token_fraction=0.25)
    assert whole == {"weight", "bias", "tau"}
    assert len(rows) == 2 * len(dict(pattention_layers(model)))
    assert {some.stop for name, some in rows.items() if ".ffn." in name} == {32}
    for name, layer in pattention_layers(part):
        assert torch.equal(layer.key_tokens, model.get_submodule(name).key_tokens[: layer.num_tokens])


def test_growth_appends_and_what_was_recorded_holds(tmp_path):
    model = make_sorted(IDS)
    record = copy.deepcopy(model.config.token_prefixes)
    grown = grow(model, 2)
    grown.save_pretrained(tmp_path)
    half = TokenFormerForCausalLM.from_pretrained(tmp_path, token_fraction=0.5)
    assert relative_error(half(IDS).logits, model(IDS).logits) < 1e-5
    assert TokenFormerForCausalLM.from_pretrained(tmp_path, token_fraction=0.75)(IDS).logits.isfinite().all()
    assert ungrow(grown).config.token_prefixes == record
    deeper = grow(model, depth=4)
    assert deeper.config.token_prefixes.keys() == {name for name, _ in pattention_layers(deeper.model)}
    assert deeper.config.token_prefixes["layers.3.ffn"] == record["layers.1.ffn"]
    deeper.save_pretrained(tmp_path / "deeper")
    small = TokenFormerForCausalLM.from_pretrained(tmp_path / "deeper", token_fraction=0.25)
    shallow = shrink(model, 0.25, data=[IDS])
    assert relative_error(small(IDS).logits, shallow(IDS).logits) < 1e-4
    assert grow(model, 2, method="split").config.token_prefixes is None
    assert shallow.config.token_prefixes is None


def test_groups_and_biases_stay_whole(tmp_path):
    model = make_sorted(IDS)
    add_tokens(model, "law", num_tokens=4, where="ffn")
    nn.init.normal_(model.model.layers[0].ffn.token_groups["law"].value_tokens)
    merge_tokens(model, "law")
    model.save_pretrained(tmp_path)
    part = TokenFormerForCausalLM.from_pretrained(tmp_path, token_fraction=0.5)
    kept = [each.model.layers[0].ffn.token_groups["law"].value_tokens for each in (part, model)]
    assert torch.equal(*kept)
    assert part(IDS).logits.isfinite().all()


def test_vision_models(tmp_path):
    model, pixels = make_tiny_vision(), torch.randn(4, 3, 32, 32)
    sort_tokens(model, rank_tokens(model, [{"pixel_values": pixels}]))
    model.save_pretrained(tmp_path)
    part = AutoModelForImageClassification.from_pretrained(tmp_path, token_fraction=0.5)
    assert (
        relative_error(part(pixels).logits, shrink(model, 0.5, data=[{"pixel_values": pixels}])(pixels).logits) < 1e-4
    )


@pytest.mark.parametrize("kind", ["l2_gelu", "softmax"])
def test_tau_between_recorded_counts(kind):
    points = {"16": 4.0, "64": 8.0}
    assert prefix_tau(points, 16, kind) == 4.0
    assert prefix_tau(points, 64, kind) == 8.0
    assert prefix_tau(points, 4, kind) == pytest.approx(1.0 if kind == "softmax" else 2.0)
    assert prefix_tau(points, 40, kind) == pytest.approx(6.0 if kind == "softmax" else math.sqrt(40))
    with pytest.raises(ValueError, match="65 tokens are more than the 64"):
        prefix_tau(points, 65, kind)


def test_what_is_rounded_is_said_and_what_cannot_be_is_refused(tmp_path, caplog):
    model = make_sorted(IDS)
    model.save_pretrained(tmp_path / "sorted")
    part = TokenFormerForCausalLM.from_pretrained(tmp_path / "sorted", token_fraction=0.3)
    assert part.config.num_tokens == {"qkv": 10, "out": 10, "ffn": 38}
    assert "token_fraction=0.3 is rounded to whole tokens: qkv 10 of 32, out 10 of 32, ffn 38 of 128" in caplog.text
    sort_tokens(model, dict(rank_tokens(model, [IDS])))  # numbers of one's own say nothing of tau
    model.save_pretrained(tmp_path / "other")
    for folder in ("other", "sorted"):
        for wrong in (0, -0.5, 1.5, float("nan"), True, "half"):
            with pytest.raises(BadRequestError, match="a number above 0 and at most 1 is needed"):
                TokenFormerForCausalLM.from_pretrained(tmp_path / folder, token_fraction=wrong)
    with pytest.raises(
        BadRequestError, match=r"other are not sorted; sort them: tokenformer sort MODEL OUT --text FILE"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path / "other", token_fraction=0.5)
    with pytest.raises(BadRequestError, match="token_fraction and state_dict were given"):
        TokenFormerForCausalLM.from_pretrained(tmp_path / "sorted", token_fraction=0.5, state_dict={})
    quantize(make_sorted(IDS)).save_pretrained(tmp_path / "integers")
    with pytest.raises(BadRequestError, match="integers are quantised; load the share from the folder"):
        TokenFormerForCausalLM.from_pretrained(tmp_path / "integers", token_fraction=0.5)
    model.config.token_prefixes = {"layers.0.ffn": {"two": 1.0}}
    with pytest.raises(StrictDataclassError, match="token_prefixes is damaged"):
        model.config.validate()


def test_the_commands(tmp_path):
    model = make_small(vocab_size=256, max_position_embeddings=64)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("A text that has some words in it, and then é again. " * 20)
    text, ordered = ("--text", tmp_path / "text.txt"), tmp_path / "sorted"
    half = ("--token-fraction", 0.5)
    ended(run("info", tmp_path / "model", *half), 2, "are not sorted; sort them: tokenformer sort MODEL OUT")
    ended(run("generate", tmp_path / "model", "A", *half), 2, "are not sorted")
    result = run("sort", tmp_path / "model", ordered, *text)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "25% of the tokens" in result.stdout
    assert relative_error(TokenFormerForCausalLM.from_pretrained(ordered)(IDS).logits, model(IDS).logits) < 1e-4
    assert "16/16/64" in run("info", ordered, *half).stdout
    scored = run("eval", ordered, *text, *half, "--device", "cpu")
    assert (scored.exit_code, scored.stderr) == (0, "")
    for options in (half, ("--token-top-k", 3)):
        made = run("generate", ordered, "A", "--max-new-tokens", 3, "--seed", 0, "--device", "cpu", *options)
        assert (made.exit_code, made.stderr) == (0, "")
    ended(run("generate", ordered, "A", "--token-fraction", 2), 2, "token_fraction=2.0 was given; a number above 0")
    ended(run("sort", ordered, ordered, *text), 2, "exists already")
    make_tiny_vision().save_pretrained(tmp_path / "vision")
    ended(run("sort", tmp_path / "vision", tmp_path / "no", *text), 2, "takes images", "sort_tokens")


def naive(x, layer, k):
    """Every row by itself, token by token."""
    weights = layer.token_weights(x).detach()
    out = torch.zeros(*x.shape[:-1], layer.d_out, dtype=x.dtype)
    for row in range(len(x)):
        for token in sorted(range(layer.num_tokens), key=lambda n: -weights[row, n].abs())[:k]:
            out[row] += weights[row, token] * layer.value_tokens[token].detach()
    return out if layer.bias is None else out + layer.bias.detach()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_only_the_heaviest_tokens_mix_their_values(kind, bias):
    torch.manual_seed(0)
    layer = Pattention(5, 7, 13, kind, bias=bias, key_bias=bias, dtype=torch.float64).eval()
    if bias:
        nn.init.normal_(layer.key_bias)
        nn.init.normal_(layer.bias)
    x = torch.randn(3, 5, dtype=torch.float64)
    for k in (1, 4, 12):
        expected = naive(x, layer, k)
        layer.top_k = k
        with torch.no_grad():
            assert relative_error(layer(x), expected) < 1e-10
            assert (
                relative_error(layer.token_weights(x) @ layer.value_tokens, expected - (layer.bias if bias else 0))
                < 1e-10
            )
        assert relative_error(layer(x), expected) < 1e-10  # with gradients: the specification
        layer.top_k = None
    everything = layer(x)
    for k in (13, 1000):
        layer.top_k = k
        assert torch.equal(layer(x), everything)


# A few units in the last place of the largest output, of twenty numbers that are added.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rows", [0, 1, 2, 300])
def test_gathered_and_masked_are_equal(rows, dtype, monkeypatch):
    torch.manual_seed(0)
    x, keys, values, bias = torch.randn(rows, 8), torch.randn(200, 8), torch.randn(200, 6), torch.randn(6)
    x, keys, values, bias = (tensor.to(dtype) for tensor in (x, keys, values, bias))
    how = {"tau": 14.0, "bias": bias, "top_k": 20}
    outputs = []
    for cost in (0, 10**9):  # always gathered, never
        monkeypatch.setattr(fused, "GATHERED_COST", cost)
        outputs.append(pattention(x, keys, values, **how))
    if rows:
        assert relative_error(outputs[0], outputs[1]) < TOLERANCES[dtype]
    if dtype.itemsize >= 4 and rows:  # in narrow dtypes another token may be the last of the heaviest
        assert relative_error(outputs[0], pattention(x, keys, values, **how, form="reference")) < TOLERANCES[dtype]


def test_a_model_generates_with_top_k_and_is_as_before():
    model = make_small().eval()
    ids = IDS[:1, :8]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, token_top_k=128, **options), plain)
    some = model.generate(ids, token_top_k=3, **options)
    assert torch.equal(model.generate(ids, token_top_k=3, use_cache=False, **options), some)
    assert torch.equal(model.generate(ids, **options), plain)
    config = copy.deepcopy(model.config)
    config.token_top_k = 3
    other = TokenFormerForCausalLM(config).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.generate(ids, **options), some)
    assert [layer.top_k for name, layer in pattention_layers(other) if layer.top_k] == [3, 3]
    with pytest.raises(BadRequestError, match="a layer with top_k=3 was asked to train; top_k is for inference"):
        other.train()(ids)
    with pytest.raises(BadRequestError, match="token_top_k=0 was given; a number of tokens from 1 on is needed"):
        model.generate(ids, token_top_k=0, **options)
    with pytest.raises(StrictDataclassError, match="token_top_k=0 was given; at least 1 is needed"):
        make_small(token_top_k=0)
