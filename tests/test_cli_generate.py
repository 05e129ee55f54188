"""`tokenformer generate`: the prompt, the tokenizer, the stream of text, and how it ends."""

import os
import subprocess
import sys
import time

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from command import ended, run
from conftest import make_tiny
from official_files import write_tokenizer
from tokenformer import TokenFormerForCausalLM
from tokenformer.models.text import TextStream, byte_tokenizer


def script(*ids, vocab_size=256, end=None, **changes) -> TokenFormerForCausalLM:
    """A model that follows `ids` in a circle, whatever else it was given; after the last comes `end`, or the first.

    Its blocks add nothing, and the head of an id points to the embedding of the id before it.
    """
    model = make_tiny(vocab_size=vocab_size, hidden_size=320, tie_word_embeddings=False, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "value_tokens" in name or name == "lm_head.weight":
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab_size, 320))
        following = [*ids[1:], ids[0] if end is None else end]
        for before, after in zip(ids, following, strict=True):
            model.lm_head.weight[after, before] = 100.0
    return model


@pytest.fixture
def folder(tmp_path):
    script(*b"abcd").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_greedy_text_goes_on_from_the_prompt(folder):
    result = run("generate", folder, "xya", "--temperature", 0, "--max-new-tokens", 6)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "bcdabc\n", "")


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_the_prompt_from_stdin_loses_one_newline(folder, arguments):
    options = ("--temperature", 0, "--max-new-tokens", 2)
    assert run("generate", folder, *arguments, *options, stdin="a\n").stdout == "bc\n"
    assert run("generate", folder, *arguments, *options, stdin=b"\xff\xfeb").stdout == "cd\n"
    ended(run("generate", folder, *arguments, *options, stdin="\n"), 2, "the prompt is empty")


def test_no_prompt_on_a_terminal(folder):
    primary, secondary = os.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "tokenformer", "generate", folder], stdin=secondary, capture_output=True, text=True
    )
    os.close(primary)
    os.close(secondary)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: no prompt was given; write it after the model's folder, or pipe it in\n"


def test_sampling_is_repeatable_and_the_cache_changes_nothing(tmp_path, tiny):
    tiny.save_pretrained(tmp_path / "model")
    options = ("generate", tmp_path / "model", "Once", "--max-new-tokens", 12)
    first = run(*options, "--seed", 1).stdout
    assert run(*options, "--seed", 1).stdout == first
    assert run(*options, "--seed", 1, "--no-cache").stdout == first
    assert run(*options, "--seed", 2).stdout != first
    greedy = run(*options, "--temperature", 0).stdout
    assert run(*options, "--top-k", 1).stdout == run(*options, "--top-p", 0).stdout == greedy


