"""Runs on images: the same ladder, with mixed labels, averaged weights, and rates that fall with depth."""

import io
import itertools
import json
import math
import re
import shutil
import time

import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from conftest import make_tiny_vision
from image_files import class_folder, encoded, picture, prepared
from tokenformer import BadFileError, BadRequestError, TokenFormerForImageClassification
from tokenformer.training import load_recipe, train
from tokenformer.training.summary import stage_table
from tokenformer.training.trainer import LadderTrainer
from training_runs import (
    assert_equal,
    kill_often,
    metrics,
    run,
    run_in_child,
    weights,
    write_image_recipe,
)


@pytest.fixture(scope="module")
def ladder_run(tmp_path_factory):
    """One run of three stages, in a process of its own, that several tests look at; its recipe and its seconds."""
    folder = tmp_path_factory.mktemp("images")
    recipe = write_image_recipe(folder)
    load_recipe(recipe).data.prepare()  # imports what a child would have to
    start = time.perf_counter()
    assert run_in_child(recipe, folder / "run") == 0
    return recipe, folder / "run", time.perf_counter() - start


def test_every_stage_leaves_an_ordinary_classifier(ladder_run):
    recipe, out, _ = ladder_run
    data = load_recipe(recipe).data.prepare()
    for stage, tokens in ((1, 16), (2, 32), (3, 64)):
        folder = out / f"stage-{stage}" / "model"
        model = AutoModelForImageClassification.from_pretrained(folder)
        assert model.config.qkv_tokens == tokens
        assert model.config.id2label == {i: str(i) for i in range(10)}
        assert (model.config.image_size, model.config.num_channels) == (8, 1)
        image = Image.fromarray(data.validation.gallery.encoded(int(data.validation.rows[0])))
        pixels = AutoImageProcessor.from_pretrained(folder)(image, return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(pixels[0], data.validation[0]["pixel_values"])
        assert model(pixels).logits.shape == (1, 10)


def test_few_images_for_validation_are_of_all_classes_and_cores_are_shared(tmp_path, monkeypatch):
    folder = class_folder(tmp_path / "photos", [f"class {i}" for i in range(10)], each=20)
    section = {"images": str(folder), "validation_fraction": 0.5, "workers": None}
    recipe = load_recipe(write_image_recipe(tmp_path, data=section))
    data = recipe.data.prepare()
    few = data.held_out(40)
    assert len(few) == 40
    assert len({few[i]["labels"] for i in range(40)}) == 10
    monkeypatch.setattr("tokenformer.data.images.data.available_cores", lambda: 8)
    assert data.implied_arguments({}) == {"dataloader_num_workers": 8}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert data.implied_arguments({}) == {"dataloader_num_workers": 2}


def test_one_class_is_refused_before_anything_is_written(tmp_path):
    folder = class_folder(tmp_path / "photos", ("cat",))
    with pytest.raises(BadRequestError, match="the images have one class, cat; a classifier needs at least two"):
        run(write_image_recipe(tmp_path), tmp_path / "run", f"data.images={folder}", "data.channels=3")
    assert not (tmp_path / "run" / "stage-1").exists()


def test_metrics_count_images_and_have_the_accuracy(ladder_run):
    _, out, _ = ladder_run
    lines = metrics(out)
    assert all(line["images"] == line["step"] * 8 and "tokens" not in line for line in lines)
    train_lines = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in train_lines] == [*range(2, 27, 2), 27]
    flops = [line["flops"] for line in train_lines]
    per_step = [b - a for a, b in itertools.pairwise(flops)]
    assert per_step[-2] > 1.5 * per_step[0]
    for line in lines:
        if line["kind"] in ("validation", "stage_end"):
            assert math.isfinite(line["validation_loss"])
            assert line["validation_accuracy"] * 20 == pytest.approx(round(line["validation_accuracy"] * 20))
            assert {"ema_validation_loss", "ema_validation_accuracy"} <= set(line)
    written = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert written["images_per_second"] > 0


def test_growth_changes_the_loss_neither_of_the_weights_nor_of_their_average(ladder_run):
    _, out, _ = ladder_run
    steps = [line for line in metrics(out) if line["kind"] == "growth"]
    assert [line["step"] for line in steps] == [10, 18]
    for line in steps:
        for name in ("validation_loss", "ema_validation_loss"):
            assert line[f"{name}_after"] == pytest.approx(line[f"{name}_before"], abs=1e-5)
        assert line["validation_loss_after"] != pytest.approx(line["ema_validation_loss_after"], abs=1e-3)


