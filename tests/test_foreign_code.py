"""Python code that comes with a model or a tokenizer is never run unless --trust-remote-code is given."""

import json

import pytest

from command import ended, run
from hosts import make_host
from tokenformer.models.text import byte_tokenizer
from training_runs import write_recipe

CODE = """\
from pathlib import Path

from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

Path({marker!r}).touch()

class ForeignConfig(GPT2Config):
    model_type = "foreign"

class ForeignModel(GPT2LMHeadModel):
    config_class = ForeignConfig

class ForeignTokenizer(PreTrainedTokenizerFast):
    pass
"""
TOKENIZER = {"tokenizer_class": "ForeignTokenizer", "auto_map": {"AutoTokenizer": [None, "foreign.ForeignTokenizer"]}}


@pytest.fixture
def marker(tmp_path):
    """The file that the foreign code writes."""
    return tmp_path / "was-run"


@pytest.fixture
def foreign_model(tmp_path, marker):
    folder = tmp_path / "foreign"
    make_host("gpt2").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "foreign", "architectures": ["ForeignModel"]}
    config["auto_map"] = {"AutoConfig": "foreign.ForeignConfig", "AutoModelForCausalLM": "foreign.ForeignModel"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "foreign.py").write_text(CODE.format(marker=str(marker)))
    return folder


@pytest.fixture
def foreign_tokenizer(tmp_path, marker, tiny):
    """A TokenFormer with a tokenizer that brings code."""
    folder = tmp_path / "tokenizer"
    tiny.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **TOKENIZER}))
    (folder / "foreign.py").write_text(CODE.format(marker=str(marker)))
    return folder


def commands(tmp_path, model, tokenizer):
    """Every command that reads a model or a tokenizer, by name."""
    text = tmp_path / "text.txt"
    text.write_text("some text\n" * 100)
    return {
        "info": ("info", model),
        "eval": ("eval", model, "--text", text),
        "grow": ("grow", model, tmp_path / "grown", "--factor", 2),
        "adopt": ("adopt", model, tmp_path / "adopted"),
        "generate": ("generate", model, "text"),
        "generate, tokenizer": ("generate", tokenizer, "text"),
        "eval, tokenizer": ("eval", tokenizer, "--text", text),
        "prepare": ("prepare", text, "--tokenizer", tokenizer, "--block-length", 8, "--cache", tmp_path / "cache"),
        "eval, tasks": ("eval", model, "--tasks", "piqa"),
    }


def test_a_yes_on_standard_input_runs_nothing(tmp_path, marker, foreign_model, foreign_tokenizer):
    """Nobody is asked, either: the answer would be in stdout."""
    for name, command in commands(tmp_path, foreign_model, foreign_tokenizer).items():
        result = run(*command, stdin="y\n" * 9)
        ended(result, 2, "needs Python code that came with it, which was not run", "--trust-remote-code")
        assert not marker.exists(), name


def test_a_command_without_the_option_does_not_advise_it(tmp_path, marker, foreign_model):
    recipe = write_recipe(tmp_path)
    for command in (
        ("train", recipe, f"model.checkpoint={foreign_model}", "--dry-run"),
        ("export-official", foreign_model, tmp_path / "out.bin", tmp_path / "out.yml"),
    ):
        result = run(*command, stdin="y\n" * 9)
        ended(result, 2, "which was not run; load it in Python with trust_remote_code=True and save it as a model of")
        assert "--trust-remote-code" not in result.stderr
        assert not marker.exists()


@pytest.mark.parametrize("name", ["info", "eval", "grow", "adopt", "generate"])
def test_a_trusted_model_runs_its_code(tmp_path, marker, foreign_model, name):
    """It is still none of ours: what is refused then is its family, or its want of a tokenizer."""
    result = run(*commands(tmp_path, foreign_model, None)[name], "--trust-remote-code")
    assert marker.exists()
    ended(result, 2, "foreign")


@pytest.mark.parametrize("name", ["generate, tokenizer", "eval, tokenizer", "prepare"])
def test_a_trusted_tokenizer_is_used(tmp_path, marker, foreign_tokenizer, name):
    result = run(*commands(tmp_path, None, foreign_tokenizer)[name], "--trust-remote-code")
    assert result.exit_code == 0, result.stderr
    assert marker.exists()


def test_where_transformers_has_a_class_the_code_is_not_needed(tmp_path, marker):
    """Many models of the Hub kept their code when transformers learnt their family."""
    make_host("gpt2").save_pretrained(tmp_path / "both")
    path = tmp_path / "both" / "config.json"
    auto_map = {"AutoConfig": "foreign.ForeignConfig", "AutoModelForCausalLM": "foreign.ForeignModel"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": auto_map}))
    (tmp_path / "both" / "foreign.py").write_text(CODE.format(marker=str(marker)))
    result = run("adopt", tmp_path / "both", tmp_path / "adopted", stdin="y\n" * 9)
    assert result.exit_code == 0, result.stderr
    assert not marker.exists()


def test_our_own_loader_is_not_foreign(tmp_path, tiny):
    tiny.save_pretrained(tmp_path)
    assert (tmp_path / "load_tokenformer.py").exists()
    for more in ([], ["--trust-remote-code"]):
        assert run("generate", tmp_path, "text", "--max-new-tokens", 2, *more).exit_code == 0
