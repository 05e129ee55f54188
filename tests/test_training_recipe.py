"""Recipes: defaults < file < command line, and a one-line error that names the nearest key for every mistake."""

import os
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from conftest import make_tiny
from tokenformer import BadFileError, BadRequestError
from tokenformer.data.images import AugmentSettings, ImageSettings
from tokenformer.data.text import TextSettings
from tokenformer.training import load_recipe
from tokenformer.training.ladder import build_ladder, first_config
from tokenformer.training.recipe import check_same_recipe, config_errors_in_one_line
from tokenformer.training.settings import (
    ImageGrowth,
    ImageModel,
    ImageStage,
    ImageTraining,
    TextGrowth,
    TextModel,
    TextStage,
    TextTraining,
)
from tokenformer_cli import app
from tokenformer_cli.recipe_keys import all_keys, check_keys
from tokenformer_cli.terminal import BadCommandError
from training_runs import write_image_recipe, write_recipe

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))


def ladder_of(recipe):
    recipe.data.inspect(count_samples=False)
    return build_ladder(recipe, processes=1)


def test_defaults_recipe_command_line(tmp_path):
    path = write_recipe(tmp_path)
    recipe = load_recipe(path)
    assert recipe.training.adam_beta2 == 0.95  # the house's
    assert recipe.training.learning_rate == 3e-3  # the file's
    recipe = load_recipe(path, ["training.learning_rate=1e-4", "data.block_length=64", "growth.stages.1.steps=5"])
    assert recipe.training.learning_rate == 1e-4
    assert recipe.data.settings.block_length == 64
    assert recipe.growth.stages[1].steps == 5
    assert ladder_of(recipe).stages[1].growth.method == "rotate"
    assert recipe.name == "recipe"


@pytest.mark.parametrize(
    ("kind", "method"), [("softmax", "split"), ("gelu_l2", "split"), ("l2_silu", "rotate"), ("l2_relu", "rotate")]
)
def test_a_ladder_grows_by_split_where_rotate_is_not_exact(tmp_path, kind, method):
    recipe = load_recipe(write_recipe(tmp_path), [f"model.pattention_kind={kind}"])
    assert ladder_of(recipe).stages[1].growth.method == method


