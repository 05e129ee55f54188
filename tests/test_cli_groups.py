"""Token groups from the command line: adapt, generate and eval with --tokens, info."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from command import ended, run
from conftest import make_tiny, make_tiny_vision
from image_files import class_folder
from test_groups import TEXT, learnt
from tokenformer import add_tokens, adopt, grow, merge_tokens, save_tokens
from tokenformer.models.text import byte_tokenizer
from tokenformer.training.callbacks import Signals


@pytest.fixture
def model(tmp_path):
    make_tiny(vocab_size=257).save_pretrained(tmp_path / "model")
    (tmp_path / "law.txt").write_text("the party of the first part, hereinafter the party. " * 400)
    return tmp_path / "model"


def files_of(folder, *patterns):
    return {path.name for pattern in patterns or ["*"] for path in folder.glob(pattern)}


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


@pytest.fixture
def llama(tmp_path):
    config = LlamaConfig(**{**TEXT, "vocab_size": 257})
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "law.txt").write_text("the party of the first part, hereinafter the party. " * 400)
    return tmp_path / "model"


class TestAnotherFamily:
    def test_a_group_is_trained_and_used(self, llama, tmp_path):
        result = adapt(tmp_path, "training.learning_rate=0.1", "--where", "all")
        assert result.exit_code == 0, result.stderr
        folder = tmp_path / "adapters" / "law"
        assert files_of(folder) == {"adapter_config.json", "tokens.safetensors", "README.md"}
        text = ("eval", llama, "--text", tmp_path / "law.txt", "--length", 64, "--json")
        assert run(*text, tmp_path / "base.json").exit_code == 0
        assert run(*text, tmp_path / "law.json", "--tokens", folder).exit_code == 0
        base, law = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("base", "law"))
        assert law["loss"] < base["loss"] - 0.1

    def test_killed_and_carried_on_to_the_same_bits(self, llama, tmp_path, monkeypatch):
        assert adapt(tmp_path).exit_code == 0
        whole = load_file(tmp_path / "adapters" / "law" / "tokens.safetensors")
        for path in ("law", "law.run"):
            shutil.rmtree(tmp_path / "adapters" / path)

        def stop(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise RuntimeError("killed")

        with monkeypatch.context() as patch:
            patch.setattr(Signals, "on_step_end", stop)
            assert "killed" in adapt(tmp_path).stderr
        assert not (tmp_path / "adapters" / "law").exists()
        result = adapt(tmp_path)
        assert result.exit_code == 0, result.stderr
        kept = {path.name for path in (tmp_path / "adapters" / "law.run" / "stage-1").glob("checkpoint-*")}
        assert kept == {"checkpoint-4", "checkpoint-6"}
        again = load_file(tmp_path / "adapters" / "law" / "tokens.safetensors")
        assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())

    def test_an_adopted_model(self, tmp_path):
        config = GPTNeoXConfig(**{**TEXT, "vocab_size": 257})
        adopt(GPTNeoXForCausalLM(config).eval()).save_pretrained(tmp_path / "model")
        byte_tokenizer().save_pretrained(tmp_path / "model")
        (tmp_path / "law.txt").write_text("the party of the first part, hereinafter the party. " * 400)
        result = adapt(tmp_path)
        assert result.exit_code == 0, result.stderr
        info = run("info", tmp_path / "adapters" / "law").stdout
        assert "token group law, 4 tokens beside 2 layers, a normaliser of its own, of a gpt_neox" in info

    def test_mistakes(self, llama, tmp_path):
        ended(adapt(tmp_path, "training.ema=0.9"), 2, "training.ema is 0.9, which only TokenFormers are trained with")
        ended(adapt(tmp_path, "growth.stages=[]"), 2, "growth.stages is not one group with its steps")
        ended(adapt(tmp_path, "--name", "my.law"), 2, "a token group cannot be called 'my.law'")
        assert not (tmp_path / "adapters").exists()
        narrow = LlamaForCausalLM(LlamaConfig(**TEXT))
        narrow.save_pretrained(llama)
        ended(
            adapt(tmp_path), 2, "the tokenizer has 257 entries, and the model in", "64; give its own tokenizer, as data"
        )
        for path in llama.glob("*token*"):
            path.unlink()
        ended(adapt(tmp_path), 1, "model holds no tokenizer; give bytes, or a folder")


def test_a_mistake_leaves_nothing_behind(model, tmp_path):
    options = ("--data", tmp_path / "law.txt", "--steps", 2)
    ended(run("adapt", model, tmp_path / "my.law", *options), 2, "a token group cannot be called 'my.law'")
    ended(run("adapt", model, tmp_path / "law", *options, "training.bf61=true"), 2, "'bf61' is not known")
    assert files_of(tmp_path, "my.law*", "law.*") == {"law.txt"}


def test_a_run_is_not_gone_on_with_as_another(model, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Signals, "on_step_end", lambda *_, **__: 1 / 0)
        assert adapt(tmp_path).exit_code == 1
    run_folder = tmp_path / "adapters" / "law.run"
    before = (run_folder / "recipe.yaml").read_text()
    ended(
        adapt(tmp_path, "--tokens", 8), 2, "law.run was started with growth.stages[0].num_tokens.ffn=4, and now it is 8"
    )
    assert (run_folder / "recipe.yaml").read_text() == before
    assert adapt(tmp_path).exit_code == 0


def test_a_tokenizer_without_an_end(tmp_path):
    make_tiny(vocab_size=256).save_pretrained(tmp_path / "model")
    bytes_only = byte_tokenizer()
    state = json.loads(bytes_only.backend_tokenizer.to_str())
    state["added_tokens"] = []
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(state))
    (tmp_path / "law.txt").write_text("the party of the first part. " * 400)
    ended(adapt(tmp_path), 2, "has no end-of-document token; name one", "data.eos_token=TOKEN in a recipe or behind")


def test_a_folder_with_an_equals_sign(model, tmp_path):
    group = learnt(add_tokens(make_tiny(vocab_size=257), "law", 4), "law")
    folder = save_tokens(group, "law", tmp_path / "lr=0.1" / "law")
    options = ("generate", model, "the ", "--temperature", 0, "--max-new-tokens", 5)
    for given in (folder, f"other={folder}"):
        result = run(*options, "--tokens", given)
        assert result.exit_code == 0, result.stderr


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
