"""The authors' checkpoints: import computes their formula, export gives every bit back or says why not."""

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from conftest import make_tiny, relative_error
from official_files import (
    ROWS,
    SETTINGS,
    official_logits,
    official_tensors,
    refused,
    write_official,
    write_tokenizer,
)
from tokenformer import BadFileError, BadRequestError, grow, io
from tokenformer.official import export_official, import_official

IDS = torch.randint(0, ROWS, (2, 19), generator=torch.Generator().manual_seed(0))
MLP_KEYS = "sequential.2.mlp.key_param_tokens"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def same_bytes(ours, theirs):
    bits = [tensor.contiguous().view(torch.uint8) for tensor in (ours, theirs)]
    return ours.dtype == theirs.dtype and torch.equal(*bits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_activation_type": "gelu_l2_norm"},
        {"norm_activation_type": "softmax"},
        {"rotary_pct": 1.0, "rotary_emb_base": 500},
        {"no_weight_tying": True, "layernorm_epsilon": 0.3},
    ],
    ids=str,
)
def test_imported_model_computes_the_authors_formula(tmp_path, dtype, changes):
    settings = {**SETTINGS, **changes}
    tensors = official_tensors(settings, dtype)
    checkpoint, config = write_official(tmp_path, tensors, **changes)
    import_official(checkpoint, config, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == dtype
    ours = model.double()(IDS).logits
    theirs = official_logits({key: tensor.double() for key, tensor in tensors.items()}, settings, IDS)
    # In fp64 only tau, which is kept in fp32, is rounded.
    assert relative_error(ours, theirs) < 1e-6


@pytest.mark.parametrize("change", [{"rotary_pct": 0.5}, {"rotary_emb_base": 100}, {"layernorm_epsilon": 0.3}], ids=str)
def test_the_comparison_would_notice(change):
    tensors = official_tensors(SETTINGS, torch.float64)
    changed = official_logits(tensors, {**SETTINGS, **change}, IDS)
    assert relative_error(changed, official_logits(tensors, SETTINGS, IDS)) > 1e-4


def test_folder_is_an_ordinary_one(tmp_path):
    done = import_official(*write_official(tmp_path, dtype=torch.float16), tmp_path / "deep" / "model")
    expected = ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert set(names(tmp_path / "deep" / "model")) >= set(expected)
    assert names(tmp_path / "deep") == ["model"]
    assert done.parameters == sum(t.numel() for t in official_tensors(SETTINGS).values())
    assert done.dtype == torch.float16
    assert done.num_tokens == {"qkv": 5, "out": 7, "ffn": 11}
    assert (done.embedding_rows, done.vocabulary) == (ROWS, None)


@pytest.mark.parametrize(("end_of_text", "eos_id"), [("<|endoftext|>", 0), ("</s>", None)])
def test_tokenizer_and_padding(tmp_path, end_of_text, eos_id):
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", 30, end_of_text)
    done = import_official(*write_official(tmp_path), tmp_path / "model", tokenizer)
    assert (done.embedding_rows, done.vocabulary) == (ROWS, 30)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.get_input_embeddings().weight.shape[0] == ROWS
    assert model.config.eos_token_id == model.generation_config.eos_token_id == eos_id
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert loaded("w0 w27 strange").input_ids == [2, 29, 1]
    assert loaded.eos_token_id == eos_id
    assert loaded.model_max_length == SETTINGS["max_position_embeddings"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("untied", [False, True])
def test_round_trip_is_byte_identical(tmp_path, dtype, untied):
    changes = {"no_weight_tying": untied, "norm_activation_type": "gelu_l2_norm", "layernorm_epsilon": 1e-6}
    checkpoint, config = write_official(tmp_path, dtype=dtype, **changes)
    import_official(checkpoint, config, tmp_path / "model")
    export_official(tmp_path / "model", tmp_path / "back.bin", tmp_path / "back.yml")
    before, after = torch.load(checkpoint), torch.load(tmp_path / "back.bin")
    assert before.keys() == after.keys()
    assert all(same_bytes(after[key], before[key]) for key in before)
    written = yaml.safe_load((tmp_path / "back.yml").read_text())
    assert {key: written[key] for key in SETTINGS} == {**SETTINGS, "no_weight_tying": untied} | {
        "norm_activation_type": "gelu_l2_norm"
    }
    assert written["layernorm_epsilon"] == 1e-6
    assert written["rotary_emb_base"] == 10000
    # What was exported can be imported, to the same weights.
    import_official(tmp_path / "back.bin", tmp_path / "back.yml", tmp_path / "again")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("model", "again")]
    assert weights[0] == weights[1]


def views_of_one_buffer(tensors):
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
    parts = flat.split([tensor.numel() for tensor in tensors.values()])
    return {key: part.view(tensor.shape) for (key, tensor), part in zip(tensors.items(), parts, strict=True)}


def one_tensor_twice(tensors):
    return {**tensors, MLP_KEYS.replace("key", "value"): tensors[MLP_KEYS]}


def transposed(tensors):
    return {**tensors, MLP_KEYS: tensors[MLP_KEYS].T.contiguous().T}


def output_is_the_embedding(tensors):
    return {**tensors, "sequential.7.final_linear.weight": tensors["sequential.0.word_embeddings.weight"]}


@pytest.mark.parametrize("arrange", [views_of_one_buffer, one_tensor_twice, transposed, output_is_the_embedding])
def test_nothing_is_lost_however_the_tensors_lie(tmp_path, arrange):
    tensors = arrange(official_tensors(SETTINGS))
    untied = arrange is output_is_the_embedding
    import_official(*write_official(tmp_path, tensors, no_weight_tying=untied), tmp_path / "model")
    export_official(tmp_path / "model", tmp_path / "back.bin", tmp_path / "back.yml")
    back = torch.load(tmp_path / "back.bin")
    assert all(same_bytes(back[key], tensors[key]) for key in tensors)
    assert back.keys() == tensors.keys()


def test_old_torch_files_are_read(tmp_path):
    checkpoint, config = write_official(tmp_path)
    torch.save(torch.load(checkpoint), checkpoint, _use_new_zipfile_serialization=False)
    import_official(checkpoint, config, tmp_path / "model")


def test_settings_as_text_and_with_hyphens(tmp_path):
    checkpoint, config = write_official(tmp_path)
    text = config.read_text().replace('"rotary_pct"', '"rotary-pct"')
    config.write_text(text.replace('"pos_emb"', '"layernorm-epsilon": 1e-3, "pos_emb"'))
    import_official(checkpoint, config, tmp_path / "model")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.layer_norm_eps == 1e-3


def save(model, folder):
    model.save_pretrained(folder)
    return folder


def test_grown_models(tmp_path):
    tiny = make_tiny()
    zero = save(grow(tiny, 2, method="zero"), tmp_path / "zero")
    by_one = save(grow(tiny, num_tokens={"out": 65}), tmp_path / "by_one")
    for folder, message in (
        (
            zero,
            r"zero: model\.layers\.0\.attention\.query has 128 tokens and tau 8, .* take tau 11\.31371 ",
        ),
        (
            by_one,
            r"attention\.out has 65 tokens and tau 8, as a grown model may; .* tau 8\.062258 and compute",
        ),
    ):
        refused(
            tmp_path,
            BadRequestError,
            message,
            lambda folder=folder: export_official(folder, tmp_path / "a.bin", tmp_path / "a.yml"),
        )
    # split multiplies tau as √n grows, so that the authors' code computes the grown model too.
    split = grow(tiny, 3, method="split")
    export_official(save(split, tmp_path / "split"), tmp_path / "split.bin", tmp_path / "split.yml")
    settings = yaml.safe_load((tmp_path / "split.yml").read_text())
    ours, theirs = split(IDS).logits, official_logits(torch.load(tmp_path / "split.bin"), settings, IDS)
    assert relative_error(ours, theirs) < 1e-5


def test_models_that_the_authors_code_cannot_compute(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    for name, changes, message in (
        ("norms", {"parametric_norm": True}, r"norms: the blocks' norms have weights and biases"),
        (
            "rope",
            {"rope_parameters": rope},
            r"rope: rope_type is 'linear'; the authors' code only has 'default'",
        ),
        ("heads", {"hidden_size": 48}, r"heads: rotary_pct is 0\.25, which rotates 3 of a head's 12 entries"),
    ):
        folder = save(make_tiny(**changes), tmp_path / name)
        refused(
            tmp_path,
            BadRequestError,
            message,
            lambda folder=folder: export_official(folder, tmp_path / "a.bin", tmp_path / "a.yml"),
        )


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def drop_a_tensor(path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    del tensors["model.layers.1.ffn.tau"]
    save_file({**tensors, "model.stranger": torch.ones(2)}, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "spoil", "error", "message"),
    [
        ("model.safetensors", truncate, BadFileError, r"the weights in .*model cannot be read"),
        (
            "model.safetensors",
            lambda path: path.unlink(),
            BadFileError,
            r"the weights in .*model cannot be read",
        ),
        (
            "model.safetensors",
            drop_a_tensor,
            BadFileError,
            r"model lacks model\.layers\.1\.ffn\.tau and has the unexpected model\.stranger; ",
        ),
        ("config.json", truncate, BadFileError, r"config\.json cannot be read"),
        (
            "config.json",
            lambda path: path.unlink(),
            BadRequestError,
            r"model is not a model folder: it has no config",
        ),
        (
            "config.json",
            lambda path: GPT2Config().save_pretrained(path.parent),
            BadRequestError,
            r"model holds a gpt2 model, but a TokenFormer",
        ),
    ],
)
def test_broken_model_folders(tmp_path, name, spoil, error, message):
    spoil(save(make_tiny(), tmp_path / "model") / name)
    refused(
        tmp_path,
        error,
        message,
        lambda: export_official(tmp_path / "model", tmp_path / "a.bin", tmp_path / "a.yml"),
    )


def test_export_overwrites_nothing(tmp_path):
    folder, taken, free = save(make_tiny(), tmp_path / "model"), tmp_path / "taken", tmp_path / "free"
    taken.write_text("mine")
    for checkpoint, config, message in (
        (taken, free, r"taken exists already and would be overwritten"),
        (free, taken, r"taken exists already"),
        (free, free, r"free was given for both files"),
        (tmp_path, free, r"is a folder; name the file"),
        (folder / "a.bin", free, r"a\.bin is inside .*, which is read; choose a folder outside it"),
        (free, folder / "new" / "a.yml", r"a\.yml is inside .*, which is read"),
    ):
        refused(
            tmp_path,
            BadRequestError,
            message,
            lambda checkpoint=checkpoint, config=config: export_official(folder, checkpoint, config),
        )


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_export_leaves_both_files_or_none(tmp_path, monkeypatch, error):
    folder = save(make_tiny(), tmp_path / "model")

    def work():
        export_official(folder, tmp_path / "a.bin", tmp_path / "a.yml")

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("tokenformer.official.write_settings", fail)
        refused(tmp_path, type(error), r"", work)

    # The second file cannot take its name: the first loses it again.
    rename = io.Path.rename

    def rename_once(path, target):
        return fail() if target.name == "a.yml" else rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(io.Path, "rename", rename_once)
        refused(tmp_path, type(error), r"", work)
    work()
    assert names(tmp_path) == ["a.bin", "a.yml", "model"]
