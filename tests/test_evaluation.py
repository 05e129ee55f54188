"""Scoring a text: windows, the naive twin, bits per byte across tokenizers, and the command `eval`."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
)

from command import ended, run
from conftest import make_tiny
from official_files import write_tokenizer
from tokenformer import BadFileError, BadRequestError
from tokenformer.evaluation import evaluate_text
from tokenformer.evaluation import text as text_module
from tokenformer.evaluation.text import windows
from tokenformer.models.text import byte_tokenizer

BYTES = byte_tokenizer(256)
TEXT = "Grüße aus der Höhle: a text of bytes, which is no text of characters. €"


def words(*vocabulary) -> PreTrainedTokenizerFast:
    """A tokenizer that knows these strings, and cuts a text into the longest it finds."""
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token="?"))
    tokenizer.model.continuing_subword_prefix = ""
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_level(*merges) -> PreTrainedTokenizerFast:
    """Byte-level BPE: bytes, and the pairs of them that are merged."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def lively(**changes):
    """A tiny model in fp64 whose predictions differ from token to token."""
    model = make_tiny(**changes).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


@torch.no_grad()
def naive_nats(model, ids, length, stride) -> list[float]:
    """Each token by itself: the first window that reaches it gives its context."""
    nats = []
    for target in range(1, len(ids)):
        start = 0
        while start + length < target:
            start += stride
        logits = model(torch.tensor([ids[start:target]])).logits[0, -1]
        nats.append(-logits.log_softmax(-1)[ids[target]].item())
    return nats