def test_the_resolved_recipe_is_a_recipe(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path))
    (tmp_path / "resolved.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path / "resolved.yaml").to_yaml() == recipe.to_yaml()
    images = load_recipe(write_image_recipe(tmp_path), ["data.augment.crop_scale=[0.2, 1]"])
    assert images.data.settings.augment.crop_scale == [0.2, 1]
    (tmp_path / "resolved.yaml").write_text(images.to_yaml())
    assert load_recipe(tmp_path / "resolved.yaml").resolved() == images.resolved()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["modle.hidden_size=3"], r"'modle' is not known; did you mean 'model'\?"),
        (["model.hiden_size=3"], r"model: 'hiden_size' is not known; did you mean 'hidden_size'\?"),
        (["data.block_lenght=3"], r"data: 'block_lenght' is not known; did you mean 'block_length'\?"),
        (["training.lerning_rate=1"], r"training: 'lerning_rate' is not known; did you mean 'learning_rate'\?"),
        (["growth.metod=zero"], r"growth: 'metod' is not known; did you mean 'method'\?"),
        (["growth.stages.1.facter=3"], r"growth.stages\[1\]: 'facter' is not known; did you mean 'factor'\?"),
        (["growth.method=spilt"], r"growth.method is 'spilt'; did you mean 'split'\?"),
        (["growth.warmup_steps=many"], r"growth.warmup_steps is 'many'; a whole number of at least 0 is needed"),
        (["data.block_length=1.5"], r"data.block_length is 1.5; a whole number of at least 2 is needed"),
        (["training.parallel=tp"], r"training.parallel is 'tp'; choose one of ddp, fsdp"),
        (["training.save_steps=0"], r"training.save_steps is 0; a whole number of at least 1"),
        (
            ["training.lr_scheduler_type=cosine"],
            r"training: 'lr_scheduler_type' is not for a recipe to decide; use growth.sched",
        ),
        (["training.resume_from_checkpoint=x"], r"use the same command again"),
        (["growth.stages=[{factor: 2, steps: 3}]"], r"growth: stages\[0\] has factor; the first stage has the model's"),
        (["growth.stages=[{steps: 3}, {steps: 3}]"], r"growth: stages\[1\] has no size; set one of factor, to, num"),
        (
            ["growth.stages=[{steps: 3, tokens: 9}]"],
            r"growth.stages\[0\]: steps and tokens given; set one of steps and tokens, as steps=100",
        ),
        (["growth.stages=[{steps: 0}]"], r"growth.stages\[0\].steps is 0; a whole number of at least 1 is needed"),
        (["growth.stages=[{}]"], r"growth.stages\[0\]: no budget given; set one of steps and tokens"),
        (["growth.stages.5.steps=3"], r"growth.stages.5.steps is beyond the end of that list, which counts from 0"),
        (["growth.stages.0.steps=many"], r"growth.stages\[0\].steps is 'many'; a whole number of at least 1 is needed"),
        (["growth.warmup_steps=-1"], r"growth.warmup_steps is -1; a whole number of at least 0 is needed"),
        (
            ["growth.decay_steps=0"],
            r"growth.decay_steps is 0; a number above 0 is needed",
        ),
        (["growth.patience=0"], r"growth.patience is 0; a whole number of at least 1 is needed"),
        (["growth.min_lr_ratio=2"], r"growth.min_lr_ratio is 2; a number of at least 0 and at most 1 is needed"),
        (["growth.stages=3"], r"growth.stages is 3; a list of stages is needed"),
        (["growth.stages=[{steps: 3}]", "growth.trigger=plateau"], r"no second stage to grow into"),
        (["growth.stages.1.learning_rate=0"], r"growth.stages\[1\].learning_rate is 0; a number above 0 is needed"),
        (
            ["growth.stages.1.learning_rate=fast"],
            r"stages\[1\].learning_rate is 'fast'; a number above 0 is needed",
        ),
        (["training.learning_rate=abc"], r"training.learning_rate is 'abc'; a number above 0 is needed"),
        (["training.bf16=maybe"], r"training.bf16 is 'maybe'; true or false is needed"),
        (["training.seed=abc"], r"training.seed is 'abc'; a whole number of at least 0 and below"),
        (["training.per_device_train_batch_size=0"], r"batch_size is 0; a whole number of at least 1 is needed"),
        (
            ["training.gradient_accumulation_steps=two"],
            r"accumulation_steps is 'two'; a whole number of at least 1 is needed",
        ),
        (["training.global_batch=abc"], r"global_batch is 'abc'; a whole number of at least 1 is needed"),
        (["training.max_steps=3"], r"training.max_steps is given, and the budget is in growth.stages"),
        (["training.use_cpu=true"], r"training: 'use_cpu' is not for a recipe to decide; set CUDA_VISIBLE_DEVICES="),
        (["--learning-rate"], r"'--learning-rate' is not an override; write section.key=value"),
        (["learning_rate"], r"'learning_rate' is not an override"),
        (["model=3"], r"model is 3; a section holds keys and values"),
        (["training.learning_rate=-1"], r"training.learning_rate is -1; a number above 0 is needed"),
        (["training.adam_beta2=1.5"], r"training.adam_beta2 is 1.5; a number of at least 0 and below 1 is needed"),
        (["training.seed=-1"], r"training.seed is -1; a whole number of at least 0 and below 4294967296 is needed"),
        (["training.optim=adamm_torch"], r"training.optim is 'adamm_torch'; did you mean 'adamw_torch'"),
        (
            ["training.optim=adafactor"],
            r"training.optim is 'adafactor', whose state a ladder does not carry across growth; choose .*adam be reset",
        ),
        (["training.bf16=true", "training.fp16=true"], r"training: bf16 and fp16 are both true; choose one"),
        (["training.ema=1"], r"training.ema is 1; a number above 0 and below 1 is needed"),
        (["training.ema=yes"], r"training.ema is True; a number above 0"),
        (["training.layer_decay=0"], r"training.layer_decay is 0; a number above 0 and at most 1 is needed"),
        (["training.rates=scale"], r"training.rates is 'scale'; .*scaled"),
        (
            ["data.size=3"],
            r"data.size is only for images, and this recipe is for text, because data.images is not given$",
        ),
        (
            ["model.patch_size=3"],
            r"model.patch_size is only for images, and this recipe is for text, because .* given$",
        ),
        (
            ["training.validation_images=3"],
            r"training.validation_images is only for images, .*; use validation_blocks$",
        ),
        (
            ["growth.stages=[{epochs: 3}]"],
            r"growth.stages\[0\].epochs is only for images, .* not given; use steps or tokens$",
        ),
    ],
)
def test_mistakes(tmp_path, overrides, message):
    with pytest.raises(BadRequestError, match=message) as error:
        load_recipe(write_recipe(tmp_path), overrides)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.block_length=3"],
            r"data.block_length is only for text, and this recipe is for images, because data.images is given$",
        ),
        (
            ["data.train=x"],
            r"data.train is only for text, and this recipe is for images, because data.images is given$",
        ),
        (["data.augment.flp=0.5"], r"data.augment: 'flp' is not known; did you mean 'flip'\?"),
        (["data.augment.flip=often"], r"data.augment.flip is 'often'; a number of at least 0"),
        (["data.augment=3"], r"augment is 3; a list of keys and values is needed"),
        (["data.sizes=3"], r"data: 'sizes' is not known; did you mean 'size'\?"),
        (["model.vocab_size=3"], r"model.vocab_size is only for text, and this recipe is for images, .* given$"),
        (["model.patchsize=3"], r"model: 'patchsize' is not known; did you mean 'patch_size'\?"),
        (
            ["training.validation_blocks=3"],
            r"training.validation_blocks is only for text, .*; use validation_images$",
        ),
        (["training.validation_images=0"], r"training.validation_images is 0; a whole number of at least 1 is needed"),
        (
            ["training.label_smoothing_factor=0.1"],
            r"training: 'label_smoothing_factor' .*; use data.augment.label_smoothing",
        ),
        (
            ["growth.stages=[{tokens: 3}]"],
            r"growth.stages\[0\].tokens is only for text, .* given; use steps, images or epochs$",
        ),
        (["growth.stages=[{images: 3, epochs: 3}]"], r"images and epochs given; set one of steps, images and epochs"),
    ],
)
def test_mistakes_in_a_recipe_of_images(tmp_path, overrides, message):
    with pytest.raises(BadRequestError, match=message) as error:
        load_recipe(write_image_recipe(tmp_path), overrides)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.global_batch=7"], r"a batch of 7 was given; mixup and cutmix pair images"),
        (["data.augment.flip=2"], r"data.augment.flip is 2; a number of at least 0 and at most 1 is needed"),
        (["data.size=9"], r"model: image_size=9 does not divide into patches of 4 pixels"),
        (["model.image_size=16"], r"data.size is 8, and the model takes 16 \(model.image_size\)"),
        (["model.num_labels=9", "growth.stages=[{epochs: 1}]"], r"model.num_labels is 9; the images have 10 classes"),
        (["model.num_labels=9", "data.class_names=[a, b]"], r"model.num_labels is 9; the images have 2 classes"),
    ],
)
def test_mistakes_of_images_that_are_found_before_training(tmp_path, overrides, message):
    result = CliRunner().invoke(app, ["train", str(write_image_recipe(tmp_path)), *overrides, "--dry-run"])
    assert result.exit_code == 2
    assert re.search(message, result.output), result.output


