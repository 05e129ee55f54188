"""Files that do not fit the authors' format: refused in one line, with nothing left behind."""

import os
import pickle

import pytest
import torch

from official_files import (
    ROWS,
    SETTINGS,
    fail_after_saving,
    official_tensors,
    refused,
    write_official,
    write_tokenizer,
)
from tokenformer import BadFileError, BadRequestError
from tokenformer.official import import_official

MLP_KEYS = "sequential.2.mlp.key_param_tokens"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"norm": "rmsnorm"}, BadRequestError, r"norm is 'rmsnorm'; only 'layernorm_nonparam' is supported"),
        ({"norm": "layernorm"}, BadRequestError, r"norm is 'layernorm'; only 'layernorm_nonparam'"),
        ({"final_norm": "layernorm_nonparam"}, BadRequestError, r"final_norm is .*; only 'layernorm' is"),
        (
            {"norm_activation_type": "relu"},
            BadRequestError,
            r"is 'relu'; the supported ones are l2_norm_gelu, gelu_l2_norm, s",
        ),
        (
            {"norm_activation_type": ["softmax"]},
            BadRequestError,
            r"norm_activation_type is \['softmax'\]; the supported",
        ),
        ({"pos_emb": "learned"}, BadRequestError, r"pos_emb is 'learned'; only 'rotary' is supported"),
        ({"gpt_j_residual": True}, BadRequestError, r"gpt_j_residual is True; only False is supported"),
        ({"model_parallel_size": 2}, BadRequestError, r"model_parallel_size is 2; only 1 is supported"),
        ({"sliding_window_width": 64}, BadRequestError, r"sliding_window_width is 64; only None"),
        ({"use_mup": True}, BadRequestError, r"use_mup is True"),
        ({"rotary_pct": 0.2}, BadRequestError, r"rotates 3 of a head's 16 entries; they rotate in pairs"),
        ({"rotary_pct": 0.1}, BadRequestError, r"rotates 1 of a head's 16"),
        ({"rotary_pct": 1.5}, BadRequestError, r"rotates 24 of a head's 16"),
        ({"rotary_pct": "a quarter"}, BadFileError, r"rotary_pct is 'a quarter'; a number above 0 is needed"),
        ({"rotary_pct": float("inf")}, BadFileError, r"rotary_pct is .*; a number above 0 is needed"),
        ({"layernorm_epsilon": True}, BadFileError, r"layernorm_epsilon is True; a number"),
        ({"num_attention_heads": 5}, BadRequestError, r"hidden_size is 48; it must divide by 5"),
        ({"ffn_slot_num": 0}, BadFileError, r"ffn_slot_num is 0; a whole number of at least 1"),
        ({"num_layers": 3.0}, BadFileError, r"num_layers is 3.0; a whole number"),
        ({"qkv_slot_num": True}, BadFileError, r"qkv_slot_num is True; a whole number"),
        ({"no_weight_tying": "no"}, BadFileError, r"no_weight_tying is 'no'; true or false"),
    ],
    ids=str,
)
def test_settings_that_are_refused(tmp_path, changes, error, message):
    checkpoint, config = write_official(tmp_path, official_tensors(SETTINGS), **changes)
    refused(
        tmp_path,
        error,
        rf"official\.yml: .*{message}",
        lambda: import_official(checkpoint, config, tmp_path / "m"),
    )


@pytest.mark.parametrize("key", sorted(SETTINGS.keys() - {"pos_emb", "gpt_j_residual"}))
def test_missing_settings_are_named(tmp_path, key):
    checkpoint, config = write_official(tmp_path, official_tensors(SETTINGS), **{key: None})
    message = rf"official\.yml lacks {key};"
    refused(tmp_path, BadFileError, message, lambda: import_official(checkpoint, config, tmp_path / "m"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"holds a NoneType, not a mapping"),
        (b"[1, 2]", r"holds a list, not a mapping"),
        (b"just words", r"holds a str, not a mapping"),
        (b"{a: [", r"is not YAML: "),
        (b"\x80\x81", r"is not YAML: "),
        (b"[" * 20_000, r"is not YAML: its brackets are nested too deeply"),
        (b"!!python/object/apply:os.system ['true']", r"is not YAML: "),
    ],
)
def test_files_that_are_no_settings(tmp_path, content, message):
    checkpoint, config = write_official(tmp_path)
    config.write_bytes(content)
    message = rf"official\.yml {message}"
    refused(tmp_path, BadFileError, message, lambda: import_official(checkpoint, config, tmp_path / "m"))


