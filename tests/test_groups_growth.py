"""Token groups and growth: a grown model keeps its groups, a growth step can be a group, and a step can be undone."""

import copy
import warnings

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import make_tiny, make_tiny_vision, relative_error, train_step
from test_groups import IDS, learnt, logits, make
from tokenformer import (
    BadRequestError,
    add_tokens,
    cost,
    grow,
    grow_optimizer,
    load_tokens,
    merge_tokens,
    remove_tokens,
    save_tokens,
    token_groups,
    ungrow,
    use_tokens,
)
from tokenformer.pattention.groups import layers_with_groups

STEPS = [
    {"factor": 2},
    {"factor": 2, "method": "zero"},
    {"depth": 4},
    {"depth": 3, "factor": 2, "new_blocks_at": "top"},
]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_grown_model_keeps_its_groups(step, inplace):
    model = learnt(add_tokens(make_tiny(), "law", 4, where="all"), "law")
    on, off = logits(model), logits(use_tokens(model))
    grown = grow(use_tokens(model, "law"), **step, inplace=inplace)
    assert relative_error(logits(grown), on) < 1e-5
    assert relative_error(logits(use_tokens(grown)), off) < 1e-5
    assert len(token_groups(grown)[0].layers) == 2 * 5  # none beside new blocks
    assert type(remove_tokens(grown, "law")) is type(make_tiny())
    assert {p.requires_grad for p in grown.parameters()} == {True}