def test_the_batch_of_each_process_must_be_even_to_be_mixed(tmp_path):
    recipe = load_recipe(write_image_recipe(tmp_path, training={"global_batch": 6}))
    recipe.check_data(1)
    recipe.check_data(3)
    with pytest.raises(BadRequestError, match="a batch of 3 was given"):
        recipe.check_data(2)


def test_what_follows_from_the_images(tmp_path):
    """Size, channels and classes, whatever a preset says; the model section decides the rest."""
    recipe = load_recipe(write_image_recipe(tmp_path), ["model={preset: tiny32, patch_size: 2}"])
    recipe.data.inspect(count_samples=True)
    config = first_config(recipe)
    assert (config.image_size, config.num_channels, config.patch_size, config.num_labels) == (8, 1, 2, 10)
    assert config.id2label[7] == "7"
    assert config.problem_type == "single_label_classification"


def test_a_checkpoint_of_the_other_kind_is_refused(tmp_path):
    make_tiny().save_pretrained(tmp_path / "language")
    recipe = load_recipe(write_image_recipe(tmp_path), [f"model.checkpoint={tmp_path / 'language'}"])
    with pytest.raises(BadRequestError, match="a tokenformer model, but a TokenFormer, an image classifier, is needed"):
        first_config(recipe)


