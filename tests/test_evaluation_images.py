"""`tokenformer eval MODEL --images SOURCE`: what a plain loop finds too, for ours and for peers; and bad images."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from command import ended, run
from conftest import make_tiny, make_tiny_vision
from image_files import class_folder, encoded, idx_folder, picture, table
from tokenformer import BadFileError, BadRequestError
from tokenformer.data.images import ImageSettings
from tokenformer.data.images.sources import find_images
from tokenformer.evaluation import evaluate_images
from tokenformer.evaluation.images import match_classes
from tokenformer.models.images import read_image_processor

NAMES = ("ape", "bee", "cat", "dog", "eel", "fox", "gnu")


def save_classifier(folder, names=NAMES, **changes):
    model = make_tiny_vision(id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)}, **changes)
    model.save_pretrained(folder)
    return model


def gallery_of(source, **settings):
    return find_images(ImageSettings(validation=str(source), **settings), "validation")


@pytest.fixture
def photos(tmp_path):
    return class_folder(tmp_path / "photos", names=NAMES, each=5)


def by_hand(model, processor, photos):
    """Whether each picture's class is the first choice, and whether one of five, and its class."""
    found = []
    for path in sorted(photos.glob("*/*.png")):
        pixels = processor(Image.open(path).convert("RGB"), return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            order = model(pixels).logits[0].argsort(descending=True).tolist()
        best = [model.config.id2label[i] for i in order]
        found.append((best[0] == path.parent.name, path.parent.name in best[:5], path.parent.name))
    return found


@pytest.mark.parametrize("batch_size", [4, 64])
@pytest.mark.parametrize("workers", [0, 2])
def test_accuracies_are_those_of_a_plain_loop(tmp_path, photos, batch_size, workers):
    model = save_classifier(tmp_path / "model")
    processor = read_image_processor(tmp_path / "model")
    score = evaluate_images(model, processor, gallery_of(photos), batch_size=batch_size, workers=workers)
    expected = by_hand(model, processor, photos)
    assert 0 < sum(right for right, _, _ in expected) < sum(near for _, near, _ in expected) < 35
    assert score.images == 35
    assert score.top1 == sum(right for right, _, _ in expected) / 35
    assert score.top5 == sum(near for _, near, _ in expected) / 35
    for one in score.classes:
        mine = [right for right, _, name in expected if name == one.name]
        assert (one.images, one.correct) == (len(mine), sum(mine))
    assert [one.name for one in score.classes] == list(NAMES)


def test_classes_are_matched_by_name_whatever_their_order(tmp_path, photos):
    model = save_classifier(tmp_path / "model")
    processor = read_image_processor(tmp_path / "model")
    expected = evaluate_images(model, processor, gallery_of(photos))
    model.config.id2label = dict(enumerate(reversed(NAMES)))
    model.classifier.weight.data = model.classifier.weight.data.flip(0)
    assert evaluate_images(model, processor, gallery_of(photos)) == expected
    few = class_folder(tmp_path / "few", names=("fox", "bee"), each=2)
    assert [one.name for one in evaluate_images(model, processor, gallery_of(few)).classes] == ["bee", "fox"]


def test_the_command_on_a_peer(tmp_path, photos):
    """A ViT of transformers, with its own image processor, as it stands in a folder."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    names = {"id2label": dict(enumerate(NAMES)), "label2id": {name: i for i, name in enumerate(NAMES)}}
    torch.manual_seed(0)
    peer = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **sizes, **names)).eval()
    torch.nn.init.normal_(peer.classifier.weight)
    peer.save_pretrained(tmp_path / "peer")
    processor = ViTImageProcessorPil(size={"height": 16, "width": 16}, image_mean=[0.4] * 3, image_std=[0.2] * 3)
    processor.save_pretrained(tmp_path / "peer")
    expected = by_hand(peer, processor, photos)
    result = run("eval", tmp_path / "peer", "--images", photos, "--json", tmp_path / "score.json")
    assert result.exit_code == 0, result.stderr
    written = json.loads((tmp_path / "score.json").read_text())
    assert written["top1"] == sum(right for right, _, _ in expected) / 35
    assert written["top5"] == sum(near for _, near, _ in expected) / 35
    assert (written["model"], written["images"]) == (str(tmp_path / "peer"), 35)
    assert (written["source"], written["matched"], written["bad"]) == (str(photos), "by name", [])
    assert written["classes"][2] == {"name": "cat", "images": 5, "correct": written["classes"][2]["correct"], "bad": 0}
    assert (written["split"], written["hub_config"], written["dtype"]) == ("validation", None, "float32")
    assert written["versions"]["pillow"] == version("pillow")
    for words in (
        "class images correct accuracy",
        f"top-1    {written['top1']:.4f}\n",
        "scored   35 images of 7 classes, matched by name\n",
    ):
        assert words in result.stdout
    assert result.stderr == ""


def test_bad_images_are_named_counted_and_left_out(tmp_path, photos):
    model = save_classifier(tmp_path / "model")
    (photos / "bee" / "1.png").write_bytes(b"broken")
    (photos / "gnu" / "4.png").write_bytes(encoded(picture(3))[:80])
    processor = read_image_processor(tmp_path / "model")
    expected = by_hand(model, processor, without(photos, tmp_path / "good", {"bee/1.png", "gnu/4.png"}))
    result = run("eval", tmp_path / "model", "--images", photos, "--batch-size", 8, "--json", tmp_path / "score.json")
    assert result.exit_code == 0, result.stderr
    written = json.loads((tmp_path / "score.json").read_text())
    assert written["images"] == 33
    assert written["top1"] == sum(right for right, _, _ in expected) / 33
    assert {one["name"]: one["images"] for one in written["classes"]} == dict.fromkeys(NAMES, 5) | {"bee": 4, "gnu": 4}
    assert {one["name"]: one["bad"] for one in written["classes"]} == dict.fromkeys(NAMES, 0) | {"bee": 1, "gnu": 1}
    assert len(written["bad"]) == 2
    lines = result.stderr.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["left out", "left out"]
    assert f"{photos}/bee/1.png cannot be decoded: it is not an image of a known format" in lines[0]
    assert f"{photos}/gnu/4.png cannot be decoded" in lines[1]
    assert "left out  2 images that cannot be decoded" in result.stdout
    stopped = run("eval", tmp_path / "model", "--images", photos, "--strict")
    ended(stopped, 1, "bee/1.png cannot be decoded", "fix or remove it, or leave out --strict")


def test_a_class_of_bad_images_only_is_said_to_be_missing(tmp_path, photos):
    save_classifier(tmp_path / "model")
    for file in (photos / "bee").iterdir():
        file.write_bytes(b"broken")
    result = run("eval", tmp_path / "model", "--images", photos, "--json", tmp_path / "score.json")
    assert result.exit_code == 0, result.stderr
    assert "scored      30 images of 6 classes, matched by name\n" in result.stdout
    assert "not scored  bee: no image of these classes can be decoded\n" in result.stdout
    classes = json.loads((tmp_path / "score.json").read_text())["classes"]
    assert {"name": "bee", "images": 0, "correct": 0, "bad": 5} in classes


def without(photos, target, names):
    for path in photos.glob("*/*.png"):
        if str(path.relative_to(photos)) not in names:
            (target / path.parent.name).mkdir(parents=True, exist_ok=True)
            (target / path.parent.name / path.name).write_bytes(path.read_bytes())
    return target


def test_nothing_but_bad_images(tmp_path):
    save_classifier(tmp_path / "model", names=("cat", "dog"))
    photos = class_folder(tmp_path / "photos", each=1)
    for path in photos.glob("*/*.png"):
        path.write_bytes(b"broken")
    result = run("eval", tmp_path / "model", "--images", photos)
    assert result.exit_code == 1
    assert "none of 2 images can be decoded" in result.stderr.splitlines()[-1]


def test_numbers_are_classes_by_name_where_the_model_has_such_names(tmp_path):
    names = sorted(str(i) for i in range(12))
    model = save_classifier(tmp_path / "model", names=names)
    table(list(range(12))).to_parquet(tmp_path / "a.parquet")
    gallery = gallery_of(tmp_path / "a.parquet")
    assert match_classes(gallery, model.config) == ("by name", [names.index(str(i)) for i in range(12)])
    model = save_classifier(tmp_path / "words", names=[f"word {i}" for i in range(12)])
    assert match_classes(gallery, model.config) == ("by number: 0 is word 0", list(range(12)))


def test_a_score_is_shown_even_if_its_file_cannot_be_written(tmp_path, photos, monkeypatch):
    save_classifier(tmp_path / "model")

    def full(self, *arguments, **more):
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    result = run("eval", tmp_path / "model", "--images", photos, "--json", tmp_path / "score.json")
    assert result.exit_code == 1
    assert "top-1" in result.stdout


def test_the_mode_of_a_model_is_as_it_was(tmp_path, photos):
    model = save_classifier(tmp_path / "model").train()
    evaluate_images(model, read_image_processor(tmp_path / "model"), gallery_of(photos))
    assert model.training


def test_few_classes_have_no_top_5(tmp_path):
    model = save_classifier(tmp_path / "model", names=("cat", "dog"))
    photos = class_folder(tmp_path / "photos")
    score = evaluate_images(model, read_image_processor(tmp_path / "model"), gallery_of(photos))
    assert (score.top5, score.images) == (None, 8)
    assert "top-5" not in run("eval", tmp_path / "model", "--images", photos).stdout


def test_other_sources_and_grey_pictures(tmp_path):
    """Parquet with other columns, IDX files without names for their classes, and a model of one channel."""
    save_classifier(tmp_path / "model", names=("x", "y", "z"))
    table([0, 1, 2, 2], names=["x", "y", "z"], label="kind", image="photo").to_parquet(tmp_path / "a.parquet")
    result = run("eval", tmp_path / "model", "--images", tmp_path / "a.parquet", "--label-column", "kind")
    assert "scored  4 images of 3 classes" in result.stdout, result.stderr
    grey = save_classifier(tmp_path / "grey", names=("x", "y", "z"), num_channels=1, image_size=8)
    result = run("eval", tmp_path / "grey", "--images", idx_folder(tmp_path / "idx"), "--json", tmp_path / "score.json")
    assert result.exit_code == 0, result.stderr
    written = json.loads((tmp_path / "score.json").read_text())
    # The folder's held-out part, whose labels are 0, 1, 2, 0.
    assert [(one["name"], one["images"]) for one in written["classes"]] == [("0", 2), ("1", 1), ("2", 1)]
    assert grey.config.num_channels == 1


def test_the_digits(tmp_path):
    """The example of docs/vision.md, on all of them."""
    save_classifier(tmp_path / "model", names=[str(i) for i in range(10)], image_size=8)
    result = run("eval", tmp_path / "model", "--images", "digits")
    assert "scored  1,797 images of 10 classes" in result.stdout, result.stderr


def test_many_classes_show_the_worst(tmp_path):
    names = [f"class {i:03}" for i in range(120)]
    save_classifier(tmp_path / "model", names=names)
    table(list(range(120)), names=names).to_parquet(tmp_path / "a.parquet")
    result = run("eval", tmp_path / "model", "--images", tmp_path / "a.parquet", "--json", tmp_path / "score.json")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\nclass ") == 20
    assert "The 20 classes of 120 with the lowest accuracy; --json has all." in result.stdout
    assert len(json.loads((tmp_path / "score.json").read_text())["classes"]) == 120


def test_mistakes(tmp_path, photos):
    model = save_classifier(tmp_path / "model")
    evaluate = ("eval", tmp_path / "model", "--images")
    ended(run(*evaluate, tmp_path / "no"), 2, "there is no file or folder", "no")
    ended(run(*evaluate, photos, "--text", photos), 2, "2 of --text, --tasks, --images were given; pass one of them")
    ended(run(*evaluate, photos, "--stride", 3), 2, "--stride was given, but it only works with --text")
    ended(
        run("eval", tmp_path / "model", "--text", __file__, "--strict"),
        2,
        "--strict was given, but it only works with --images",
    )
    ended(run(*evaluate, photos, "--batch-size", 0), 2, "batch size 0 was given")
    others = class_folder(tmp_path / "others", names=("ape", "cats"))
    ended(run(*evaluate, others), 2, "have the class 'cats', which the model does not know", "did you mean 'cat'?")
    ended(
        run(*evaluate, others, "--by-position"), 2, "have 2 classes, and the model knows 7", "all of them by position"
    )
    renamed = class_folder(tmp_path / "renamed", names=[f"n0{i}" for i in range(7)], each=1)
    assert "7 classes, matched by position: n00 is ape\n" in run(*evaluate, renamed, "--by-position").stdout
    many = class_folder(tmp_path / "many", names=[f"n{i}" for i in range(8)], each=1)
    ended(run(*evaluate, many, "--by-position"), 2, "the images have 8 classes, and the model knows 7")
    model.config.id2label = dict(enumerate(["ape", "ape", *NAMES[2:]]))
    with pytest.raises(BadRequestError, match="the class 'ape', which the model has several times"):
        evaluate_images(model, None, gallery_of(class_folder(tmp_path / "apes", names=("ape", "cat"))))
    make_tiny().save_pretrained(tmp_path / "language")
    ended(
        run("eval", tmp_path / "language", "--images", photos), 2, "holds a tokenformer model, but an image classifier"
    )
    ended(
        run("eval", tmp_path / "model", "--text", __file__),
        2,
        "holds a tokenformer_vision model, but a causal language",
    )
    processor = tmp_path / "model" / "preprocessor_config.json"
    processor.write_text(json.dumps({**json.loads(processor.read_text()), "image_mean": [0.5, 0.5]}))
    for size in (64, 1):  # of which the second has worker processes
        result = run(*evaluate, photos, "--batch-size", size)
        ended(result, 1, "cannot take an image of 3 channels: ", "fix the model's preprocessor_config.json")
    processor.unlink()
    ended(run(*evaluate, photos), 2, "has no preprocessor_config.json")
    processor.write_text("{")
    ended(run(*evaluate, photos), 1, "the image processor of", "cannot be read")


def test_a_peer_that_classifies_no_images(tmp_path, photos):
    from transformers import GPTNeoXConfig

    GPTNeoXConfig(hidden_size=16, num_attention_heads=2).save_pretrained(tmp_path / "neox")
    ended(
        run("eval", tmp_path / "neox", "--images", photos),
        2,
        "holds a gpt_neox model, but an image classifier is needed",
    )


def test_a_broken_model_has_no_score(tmp_path, photos):
    model = save_classifier(tmp_path / "model")
    model.classifier.bias.data[3] = float("nan")
    with pytest.raises(BadFileError, match="the logits are not finite"):
        evaluate_images(model, read_image_processor(tmp_path / "model"), gallery_of(photos))