def test_the_optimizer_of_a_group_follows():
    model = add_tokens(make_tiny(), "law", 4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    for _ in range(2):
        train_step(model, optimizer, IDS)
    grown = grow(model, 2)
    carried = grow_optimizer(optimizer, model, grown)
    assert [train_step(grown, carried, IDS) for _ in range(3)] == pytest.approx(
        [train_step(model, optimizer, IDS) for _ in range(3)], rel=1e-4
    )


def test_a_shared_normaliser_grows_by_zero_only():
    model = learnt(add_tokens(make_tiny(), "law", 4, norm="shared"), "law")
    with pytest.raises(
        BadRequestError, match=r"grow: the token group 'law' shares the normaliser of .* merge it first"
    ):
        grow(model, 2)
    assert relative_error(logits(grow(model, 2, method="zero")), logits(model)) < 1e-5


class TestAStepAsAGroup:
    @pytest.mark.parametrize("make_model", [make_tiny, lambda: make_tiny_vision(image_size=16)])
    def test_it_can_be_switched_off(self, make_model, tmp_path):
        model = make_model()
        before = logits(model)
        grown = grow(model, 2, as_group="stage-2")
        assert torch.equal(logits(grown), before)
        assert not token_groups(model)
        assert all(p.requires_grad for p in grown.parameters())
        learnt(grown, "stage-2")
        after = logits(grown)
        assert relative_error(after, before) > 1e-3
        assert torch.equal(logits(use_tokens(grown)), before)
        use_tokens(grown, "stage-2").save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert torch.equal(logits(loaded.eval()), after)
        assert torch.equal(logits(use_tokens(loaded)), before)
        assert token_groups(loaded)[0].kept

    def test_its_size_is_counted(self):
        grown = grow(make_tiny(), 2, as_group="stage-2")
        config = grown.config
        assert cost.parameters(config).total == grown.num_parameters()
        assert cost.parameters(config).total == grow(make_tiny(), 2).num_parameters()
        twice = cost.training_flops_per_token(grow(make_tiny(), 2).config, 64)
        assert cost.training_flops_per_token(config, 64) == twice

    def test_it_may_be_followed_by_others_and_by_growth(self, tmp_path):
        model = grow(grow(make_tiny(), 2, as_group="stage-2"), num_tokens={"ffn": 300}, as_group="stage-3")
        learnt(learnt(model, "stage-2"), "stage-3", 1)
        deep = grow(model, depth=4)
        deep.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert relative_error(logits(loaded), logits(model)) < 1e-5
        assert [facts.name for facts in token_groups(loaded)] == ["stage-2", "stage-3"]
        remove_tokens(remove_tokens(loaded, "stage-2"), "stage-3").save_pretrained(tmp_path / "bare")
        bare = AutoModelForCausalLM.from_pretrained(tmp_path / "bare").eval()
        assert relative_error(logits(bare), logits(make_tiny())) < 1e-5

    @pytest.mark.parametrize("inplace", [False, True])
    def test_an_optimizer_follows(self, inplace):
        model = make_tiny().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train_step(model, optimizer, IDS)
        moments = copy.deepcopy(optimizer.state[model.model.embed_tokens.weight])
        if inplace:
            grown = grow(model, 2, as_group="stage-2", inplace=True, optimizer=optimizer)
        else:
            grown = grow(model, 2, as_group="stage-2")
            optimizer = grow_optimizer(optimizer, model, grown)
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
            id(p) for p in grown.parameters()
        }
        assert torch.equal(optimizer.state[grown.model.embed_tokens.weight]["exp_avg"], moments["exp_avg"])
        train_step(grown, optimizer, IDS)
        assert all(group["stage-2"].value_tokens.any() for _, group in layers_with_groups(grown))

    def test_it_is_taken_back_like_any_other_step(self):
        small = make_tiny()
        model = grow(small, 2)
        grown = grow(model, 2, as_group="stage-2")
        assert [step["method"] for step in grown.config.growth_history] == ["rotate", "group"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            back = ungrow(learnt(grown, "stage-2"))
        assert not token_groups(back)
        assert type(back) is type(small)
        assert torch.equal(logits(back), logits(model))
        assert back.config.to_dict() == model.config.to_dict()
        assert remove_tokens(grown, "stage-2").config.growth_history == model.config.growth_history

    def test_what_cannot_be(self):
        model = make_tiny()
        with pytest.raises(BadRequestError, match="as_group is given with method, noise or exact"):
            grow(model, 2, method="zero", as_group="a")
        with pytest.raises(BadRequestError, match="as_group is given with depth"):
            grow(model, 2, depth=4, as_group="a")
        with pytest.raises(BadRequestError, match="cannot be called 'a b'"):
            grow(model, 2, as_group="a b")
        with pytest.raises(BadRequestError, match="growth by a token group needs a TokenFormer"):
            grow(make("adopted"), 2, as_group="a")


class TestMergedWithItsOwnNormaliser:
    def test_it_is_part_of_the_model_for_good(self, tmp_path):
        model = learnt(add_tokens(make_tiny(), "law", 4, where="all"), "law")
        on, old = logits(model), copy.deepcopy(make_tiny().state_dict())
        learnt(add_tokens(merge_tokens(model, "law"), "fr", 3), "fr", 1)
        assert torch.equal(logits(use_tokens(model)), on)
        assert torch.equal(logits(model, adapter_names=["__base__"] * 3), on)
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in old.items())
        remove_tokens(model, "fr").save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(logits(loaded), on)
        with pytest.raises(
            BadRequestError, match="the token group 'law' is merged: it is part of the model, and always"
        ):
            use_tokens(loaded, "law")

    @pytest.mark.parametrize("norm", ["own", "shared"])
    def test_then_all_of_the_model_can_be_trained(self, norm):
        model = make_tiny()
        model.model.norm.weight.requires_grad_(False)
        add_tokens(model, "law", 4, norm=norm)
        merge_tokens(add_tokens(model, "fr", 4), "law")
        assert {name for name, p in model.named_parameters() if p.requires_grad} == {
            name for name, _ in model.named_parameters() if ".fr." in name
        }
        remove_tokens(model, "fr")
        assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["model.norm.weight"]

    def test_some_layers_of_a_role_cannot_be_appended_to(self):
        model = add_tokens(make_tiny(), "law", 4, where="model.layers.1.ffn", norm="shared")
        with pytest.raises(BadRequestError, match="has other numbers of tokens in some ffn layers than in others"):
            merge_tokens(model, "law")


