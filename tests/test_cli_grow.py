"""`tokenformer grow`: what it writes, what it checks, and that a failure leaves nothing behind."""

from importlib import import_module

import pytest
import torch
from transformers import AutoModelForCausalLM

from command import ended, run
from conftest import make_tiny, relative_error
from official_files import fail_after_saving, write_tokenizer
from tokenformer import TokenFormerForCausalLM
from tokenformer.growth import grow_folder as growth_folder

IDS = torch.arange(40).view(2, 20)


@pytest.fixture
def source(tmp_path, tiny):
    tiny.save_pretrained(tmp_path / "small")
    return tmp_path / "small"


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        (["--factor", 2], (128, 128, 512)),
        (["--factor", 2.5, "--method", "split", "--seed", 7, "--noise", 0.5], (160, 160, 640)),
        (["--to", "tiny-4x"], (256, 256, 1024)),
        (["--tokens", "qkv=70, ffn=300"], (70, 64, 300)),
        (["--depth", 3], (64, 64, 256)),
        (["--depth", 4, "--factor", 2, "--new-blocks", "fresh", "--new-blocks-at", "top"], (128, 128, 512)),
    ],
)
def test_the_grown_folder_computes_the_same(tmp_path, source, tiny, arguments, tokens):
    result = run("grow", source, tmp_path / "large", *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    large = AutoModelForCausalLM.from_pretrained(tmp_path / "large")
    assert tuple(large.config.num_tokens.values()) == tokens
    assert relative_error(large(IDS).logits, tiny(IDS).logits) < 1e-5
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["parameters", "147,584", f"{large.num_parameters():,}"] in rows
    assert ["tokens,", "ffn", "256", str(tokens[2])] in [
        [*row[:3], row[3].replace(",", "")] for row in rows if len(row) == 4
    ]
    assert float(next(row[-1] for row in rows if row[:2] == ["relative", "difference"])) < 1e-5
    assert rows[-1] == ["written", str(tmp_path / "large")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_dtype_stays(tmp_path, tiny, dtype):
    tiny.to(dtype).save_pretrained(tmp_path / "small")
    result = run("grow", tmp_path / "small", tmp_path / "large", "--factor", 2, "--method", "split")
    assert (result.exit_code, result.stderr) == (0, "")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "large").dtype == dtype


def test_the_tokenizer_comes_along_and_nothing_else(tmp_path):
    make_tiny(vocab_size=40).save_pretrained(tmp_path / "small")
    tokenizer = write_tokenizer(tmp_path / "small" / "tokenizer.json", 30)
    (tmp_path / "small" / "tokenizer_config.json").write_text("{}")
    (tmp_path / "small" / "optimizer.pt").write_text("large")
    for name in ("chat_template.jinja", "spiece.model"):
        (tmp_path / "small" / name).write_text("")
    assert run("grow", tmp_path / "small", tmp_path / "large", "--factor", 2).exit_code == 0
    names = {path.name for path in (tmp_path / "large").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "model.safetensors", "README.md"} <= names
    assert {"chat_template.jinja", "spiece.model"} <= names
    assert "optimizer.pt" not in names
    assert (tmp_path / "large" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()


def test_random_growth_must_be_asked_for(tmp_path, source):
    arguments = ("grow", source, tmp_path / "large", "--factor", 2, "--method", "random")
    ended(run(*arguments), 2, "method random changes what the model computes; add --inexact")
    result = run(*arguments, "--inexact")
    assert result.exit_code == 0, result.stderr
    difference = next(line for line in result.stdout.splitlines() if "relative difference" in line)
    assert float(difference.split()[-1]) > 0.01


@pytest.fixture
def careless(monkeypatch):
    """Growth that forgets something, as a fault in this library would."""
    real = growth_folder.apply_growth

    def grow_wrongly(model, growth, inplace):
        real(model, growth, inplace=inplace)
        model.model.layers[0].ffn.tau *= 1.1

    monkeypatch.setattr(growth_folder, "apply_growth", grow_wrongly)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_model_that_changed_is_not_written(tmp_path, tiny, careless, dtype):
    tiny.to(dtype).save_pretrained(tmp_path / "small")
    before = sorted(tmp_path.iterdir())
    arguments = ("grow", tmp_path / "small", tmp_path / "large", "--factor", 2)
    ended(run(*arguments), 1, "the grown model's logits differ", "nothing was written")
    assert sorted(tmp_path.iterdir()) == before
    result = run(*arguments, "--no-verify")
    assert result.exit_code == 0, result.stderr
    assert "relative difference of logits  not compared\n" in result.stdout


def test_a_broken_model_fails_the_check(tmp_path, tiny):
    tiny.lm_head.weight.data[3, 3] = torch.nan
    tiny.save_pretrained(tmp_path / "small")
    ended(run("grow", tmp_path / "small", tmp_path / "large", "--factor", 2), 1, "differ", "by nan")
    assert not (tmp_path / "large").exists()


def test_the_request_is_checked_before_the_weights_are_read(tmp_path, source):
    (source / "model.safetensors").write_bytes(b"broken")
    large = tmp_path / "large"
    ended(run("grow", source, large), 2, "no size was given; give one of --factor, --to, --tokens")
    ended(run("grow", source, large, "--factor", 2, "--to", "tiny-2x"), 2, "--factor and --to was given")
    ended(run("grow", source, large, "--factor", 0.5), 2, "must be larger than 1")
    ended(run("grow", source, large, "--to", "124m"), 2, "hidden_size=768, this model has 64")
    ended(run("grow", source, large, "--to", "tiny-3x"), 2, "preset 'tiny-3x' is not known; did you mean 'tiny-")
    ended(run("grow", source, large, "--tokens", "ffn=10"), 2, "growth cannot shrink")
    ended(run("grow", source, large, "--tokens", "fnn=1000"), 2, "did you mean 'ffn'?")
    ended(run("grow", source, large, "--tokens", "ffn:1000"), 2, "'ffn:1000' is not of the form role=count")
    ended(run("grow", source, large, "--tokens", "ffn=256,ffn=512"), 2, "ffn is given twice; give one count")
    ended(run("grow", source, large, "--factor", 2, "--noise", "nan"), 2, "noise=nan was given; a number from 0 on")
    ended(run("grow", source, large, "--tokens", ""), 2, "is not of the form role=count")
    ended(run("grow", source, large, "--factor", 2, "--method", "zeros"), 2, "did you mean 'zero'?")
    ended(run("grow", source, source, "--factor", 2), 2, "small exists already and would be overwritten")
    ended(run("grow", tmp_path / "no", large, "--factor", 2), 2, "no does not exist")
    ended(run("grow", source, large, "--factor", 2), 1, "the weights in", "cannot be read")
    assert not large.exists()


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (OSError(28, "No space left"), 1)])
def test_an_interrupted_command_leaves_nothing(tmp_path, source, monkeypatch, error, code):
    fail_after_saving(monkeypatch, error)
    before = sorted(tmp_path.iterdir())
    ended(run("grow", source, tmp_path / "large", "--factor", 2), code)
    assert sorted(tmp_path.iterdir()) == before


def test_memory_holds_one_model(tmp_path, source, monkeypatch):
    """The model is grown in place, and no second one is loaded to compare with."""
    loaded = []
    load = TokenFormerForCausalLM.from_pretrained
    monkeypatch.setattr(
        TokenFormerForCausalLM, "from_pretrained", lambda *a, **options: loaded.append(a) or load(*a, **options)
    )
    monkeypatch.setattr(import_module("tokenformer.growth.grow"), "copy", None)  # the name is the function's too
    growth_folder.grow_folder(source, tmp_path / "large", factor=2)
    assert len(loaded) == 1