def test_a_key_stands_in_a_recipe_once(tmp_path):
    path = write_recipe(tmp_path)
    path.write_text(path.read_text() + "training:\n  save_steps: 7\n")
    with pytest.raises(BadFileError, match=r"not a readable recipe: the key 'training' is defined twice.* line \d+"):
        load_recipe(path, [])
    path.write_text("? [a]\n: b\n")
    with pytest.raises(BadFileError, match=r"not a readable recipe: .*unhashable key"):
        load_recipe(path, [])


def test_the_context_is_what_is_trained_on(tmp_path):
    """Beyond it a model knows no positions: it would be scored and sampled there."""
    recipe = load_recipe(write_recipe(tmp_path), ["data.block_length=24"])
    assert first_config(recipe).max_position_embeddings == 24
    longer = load_recipe(write_recipe(tmp_path), ["data.block_length=24", "model.max_position_embeddings=99"])
    assert first_config(longer).max_position_embeddings == 99


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["growth.stages=[]"], r"training.max_steps is not given; set it, or give growth.stages"),
        (
            ["growth.stages.2.factor=0.5"],
            r"recipe.yaml: growth.stages\[2\]: factor=0.5 was given; it must be larger than 1",
        ),
        (["model.preset=tny"], r"recipe.yaml: model.preset: preset 'tny' is not known; did you mean 'tiny'\?"),
        (["model.id2label={a: b}"], r"recipe.yaml: model: invalid literal for int\(\) with base 10: 'a'"),
        (["growth.stages.1={to: 354m, steps: 2}"], r"preset '354m' has hidden_size=768, this model has 32"),
        (["growth.max_parameters=30000"], r"growth.stages\[1\] has .* parameters; growth.max_parameters is 30,000"),
        (["model.max_position_embeddings=16"], r"data.block_length is 32; the model reads 16"),
        (
            ["model.vocab_size=256"],
            r"the tokenizer has 257 entries: leave it out, or .*resize_token_embeddings\(257\)",
        ),
        (["model.checkpoint=nowhere", "model.hidden_size=32"], r"nowhere, which is not a model folder"),
        (
            ["model.num_attention_heads=5"],
            r"recipe.yaml: model: hidden_size=32 is not divisible by num_attention_heads=5",
        ),
        (["model.hidden_size=abc"], r"recipe.yaml: model: .*hidden_size.*"),
    ],
)
def test_mistakes_that_need_the_model_are_found_before_training(tmp_path, overrides, message):
    path = write_recipe(tmp_path)
    result = CliRunner().invoke(app, ["train", str(path), *overrides, "--dry-run"])
    assert result.exit_code == 2
    with pytest.raises(Exception, match=message):
        ladder_of(load_recipe(path, overrides))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.block_length=0", "data.block_length is 0; a whole number of at least 2 is needed"),
        ("data.split=[0.9, 0.2]", "two or three positive shares that add up to 1"),
    ],
)
def test_a_dry_run_checks_the_data_section_of_text(tmp_path, override, message):
    result = CliRunner().invoke(app, ["train", str(write_recipe(tmp_path)), override, "--dry-run"])
    assert result.exit_code == 2
    assert message in result.output


def dry_run(path, *overrides, processes=1):
    environment = {**os.environ, "COLUMNS": "120", "WORLD_SIZE": str(processes)}
    return CliRunner(env=environment).invoke(app, ["train", str(path), *overrides, "--dry-run"]).output


def test_a_dry_run_says_what_would_be_done(tmp_path):
    first, second, *_ = dry_run(write_recipe(tmp_path)).split("stage 2 of 3")
    assert "growth" not in first  # the first stage does not grow
    assert re.search(r"growth +rotate\n", second)
    assert re.search(r"memory includes +weights, gradients, Adam's moments, activations\n", second)
    assert re.search(r"tokens per step +256 \(8 blocks of 32 per process, 1 process\)\n", second)
    assert re.search(r"tokens in total +6,912\n", second)
    assert "(4 blocks of 32 per process, 2 processes)" in dry_run(write_recipe(tmp_path), processes=2)