class TestUngrow:
    @pytest.mark.parametrize("step", STEPS)
    @pytest.mark.parametrize("inplace", [False, True])
    def test_it_is_the_model_before_bit_for_bit_if_only_new_tokens_were_trained(self, step, inplace):
        model = make_tiny()
        grown = grow(model, **step)
        for name, parameter in grown.named_parameters():
            if name.endswith("_tokens") and "factor" in step:
                parameter.data[parameter.shape[0] // 2 :] += 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            smaller = ungrow(grown, inplace=inplace)
        assert smaller.config.to_dict() == model.config.to_dict()
        state = smaller.state_dict()
        assert list(state) == list(model.state_dict())
        for name, tensor in model.state_dict().items():
            if name.endswith("tau"):
                torch.testing.assert_close(state[name], tensor)
            else:
                assert torch.equal(state[name], tensor)
        assert relative_error(logits(smaller), logits(model)) < 1e-6
        if inplace:
            assert smaller is grown

    def test_what_is_lost_is_said(self):
        grown = grow(make_tiny(), 2)
        optimizer = torch.optim.AdamW(grown.parameters(), lr=1e-3)
        grown(IDS, labels=IDS).loss.backward()
        optimizer.step()
        with pytest.warns(
            UserWarning, match="old weights have been trained or cast since the model grew, so this is not"
        ):
            smaller = ungrow(grown)
        assert smaller.config.num_tokens == make_tiny().config.num_tokens

    def test_one_weight_that_moved_is_noticed(self):
        grown = grow(make_tiny(), 2)
        grown.model.embed_tokens.weight.data[-1, -1] += 1
        with pytest.warns(UserWarning, match="old weights have been trained"):
            ungrow(grown)

    def test_a_group_beside_new_blocks_goes_with_them(self):
        deep = grow(make_tiny(), depth=3, new_blocks_at="top")
        add_tokens(deep, "law", 4, where="model.layers.2.ffn")
        back = ungrow(deep)
        assert type(back) is type(make_tiny())
        assert all(p.requires_grad for p in back.parameters())
        back(IDS)

    def test_one_step_after_another(self):
        model = grow(grow(make_tiny(), 2), depth=3)
        assert relative_error(logits(ungrow(ungrow(model))), logits(make_tiny())) < 1e-6

    def test_what_cannot_be(self):
        with pytest.raises(BadRequestError, match="the model has not grown: its configuration remembers no step"):
            ungrow(make_tiny())
        with pytest.raises(BadRequestError, match="ungrow: the last step was a split"):
            ungrow(grow(make_tiny(), 2, method="split"))
        with pytest.raises(BadRequestError, match="ungrow: a TokenFormer is needed, and a LlamaForCausalLM was given"):
            ungrow(make("llama"))


def test_a_group_from_before_growth_in_depth_fits_after_it(tmp_path):
    model = learnt(add_tokens(make_tiny(), "law", 4), "law")
    folder = save_tokens(model, "law", tmp_path / "law")
    deep = load_tokens(grow(make_tiny(), depth=4), folder)
    assert list(token_groups(deep)[0].layers) == ["model.layers.0.ffn", "model.layers.2.ffn"]
    assert relative_error(logits(deep), logits(model)) < 1e-5


def test_adapters_and_groups_do_not_mix():
    model = add_tokens(make("llama"), "law", 4)
    with pytest.raises(
        BadRequestError, match="peft: the model has token groups, and adapters do not go on top of them"
    ):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    adapted = peft.get_peft_model(make("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(
        BadRequestError, match="the model has adapters of peft, and token groups do not go on top of them"
    ):
        add_tokens(adapted, "law", 4)
