"""Tokenizers: bytes, files, folders, Hub names, and one trained on the corpus."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import tokenformer.data.text.tokenizer as tokenizer_module
from data_files import LINES, ids_of, prepared, write_documents, write_jsonl
from tokenformer import BadFileError, BadRequestError
from tokenformer.data.text import TextSettings, load_tokenizer, train_tokenizer
from tokenformer.data.text.documents import Piece, Place
from tokenformer.data.text.encode import ByteEncoder, TokenizerEncoder


def write_words(path, *words, **settings):
    """A tokenizer.json of whole words."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(("?", *words))}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for name, value in settings.items():
        getattr(words, name)(**value)
    words.save(str(path))
    return path


@pytest.fixture(scope="module")
def saved_bytes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    load_tokenizer("bytes").save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_are_their_own_ids_after_saving_too(saved_bytes, text):
    for tokenizer in (load_tokenizer("bytes"), saved_bytes):
        ids = tokenizer(text).input_ids
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", ["<|endoftext|>", " a  b , don 't .", "a\r\n\tb\n", "\0", "\ufeffx", "e\u0301 ﬁ"])
def test_bytes_of_awkward_texts(saved_bytes, text):
    assert saved_bytes(text).input_ids == list(text.encode())
    assert saved_bytes.decode(list(text.encode())) == text
    numpy_ids = ByteEncoder()([Piece(text.encode(), True, Place())]).ids
    assert numpy_ids.tolist() == [*saved_bytes(text).input_ids, saved_bytes.eos_token_id]


def test_the_byte_tokenizer_is_an_ordinary_one(saved_bytes):
    assert isinstance(saved_bytes, PreTrainedTokenizerFast)
    assert len(saved_bytes) == 257
    assert saved_bytes.eos_token == "<|endoftext|>"
    assert saved_bytes.eos_token_id == 256
    assert saved_bytes.decode([97, 256]) == "a<|endoftext|>"
    assert saved_bytes.decode([97, 256], skip_special_tokens=True) == "a"
    assert saved_bytes.decode([0xC3]) == "\ufffd"


def test_prepared_bytes_need_no_valid_text(tmp_path):
    data = prepared(
        tmp_path, write_documents(tmp_path / "c", [bytes(range(1, 256))]), errors="strict", block_length=255
    )
    assert data.train[0]["input_ids"].tolist() == list(range(1, 256))
    assert (data.vocab_size, data.eos_token_id, data.stats["replaced"]) == (257, 256, 0)
    assert data.tokenizer.eos_token_id == 256


def test_a_trained_tokenizer_is_a_byte_level_bpe(tmp_path):
    source = write_documents(tmp_path / "c", [line.encode() for line in LINES])
    tokenizer = train_tokenizer(TextSettings(train=[str(path) for path in source]), 300)
    tokenizer.save_pretrained(tmp_path / "bpe")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "bpe")
    assert len(loaded) == 300
    assert loaded.eos_token_id == 0
    text = "the quick brown naïve 狐 🦊\n"
    assert loaded.decode(loaded(text).input_ids) == text
    assert len(loaded(LINES[0]).input_ids) < len(LINES[0]) / 2
    again = train_tokenizer(TextSettings(train=[str(path) for path in source]), 300)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    data = prepared(tmp_path, source, tokenizer=str(tmp_path / "bpe"))
    assert data.vocab_size == 300
    assert data.tokenizer.decode(data.train[0]["input_ids"]).startswith("line 0: the quick")


def test_files_and_folders(tmp_path):
    path = write_words(tmp_path / "words.json", "a", "b", "</s>")
    tokenizer = load_tokenizer(path)
    assert tokenizer("a b c").input_ids == [1, 2, 0]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 3
    tokenizer.save_pretrained(tmp_path / "folder")
    for name in (tmp_path / "folder", str(tmp_path / "folder" / "tokenizer.json")):
        assert load_tokenizer(name)("b a").input_ids == [2, 1]
        assert load_tokenizer(name).eos_token_id == 3


def test_a_hub_name_goes_to_auto_tokenizer(monkeypatch):
    asked = []

    def from_pretrained(name, trust_remote_code):
        assert trust_remote_code is False
        asked.append(name)
        return load_tokenizer("bytes")

    monkeypatch.setattr(tokenizer_module.AutoTokenizer, "from_pretrained", from_pretrained)
    assert load_tokenizer("owner/name").eos_token_id == 256
    assert asked == ["owner/name"]


def test_the_end_token_is_found_named_or_asked_for(tmp_path):
    path = write_words(tmp_path / "words.json", "a", "[SEP]")
    with pytest.raises(BadRequestError, match=r"words.json' has no end-of-document token.* with eos_token"):
        load_tokenizer(path)
    assert load_tokenizer(path, eos_token="[SEP]").eos_token_id == 2
    with pytest.raises(BadRequestError, match=r"has no token '\[SEPP\]'"):
        load_tokenizer(path, eos_token="[SEPP]")
    data = prepared(
        tmp_path, write_documents(tmp_path / "c", [b"a a a"]), tokenizer=str(path), eos_token="[SEP]", block_length=4
    )
    assert data.train[0]["input_ids"].tolist() == [1, 1, 1, 2]
    assert data.eos_token_id == 2
    with pytest.raises(BadRequestError, match=r"has no token 'endoftext'; did you mean '<\|endoftext\|>'\?"):
        load_tokenizer("bytes", eos_token="endoftext")


