"""Token groups on disk: saved and loaded, by Trainer too, beside another base refused, and damaged ones named."""

import copy
import json
import shutil
from itertools import product

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from conftest import make_tiny, relative_error
from test_groups import IDS, TEXT, learnt, logits, make
from test_groups_places import BuffersOnly
from tokenformer import (
    BadFileError,
    BadRequestError,
    add_tokens,
    adopt,
    grow,
    load_tokens,
    remove_tokens,
    save_tokens,
    token_groups,
    use_tokens,
)

STEPS = [
    *({"factor": 2, "method": method, "exact": False} for method in ("zero", "rotate", "random", "split")),
    {"depth": 4},
    {"depth": 3, "new_blocks_at": "top", "factor": 2},
]
AS_A_GROUP = ("tokenformer", {"factor": 2, "as_group": "stage-2"})  # for which no other model has room


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


def two_groups():
    """law and fr, both on, neither of which trains."""
    model = learnt(learnt(add_tokens(add_tokens(make("llama"), "law", 4), "fr", 3), "fr", 1), "law")
    return model.requires_grad_(False)


def files_of(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


GROUP_FILES = {"adapter_config.json", "tokens.safetensors", "README.md"}
INDEX = "model.safetensors.index.json"


class TestSavePretrained:
    def test_several_groups_have_folders_of_their_own(self, tmp_path):
        model = two_groups()
        model.save_pretrained(tmp_path)
        other = load_tokens(load_tokens(make("llama"), tmp_path / "law"), tmp_path / "fr")
        assert relative_error(logits(other), logits(model)) < 1e-6

    def test_the_group_that_trains_is_saved_whichever_are_on(self, tmp_path):
        model = add_tokens(add_tokens(make("llama"), "law", 4), "fr", 3)
        use_tokens(model, "law").save_pretrained(tmp_path)
        assert files_of(tmp_path) == {*GROUP_FILES, INDEX}
        assert json.loads((tmp_path / "adapter_config.json").read_text())["name"] == "fr"

    def test_no_mixture_of_two_saves_is_left(self, tmp_path):
        model = two_groups()
        several = {INDEX, *(f"{name}/{file}" for name in ("law", "fr") for file in GROUP_FILES)}
        for names in (["law", "fr"], ["law"], ["fr", "law"], ["fr"]):
            use_tokens(model, names).save_pretrained(tmp_path)
            assert files_of(tmp_path) == (several if len(names) == 2 else {INDEX, *GROUP_FILES})

    def test_what_save_tokens_wrote_is_left_alone(self, tmp_path):
        model = two_groups()
        save_tokens(model, "law", tmp_path / "law")
        use_tokens(model, "fr").save_pretrained(tmp_path)
        assert files_of(tmp_path) == {INDEX, *GROUP_FILES, *(f"law/{file}" for file in GROUP_FILES)}
        (tmp_path / INDEX).unlink()
        with pytest.raises(BadRequestError, match="holds an adapter, and 2 token groups cannot be saved in it; choose"):
            use_tokens(model, ["law", "fr"]).save_pretrained(tmp_path)

    def test_the_folder_of_a_model_is_refused(self, tmp_path):
        base = make("llama")
        base.save_pretrained(tmp_path)
        before = files_of(tmp_path)
        with pytest.raises(BadRequestError, match=f"{tmp_path} holds a model, which could .*, as {tmp_path / 'law'}"):
            add_tokens(base, "law", 4).save_pretrained(tmp_path)
        assert files_of(tmp_path) == before
        assert torch.equal(logits(type(make("llama")).from_pretrained(tmp_path).eval()), logits(make("llama")))

    def test_a_push_to_the_hub_is_refused_before_anything_is_written(self, tmp_path):
        model = add_tokens(make("llama"), "law", 4)
        with pytest.raises(BadRequestError, match="save_pretrained: save the groups, and upload their folder"):
            model.save_pretrained(tmp_path / "new", push_to_hub=True)
        assert not (tmp_path / "new").exists()

    def test_a_base_that_has_grown_is_said_not_to_be_saved(self, tmp_path):
        model = grow(add_tokens(make_tiny(), "law", 4), 2)
        with pytest.warns(UserWarning, match="the model has grown since it was loaded, and only its token groups are"):
            model.save_pretrained(tmp_path / "law")
        base = remove_tokens(copy.deepcopy(model), "law")
        base.save_pretrained(tmp_path / "base")
        loaded = load_tokens(type(make_tiny()).from_pretrained(tmp_path / "base").eval(), tmp_path / "law")
        assert torch.equal(logits(loaded), logits(model))


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
            r"adapter_config.json is damaged: layers is None; save the group again",
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


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"base": "x"}, "damaged: base is 'x'; save the group again"),
        (
            {"base": {"model_type": "llama", "blocks": 2, "adopted": False, "kept": [], "numbers": {"x": ["a"] * 4}}},
            "damaged: base is {",
        ),
        (
            {"base": {"model_type": "llama", "blocks": 2, "adopted": False, "kept": [], "numbers": 3}},
            "damaged: base is {'model_type'",
        ),
        (
            {
                "base": {
                    "model_type": "llama",
                    "blocks": 2,
                    "adopted": False,
                    "kept": [],
                    "numbers": {"x": [float("nan")]},
                }
            },
            "damaged: base",
        ),
        ({"kinds": []}, r"damaged: kinds is \[\]; save"),
        ({"kinds": None}, "damaged: kinds is None"),
        ({"kinds": {"model.layers.0.mlp": "zz", "model.layers.1.mlp": "l2_gelu"}}, "damaged: kinds is {"),
        ({"kinds": {"model.layers.0.mlp": "l2_gelu"}}, "damaged: layers and kinds do not name the same layers"),
        ({"norm": ["own"]}, r"damaged: norm is \['own'\]"),
        ({"name": 3}, "damaged: name is 3"),
    ],
)
def test_damaged_facts_are_named_and_nothing_changed(saved, facts, message):
    model = make("llama")
    with pytest.raises(BadFileError, match=message) as error:
        load_tokens(model, changed(saved, **facts))
    assert "\n" not in str(error.value)
    assert not token_groups(model)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("tau", lambda tensor: torch.ones(3), r"law.tau has the shape \[3\], and it is one number; save the group"),
        (
            "key_tokens",
            lambda tensor: tensor.int(),
            "law.key_tokens is of torch.int32, and floating-point numbers are needed",
        ),
        ("key_tokens", lambda tensor: tensor * float("nan"), "law.key_tokens has numbers that are not finite"),
        ("value_tokens", lambda tensor: tensor + float("inf"), "law.value_tokens has numbers that are not finite"),
    ],
)
def test_damaged_numbers_are_named_and_nothing_changed(saved, part, change, message):
    path = saved / "tokens.safetensors"
    tensors = load_file(path)
    save_file({name: change(t) if name.endswith(part) else t for name, t in tensors.items()}, path)
    model = make("llama")
    with pytest.raises(BadFileError, match=message):
        load_tokens(model, saved)
    assert not token_groups(model)