def test_what_a_stage_ends_with_says_whose_weights_the_model_has(ladder_run):
    _, out, _ = ladder_run
    for stage, step in ((1, 10), (3, 27)):
        result = json.loads((out / f"stage-{stage}" / "result.json").read_text())
        assert (result["step"], result["weights"]) == (step, "averaged")
        averages = load_file(out / f"stage-{stage}" / f"checkpoint-{step}" / "ema.safetensors")
        model = weights(out, stage)
        assert_equal({name: model[name] for name in averages}, averages)
        last = load_file(out / f"stage-{stage}" / f"checkpoint-{step}" / "model.safetensors")
        assert not torch.equal(last["classifier.weight"], model["classifier.weight"])
        assert all(torch.equal(last[name], model[name]) for name in model if name.endswith("tau"))


def test_other_images_under_the_same_names_are_refused_and_copies_are_not(tmp_path):
    images = class_folder(tmp_path / "images")
    key = prepared(tmp_path, images).key
    shutil.copytree(images, tmp_path / "copied", copy_function=shutil.copyfile)  # with the time of now
    assert prepared(tmp_path, tmp_path / "copied").key == key
    picture(0, width=13).save(next(images.rglob("*.png")))
    assert prepared(tmp_path, images).key != key


def test_the_table_at_the_end(ladder_run):
    _, out, _ = ladder_run
    columns, rows = stage_table(out)
    assert columns[2:3] + columns[-3:] == ["images so far", "accuracy", "loss,\naveraged", "accuracy,\naveraged"]
    end = [line for line in metrics(out) if line["kind"] == "stage_end"][-1]
    assert rows[-1][-1] == f"{end['ema_validation_accuracy']:.4f}"


@pytest.mark.slow
def test_killed_at_random_moments(ladder_run, tmp_path):
    """With a worker that decodes, mixed labels, an average, and rates by depth."""
    recipe, reference, seconds = ladder_run
    kill_often(recipe, tmp_path, reference, seconds, kills=12)


def test_the_number_of_workers_changes_nothing(ladder_run, tmp_path):
    recipe, _, _ = ladder_run
    run(recipe, tmp_path / "one", "growth.stages=[{steps: 10}]")
    for overrides in (["data.workers=0"], ["data.workers=0", "training.dataloader_num_workers=2"]):
        out = tmp_path / overrides[-1]
        run(recipe, out, "growth.stages=[{steps: 10}]", *overrides)
        assert_equal(weights(out, 1), weights(tmp_path / "one", 1))
        assert metrics(out) == metrics(tmp_path / "one")


def test_a_step_in_parts_is_the_same_step(tmp_path):
    """Of labels that are shares of all classes Trainer would count every number, and make the loss a tenth."""
    changes = {"model": {"attention_dropout": 0.0, "drop_path_rate": 0.0}, "growth": {"stages": [{"steps": 6}]}}
    recipe = write_image_recipe(tmp_path, **changes, training={"learning_rate": 3e-4})
    run(recipe, tmp_path / "whole")
    run(recipe, tmp_path / "parts", "training.gradient_accumulation_steps=2")
    for whole, parts in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "parts"), strict=True):
        for key in ("loss", "validation_loss", "ema_validation_loss"):
            if key in whole:
                assert parts[key] == pytest.approx(whole[key], rel=1e-5)
    first = next(line for line in metrics(tmp_path / "whole") if line["kind"] == "train")
    assert 2.0 < first["loss"] < 3.5  # about ln 10, not a tenth of it


def test_epochs_and_images_are_budgets(tmp_path):
    recipe = write_image_recipe(tmp_path, training={"global_batch": 100}, growth={"stages": [{"epochs": 0.2}]})
    run(recipe, tmp_path / "epochs")
    images = len(load_recipe(recipe).data.prepare().train)
    assert metrics(tmp_path / "epochs")[-1]["step"] == round(0.2 * images / 100) == 3
    run(recipe, tmp_path / "images", "growth.stages=[{images: 210}]")
    assert metrics(tmp_path / "images")[-1]["step"] == 2


