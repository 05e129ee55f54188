"""The vision model as transformers' users meet it: load, classify, train, compile; positions, pooling, drop path."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTImageProcessorPil,
    ViTModel,
    pipeline,
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.utils import logging

from conftest import make_tiny, make_tiny_vision, relative_error
from tokenformer import (
    PRESETS,
    VISION_PRESETS,
    BadRequestError,
    TokenFormerForImageClassification,
    TokenFormerVisionConfig,
    TokenFormerVisionModel,
    cost,
    grow,
    pattention_layers,
)

MILLIONS = {"b16-86m": 86, "b16": 109, "l16-307m": 307, "l16": 407}
SHAPES = [
    {},
    {"pooling": "mean"},
    {"position_embedding": "sincos"},
    {"pooling": "mean", "position_embedding": "sincos", "num_channels": 1, "parametric_norm": True},
]


@pytest.fixture
def images():
    return torch.randn(3, 3, 32, 32)


def images_for(model, count=3):
    return torch.randn(count, model.config.num_channels, model.config.image_size, model.config.image_size)


@pytest.mark.parametrize("name", MILLIONS)
def test_parameter_counts_match_the_names(name):
    with torch.device("meta"):
        model = TokenFormerForImageClassification(TokenFormerVisionConfig.preset(name))
    assert model.num_parameters() / 1e6 == pytest.approx(MILLIONS[name], rel=0.02)
    assert (model.config.image_size, model.config.patch_size, model.config.num_labels) == (224, 16, 1000)


def test_small_presets_and_names():
    counts = {"tiny32": 106_378, "tiny32-2x": 204_682, "small32": 2_678_410}
    assert VISION_PRESETS.keys() == counts.keys() | MILLIONS.keys()
    assert not VISION_PRESETS.keys() & PRESETS.keys()
    for name, count in counts.items():
        with torch.device("meta"):
            assert TokenFormerForImageClassification(TokenFormerVisionConfig.preset(name)).num_parameters() == count
    config = TokenFormerVisionConfig.preset("tiny32", id2label={0: "cat", 1: "dog", 2: "cow"}, drop_path_rate=0.1)
    assert (config.num_labels, config.id2label[2], config.drop_path_rate) == (3, "cow", 0.1)
    assert TokenFormerVisionConfig.preset("b16", num_labels=5).num_labels == 5
    with pytest.raises(BadRequestError, match=r"preset 'tiny-32' is not known; did you mean 'tiny32'\?"):
        TokenFormerVisionConfig.preset("tiny-32")
    with pytest.raises(BadRequestError, match=r"'num_label' is not a field; did you mean 'num_labels'\?"):
        TokenFormerVisionConfig.preset("tiny32", num_label=3)
    with pytest.raises(BadRequestError, match="preset '124m' is not known"):
        TokenFormerVisionConfig.preset("124m")


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_auto_classes_and_saving(changes, tmp_path):
    model = make_tiny_vision(**changes)
    images = images_for(model)
    model.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), TokenFormerVisionConfig)
    base = AutoModel.from_pretrained(tmp_path)
    assert isinstance(base, TokenFormerVisionModel)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert isinstance(loaded, TokenFormerForImageClassification)
    out = model(images)
    assert out.logits.shape == (3, 10)
    assert torch.equal(loaded(images).logits, out.logits)
    assert torch.equal(model.classifier(base(images).pooler_output), out.logits)
    assert {f.suffix for f in tmp_path.iterdir()} == {".json", ".safetensors", ".md", ".py"}


def test_a_program_without_our_import_and_without_pillow_can_load_and_save_it(tmp_path, images):
    """The loader in the folder brings our classes. Pillow is an extra: only pictures need it."""
    model = make_tiny_vision()
    model.save_pretrained(tmp_path / "model")
    torch.save(images, tmp_path / "images.pt")
    program = (
        "import sys, importlib.util as util; find = util.find_spec;"
        "util.find_spec = lambda name, *a: None if name.split('.')[0] == 'PIL' else find(name, *a);"
        "sys.modules['PIL'] = None;"
        "import torch; from transformers import AutoModelForImageClassification;"
        "assert not any(name.startswith('tokenformer') for name in sys.modules);"
        f"folder = {str(tmp_path / 'model')!r};"
        "model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True);"
        f"images = torch.load({str(tmp_path / 'images.pt')!r});"
        f"torch.save(model(images).logits, {str(tmp_path / 'logits.pt')!r});"
        f"model.save_pretrained({str(tmp_path / 'again')!r})"
    )
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "cache")}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    # Close, not equal: another process may compute with other kernels.
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt", weights_only=True), model(images).logits)
    folders = [{path.name for path in (tmp_path / name).iterdir()} for name in ("model", "again")]
    assert folders[0] == folders[1]


def picture(size=(50, 40), mode="RGB"):
    image = Image.new("RGB", size, (200, 10, 30))
    image.paste((0, 250, 90), (5, 5, 30, 20))
    return image.convert(mode)


def test_the_pipeline(tmp_path, caplog):
    names = {i: f"class {i}" for i in range(10)}
    model = make_tiny_vision(id2label=names, label2id={name: i for i, name in names.items()})
    model.save_pretrained(tmp_path)
    logging.enable_propagation()
    try:
        classify = pipeline("image-classification", model=str(tmp_path))
    finally:
        logging.disable_propagation()
    assert "not supported" not in caplog.text
    assert isinstance(classify.image_processor, ViTImageProcessorPil)
    assert isinstance(AutoImageProcessor.from_pretrained(tmp_path), ViTImageProcessorPil)
    found = classify(picture())
    pixels = torch.tensor(list(picture().resize((32, 32), Image.Resampling.BICUBIC).tobytes())) / 127.5 - 1
    expected = model(pixels.view(1, 32, 32, 3).permute(0, 3, 1, 2)).logits.softmax(-1)[0]
    assert [entry["label"] for entry in found] == [f"class {i}" for i in expected.topk(5).indices.tolist()]
    assert found[0]["score"] == pytest.approx(expected.max().item(), rel=1e-4)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
def test_the_image_processor_takes_any_picture(tmp_path, mode):
    model = make_tiny_vision()
    model.save_pretrained(tmp_path)
    inputs = AutoImageProcessor.from_pretrained(tmp_path)(
        [picture(mode=mode), picture((7, 99), mode)], return_tensors="pt"
    )
    assert inputs["pixel_values"].shape == (2, 3, 32, 32)
    assert inputs["pixel_values"].abs().max() <= 1
    assert model(**inputs).logits.isfinite().all()


def test_an_image_processor_of_ones_own_is_kept(tmp_path):
    ViTImageProcessorPil(size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3]).save_pretrained(tmp_path)
    make_tiny_vision().save_pretrained(tmp_path)
    assert AutoImageProcessor.from_pretrained(tmp_path).image_mean == (0.1, 0.2, 0.3)


def write_means(folder, means=(0.1, 0.2, 0.3)):
    """As of a model that was trained with other means than a new one is saved with."""
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "image_mean": means}))
    return path


@pytest.mark.parametrize("source", ["folder", "hub"])
@pytest.mark.parametrize("auto", [TokenFormerForImageClassification, AutoModelForImageClassification])
def test_a_model_that_was_loaded_keeps_its_image_processor(tmp_path, monkeypatch, source, auto):
    """Grown too, and its blocks without their head; also if the place it was loaded from is gone."""
    first = tmp_path / "first"
    if source == "hub":  # as huggingface_hub lays a download down, of a revision, in a cache that is not the usual one
        first = tmp_path / "models--me--mine" / "snapshots" / ("0" * 40)
    make_tiny_vision().save_pretrained(first)
    means = write_means(first).read_bytes()
    if source == "hub":
        (tmp_path / "models--me--mine" / "refs").mkdir()
        (tmp_path / "models--me--mine" / "refs" / "tried").write_text("0" * 40)
        model = auto.from_pretrained("me/mine", cache_dir=tmp_path, revision="tried", local_files_only=True)
    else:
        monkeypatch.chdir(tmp_path)
        model, _ = auto.from_pretrained("first", output_loading_info=True)
        monkeypatch.chdir("/")
    shutil.rmtree(first)
    for name, saved in (("again", model), ("grown", grow(model, 2)), ("blocks", model.model)):
        saved.save_pretrained(tmp_path / name)
        assert (tmp_path / name / "preprocessor_config.json").read_bytes() == means


def test_of_a_folder_that_is_saved_to_again(tmp_path, caplog):
    """What a model was saved or loaded with gives way; what somebody else wrote stays, with a word if it cannot be
    right."""
    path = tmp_path / "preprocessor_config.json"
    make_tiny_vision().save_pretrained(tmp_path)
    TokenFormerForImageClassification.from_pretrained(tmp_path, image_size=64).save_pretrained(tmp_path)
    assert json.loads(path.read_text())["size"] == {"height": 64, "width": 64}
    make_tiny_vision().save_pretrained(tmp_path)
    assert json.loads(path.read_text())["size"] == {"height": 32, "width": 32}
    write_means(tmp_path)
    loaded = TokenFormerForImageClassification.from_pretrained(tmp_path, image_size=64)
    make_tiny_vision().save_pretrained(tmp_path)
    assert json.loads(path.read_text())["image_mean"] == [0.1, 0.2, 0.3]
    loaded.save_pretrained(tmp_path)
    assert json.loads(path.read_text())["size"] == {"height": 64, "width": 64}
    assert not caplog.records
    make_tiny_vision().save_pretrained(tmp_path)
    assert "is kept, and is not what this model of 32 pixels takes" in caplog.text
    other = write_means(tmp_path, (0.4, 0.4, 0.4)).read_bytes()
    loaded.save_pretrained(tmp_path)
    assert "is not what this model of 64 pixels was loaded with; delete it" in caplog.text
    assert path.read_bytes() == other


def test_without_classes_it_gives_what_it_pools(images):
    model = make_tiny_vision(num_labels=0)
    assert torch.equal(model(images).logits, model.model(images).pooler_output)


def test_a_folder_whose_processor_has_no_type_is_known_by_its_model(tmp_path):
    make_tiny_vision().save_pretrained(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    del settings["image_processor_type"]
    path.write_text(json.dumps(settings))
    assert isinstance(AutoImageProcessor.from_pretrained(tmp_path), ViTImageProcessorPil)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype, images, tmp_path):
    model = make_tiny_vision(position_embedding="sincos")
    model.save_pretrained(tmp_path)
    expected = model(images).logits
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path, dtype=dtype)
    assert all(layer.tau.dtype == torch.float32 for _, layer in pattention_layers(loaded))
    # Pixels may come in fp32, as the image processor gives them.
    assert loaded(images).logits.dtype == dtype
    assert relative_error(loaded(images).logits, expected) < 0.05
    assert torch.equal(model.to(dtype)(images).logits, loaded(images).logits)


def test_it_is_the_language_models_block(images):
    """One block, and the mask is all that differs: attention of the first patch reaches the last."""
    ours, text = make_tiny_vision(), make_tiny()
    assert type(ours.model.layers[0]) is type(text.model.layers[0])
    names = [[name for name, _ in model.model.layers[0].named_parameters()] for model in (ours, text)]
    assert names[0] == names[1]
    changed = images.clone()
    changed[:, :, -4:, -4:] = 1.0
    before, after = ours.model(images).last_hidden_state, ours.model(changed).last_hidden_state
    assert (before[:, :2] != after[:, :2]).any(dim=-1).all()


def test_initialisation():
    model = make_tiny_vision(hidden_size=128, num_hidden_layers=3, qkv_tokens=256)
    for _, layer in pattention_layers(model):
        assert layer.key_tokens.std().item() == pytest.approx(128**-0.5, rel=0.03)
        assert layer.value_tokens.std().item() == pytest.approx(2 / (3 * 128**0.5), rel=0.03)
    embeddings = model.model.embeddings
    assert embeddings.patch_embeddings.weight.std().item() == pytest.approx(128**-0.5, rel=0.05)
    assert embeddings.position_embeddings.std().item() == pytest.approx(128**-0.5, rel=0.05)
    assert embeddings.class_token.std().item() == pytest.approx(128**-0.5, rel=0.2)
    assert model.classifier.weight.std().item() == pytest.approx(128**-0.5, rel=0.1)
    assert not model.classifier.bias.any()
    assert model.model.layers[0].attention_norm.weight is None
    assert model.model.norm.weight is not None
    assert make_tiny_vision(parametric_norm=True).model.layers[0].ffn_norm.weight is not None


def test_pooling(images):
    model = make_tiny_vision(pooling="mean")
    assert model.model.embeddings.class_token is None
    out = model.model(images)
    assert out.last_hidden_state.shape == (3, 64, 64)
    assert torch.equal(out.pooler_output, out.last_hidden_state.mean(dim=1))
    out = make_tiny_vision().model(images)
    assert out.last_hidden_state.shape == (3, 65, 64)
    assert torch.equal(out.pooler_output, out.last_hidden_state[:, 0])


def test_without_positions_patches_could_change_places(images):
    """What tells patches apart is their position: with it zero, their order does not matter."""
    model = make_tiny_vision()
    shuffled = images.unflatten(3, (8, 4))[:, :, :, torch.randperm(8)].flatten(3)
    assert relative_error(model(shuffled).logits, model(images).logits) > 1e-3
    torch.nn.init.zeros_(model.model.embeddings.position_embeddings)
    assert relative_error(model(shuffled).logits, model(images).logits) < 1e-5


@pytest.mark.parametrize("position", ["learned", "sincos"])
def test_positions_at_other_resolutions(position, images):
    model = make_tiny_vision(position_embedding=position)
    assert torch.equal(model(images, interpolate_pos_encoding=True).logits, model(images).logits)
    for height, width in ((48, 48), (16, 64), (32, 36), (33, 35)):
        out = model.model(torch.randn(2, 3, height, width), interpolate_pos_encoding=True)
        assert out.last_hidden_state.shape == (2, 1 + (height // 4) * (width // 4), 64)
    with pytest.raises(
        BadRequestError, match=r"images of 48 × 32 pixels were given, .* 32 × 32; resize them, or give inte"
    ):
        model(torch.randn(2, 3, 48, 32))
    with pytest.raises(
        BadRequestError, match=r"shape \(2, 1, 32, 32\) were given; \[batch, 3, height, width\] is needed"
    ):
        model(torch.randn(2, 1, 32, 32))
    with pytest.raises(ValueError, match="specify pixel_values"):
        model()


def test_learned_positions_are_stretched_as_a_picture():
    embeddings = make_tiny_vision().model.embeddings
    grid = torch.linspace(-1, 1, 8)
    embeddings.position_embeddings.data = grid[:, None, None].expand(8, 8, 64).reshape(1, 64, 64).clone()
    stretched = embeddings.positions(16, 5).view(16, 5, 64)
    assert torch.allclose(stretched, stretched[:, :1, :1].expand_as(stretched), atol=1e-6)
    assert (stretched[1:-1, 0, 0].diff() > 0).all()


def test_learned_positions_are_stretched_as_those_of_a_vit():
    peer = ViTModel(ViTConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=4))
    embeddings, theirs = make_tiny_vision().model.embeddings, peer.embeddings
    torch.nn.init.normal_(theirs.position_embeddings)
    embeddings.position_embeddings.data = theirs.position_embeddings.data[:, 1:].clone()
    expected = theirs.interpolate_pos_encoding(torch.zeros(1, 1 + 12 * 5, 64), 48, 20)[:, 1:]
    torch.testing.assert_close(embeddings.positions(12, 5), expected)


@pytest.mark.parametrize("position_embedding", ["learned", "sincos"])
def test_a_model_can_be_made_one_of_another_size(tmp_path, position_embedding):
    """Its positions are stretched once for all, and so is what its image processor makes."""
    model = make_tiny_vision(position_embedding=position_embedding)
    model.save_pretrained(tmp_path / "small")
    settings = {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}, "image_mean": [0.4] * 3}
    settings = {"image_processor_type": "CLIPImageProcessor", **settings}
    (tmp_path / "small" / "preprocessor_config.json").write_text(json.dumps(settings))
    larger = TokenFormerForImageClassification.from_pretrained(tmp_path / "small", image_size=64)
    assert larger.num_parameters() == model.num_parameters() == cost.parameters(larger.config).total
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(larger(images).logits, model(images, interpolate_pos_encoding=True).logits)
    larger.save_pretrained(tmp_path / "large")
    again = TokenFormerForImageClassification.from_pretrained(tmp_path / "large")
    assert (again.config.image_size, again.config.position_grid) == (64, 8)
    assert torch.equal(again(images).logits, larger(images).logits)
    written = json.loads((tmp_path / "large" / "preprocessor_config.json").read_text())
    assert written == {**settings, "size": {"shortest_edge": 72}, "crop_size": {"height": 64, "width": 64}}


def test_sincos_positions():
    embeddings = make_tiny_vision(position_embedding="sincos").model.embeddings
    assert embeddings.position_embeddings is None
    grid = embeddings.positions(8, 8).view(8, 8, 64)
    frequency = 10000 ** (-3 / 16)  # the fourth of 16
    assert grid[5, 2, 3].item() == pytest.approx(torch.tensor(5 * frequency).sin().item(), abs=1e-6)
    assert grid[5, 2, 32 + 16 + 3].item() == pytest.approx(torch.tensor(2 * frequency).cos().item(), abs=1e-6)
    assert len(grid.flatten(0, 1).unique(dim=0)) == 64
    # Twice the resolution: the middle of four patches is where the one patch was.
    finer = embeddings.positions(16, 16).view(16, 16, 64)
    places = (torch.arange(16) + 0.5) / 2 - 0.5
    waves = places[:, None] * 10000 ** (-torch.arange(16) / 16)
    torch.testing.assert_close(finer[:, 0, :16], waves.sin(), atol=1e-5, rtol=0)
    torch.testing.assert_close(finer[0, :, 48:], waves.cos(), atol=1e-5, rtol=0)


def test_drop_path_rises_with_depth_and_is_off_in_evaluation(images):
    model = make_tiny_vision(drop_path_rate=0.4, num_hidden_layers=3)
    assert [layer.drop_path.rate for layer in model.model.layers] == pytest.approx([0.0, 0.2, 0.4])
    assert all(layer.drop_path.rate == 0 for layer in make_tiny().model.layers)
    plain = make_tiny_vision(num_hidden_layers=3)
    assert torch.equal(model(images).logits, plain(images).logits)
    assert not torch.equal(model.train()(images).logits, plain.train()(images).logits)


def test_a_dropped_branch_is_left_out_whole_and_on_average_nothing_changes():
    layer = make_tiny_vision(drop_path_rate=0.5).model.layers[1].train()
    branch = torch.randn(4000, 2, 3)
    dropped = layer.drop_path(branch)
    kept = dropped.ne(0).all(dim=(1, 2))
    assert torch.equal(kept, dropped.ne(0).any(dim=2).any(dim=1))
    assert kept.float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert torch.equal(dropped[kept], branch[kept] * 2)


def test_attention_implementations_agree(images):
    model = make_tiny_vision()
    expected = model(images).logits
    model.set_attn_implementation("eager")
    assert relative_error(model(images).logits, expected) < 1e-5


def test_outputs(images):
    model = make_tiny_vision()
    model.set_attn_implementation("eager")
    out = model(images, output_hidden_states=True, output_attentions=True)
    assert [tuple(h.shape) for h in out.hidden_states] == [(3, 65, 64)] * 3
    assert [tuple(a.shape) for a in out.attentions] == [(3, 4, 65, 65)] * 2
    assert torch.equal(out.hidden_states[0], model.model.embeddings(images))
    torch.testing.assert_close(out.attentions[0].sum(-1), torch.ones(3, 4, 65))
    assert torch.equal(model(images, return_dict=False)[0], out.logits)
    assert model.get_input_embeddings() is model.model.embeddings.patch_embeddings


@pytest.mark.parametrize(
    ("problem", "labels", "loss"),
    [
        (None, torch.tensor([1, 0, 9]), F.cross_entropy),
        ("single_label_classification", torch.tensor([1, 0, 9]), F.cross_entropy),
        ("single_label_classification", torch.rand(3, 10).softmax(dim=1), F.cross_entropy),
        (None, torch.rand(3, 10), F.binary_cross_entropy_with_logits),
        ("regression", torch.randn(3, 10), F.mse_loss),
    ],
)
def test_losses(problem, labels, loss, images):
    model = make_tiny_vision(problem_type=problem)
    out = model(images, labels=labels)
    assert out.loss.item() == pytest.approx(loss(out.logits, labels).item(), rel=1e-6)


def test_shares_of_classes_in_half_precision_and_a_share_of_one_is_the_class(images):
    model = make_tiny_vision(problem_type="single_label_classification").bfloat16()
    classes = torch.tensor([1, 0, 9])
    loss = model(images, labels=F.one_hot(classes, 10).float()).loss
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(F.cross_entropy(model(images).logits.float(), classes).item(), rel=1e-6)


@pytest.mark.parametrize("drop_path", [0.0, 0.5])
def test_gradient_checkpointing_changes_nothing(drop_path, images):
    losses, gradients = [], []
    for checkpointing in (False, True):
        model = make_tiny_vision(drop_path_rate=drop_path).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(3)
        loss = model(images, labels=torch.tensor([1, 2, 3])).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append(model.model.layers[0].attention.query.key_tokens.grad)
    assert losses[0] == losses[1]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("changes", [{}, {"pooling": "mean", "position_embedding": "sincos"}], ids=str)
def test_compiles_to_one_graph(changes, images):
    model = make_tiny_vision(**changes)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(images).logits, model(images).logits) < 1e-5


def test_exports_with_a_dynamic_batch(images):
    model = make_tiny_vision()
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(
        model, (), {"pixel_values": images}, dynamic_shapes={"pixel_values": {0: batch}}, strict=False
    )
    more = torch.randn(5, 3, 32, 32)
    assert relative_error(program.module()(pixel_values=more).logits, model(more).logits) < 1e-5


def test_the_trainer_trains_it(tmp_path):
    """Two classes that differ in colour."""
    model = make_tiny_vision(num_labels=2, drop_path_rate=0.1).train()
    data = [{"pixel_values": 0.3 * torch.randn(3, 32, 32) + (1 if i % 2 else -1), "labels": i % 2} for i in range(32)]
    arguments = TrainingArguments(
        tmp_path, use_cpu=True, max_steps=15, learning_rate=3e-3, logging_steps=1, report_to="none", disable_tqdm=True
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] / 4


def test_the_model_card(tmp_path):
    grown = grow(make_tiny_vision(), to="tiny32-2x", method="split", seed=3)
    grown.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert card.count("# A TokenFormer vision model") == 1
    assert f"| parameters | {grown.num_parameters():,} |" in card
    assert "| image, patch, classes | 32 pixels, 4 pixels, 10 |" in card
    assert "AutoModelForImageClassification.from_pretrained" in card
    assert "1. split (seed 3): 48/48/192 -> 96/96/384" in card


def test_the_docs(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parent.parent / "docs" / "vision.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1), {})
    assert capsys.readouterr().out.splitlines()[-1].startswith("LABEL_")
    rows = {
        cells[0]: cells for cells in ([c.strip() for c in line.split("|")[1:-1]] for line in page.splitlines()) if cells
    }
    for name in VISION_PRESETS:
        config = TokenFormerVisionConfig.preset(name)
        shape = f"{config.hidden_size}, {config.num_hidden_layers}, {config.num_attention_heads}"
        tokens = " / ".join(map(str, config.num_tokens.values()))
        assert rows[name][2:5] == [shape, tokens, f"{cost.parameters(config).total:,}"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_attention_heads", 7, "hidden_size=64 is not divisible by num_attention_heads=7"),
        ("qkv_tokens", 0, "qkv_tokens=0 was given; at least 1"),
        ("patch_size", 5, "image_size=32 does not divide into patches of 5 pixels"),
        ("pooling", "meen", "did you mean 'mean'"),
        ("position_embedding", "rotary", "position_embedding='rotary' is not known; choose one of learned, sincos"),
        ("hidden_size", 0, "hidden_size=0 was given; at least 1 is needed"),
        ("num_attention_heads", -2, "num_attention_heads=-2 was given; at least 1 is needed"),
        ("num_hidden_layers", 0, "num_hidden_layers=0 was given; at least 1 is needed"),
        ("attention_dropout", 2.0, "attention_dropout=2.0 was given; it must be at least 0 and below 1"),
        ("drop_path_rate", 1.0, "drop_path_rate=1.0 was given; it must be at least 0 and below 1"),
    ],
)
def test_bad_configurations(field, value, message):
    with pytest.raises(Exception, match=message):
        TokenFormerVisionConfig.preset("tiny32", **{field: value})


def test_sincos_needs_a_width_of_four():
    with pytest.raises(Exception, match="hidden_size=66 is not divisible by 4"):
        TokenFormerVisionConfig.preset("tiny32", hidden_size=66, num_attention_heads=3, position_embedding="sincos")


def test_what_goes_to_the_hub_is_whole(tmp_path, monkeypatch):
    uploaded = {}

    def upload(self, working_dir, repo_id, files_timestamps, **more):
        uploaded[repo_id] = {path.name for path in Path(working_dir).iterdir()}

    api = SimpleNamespace(create_repo=lambda name, **more: SimpleNamespace(repo_id=name))
    monkeypatch.setattr("transformers.utils.hub.hf_api", lambda: api)
    monkeypatch.setattr(TokenFormerForImageClassification, "_upload_modified_files", upload)
    where = {"push_to_hub": True, "repo_id": "me/mine", "private": True}
    make_tiny_vision().save_pretrained(tmp_path / "model", max_shard_size="100KB", **where)
    assert (tmp_path / "model/model.safetensors.index.json").is_file()
    assert uploaded["me/mine"] == {path.name for path in (tmp_path / "model").iterdir()}
    assert {"load_tokenformer.py", "preprocessor_config.json", "README.md"} <= uploaded["me/mine"]
