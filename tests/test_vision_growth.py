"""Growth of the vision model is the language model's growth: exact, with the optimizer, in Python and on disk."""

import pytest
import torch
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from command import ended, run
from conftest import make_tiny_vision, relative_error
from tokenformer import (
    KINDS,
    BadRequestError,
    TokenFormerForImageClassification,
    TokenFormerVisionConfig,
    grow,
    grow_optimizer,
    pattention_layers,
    replace_linears,
)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
EXACT = [(kind, method) for kind in KINDS for method in ("zero", "split") if (kind, method) != ("softmax", "zero")]
EXACT += [("l2_gelu", "rotate")]
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([1, 7, 7, 3])


def train(model, steps=4, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(steps):
        model(IMAGES.to(model.dtype), labels=LABELS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def logits(model, **options):
    return model(IMAGES.to(model.dtype), **options).logits


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kind", "method"), EXACT)
def test_repeated_growth_with_training_between_is_exact(kind, method, dtype):
    model = make_tiny_vision(pattention_kind=kind, drop_path_rate=0.2).to(dtype)
    for factor in (2, 4):
        before = logits(train(model))
        model = grow(model, factor, method=method)
        assert relative_error(logits(model), before) <= TOLERANCE[dtype]
    assert model.config.num_tokens == {"qkv": 384, "out": 384, "ffn": 1536}
    assert [step["method"] for step in model.config.growth_history] == [method, method]


@pytest.mark.parametrize("changes", [{"pooling": "mean"}, {"position_embedding": "sincos"}], ids=str)
@pytest.mark.parametrize("method", ["zero", "split"])
def test_other_shapes_and_resolutions(changes, method):
    model = train(make_tiny_vision(**changes).double())
    grown = grow(model, num_tokens={"qkv": 100, "ffn": 768}, method=method)
    assert relative_error(logits(grown), logits(model)) <= 1e-10
    larger = torch.randn(2, 3, 48, 40, dtype=torch.float64)
    outputs = [one(larger, interpolate_pos_encoding=True).logits for one in (grown, model)]
    assert relative_error(*outputs) <= 1e-10


def test_bf16():
    model = train(make_tiny_vision().bfloat16())
    assert torch.equal(logits(grow(model, 2, method="zero")), logits(model))
    for method in ("split", "rotate"):
        assert relative_error(logits(grow(model, 2, method=method)), logits(model)) < 0.05


def test_to_a_preset():
    with torch.device("meta"):
        small = TokenFormerForImageClassification(TokenFormerVisionConfig.preset("b16-86m"))
        expected = TokenFormerForImageClassification(TokenFormerVisionConfig.preset("b16"))
    assert grow(small, to="b16").num_parameters() == expected.num_parameters()
    with pytest.raises(BadRequestError, match=r"preset 'l16' has hidden_size=1024, this model has 768"):
        grow(small, to="l16")
    with pytest.raises(BadRequestError, match="preset '354m' is not known"):
        grow(small, to="354m")
    with pytest.raises(BadRequestError, match="choose one of qkv, out, ffn"):
        grow(small, num_tokens={"classifier": 3})
    grown = grow(make_tiny_vision(), to="tiny32-2x", method="split")
    assert grown.config.num_tokens == TokenFormerVisionConfig.preset("tiny32-2x").num_tokens


@pytest.mark.parametrize("method", ["zero", "split"])
def test_the_optimizer_follows_and_every_new_token_learns(method):
    model = make_tiny_vision()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer=optimizer)
    grown = grow(model, 2, method=method)
    moved = grow_optimizer(optimizer, model, grown)
    name = "model.layers.1.ffn.value_tokens"
    before, after = (
        state.state[dict(one.named_parameters())[name]]["exp_avg"]
        for one, state in ((model, optimizer), (grown, moved))
    )
    assert after.shape == (384, 64)
    assert torch.equal(after[:192], before)
    assert torch.equal(after[192:], before if method == "split" else torch.zeros_like(before))
    position = grown.model.embeddings.position_embeddings
    assert torch.equal(
        moved.state[position]["exp_avg"], optimizer.state[model.model.embeddings.position_embeddings]["exp_avg"]
    )
    start = {name: layer.key_tokens.clone() for name, layer in pattention_layers(grown)}
    train(grown, steps=1, optimizer=moved)
    for name, layer in pattention_layers(grown):
        new = slice(layer.num_tokens // 2, None)
        assert (layer.key_tokens[new] != start[name][new]).any(dim=1).all(), name


def test_inplace():
    model = train(make_tiny_vision())
    parameters, before = dict(model.named_parameters()), logits(model)
    assert grow(model, 2, method="split", inplace=True) is model
    assert all(parameters[name] is p for name, p in model.named_parameters())
    assert relative_error(logits(model), before) < 1e-5


def test_a_grown_model_is_saved_and_loaded(tmp_path):
    grown = grow(train(make_tiny_vision()), 2.5, method="split")
    grown.save_pretrained(tmp_path, max_shard_size="100KB")
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert loaded.config.growth_history == grown.config.growth_history
    assert torch.equal(logits(loaded), logits(grown))


def test_linears_of_a_vit_become_pattentions():
    """Any ViT of transformers can be given parameter tokens, and grown then."""
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=3)
    config.image_size, config.patch_size = 32, 8
    model = ViTForImageClassification(config).eval()
    replace_linears(model, ["*.mlp.*", "*_proj"], num_tokens=24)
    assert len(list(pattention_layers(model))) == 12
    assert relative_error(logits(grow(model, 3, method="split")), logits(model)) < 1e-5
    ours = replace_linears(make_tiny_vision(), "classifier", num_tokens=16)
    assert relative_error(logits(grow(ours, 2)), logits(ours)) < 1e-5


@pytest.fixture
def source(tmp_path):
    train(make_tiny_vision()).save_pretrained(tmp_path / "small")
    return tmp_path / "small"


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        (["--factor", 2.5, "--method", "split"], (120, 120, 480)),
        (["--to", "tiny32-2x"], (96, 96, 384)),
        (["--tokens", "ffn=300"], (48, 48, 300)),
    ],
)
def test_the_grow_command(tmp_path, source, arguments, tokens):
    own = ViTImageProcessorPil(size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3])
    own.save_pretrained(source)
    result = run("grow", source, tmp_path / "large", *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    small, large = (AutoModelForImageClassification.from_pretrained(tmp_path / name) for name in ("small", "large"))
    assert tuple(large.config.num_tokens.values()) == tokens
    assert relative_error(logits(large), logits(small)) < 1e-5
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["parameters", "106,378", f"{large.num_parameters():,}"] in rows
    assert any(row[:6] == ["FLOPs", "per", "image", "of", "32", "pixels"] for row in rows)
    assert float(next(row[-1] for row in rows if row[:2] == ["relative", "difference"])) < 1e-5
    processors = [(tmp_path / name / "preprocessor_config.json").read_bytes() for name in ("small", "large")]
    assert processors[0] == processors[1]


def test_commands_refuse_what_is_not_theirs(tmp_path, source):
    ended(run("grow", source, tmp_path / "large", "--to", "tiny-2x"), 2, "preset 'tiny-2x' is not known")
    ended(run("grow", source, tmp_path / "large", "--to", "small32"), 2, "hidden_size=192, this model has 64")
    ended(run("generate", source, "x"), 2, "holds a TokenFormerForImageClassification, which does not generate text")
    ended(
        run("eval", source, "--text", __file__),
        2,
        "holds a tokenformer_vision model, but a causal language model is needed",
    )
    ViTConfig(num_labels=3).save_pretrained(tmp_path / "vit")
    ended(run("grow", tmp_path / "vit", tmp_path / "large", "--factor", 2), 2, "holds a vit model")


def test_a_model_that_changed_is_not_written(tmp_path, source):
    model = AutoModelForImageClassification.from_pretrained(source)
    model.classifier.weight.data[3, 3] = torch.nan
    model.save_pretrained(source)
    ended(run("grow", source, tmp_path / "large", "--factor", 2), 1, "differ", "by nan", "nothing was written")
    assert not (tmp_path / "large").exists()