def test_a_dry_run_says_what_it_assumes(tmp_path):
    path = write_recipe(tmp_path)
    assert "assumed" not in dry_run(path)
    assert "is assumed: the tokenizer owner/name is not here" in dry_run(path, "data.tokenizer=owner/name")
    assert "10 are assumed: the images were not looked at" in dry_run(
        write_image_recipe(tmp_path), "model.num_labels=10"
    )


def test_a_dry_run_names_sources_that_are_not_there(tmp_path):
    path = write_recipe(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    for there in ("stdlib", "owner/name", "hub:imdb", f"{tmp_path}/a.txt", f"{tmp_path}/*.txt"):
        assert "missing sources" not in dry_run(path, f"data.train={there}")
    output = dry_run(path, f"data.train=[stdlib, nowhere.txt, {tmp_path}/*.csv]", "data.validation=no/where.txt")
    assert re.search(rf"missing sources +nowhere.txt, {tmp_path}/\*.csv, no/where.txt\n", output)
    images = write_image_recipe(tmp_path)
    assert re.search(r"missing sources +no-folder\n", dry_run(images, "data.images=no-folder", "model.num_labels=2"))
    assert "missing sources" not in dry_run(images, "data.images=digits", "model.num_labels=10")


def test_the_memory_of_a_dry_run_knows_what_is_cut_up_and_what_is_half_as_wide():
    (path,) = (p for p in RECIPES if p.name == "pile_1b5.yaml")

    def needed(parallel, half):
        overrides = [f"training.parallel={parallel}", f"training.bf16={half}", "training.global_batch=64"]
        output = dry_run(path, *overrides, processes=8)
        return float(re.search(r"about ([\d.]+) GiB", output)[1])

    state = 16 * ladder_of(load_recipe(path)).stages[0].parameters / 2**30  # weights, gradients and two moments
    full = needed("ddp", half="false")
    assert full - needed("fsdp", half="false") == pytest.approx(state * 7 / 8, abs=0.1)
    assert full - needed("ddp", half="true") == pytest.approx((full - state) / 2, rel=0.1)


def test_files_that_are_not_recipes(tmp_path):
    with pytest.raises(BadRequestError, match=r"nowhere.yaml does not exist; give the path of a recipe"):
        load_recipe(tmp_path / "nowhere.yaml")
    for text, message in (("- a\n- b", "holds no sections"), ("a: [", "is not a readable recipe")):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(BadFileError, match=message):
            load_recipe(tmp_path / "bad.yaml")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_can_be_dry_run(path):
    result = CliRunner(env={**os.environ, "COLUMNS": "120"}).invoke(app, ["train", str(path), "--dry-run"])
    assert result.exit_code == 0, result.output
    counted = ("FLOPs per image", "images per step") if "vit_" in path.name else ("FLOPs per token", "tokens per step")
    for words in ("parameters", *counted, "compute", "memory", "steps"):
        assert words in result.output
    assert result.output.startswith("stage 1 of")
    assert "null" not in result.output
    resolved = yaml.safe_load(CliRunner().invoke(app, ["train", str(path), "--resolved"]).output)
    assert resolved == load_recipe(path).resolved()


def test_the_papers_ladder_has_the_papers_sizes():
    (path,) = (p for p in RECIPES if p.name == "openwebtext_ladder.yaml")
    recipe = load_recipe(path)
    ladder = ladder_of(recipe)
    millions = [stage.parameters / 1e6 for stage in ladder.stages]
    assert millions == pytest.approx([124, 354, 757, 1400], rel=0.02)
    assert (ladder.unit, ladder.units_per_step) == ("tokens", 512 * 1024)
    assert ladder.stages[0].steps == round(300e9 / (512 * 1024))


@pytest.mark.parametrize(("name", "millions", "epochs"), [("b16", 109, 300), ("l16", 407, 200)])
def test_the_papers_classifiers_are_trained_as_maes_are_from_scratch(name, millions, epochs):
    (path,) = (p for p in RECIPES if p.name == f"vit_imagenet_{name}.yaml")
    recipe = load_recipe(path)
    ladder = ladder_of(recipe)
    assert ladder.stages[0].parameters / 1e6 == pytest.approx(millions, rel=0.02)
    assert ladder.units_per_step == 4096
    assert ladder.stages[0].end * 4096 == pytest.approx(epochs * 1_281_167, rel=1e-4)
    assert ladder.settings.warmup_steps == pytest.approx(20 * 1_281_167 / 4096, abs=1)
    assert recipe.training.learning_rate * ladder.rate_factor(6255) == pytest.approx(1e-4 * 4096 / 256)
    assert ladder.rate_factor(ladder.stages[0].end) == 0
    assert (recipe.training.weight_decay, recipe.training.adam_beta2, recipe.training.ema) == (
        0.3,
        0.95,
        0.9999,
    )


def test_the_command_says_one_line_about_a_mistake(tmp_path):
    result = CliRunner().invoke(app, ["train", str(write_recipe(tmp_path)), "training.lerning_rate=1"])
    assert result.exit_code == 2
    assert "did you mean 'learning_rate'?" in result.output
    assert "Traceback" not in result.output


def test_the_keys_that_are_checked_before_torch_is_imported_are_all_keys():
    sections = {
        "model": (TextModel, ImageModel),
        "data": (TextSettings, ImageSettings),
        "training": (TextTraining, ImageTraining),
        "growth": (TextGrowth, ImageGrowth),
        "growth.stages": (TextStage, ImageStage),
    }
    known, decided = all_keys()
    for place, both in sections.items():
        for names, section in zip(known[place], both, strict=True):
            assert set(names) == {*section.model_fields, *getattr(section, "decided", ())} - set(decided), place
    assert set(known["data.augment"][1]) == set(AugmentSettings.model_fields)


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        ("trainin.seed=1", "text"),
        ("training.lerning_rate=1", "text"),
        ("model.hiden_size=4", "images"),
        ("data.augment.flp=1", "images"),
        ("growth.stages.0.stps=3", "text"),
        ("growth.stages[1].facto=3", "images"),
    ],
)
def test_a_mistyped_key_is_refused_in_the_same_words_early_and_late(tmp_path, override, kind):
    path = (write_recipe if kind == "text" else write_image_recipe)(tmp_path)
    with pytest.raises(BadRequestError) as late:
        load_recipe(path, [override])
    with pytest.raises(BadCommandError, match="did you mean") as early:
        check_keys(path, [override])
    assert str(early.value) == str(late.value)