def test_images_that_cannot_be_read_are_counted_at_the_end_of_a_stage(tmp_path):
    folder = class_folder(tmp_path / "photos", each=6)
    (folder / "cat" / "0.png").write_bytes(b"broken")
    (folder / "dog" / "3.png").write_bytes(encoded(picture(9))[:60])
    recipe = write_image_recipe(
        tmp_path,
        data={"images": str(folder), "channels": 3, "workers": 0, "validation_fraction": 0.5},
        growth={"stages": [{"steps": 4}]},
    )
    console = Console(file=io.StringIO(), width=300)
    train(load_recipe(recipe, [f"training.output_dir={tmp_path / 'run'}"]), console)
    said = f"2 images could not be read and were replaced by others; first: {folder}/cat/0.png"
    assert said in console.file.getvalue()
    with pytest.raises(BadFileError, match=r"(cat/0|dog/3).png cannot be decoded: .*set strict to false"):
        run(recipe, tmp_path / "strict", "data.strict=true")
    run(recipe, tmp_path / "strict", "data.strict=false")  # what the message advises carries the run on
    assert (tmp_path / "strict" / "stage-1" / "model" / "config.json").exists()


def test_a_trained_classifier_starts_a_run_on_other_classes(ladder_run, tmp_path, caplog):
    """All but the classifier is kept; on the same classes, that too, and Adam's moments and the average come along."""
    _, out, _ = ladder_run
    start = out / "stage-1" / "checkpoint-10"
    folder = class_folder(tmp_path / "photos", each=6)
    one = {"stages": [{"steps": 1}]}
    recipe = write_image_recipe(tmp_path, data={"images": str(folder)}, growth=one)
    console = Console(file=io.StringIO())
    train(load_recipe(recipe, [f"training.output_dir={tmp_path / 'other'}", f"model.checkpoint={start}"]), console)
    said = f"{start} has other classes: the classifier is initialised anew, and Adam's state is reset"
    assert said in console.file.getvalue()
    first, before = (load_file(path / "model.safetensors") for path in (tmp_path / "other/stage-1/checkpoint-0", start))
    assert first["classifier.weight"].shape == (2, 32)
    assert_equal(*({n: t for n, t in one.items() if not n.startswith("classifier")} for one in (first, before)))
    assert not (tmp_path / "other/stage-1/checkpoint-0/optimizer.safetensors").exists()
    recipe = write_image_recipe(tmp_path, growth=one)
    caplog.clear()
    run(recipe, tmp_path / "same", f"model.checkpoint={start}")
    assert "was trained on pixels" not in caplog.text
    for name in ("model", "optimizer", "ema"):
        theirs = load_file(start / f"{name}.safetensors")
        assert_equal(load_file(tmp_path / "same" / "stage-1" / "checkpoint-0" / f"{name}.safetensors"), theirs)
    run(recipe, tmp_path / "size", f"model.checkpoint={start}", "data.size=16", "model.drop_path_rate=0.3")
    larger = TokenFormerForImageClassification.from_pretrained(tmp_path / "size" / "stage-1" / "checkpoint-0")
    assert (larger.config.image_size, larger.config.drop_path_rate) == (16, 0.3)
    assert_equal(larger.state_dict(), TokenFormerForImageClassification.from_pretrained(start).state_dict())
    run(recipe, tmp_path / "pixels", f"model.checkpoint={start}", "data.mean=[0.1]", "data.std=[0.5]")
    said = "was trained on pixels of image_mean [0.5], and is given [0.1]; data.normalise, or data.mean and data.std"
    assert said in caplog.text
    with pytest.raises(BadRequestError, match=r"recipe.yaml: model: image_size=9 does not divide into patches of"):
        run(recipe, tmp_path / "odd", f"model.checkpoint={start}", "data.size=9")
    with pytest.raises(
        BadRequestError, match=r"recipe.yaml: model: drop_path_rate=1.5 was given; it must be at least 0"
    ):
        run(recipe, tmp_path / "odd", f"model.checkpoint={start}", "model.drop_path_rate=1.5")
    broken = tmp_path / "broken"
    shutil.copytree(start, broken)
    (broken / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(BadFileError, match=rf"the weights in {broken} cannot be read: "):
        run(recipe, tmp_path / "none", f"model.checkpoint={broken}")


def test_what_weight_decay_spares(monkeypatch):
    """Norms, biases, and of an image model what belongs to places: the class token and the positions."""
    model = make_tiny_vision(parametric_norm=True)
    monkeypatch.setattr(LadderTrainer, "plain_model", model)
    decayed = object.__new__(LadderTrainer).get_decay_parameter_names(model)
    spared = set(dict(model.named_parameters())) - set(decayed)
    assert {name for name in spared if not re.search(r"norm|bias", name)} == {
        "model.embeddings.class_token",
        "model.embeddings.position_embeddings",
    }
