"""Token groups from the command line: adapt, generate and eval with --tokens, info."""

import json

import pytest

from command import ended, run
from conftest import make_tiny, make_tiny_vision
from image_files import class_folder
from test_groups import learnt
from tokenformer import add_tokens, grow, merge_tokens, save_tokens


@pytest.fixture
def model(tmp_path):
    make_tiny(vocab_size=257).save_pretrained(tmp_path / "model")
    (tmp_path / "law.txt").write_text("the party of the first part, hereinafter the party. " * 400)
    return tmp_path / "model"


def adapt(tmp_path, *more):
    options = ("--data", tmp_path / "law.txt", "--tokens", 4, "--steps", 6, "data.validation_fraction=0")
    return run("adapt", tmp_path / "model", tmp_path / "adapters" / "law", *options, "training.save_steps=2", *more)


def test_a_group_is_trained_and_used(model, tmp_path):
    result = adapt(tmp_path, "training.learning_rate=0.3")
    assert result.exit_code == 0, result.stderr
    folder = tmp_path / "adapters" / "law"
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "tokens.safetensors", "README.md"}
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)
    text = ("eval", model, "--text", tmp_path / "law.txt", "--length", 64, "--json")
    assert run(*text, tmp_path / "base.json").exit_code == 0
    assert run(*text, tmp_path / "law.json", "--tokens", folder).exit_code == 0
    base, law = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("base", "law"))
    assert law["loss"] < base["loss"]
    assert law["token_groups"] == [str(folder)]
    assert "token_groups" not in base
    options = ("--temperature", 0, "--max-new-tokens", 20)
    plain = run("generate", model, "the ", *options).stdout
    spoken = run("generate", model, "the ", *options, "--tokens", f"other={folder}")
    assert spoken.exit_code == 0, spoken.stderr
    assert spoken.stdout != plain
    assert (
        "token group law, 4 tokens beside 2 layers, a normaliser of its own, of a tokenformer"
        in run("info", folder).stdout
    )
    ended(adapt(tmp_path), 2, f"{folder} exists")


def test_images_too(tmp_path):
    make_tiny_vision(num_labels=2, image_size=8, patch_size=4).save_pretrained(tmp_path / "model")
    class_folder(tmp_path / "images", each=8)
    options = ("--data", tmp_path / "images", "--steps", 3, "data.size=8", "data.validation_fraction=0.2")
    result = run("adapt", tmp_path / "model", tmp_path / "new", *options, "training.per_device_train_batch_size=4")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "new" / "tokens.safetensors").exists()


def test_what_is_part_of_a_model_is_listed(tmp_path):
    model = grow(make_tiny(), 2, as_group="stage-2")
    merge_tokens(add_tokens(model, "law", 4), "law").save_pretrained(tmp_path / "model")
    lines = run("info", tmp_path / "model").stdout
    assert "token group stage-2, 64 to 256 tokens beside 10 layers, a normaliser of its own\n" in lines
    assert "token group law, 4 tokens beside 2 layers, a normaliser of its own, merged\n" in lines


def test_mistakes(model, tmp_path):
    other = save_tokens(learnt(add_tokens(make_tiny(hidden_size=32), "law", 4), "law"), "law", tmp_path / "narrow")
    ended(run("generate", model, "x", "--tokens", other), 2, "was trained beside another base")
    ended(run("generate", model, "x", "--tokens", tmp_path / "nowhere"), 2, "is not a token group")
    ended(run("adapt", model, tmp_path / "out"), 2, 'no data was given; say what to learn, as --data "law/*.txt"')
    data = ("--data", tmp_path / "law.txt")
    ended(
        run("adapt", model, tmp_path / "out", *data, "--where", "fnn"),
        2,
        "where='fnn' is not known; did you mean 'ffn'",
    )
    ended(run("adapt", model, tmp_path / "out", *data, "--name", "a b"), 2, "a token group cannot be called 'a b'")
    ended(run("adapt", tmp_path / "no", tmp_path / "out", *data), 2, "no does not exist")
    assert not (tmp_path / "out").exists()