def test_a_mistyped_key_in_a_file_is_refused_in_the_same_words_early_and_late(tmp_path):
    path = write_recipe(tmp_path, growth={"stages": [{"steps": 9}, {"facter": 2, "steps": 9}]})
    with pytest.raises(BadRequestError, match=r"recipe.yaml: growth.stages\[1\]: 'facter' is not known") as late:
        load_recipe(path)
    with pytest.raises(BadCommandError) as early:
        check_keys(path, [])
    assert str(early.value) == str(late.value)


def test_only_what_a_configuration_says_is_the_recipe_s_fault():
    with pytest.raises(ValueError, match=r"^a mistake of ours$"), config_errors_in_one_line(Path("recipe.yaml")):
        raise ValueError("a mistake of ours")


def test_what_is_not_a_mistyped_key_is_left_to_the_library(tmp_path):
    good = write_recipe(tmp_path)
    check_keys(good, ["training.warmup_steps=1", "training.seed=x", "data.augment.flip=1"])
    for text in ("a: [", "[" * 20_000, "- 1", "model: &a [*a]"):
        (tmp_path / "bad.yaml").write_text(text)
        check_keys(tmp_path / "bad.yaml", [])
    check_keys(tmp_path / "nowhere.yaml", [])


def test_validations_that_end_stages_stay_as_often_as_they_were(tmp_path):
    for trigger, refused in (("budget", False), ("plateau", True)):
        out = tmp_path / trigger
        recipe = load_recipe(write_recipe(tmp_path, growth={"trigger": trigger}), [f"training.output_dir={out}"])
        (out / "stage-1").mkdir(parents=True)
        (out / "stage-1" / "start.json").write_text("{}")
        (out / "recipe.yaml").write_text(yaml.safe_dump(recipe.resolved()))
        recipe.training.eval_steps = 3
        if refused:
            with pytest.raises(BadRequestError, match=r"was started with training.eval_steps="):
                check_same_recipe(recipe, out)
        else:
            check_same_recipe(recipe, out)