def test_limits_and_special_tokens_of_a_tokenizer_do_not_touch_the_corpus(tmp_path):
    path = write_words(
        tmp_path / "words.json", "a", "<eos>", enable_truncation={"max_length": 2}, enable_padding={"length": 9}
    )
    tokenizer = load_tokenizer(path, eos_token="<eos>")
    data = prepared(tmp_path, write_documents(tmp_path / "c", [b"a a a a a"]), tokenizer=str(path), block_length=6)
    assert data.train[0]["input_ids"].tolist() == [1, 1, 1, 1, 1, 2]
    assert tokenizer.eos_token_id == 2
    bpe = train_tokenizer(TextSettings(train=str(tmp_path / "c" / "0000.txt")), 257)
    spelled = TokenizerEncoder(bpe, True)([Piece(b"<|endoftext|>", True, Place())]).ids
    assert np.count_nonzero(spelled == bpe.eos_token_id) == 1


def test_the_key_has_the_tokenizer_in_it(tmp_path):
    source = write_documents(tmp_path / "c", [b"a b " * 20])
    one = prepared(tmp_path, source, tokenizer=str(write_words(tmp_path / "1.json", "a", "b", "<eos>")))
    other = prepared(tmp_path, source, tokenizer=str(write_words(tmp_path / "2.json", "b", "a", "<eos>")))
    (tmp_path / "3.json").write_bytes((tmp_path / "1.json").read_bytes())
    assert one.key != other.key
    assert prepared(tmp_path, source, tokenizer=str(tmp_path / "3.json")).cached


def test_tokenizers_that_cannot_be_had(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(BadFileError, match=r"broken.json is not a tokenizer.json"):
        load_tokenizer(tmp_path / "broken.json")
    (tmp_path / "empty").mkdir()
    for name, content in (
        (None, None),
        ("config.json", '{"model_type": "gpt2"}'),
        ("tokenizer_config.json", "{}"),
        ("config.json", '{"model_type": "bert"}'),
        ("config.json", '{"model_type": "llama"}'),
    ):
        if name is not None:
            (tmp_path / "empty" / name).write_text(content)
        with pytest.raises(BadFileError, match="empty holds no tokenizer; give bytes, or a folder with a tokenizer"):
            load_tokenizer(tmp_path / "empty")
    (tmp_path / "empty" / "tokenizer.json").write_text("{")
    with pytest.raises(BadFileError, match="transformers cannot load a tokenizer from the folder"):
        load_tokenizer(tmp_path / "empty")
    with pytest.raises(BadRequestError, match="at most 1,048,576 are possible"):
        train_tokenizer(TextSettings(train=str(tmp_path)), 2**20 + 1)
    with pytest.raises(BadRequestError, match="'byte' is neither bytes nor a local path, and could not be loaded"):
        load_tokenizer("byte")
    with pytest.raises(BadRequestError, match="need at least 257"):
        train_tokenizer(TextSettings(train=str(tmp_path)), 100)


def test_broken_text_is_replaced_and_counted_or_refused(tmp_path):
    good = write_documents(tmp_path / "good", ["".join(LINES).encode()])
    train_tokenizer(TextSettings(train=str(good[0])), 300).save_pretrained(tmp_path / "bpe")
    settings = {"tokenizer": str(tmp_path / "bpe"), "block_length": 4}
    documents = [b"fine \xef\xbf\xbd is in the text", b"broken \xff here \xc3( and \x80 there", b"cut \xe2\x82"]
    data = prepared(tmp_path, write_documents(tmp_path / "bad", documents), **settings)
    assert data.stats["replaced"] == 4
    text = data.tokenizer.decode(ids_of(data.train), skip_special_tokens=True)
    assert text.startswith("fine \ufffd is in the textbroken \ufffd here \ufffd( and \ufffd there")
    with pytest.raises(BadFileError, match=r"0001\.txt is not UTF-8 at byte 7 "):
        prepared(tmp_path, tmp_path / "bad", **settings, errors="strict")
    with pytest.raises(BadFileError, match=r"0001\.txt is not UTF-8 at byte 7 "):
        prepared(tmp_path, tmp_path / "bad", **settings, errors="strict", workers=2)
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b'{"text": "good"}\n{"text": "b\xffd"}\n' + json.dumps({"text": "half \ud83d pair"}).encode())
    assert prepared(tmp_path, rows, **settings).stats["replaced"] == 4  # a byte, and three of half a pair
    with pytest.raises(BadFileError, match=r"rows\.jsonl line 2 is not UTF-8 at byte 1 "):
        prepared(tmp_path, rows, **settings, errors="strict")
    assert prepared(tmp_path, write_jsonl(tmp_path / "fine.jsonl", ["naïve"] * 9), **settings).stats["replaced"] == 0