def changed(**changes):
    """The right tensors with some changed; None leaves one out."""
    tensors = {**official_tensors(SETTINGS), **changes}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (changed(**{MLP_KEYS: None}), rf" lacks {MLP_KEYS};"),
        (changed(**{"sequential.6.norm.bias": None}), r"lacks sequential\.6\.norm\.bias;"),
        (
            changed(**{"sequential.0.word_embeddings.weight": None}),
            r"lacks sequential\.0\.word_embeddings\.weight;",
        ),
        (
            changed(**{"sequential.2.attention.rotary_emb.inv_freq": torch.ones(2)}),
            r"has the unexpected sequential\.2\.attention\.rotary_emb\.inv_freq;",
        ),
        (
            changed(**{MLP_KEYS: None, "extra": torch.ones(2)}),
            r"lacks sequential\.2.* and has the unexpected extra;",
        ),
        (
            official_tensors({**SETTINGS, "num_layers": 2}),
            r"lacks sequential\.4\.attention\.key\.key_.* and 6 more and has the unexpected sequential\.5",
        ),
        (
            official_tensors({**SETTINGS, "no_weight_tying": True}),
            r"unexpected sequential\.7\.final_linear\.weight",
        ),
        (
            official_tensors({**SETTINGS, "ffn_slot_num": 12}),
            r"mlp\.key_param_tokens is \[12, 48\]; .* \[11, 48\]",
        ),
        (
            changed(**{MLP_KEYS: torch.ones(48, 11)}),
            r"mlp\.key_param_tokens is \[48, 11\]; .* must be \[11, 48\]",
        ),
        (
            changed(**{"sequential.0.word_embeddings.weight": torch.tensor(1.0)}),
            r"word_embeddings\.weight is \[\];",
        ),
        (
            changed(**{MLP_KEYS: torch.ones(11, 48).half()}),
            rf"{MLP_KEYS} is float16 and .* is float32; one float",
        ),
        (
            {key: t.to(torch.int32) for key, t in official_tensors(SETTINGS).items()},
            r"int32; one floating dtype",
        ),
        (changed(**{MLP_KEYS: "text"}), rf"'{MLP_KEYS}' is a str, not a dense tensor"),
        (
            changed(**{MLP_KEYS: torch.ones(11, 48).to_sparse()}),
            rf"'{MLP_KEYS}' is a Tensor, not a dense tensor",
        ),
        (
            changed(**{MLP_KEYS: torch.ones(11, 48, device="meta")}),
            rf"'{MLP_KEYS}' is a Tensor, not a dense tensor",
        ),
        ({"module": official_tensors(SETTINGS)}, r"'module' is a dict, not a dense tensor"),
        ([torch.ones(2)], r"holds a list, not a dictionary of tensors"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, tensors, message):
    checkpoint, config = write_official(tmp_path, tensors)
    message = rf"official\.bin.*{message}"
    refused(tmp_path, BadFileError, message, lambda: import_official(checkpoint, config, tmp_path / "m"))


class Code:
    """Unpickled by an unsafe reader, it would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_files_that_are_no_checkpoint(tmp_path):
    checkpoint, config = write_official(tmp_path)
    whole = checkpoint.read_bytes()
    torch.save(official_tensors(SETTINGS), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    torch.save(changed(extra=Code(tmp_path / "made")), tmp_path / "code.bin")
    broken = r"official\.bin cannot be read as a checkpoint: it is truncated, or not a file that torch.save wrote"
    for content, message in (
        (b"", broken),
        (b"<!doctype html>", broken),
        (b"hello", broken),
        (os.urandom(500), broken),
        (whole[:-1], broken),
        (whole[: len(whole) // 2], broken),
        (whole[:10], broken),
        ((tmp_path / "old.bin").read_bytes()[:-1], broken),
        (pickle.dumps({"a": Code(tmp_path / "made")}), broken),
        (
            (tmp_path / "code.bin").read_bytes(),
            r"official\.bin .*: it holds \w+\.mkdir, and only tensors are loaded",
        ),
    ):
        checkpoint.write_bytes(content)
        refused(tmp_path, BadFileError, message, lambda: import_official(checkpoint, config, tmp_path / "m"))
    assert not (tmp_path / "made").exists()


def test_missing_files_are_named(tmp_path):
    checkpoint, config = write_official(tmp_path)
    for arguments, message in (
        ((tmp_path / "no.bin", config, tmp_path / "m"), r"no\.bin does not exist"),
        ((checkpoint, tmp_path / "no.yml", tmp_path / "m"), r"no\.yml does not exist"),
        ((checkpoint, config, tmp_path / "m", tmp_path / "no.json"), r"no\.json does not exist"),
        ((tmp_path, config, tmp_path / "m"), r"is not a file"),
    ):
        refused(tmp_path, BadRequestError, message, lambda arguments=arguments: import_official(*arguments))


def test_tokenizers_that_do_not_fit(tmp_path):
    checkpoint, config = write_official(tmp_path)
    large = write_tokenizer(tmp_path / "large.json", ROWS + 1)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for tokenizer, error, message in (
        (
            large,
            BadRequestError,
            rf"large\.json has {ROWS + 1} entries, the checkpoint's embedding {ROWS} rows",
        ),
        (broken, BadFileError, r"broken\.json is not a tokenizer\.json"),
    ):

        def work(tokenizer=tokenizer):
            import_official(checkpoint, config, tmp_path / "m", tokenizer)

        refused(tmp_path, error, message, work)


def test_out_dir_must_be_new_or_empty(tmp_path, monkeypatch):
    checkpoint, config = write_official(tmp_path)
    full, empty, file = tmp_path / "full", tmp_path / "empty", tmp_path / "file"
    full.mkdir()
    empty.mkdir()
    (full / "mine.txt").write_text("mine")
    file.write_text("mine")
    for taken in (full, file):

        def work(taken=taken):
            # Said before the files are read, which may take long: this one is not even there.
            import_official(tmp_path / "no.bin", config, taken)

        refused(tmp_path, BadRequestError, r"exists already and would be overwritten", work)
    monkeypatch.chdir(empty)
    refused(tmp_path, BadRequestError, r"working directory", lambda: import_official(checkpoint, config, "."))
    monkeypatch.chdir(tmp_path)
    import_official(checkpoint, config, "empty")
    assert "model.safetensors" in names(empty)


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_interrupted_import_leaves_nothing(tmp_path, monkeypatch, error):
    checkpoint, config = write_official(tmp_path)
    fail_after_saving(monkeypatch, error)
    refused(tmp_path, type(error), r"", lambda: import_official(checkpoint, config, tmp_path / "model"))