@pytest.mark.parametrize(
    ("length", "stride", "batch_size"),
    [(16, 8, 4), (16, 16, 3), (16, 1, 7), (7, 3, 1), (1, 1, 5), (100, None, 2), (None, None, 4)],
)
def test_equals_the_naive_computation(length, stride, batch_size):
    context = max(40, length or 0)
    model = lively(max_position_embeddings=context)
    score = evaluate_text(model, BYTES, TEXT, length=length, stride=stride, batch_size=batch_size)
    length = length or context
    ids = list(TEXT.encode())
    nats = naive_nats(model, ids, length, stride or max(1, length // 2))
    assert score.loss == pytest.approx(math.fsum(nats) / len(nats), rel=1e-12)
    assert score.perplexity == pytest.approx(math.exp(score.loss), rel=1e-12)
    assert score.bits_per_byte == pytest.approx(math.fsum(nats) / math.log(2) / (len(ids) - 1), rel=1e-12)
    assert score.tokens == score.bytes == len(ids) - 1
    assert (score.length, score.stride) == (length, stride or max(1, length // 2))


@given(st.integers(1, 200), st.integers(1, 40), st.data())
def test_every_token_is_scored_once_with_enough_context(tokens, length, data):
    stride = data.draw(st.integers(1, length))
    scored = []
    for window in windows(tokens, length, stride):
        assert 0 < window.end - window.start <= length
        for position in range(window.scored_from, window.end):
            scored.append(position)
            assert position - window.start >= min(position, length - stride)
    assert scored == list(range(tokens))


def test_bits_per_byte_by_hand():
    """A model that finds every token equally likely pays log2(vocabulary) bits a token."""
    text = "abababab"
    for tokenizer, vocabulary, tokens, bits in (
        (words("a", "b", "?"), 4, 7, 14),  # a b a b a b a b: seven scored tokens of two bits
        (words("ab", "a", "b", "?"), 4, 3, 6),  # ab ab ab ab: three of two bits
        (words("ab", "abab", "?"), 64, 1, 6),  # abab abab: one of six bits
    ):
        model = make_tiny(vocab_size=vocabulary)
        torch.nn.init.zeros_(model.lm_head.weight)
        score = evaluate_text(model, tokenizer, text, length=4)
        assert score.tokens == tokens
        assert score.bytes == len(text) - len(text) // (tokens + 1)  # without the first token's
        assert score.loss == pytest.approx(math.log(vocabulary), rel=1e-6)
        assert score.perplexity == pytest.approx(vocabulary, rel=1e-5)
        assert score.bits_per_byte == pytest.approx(bits / score.bytes, rel=1e-6)


def test_two_tokenizers_that_say_the_same_have_the_same_bits_per_byte():
    """Ids of one bit a byte and ids of two bits for two bytes carry the same information."""
    text = "abbaabababba"
    singles, pairs = words("a", "b"), words("aa", "ab", "ba", "bb")
    scores = []
    for tokenizer, vocabulary in ((singles, 2), (pairs, 4)):
        model = make_tiny(vocab_size=vocabulary)
        torch.nn.init.zeros_(model.lm_head.weight)
        scores.append(evaluate_text(model, tokenizer, text))
    assert [score.tokens for score in scores] == [11, 5]
    assert [score.bytes for score in scores] == [11, 10]
    assert scores[0].perplexity != pytest.approx(scores[1].perplexity)
    assert [score.bits_per_byte for score in scores] == pytest.approx([1, 1], rel=1e-6)


def test_tokenizers_that_begin_alike_count_the_same_bytes():
    """However they cut the rest: the bytes are the text's, without those of its first token."""
    model = make_tiny(vocab_size=300)
    merged = byte_level(("t", "e"), ("Ã", "¼"), ("te", "x"), ("tex", "t"), ("Ġ", "o"), ("Ġo", "f"))
    scores = [evaluate_text(model, tokenizer, TEXT) for tokenizer in (BYTES, byte_level(), merged)]
    assert [score.bytes for score in scores] == [len(TEXT.encode()) - 1] * 3
    assert scores[0].tokens == scores[1].tokens > scores[2].tokens
    for score in scores:
        assert score.bits_per_byte * score.bytes == pytest.approx(score.loss * score.tokens / math.log(2), rel=1e-12)


def test_bytes_are_those_of_the_text_not_of_its_tokens():
    model = make_tiny(vocab_size=300)
    text = "é, ü and €"
    merged = byte_level(("Ã", "©"))
    assert len(merged(text)["input_ids"]) == len(text.encode()) - 1
    for tokenizer, first in ((byte_level(), 1), (merged, 2)):
        for given_text in (text, text.encode()):
            assert evaluate_text(model, tokenizer, given_text).bytes == len(text.encode()) - first


def test_bytes_need_not_be_text(tiny, tmp_path):
    byte_tokenizer(256).save_pretrained(tmp_path)
    for tokenizer in (BYTES, AutoTokenizer.from_pretrained(tmp_path)):
        assert evaluate_text(tiny, tokenizer, bytes(range(256))).tokens == 255
    with pytest.raises(BadRequestError, match="not UTF-8"):
        evaluate_text(make_tiny(vocab_size=300), byte_level(), b"a\xff")


def test_the_model_is_left_as_it_was(tiny):
    tiny.train()
    evaluate_text(tiny, BYTES, TEXT)
    assert tiny.training
    assert all(parameter.grad is None for parameter in tiny.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 513}, "length 513 was given; it must lie between 1 and the model's context of 512"),
        ({"length": 0}, "length 0"),
        ({"length": 8, "stride": 9}, "stride 9 was given; it must lie between 1 and the length of 8"),
        ({"stride": 0}, "stride 0"),
        ({"batch_size": 0}, "batch size 0"),
        ({"text": "a"}, "the text has 1 tokens"),
        ({"text": ""}, "the text has 0 tokens"),
        ({"tokenizer": words(*"abcdefghij", *(f"w{i}" for i in range(300)), "?")}, "the tokenizer gave the id 310"),
    ],
)
def test_refusals(tiny, options, message):
    with pytest.raises(BadRequestError, match=message):
        evaluate_text(tiny, **{"tokenizer": BYTES, "text": "Z and more", **options})


def test_a_broken_model_has_no_score(tiny):
    tiny.lm_head.weight.data[0, 0] = math.nan
    with pytest.raises(BadFileError, match="the loss is nan"):
        evaluate_text(tiny, BYTES, TEXT)


@pytest.fixture
def folder(tmp_path, tiny):
    tiny.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_bytes(TEXT.encode() + b"\r\n\xff")
    return tmp_path / "model"


def test_the_command(tmp_path, folder, tiny):
    text, out = tmp_path / "text.txt", tmp_path / "score.json"
    result = run("eval", folder, "--text", text, "--length", 16, "--stride", 4, "--batch-size", 2, "--json", out)
    assert result.exit_code == 0, result.stderr
    expected = evaluate_text(tiny, BYTES, text.read_bytes(), length=16, stride=4)
    written = json.loads(out.read_text())
    assert written["loss"] == pytest.approx(expected.loss, rel=1e-6)
    assert (written["tokens"], written["bytes"], written["stride"]) == (expected.tokens, expected.bytes, 4)
    assert (written["model"], written["text"]) == (str(folder), str(text))
    assert f"bits per byte  {expected.bits_per_byte:.4f}\n" in result.stdout
    assert result.stderr == ""


def test_the_command_with_a_tokenizer(tmp_path):
    make_tiny(vocab_size=40).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model" / "tokenizer.json", 30)
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4")
    result = run("eval", tmp_path / "model", "--text", tmp_path / "text.txt")
    assert result.exit_code == 0, result.stderr
    assert "scored         3 tokens, 9 bytes\n" in result.stdout


def test_the_command_scores_any_causal_language_model(tmp_path):
    """A GPT-NeoX folder, with its own tokenizer: the same windows, computed directly."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    peer = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=280, max_position_embeddings=24, **sizes)).double().eval()
    tokenizer = byte_level(("t", "e"), ("te", "x"), ("tex", "t"))
    peer.save_pretrained(tmp_path / "peer")
    tokenizer.save_pretrained(tmp_path / "peer")
    (tmp_path / "text.txt").write_text(TEXT)
    result = run("eval", tmp_path / "peer", "--text", tmp_path / "text.txt", "--json", tmp_path / "score.json")
    assert result.exit_code == 0, result.stderr
    written = json.loads((tmp_path / "score.json").read_text())
    nats = naive_nats(peer, tokenizer(TEXT)["input_ids"], length=24, stride=12)
    assert (written["length"], written["stride"]) == (24, 12)
    assert (written["tokens"], written["bytes"]) == (len(nats), len(TEXT.encode()) - 1)
    assert written["loss"] == pytest.approx(math.fsum(nats) / len(nats), rel=1e-12)
    assert written["bits_per_byte"] == pytest.approx(math.fsum(nats) / math.log(2) / written["bytes"], rel=1e-12)


def test_a_model_without_a_longest_context_needs_a_length():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "expand": 1, "time_step_rank": 2}
    endless = MambaForCausalLM(MambaConfig(vocab_size=256, **sizes))
    with pytest.raises(BadRequestError, match="a mamba model has no longest context"):
        evaluate_text(endless, BYTES, TEXT)
    with pytest.raises(BadRequestError, match="length 0 was given; it must be at least 1"):
        evaluate_text(endless, BYTES, TEXT, length=0)
    assert evaluate_text(endless, BYTES, TEXT, length=16).bytes == len(TEXT.encode()) - 1


def test_windows_are_no_longer_and_no_more_than_memory_bears(monkeypatch):
    model = make_tiny(max_position_embeddings=32768)
    shapes = []
    model.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    evaluate_text(model, BYTES, "x" * 2500)
    assert shapes == [(1, 2048), (1, 1475)]
    shapes.clear()
    for most, count in ((2**28, 4), (3 * 16 * 256, 3), (1, 1)):
        monkeypatch.setattr(text_module, "MOST_LOGITS", most)
        evaluate_text(model, BYTES, "x" * 65, length=16, stride=16)
        assert shapes[0] == (count, 16)
        shapes.clear()


def test_another_s_folder_that_lacks_weights(tmp_path):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 256}
    config = GPTNeoXConfig(num_hidden_layers=1, **sizes)
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "peer")
    config.num_hidden_layers = 2
    config.save_pretrained(tmp_path / "peer")
    (tmp_path / "text.txt").write_text(TEXT)
    ended(run("eval", tmp_path / "peer", "--text", tmp_path / "text.txt"), 1, "lacks gpt_neox.layers.1.")


def test_mistakes_on_the_command_line(tmp_path, folder):
    text = tmp_path / "text.txt"
    ended(run("eval", tmp_path / "no", "--text", text), 2, "no does not exist; check the path")
    ended(run("eval", tmp_path, "--text", text), 2, "is not a model folder: it has no config.json")
    ended(run("eval", folder, "--text", tmp_path / "no.txt"), 2, "no.txt does not exist")
    ended(run("eval", folder, "--text", text, "--json", text), 2, "text.txt exists already")
    ended(run("eval", folder, "--text", text, "--json", tmp_path), 2, "is a folder; name a file, such as")
    (tmp_path / "empty.txt").touch()
    ended(run("eval", folder, "--text", tmp_path / "empty.txt"), 2, "empty.txt is empty; choose a file with text")
    ended(run("eval", folder, "--text", text, "--stride", 600), 2, "stride 600")
    ended(run("eval", folder, "--text", text, "--device", "abacus"), 2, "device 'abacus' cannot be used")
    (folder / "model.safetensors").write_bytes(b"broken")
    ended(run("eval", folder, "--text", text), 1, "the weights in", "cannot be read")
    (folder / "model.safetensors").unlink()
    ended(run("eval", folder, "--text", text), 1, "the weights in", "cannot be read")
