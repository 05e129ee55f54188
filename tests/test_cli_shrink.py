"""`tokenformer shrink`: what it prints, what it writes, and that a failure leaves nothing behind."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from command import ended, run
from conftest import make_tiny, make_tiny_vision
from official_files import fail_after_saving

SMALL = {"hidden_size": 32, "qkv_tokens": 32, "out_tokens": 32, "ffn_tokens": 64, "max_position_embeddings": 32}


@pytest.fixture
def source(tmp_path):
    make_tiny(**SMALL).save_pretrained(tmp_path / "large")
    (tmp_path / "text.txt").write_text("A text that has some words in it, and then é again. " * 20)
    return tmp_path / "large"


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        (["--factor", 0.5], (16, 16, 32)),
        (["--tokens", "qkv=30, ffn=10", "--limit", 301], (30, 32, 10)),
        (["--max-loss", 100], (2, 2, 4)),
    ],
)
def test_the_table_and_the_folder(tmp_path, source, arguments, tokens):
    result = run("shrink", source, tmp_path / "small", "--text", tmp_path / "text.txt", *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert tuple(small.config.num_tokens.values()) == tokens
    rows = {line[:18].strip(): line.split() for line in result.stdout.splitlines()}
    assert rows["100% of the tokens"][-1] == "+0.0000"
    assert {"75% of the tokens", "50% of the tokens", "25% of the tokens"} <= rows.keys()
    chosen = next(line.split() for line in result.stdout.splitlines() if line.startswith("chosen"))
    assert chosen[2] == f"{small.num_parameters():,}"
    assert f"ffn 64 -> {tokens[2]}" in result.stdout
    assert result.stdout.splitlines()[-1].split() == ["written", str(tmp_path / "small")]
    assert torch.isfinite(small(torch.arange(20)[None]).logits).all()


def test_the_request_is_checked_before_the_weights_are_read(tmp_path, source):
    (source / "model.safetensors").write_bytes(b"broken")
    small, text = tmp_path / "small", ("--text", tmp_path / "text.txt")
    ended(run("shrink", source, small, *text), 2, "no size was given; give one of --factor, --tokens, --max-loss")
    ended(run("shrink", source, small, *text, "--factor", 0.5, "--max-loss", 1), 2, "--factor and --max-loss was given")
    ended(run("shrink", source, small, *text, "--factor", 2), 2, "it must lie between 0 and 1")
    ended(run("shrink", source, small, *text, "--tokens", "ffn=64"), 2, "ask for fewer")
    ended(run("shrink", source, small, *text, "--tokens", "fnn=6"), 2, "did you mean 'ffn'?")
    ended(run("shrink", source, small, *text, "--factor", 0.5, "--limit", 1), 2, "at least 4 tokens are needed")
    ended(run("shrink", source, source, *text, "--factor", 0.5), 2, "exists already and would be overwritten")
    ended(run("shrink", source, small, "--text", tmp_path / "no", "--factor", 0.5), 2, "no does not exist")
    ended(run("shrink", source, small, *text, "--factor", 0.5), 1, "the weights in", "cannot be read")
    make_tiny_vision().save_pretrained(tmp_path / "vision")
    ended(run("shrink", tmp_path / "vision", small, *text, "--factor", 0.5), 2, "takes images", "in Python")
    assert not small.exists()


def test_an_interrupted_command_leaves_nothing(tmp_path, source, monkeypatch):
    fail_after_saving(monkeypatch, KeyboardInterrupt())
    before = sorted(tmp_path.iterdir())
    result = run("shrink", source, tmp_path / "small", "--text", tmp_path / "text.txt", "--factor", 0.5)
    assert result.exit_code == 130
    assert sorted(tmp_path.iterdir()) == before