def test_it_stops_at_the_end_of_text(tmp_path):
    script(*b"abc", vocab_size=257, end=256).save_pretrained(tmp_path / "bytes")
    assert run("generate", tmp_path / "bytes", "a", "--temperature", 0).stdout == "bc\n"
    model = script(5, 6, 7, vocab_size=40, end=0)
    model.save_pretrained(tmp_path / "words")
    write_tokenizer(tmp_path / "words" / "tokenizer.json", 30, end_of_text="<end>")
    (tmp_path / "words" / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    assert run("generate", tmp_path / "words", "w3", "--temperature", 0).stdout == "w4 w5\n"


def test_a_character_is_never_cut(tmp_path):
    """Bytes of € and 😀 in turns, one id each; read with and without a tokenizer."""
    text = "€😀"
    model = script(*b"\n", *text.encode())
    model.save_pretrained(tmp_path / "bytes")
    expected = f"{text}\n{text}\n"
    result = run("generate", tmp_path / "bytes", "\n", "--temperature", 0, "--max-new-tokens", 15)
    assert result.stdout == expected
    cut = run("generate", tmp_path / "bytes", "\n", "--temperature", 0, "--max-new-tokens", 5)
    assert cut.stdout == "€\ufffd\n"


def byte_level() -> PreTrainedTokenizerFast:
    """A tokenizer of transformers with one id a byte, in an order of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("text", ["plain", "Grüße, €uro, 😀😀 and\nlines  ", "a\ufffdb"])
def test_the_stream_of_pieces(text):
    fast = byte_level()
    for tokenizer, ids in ((byte_tokenizer(256), list(text.encode())), (fast, fast(text)["input_ids"])):
        pieces = []
        stream = TextStream(tokenizer, pieces.append)
        stream.put(torch.tensor([[1, 2, 3]]))  # the prompt
        for i in ids:
            stream.put(torch.tensor([i]))
        stream.end()
        assert "".join(pieces) == text
        assert len(pieces) >= len(text) - text.count("\ufffd")  # one piece a character, as soon as it is whole


def test_spaces_between_words_survive_the_stream(tmp_path):
    """A word-level tokenizer writes a space between two words, and none before the first."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(write_tokenizer(tmp_path / "tokenizer.json", 10)))
    pieces = []
    stream = TextStream(tokenizer, pieces.append)
    for ids in ([[2]], [3], [4], [5]):
        stream.put(torch.tensor(ids))
    stream.end()
    assert pieces == ["w1", " w2", " w3"]


def test_bytes_that_are_no_text_do_not_stop_the_stream():
    pieces = []
    stream = TextStream(byte_tokenizer(257), pieces.append)
    stream.put(torch.tensor([[0]]))
    for i in b"\xff\xffa\xe2b":
        stream.put(torch.tensor([i]))
    stream.put(torch.tensor([256]))
    stream.end()
    assert pieces == ["\ufffd\ufffda", "\ufffdb"]


def test_refusals(tmp_path, folder):
    ended(run("generate", tmp_path / "no", "a"), 2, "no does not exist")
    ended(run("generate", folder, ""), 2, "the prompt is empty")
    asked = run("generate", folder, "a" * 500, "--max-new-tokens", 100)
    ended(asked, 2, "the prompt has 500 tokens, and 100 more", "context of 512")
    ended(run("generate", folder, "a", "--temperature", -1), 2, "--temperature")
    ended(run("generate", folder, "a", "--top-p", 1.5), 2, "--top-p")
    ended(run("generate", folder, "a", "--max-new-tokens", 0), 2, "--max-new-tokens")
    make_tiny(vocab_size=300).save_pretrained(tmp_path / "other")
    ended(run("generate", tmp_path / "other", "a"), 2, "other has no tokenizer", "300 is not one of bytes")
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    ended(run("generate", tmp_path / "other", "a"), 1, "the tokenizer in", "cannot be read")
    (tmp_path / "other" / "tokenizer.json").unlink()
    (tmp_path / "other" / "tokenizer_config.json").write_text("{}")
    ended(run("generate", tmp_path / "other", "a"), 1, "other holds no tokenizer; put the model's tokenizer.json into")


def test_text_arrives_while_it_is_made(folder):
    """As a program, with the prompt in a pipe: the first text is there long before the last."""
    program = subprocess.Popen(
        [sys.executable, "-m", "tokenformer", "generate", folder, "--temperature", "0", "--max-new-tokens", "400"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    program.stdin.write(b"a\n")
    program.stdin.close()
    first = os.read(program.stdout.fileno(), 100)
    arrived = time.perf_counter()
    rest = program.stdout.read()
    took = time.perf_counter() - arrived
    assert program.wait() == 0, program.stderr.read()
    assert (first + rest).decode() == "bcda" * 100 + "\n"
    assert len(first) < 100
    assert took > 0.05


def test_ctrl_c_ends_with_130(folder, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(TokenFormerForCausalLM, "generate", interrupted)
    ended(run("generate", folder, "a"), 130, "interrupted")


def test_a_byte_that_pads_is_text_too():
    pieces = []
    stream = TextStream(byte_tokenizer(256), pieces.append)
    for ids in ([9], [97], [0], [98]):
        stream.put(torch.tensor(ids))
    stream.end()
    assert "".join(pieces) == "a\0b"
