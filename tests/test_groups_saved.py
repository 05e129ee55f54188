"""Token groups on disk: saved and loaded, by Trainer too, beside another base refused, and damaged ones named."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from conftest import make_tiny, relative_error
from test_groups import IDS, learnt, logits, make
from tokenformer import (
    BadFileError,
    BadRequestError,
    add_tokens,
    grow,
    load_tokens,
    save_tokens,
    token_groups,
    use_tokens,
)


class Blocks(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("family", "norm"),
    [*((family, "own") for family in ("llama", "bert", "vit", "tokenformer", "adopted")), ("tokenformer", "shared")],
)
def test_saved_and_loaded_under_another_name(family, norm, tmp_path):
    model = learnt(add_tokens(make(family), "law", 4, where="all", norm=norm), "law")
    folder = save_tokens(model, "law", tmp_path / "adapters" / "law")
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "tokens.safetensors", "README.md"}
    other = load_tokens(make(family), folder, name="fr")
    assert torch.equal(logits(other), logits(model))
    (facts,) = token_groups(other)
    assert (facts.name, facts.on, facts.trains) == ("fr", True, False)
    assert torch.equal(logits(use_tokens(other)), logits(make(family)))
    assert token_groups(load_tokens(make(family), folder, trainable=True))[0].trains


def test_a_group_from_before_growth_fits_after_it(tmp_path):
    model = make_tiny()
    folder = save_tokens(learnt(add_tokens(model, "law", 4), "law"), "law", tmp_path / "law")
    bigger = grow(make_tiny(), 2)
    assert relative_error(logits(load_tokens(bigger, folder)), logits(model)) < 1e-5
    assert relative_error(logits(load_tokens(make_tiny().bfloat16(), folder)).float(), logits(model)) < 0.1


def trainer(model, folder, **options):
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to="none",
        save_strategy="steps",
        save_steps=2,
        seed=0,
        disable_tqdm=True,
        **options,
    )
    return Trainer(model, arguments, train_dataset=Blocks(), eval_dataset=Blocks())


def test_trainer_saves_the_group_alone_and_resumes(tmp_path):
    def model():
        return add_tokens(make("llama"), "law", 4)

    whole = model()
    base = make("llama").state_dict()
    trainer(whole, tmp_path / "run", max_steps=6).train()
    assert all(torch.equal(whole.state_dict()[name], tensor) for name, tensor in base.items())
    checkpoint = tmp_path / "run" / "checkpoint-4"
    saved = load_file(checkpoint / "tokens.safetensors")
    assert all(".token_groups.law." in name for name in saved)
    assert not list(checkpoint.glob("model*.safetensors"))
    again = model()
    trainer(again, tmp_path / "run", max_steps=6).train(resume_from_checkpoint=str(checkpoint))
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in whole.state_dict().items())
    loaded = load_tokens(make("llama"), tmp_path / "run" / "checkpoint-6")
    assert torch.equal(logits(loaded), logits(whole.eval()))


def test_trainer_goes_back_to_the_best(tmp_path):
    model = add_tokens(make("llama"), "law", 4)
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "max_steps": 4}
    training = trainer(model, tmp_path, metric_for_best_model="eval_loss", greater_is_better=True, **options)
    training.train()
    best = load_tokens(make("llama"), training.state.best_model_checkpoint)
    assert training.state.best_model_checkpoint.endswith("checkpoint-2")
    assert torch.equal(logits(best), logits(model.eval()))


def test_several_groups_have_folders_of_their_own(tmp_path):
    model = add_tokens(make("llama"), "law", 4)
    learnt(learnt(add_tokens(model, "fr", 3), "fr", 1), "law")
    model.save_pretrained(tmp_path)
    other = load_tokens(load_tokens(make("llama"), tmp_path / "law"), tmp_path / "fr")
    assert relative_error(logits(other), logits(model)) < 1e-6


@pytest.fixture
def saved(tmp_path):
    return save_tokens(add_tokens(make("llama"), "law", 4), "law", tmp_path / "law")


def changed(folder, **facts):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
    return folder


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: changed(folder, peft_type="LORA"), r"is of a LORA adapter, not of a token group"),
        (
            lambda folder: changed(folder, layers=None),
            r"adapter_config.json is damaged: name, norm or layers are missing",
        ),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), r"adapter_config.json"),
        (lambda folder: (folder / "adapter_config.json").unlink(), r"is not a token group: it has no adapter_config"),
        (lambda folder: (folder / "tokens.safetensors").unlink(), r"law has no tokens.safetensors$"),
        (lambda folder: (folder / "tokens.safetensors").write_bytes(b"1234"), r"tokens.safetensors cannot be read"),
        (
            lambda folder: (folder / "tokens.safetensors").rename(folder / "tokens.bin"),
            r"tokens.bin is a pickle, which can run any program and is not read",
        ),
        (
            lambda folder: save_file({"x": torch.ones(1)}, folder / "tokens.safetensors"),
            r"tokens.safetensors is damaged: model.layers.0.mlp.token_groups.law.key_tokens is missing",
        ),
    ],
)
def test_what_is_damaged_is_named_and_nothing_changed(saved, break_it, message):
    break_it(saved)
    model = make("llama")
    with pytest.raises((BadFileError, BadRequestError), match=message) as error:
        load_tokens(model, saved)
    assert "\n" not in str(error.value)
    assert not token_groups(model)


def test_another_base_is_refused(saved, tmp_path):
    with pytest.raises(
        BadRequestError, match=r"was trained beside a llama model, and this is a qwen3 model; load that"
    ):
        load_tokens(make("qwen3"), saved)
    other = make("llama")
    torch.nn.init.normal_(other.model.embed_tokens.weight)
    with pytest.raises(
        BadRequestError, match=r"law was trained beside another base: the embedding of this model is not"
    ):
        load_tokens(other, saved)
    assert token_groups(load_tokens(other, saved, check_base=False))
    deep = make("tokenformer")
    narrow = save_tokens(add_tokens(deep, "law", 4, where="model.layers.1.ffn"), "law", tmp_path / "deep")
    shallow = make_tiny(num_hidden_layers=1)
    with pytest.raises(BadRequestError, match=r"has tokens for 'model.layers.1.ffn', which this model does not have"):
        load_tokens(shallow, narrow, check_base=False)
    with pytest.raises(BadRequestError, match=r"has keys \(4, 64\) and values .* is 32 to 32 wide here; it belongs to"):
        load_tokens(make_tiny(hidden_size=32), narrow, check_base=False)
    assert not token_groups(shallow)


def test_paths_and_names(saved, tmp_path):
    model = load_tokens(make("llama"), saved)
    with pytest.raises(BadRequestError, match="the model has a token group 'law' already"):
        load_tokens(model, saved)
    with pytest.raises(BadRequestError, match=r"nowhere is not a token group: it has no adapter_config\.json"):
        load_tokens(model, tmp_path / "nowhere")
    with pytest.raises(BadRequestError, match="law exists"):
        save_tokens(model, "law", saved)
    with pytest.raises(BadRequestError, match="the model has no token group 'lwa'; did you mean 'law'"):
        save_tokens(model, "lwa", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    shutil.rmtree(saved)
    assert logits(model, adapter_names=["law"] * len(IDS)).shape[0] == len(IDS)