class TestTheBase:
    def redrawn(self, model, *signs):
        for name, parameter in model.named_parameters():
            if any(sign in name for sign in signs):
                torch.nn.init.normal_(parameter, std=0.02)
        return model

    @pytest.mark.parametrize(
        ("sign", "name"),
        [
            ("embed", "model.embed_tokens.weight"),
            ("layers.1", "model.layers.1.self_attn.q_proj.weight"),
            ("down", "model.layers.0.mlp.down_proj.weight"),
        ],
    )
    def test_other_numbers_are_refused(self, saved, sign, name):
        other = self.redrawn(make("llama"), sign)
        with pytest.raises(
            BadRequestError, match=f"another base: its {name} has other numbers than this model's; load that one, or"
        ):
            load_tokens(other, saved)
        assert not token_groups(other)
        assert token_groups(load_tokens(other, saved, check_base=False))

    def test_another_depth_is_refused(self, saved):
        torch.manual_seed(0)
        deep = LlamaForCausalLM(LlamaConfig(**{**TEXT, "num_hidden_layers": 4}))
        with pytest.raises(BadRequestError, match="another base: it had 2 blocks, and this model has 4; load that one"):
            load_tokens(deep, saved)

    def test_a_group_that_was_part_of_it_must_be_there(self, tmp_path):
        def grown():
            return learnt(grow(make_tiny(), 2, as_group="stage-2"), "stage-2")

        folder = save_tokens(learnt(add_tokens(grown(), "law", 4), "law"), "law", tmp_path / "law")
        with pytest.raises(BadRequestError, match="the token group 'stage-2' was part of it, and this model does not"):
            load_tokens(make_tiny(), folder)
        with pytest.raises(BadRequestError, match=r"its .*token_groups\.stage-2\.key_tokens has other numbers"):
            load_tokens(grow(make_tiny(), 2, as_group="stage-2"), folder)
        assert torch.equal(logits(load_tokens(grown(), folder)), logits(learnt(add_tokens(grown(), "law", 4), "law")))
        # The group that is part of a model can itself be had apart.
        step = save_tokens(grown(), "stage-2", tmp_path / "step")
        assert torch.equal(logits(load_tokens(make_tiny(), step)), logits(grown()))

    @pytest.mark.parametrize(("family", "step"), [*product(["tokenformer", "adopted"], STEPS), AS_A_GROUP])
    def test_a_group_from_before_growth_fits_after_it(self, family, step, tmp_path):
        model = learnt(add_tokens(make(family), "law", 4), "law")
        folder = save_tokens(model, "law", tmp_path / "law")
        bigger = load_tokens(grow(grow(make(family), **step), 1.5, method="zero"), folder)
        if step.get("method") != "random":
            assert relative_error(logits(bigger), logits(model)) < 1e-5

    def test_of_two_rows_that_have_become_more(self, tmp_path):
        small = make_tiny(qkv_tokens=2, out_tokens=3, ffn_tokens=2)
        folder = save_tokens(add_tokens(small, "law", 4), "law", tmp_path / "law")
        for method in ("zero", "rotate", "split"):
            assert token_groups(load_tokens(grow(remove_tokens(copy.deepcopy(small), "law"), 2, method=method), folder))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("family", ["llama", "tokenformer", "bert", "vit"])
    def test_cast_since_or_before(self, family, dtype, tmp_path):
        folder = save_tokens(learnt(add_tokens(make(family), "law", 4), "law"), "law", tmp_path / "law")
        model = load_tokens(make(family).to(dtype), folder)
        back = save_tokens(model, "law", tmp_path / "back")
        assert load_file(folder / "tokens.safetensors").keys() == load_file(back / "tokens.safetensors").keys()
        assert torch.equal(logits(load_tokens(make(family).to(dtype), back)), logits(model))
        assert torch.equal(logits(load_tokens(make(family), back)), logits(load_tokens(make(family), folder)))

    def test_quantised_since_or_before(self, tmp_path):
        def quantised(model):
            return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)

        whole = learnt(add_tokens(make("llama"), "law", 4, where="all"), "law")
        model = load_tokens(quantised(make("llama")), save_tokens(whole, "law", tmp_path / "law"))
        assert relative_error(logits(model), logits(whole)) < 0.2
        back = save_tokens(model, "law", tmp_path / "back")
        assert torch.equal(logits(load_tokens(make("llama"), back)), logits(whole))
        assert torch.equal(logits(use_tokens(model)), logits(quantised(make("llama"))))
        with pytest.raises(BadRequestError, match=r"its model.embed_tokens.weight has other numbers than this model's"):
            load_tokens(self.redrawn(quantised(make("llama")), "embed"), back)

    def test_with_nothing_but_buffers(self, tmp_path):
        def quantised(model):
            for name, linear in list(model.named_modules()):
                if isinstance(linear, torch.nn.Linear) and name != "lm_head":
                    model.set_submodule(name, BuffersOnly(linear))
            return model

        model = quantised(make("llama"))
        before = logits(model)
        on = logits(learnt(add_tokens(model, "law", 4, where="all"), "law"))
        assert relative_error(on, before) > 1e-3
        folder = save_tokens(model, "law", tmp_path / "law")
        assert torch.equal(logits(load_tokens(quantised(make("llama")), folder)), on)
        assert torch.equal(logits(use_tokens(model)), before)
        assert token_groups(load_tokens(make("llama"), folder))

    def test_adopted_since(self, tmp_path):
        folder = save_tokens(add_tokens(make("gpt_neox"), "law", 4), "law", tmp_path / "law")
        with pytest.raises(BadRequestError, match="another base: it was not adopted, and this model is; load that one"):
            load_tokens(adopt(make("gpt_neox")), folder)


def test_libraries_of_adapters_say_how_a_group_is_loaded(saved, tmp_path):
    how = r"is a token group and not an adapter of peft; load the model .*, and then tokenformer.load_tokens\(model, "
    with pytest.raises(BadRequestError, match=f"{saved} {how}'{saved}'"):
        peft.PeftModel.from_pretrained(make("llama"), saved)
    with pytest.raises(BadRequestError, match=f"'law' {how}FOLDER"):
        make("llama").load_adapter(str(saved))
    make("llama").save_pretrained(tmp_path / "base")
    changed(saved, base_model_name_or_path=str(tmp_path / "base"))
    with pytest.raises(BadRequestError, match=f"'law' {how}FOLDER"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_state_dicts_and_torch_save(tmp_path):
    model = learnt(add_tokens(make("llama"), "law", 4, where="all"), "law")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = add_tokens(make("llama"), "law", 4, where="all", seed=1)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(logits(other), logits(model))
    torch.save(model, tmp_path / "model.pt")
    whole = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(logits(whole), logits(model))
    assert whole.active_adapters() == ["law"]
    assert torch.equal(logits(use_tokens(whole)), logits(make("llama")))


def test_another_family_and_another_width_are_refused(saved, tmp_path):
    with pytest.raises(
        BadRequestError, match=r"was trained beside a llama model, and this is a qwen3 model; load that"
    ):
        load_tokens(make("qwen3"), saved)
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
