"""Growth in depth: new blocks add nothing at first, to the bit, and all of them learn."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.swa_utils import AveragedModel
from transformers import AutoModelForCausalLM

from conftest import make_tiny, make_tiny_vision, relative_error, train_step
from hosts import HOSTS, embedded, make_host
from tokenformer import (
    BadRequestError,
    Pattention,
    TokenFormerConfig,
    adopt,
    grow,
    grow_optimizer,
    parameter_groups,
    plan_growth,
)
from tokenformer.growth.step import Growth
from tokenformer.models.blocks import HOST_BLOCKS, BlockGrowth
from tokenformer.models.card import growth_steps
from tokenformer.training.held_rows import FrozenRows, NewTokenWarmup

IDS = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))
WAYS = [(new, at) for new in ("copy", "fresh") for at in ("after_each", "top")]


def trained(model=None, steps=4, optimizer_class=torch.optim.AdamW, **options):
    model = (model or make_tiny()).train()
    optimizer = optimizer_class(parameter_groups(model, 3e-3, weight_decay=0.1), **options)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    return train_step(model, optimizer, IDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["l2_gelu", "gelu_l2", "softmax"])
@pytest.mark.parametrize(("new_blocks", "new_blocks_at"), WAYS)
def test_the_function_is_the_same_to_the_bit(dtype, kind, new_blocks, new_blocks_at):
    model = trained(make_tiny(pattention_kind=kind), steps=2)[0].to(dtype).eval()
    for depth in (3, 7):
        deeper = grow(model, depth=depth, new_blocks=new_blocks, new_blocks_at=new_blocks_at)
        assert len(deeper.model.layers) == deeper.config.num_hidden_layers == depth
        assert torch.equal(deeper(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("changes", [{"parametric_norm": True}, {"tie_word_embeddings": False}])
def test_other_models_too(changes):
    model = make_tiny(**changes)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    assert torch.equal(grow(model, depth=4)(IDS).logits, model(IDS).logits)
    pixels = torch.randn(2, 3, 32, 32)
    seeing = make_tiny_vision(drop_path_rate=0.4)
    deeper = grow(seeing, depth=5)
    assert torch.equal(deeper(pixels).logits, seeing(pixels).logits)
    assert [layer.drop_path.rate for layer in deeper.model.layers] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_tokens_and_depth_in_one_step():
    model, _ = trained(make_tiny().double())
    deeper = grow(model.eval(), 2, depth=4)
    assert relative_error(deeper(IDS).logits, model(IDS).logits) <= 1e-10
    assert deeper.config.num_tokens == {"qkv": 128, "out": 128, "ffn": 512}
    assert growth_steps(deeper.config) == [
        "rotate (seed 0): 64/64/256 -> 128/128/512, 2 -> 4 blocks (copy, after each)"
    ]
    assert growth_steps(grow(deeper, depth=5, new_blocks="fresh", new_blocks_at="top").config)[1:] == [
        "4 -> 5 blocks (fresh, top)"
    ]


def test_a_preset_of_another_depth(monkeypatch):
    deep = {**TokenFormerConfig.presets["tiny-2x"], "num_hidden_layers": 3}
    monkeypatch.setitem(TokenFormerConfig.presets, "deep", deep)
    grown = grow(make_tiny(), to="deep")
    assert (grown.config.num_hidden_layers, grown.config.num_tokens["ffn"]) == (3, 512)
    deeper = grow(make_tiny(qkv_tokens=128, out_tokens=128, ffn_tokens=512), to="deep")
    assert not deeper.last_growth.layers
    with pytest.raises(BadRequestError, match="the model has 3 blocks and depth=2 was given"):
        grow(grown, to="tiny-2x")


def test_caches_and_hidden_states_know_of_the_new_blocks(tmp_path):
    model, _ = trained()
    model.eval()
    model(IDS, output_hidden_states=True)  # transformers puts its hooks in place
    deeper = grow(model, depth=5)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(IDS[:, :8], **options)
    assert torch.equal(deeper.generate(IDS[:, :8], **options), expected)
    assert torch.equal(deeper.generate(IDS[:, :8], cache_implementation="static", **options), expected)
    assert len(deeper(IDS, output_hidden_states=True).hidden_states) == 6
    assert [layer.attention.layer_idx for layer in deeper.model.layers] == [0, 1, 2, 3, 4]
    # All parts of a model read one configuration, as when it was made.
    assert {id(m.config) for m in deeper.modules() if hasattr(m, "config")} == {id(deeper.config)}
    deeper.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(IDS).logits, deeper(IDS).logits)
    assert loaded.config.growth_history[0]["blocks"]["after"] == 5


def test_where_new_blocks_are_placed():
    def places(before, after, at):
        return [f"{block}{'+' * new}" for block, new in BlockGrowth(before, after, "copy", at).origins]

    assert places(2, 4, "after_each") == ["0", "0+", "1", "1+"]
    assert places(4, 6, "after_each") == ["0", "1", "1+", "2", "3", "3+"]
    assert places(2, 5, "after_each") == ["0", "0+", "1", "1+", "1+"]
    assert places(3, 5, "top") == ["0", "1", "2", "1+", "2+"]
    assert places(2, 4, "top") == ["0", "1", "0+", "1+"]
    assert places(2, 5, "top") == ["0", "1", "1+", "0+", "1+"]


def test_copies_are_copies_and_fresh_blocks_are_as_large():
    model, _ = trained()
    copied = grow(model, depth=3)
    fresh, other = (grow(model, depth=3, new_blocks="fresh", seed=seed) for seed in (0, 1))
    for deeper in (copied, fresh):
        assert deeper.model.layers[2].ffn.value_tokens.eq(0).all()
        assert deeper.model.layers[2].attention.out.value_tokens.eq(0).all()
    for name in ("attention.query.key_tokens", "attention.value.value_tokens", "ffn.key_tokens"):
        old = model.model.layers[1].get_parameter(name)
        assert torch.equal(copied.model.layers[2].get_parameter(name), old)
        new = fresh.model.layers[2].get_parameter(name)
        assert new.square().mean().sqrt().item() == pytest.approx(old.square().mean().sqrt().item(), rel=0.1)
        assert not torch.equal(new, other.model.layers[2].get_parameter(name))


@pytest.mark.parametrize(("new_blocks", "new_blocks_at"), WAYS)
def test_nothing_in_a_new_block_is_dead(new_blocks, new_blocks_at):
    model, optimizer = trained()
    deeper = grow(model, depth=4, new_blocks=new_blocks, new_blocks_at=new_blocks_at)
    start = copy.deepcopy(deeper.state_dict())
    optimizer = grow_optimizer(optimizer, model, deeper)
    for _ in range(3):
        step(deeper, optimizer)
    for name, parameter in deeper.named_parameters():
        assert parameter.ne(start[name]).any(dim=-1).all(), name


class TestOptimizer:
    def test_moments_of_a_copy(self):
        model, optimizer = trained()
        deeper = grow(model, 2, depth=3)
        grown = grow_optimizer(optimizer, model, deeper)
        layers = deeper.model.layers
        for name, _ in layers[0].named_parameters():
            old, new = (grown.state[layers[i].get_parameter(name)] for i in (1, 2))
            assert new["exp_avg"].eq(0).all()
            assert torch.equal(new["exp_avg_sq"], old["exp_avg_sq"])
            assert new["exp_avg_sq"] is not old["exp_avg_sq"]
            assert new["step"] == old["step"]
        held = [parameter for group in grown.param_groups for parameter in group["params"]]
        assert {id(parameter) for parameter in held} == {id(parameter) for parameter in deeper.parameters()}
        assert len(held) == len(set(held))

    def test_a_fresh_block_starts_without_moments(self):
        model, optimizer = trained()
        deeper = grow(model, depth=3, new_blocks="fresh")
        grown = grow_optimizer(optimizer, model, deeper)
        assert not any(parameter in grown.state for parameter in deeper.model.layers[2].parameters())

    def test_groups_are_those_that_a_deeper_model_is_given(self):
        """In their order, by which Trainer saves and loads an optimizer."""
        model, optimizer = trained()
        deeper = grow(model, depth=5)
        groups = [group["params"] for group in grow_optimizer(optimizer, model, deeper).param_groups]
        expected = [group["params"] for group in parameter_groups(deeper, 3e-3, weight_decay=0.1)]
        assert [[id(p) for p in group] for group in groups] == [[id(p) for p in group] for group in expected]

    @pytest.mark.parametrize("how", ["in place", "state dict", "loaded"])
    def test_other_ways_to_the_same(self, how, tmp_path):
        model, optimizer = trained()
        deeper = grow(model, num_tokens={"ffn": 512}, depth=4)
        expected = grow_optimizer(optimizer, model, deeper)
        if how == "state dict":
            grown = grow_optimizer(get_optimizer_state_dict(model, optimizer), model, deeper)
            named = {p: name for name, p in deeper.named_parameters()}
            for p, state in expected.state.items():
                assert all(torch.equal(grown["state"][named[p]][key], state[key]) for key in state)
            names = [name for group in grown["param_groups"] for name in group["params"]]
            assert sorted(names) == sorted(named.values())
            return
        if how == "in place":
            twin, twin_optimizer = trained()
            old = [id(parameter) for parameter in twin.parameters()]
            grow(twin, num_tokens={"ffn": 512}, depth=4, inplace=True, optimizer=twin_optimizer)
            assert set(old) <= {id(parameter) for parameter in twin.parameters()}
        else:
            deeper.save_pretrained(tmp_path)
            twin = AutoModelForCausalLM.from_pretrained(tmp_path).train()
            twin_optimizer = grow_optimizer(optimizer, model, twin)
        for _ in range(2):
            assert step(twin, twin_optimizer) == pytest.approx(step(deeper, expected), rel=1e-5)

    @pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adafactor])
    def test_other_optimizers(self, optimizer_class):
        options = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}
        model, optimizer = trained(optimizer_class=optimizer_class, **options)
        deeper = grow(model, depth=3)
        grown = grow_optimizer(optimizer, model, deeper)
        before = model(IDS, labels=IDS).loss
        assert step(deeper, grown) == pytest.approx(before.item(), rel=1e-6)

    def test_a_state_without_a_rule_is_refused_before_anything_is_touched(self):
        model, optimizer = trained()
        optimizer.state[model.model.layers[1].ffn.key_tokens]["secret"] = torch.ones(3)
        with pytest.raises(BadRequestError, match=r"no rule for how state 'secret' of model\.layers\.1\.ffn\.key_tok"):
            grow(model, depth=3, inplace=True, optimizer=optimizer)
        assert len(model.model.layers) == 2
        grow(model, depth=3, new_blocks="fresh", inplace=True, optimizer=optimizer)  # which copies no state


def test_the_training_loss_does_not_jump():
    """On the same batches, against the model that did not grow."""
    model, optimizer = trained(steps=30)
    deeper = grow(model, depth=4)
    grown = grow_optimizer(optimizer, model, deeper)
    above = [step(deeper, grown) - step(model, optimizer) for _ in range(20)]
    assert max(above) < 0.02


def test_only_new_blocks_train_and_what_is_new_rises():
    model, optimizer = trained()
    deeper = grow(model, num_tokens={"out": 128}, depth=3)
    optimizer = grow_optimizer(optimizer, model, deeper)
    start = copy.deepcopy(deeper.state_dict())
    frozen, rising = FrozenRows(deeper, deeper.last_growth), NewTokenWarmup(deeper, deeper.last_growth)
    for _ in range(2):
        deeper(IDS, labels=IDS).loss.backward()
        frozen.clear_gradients()
        rising.before_step()
        optimizer.step()
        frozen.put_back()
        optimizer.zero_grad()
    for name, parameter in deeper.named_parameters():
        _, new = deeper.last_growth.origin(name)
        old_rows = slice(0, 0) if new else slice(0, 64) if ".out." in name else slice(None)
        assert torch.equal(parameter[old_rows], start[name][old_rows]), name
        assert new == parameter.ne(start[name]).any().item() or ".out." in name, name
    last = copy.deepcopy(deeper.state_dict())
    rising.before_step()
    with torch.no_grad():
        for parameter in deeper.parameters():
            parameter += 1.0
    rising.scale_step(0.25)
    moved = {name: (parameter - last[name]) for name, parameter in deeper.named_parameters()}
    assert moved["model.layers.2.ffn.key_tokens"].mean().item() == pytest.approx(0.25, rel=1e-3)
    assert moved["model.layers.0.ffn.key_tokens"].mean().item() == pytest.approx(1.0, rel=1e-3)


def test_json_and_back():
    growth = plan_growth(make_tiny(), 2, depth=5, new_blocks="fresh", new_blocks_at="top")
    assert Growth.from_dict(growth.to_dict()) == growth
    assert growth.label == "rotate + depth"


@pytest.mark.parametrize("host", [name for name in HOSTS if name.split(",")[0] in HOST_BLOCKS])
def test_adopted_models(host, tmp_path):
    model = adopt(make_host(host))
    given = embedded(model, torch.float32)
    before = model(**given).logits
    deeper = grow(model, depth=5)
    assert torch.equal(deeper(**given).logits, before)
    wider = grow(deeper, 2)
    assert relative_error(wider(**given).logits, before) < 1e-4
    deeper.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(**given).logits, before)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**given).logits.square().sum().backward()
    optimizer.step()
    deeper = grow(model, depth=3)
    optimizer = grow_optimizer(optimizer, model, deeper)
    deeper(**given).logits.square().sum().backward()
    optimizer.step()
    learning = [parameter for parameter in deeper.parameters() if parameter.grad is not None]
    assert all(parameter in optimizer.state for parameter in learning)
    assert len(learning) > 3 * sum(parameter.dim() > 1 for parameter in deeper.base_model.parameters()) / 4


class TestRefusals:
    @pytest.mark.parametrize(
        ("request_", "message"),
        [
            ({"depth": 1}, r"the model has 2 blocks and depth=1 was given; growth cannot shrink"),
            ({"depth": 2}, r"already has 2 blocks; ask for more"),
            ({"depth": 2.5}, r"depth=2.5 was given"),
            ({"depth": 10**6}, r"depth=1000000 was given; at most 1024 blocks"),
            ({"depth": 4, "to": "tiny-2x"}, r"to and depth was given; give one of"),
            ({"depth": 4, "new_blocks": "copies"}, r"new_blocks='copies' is not known; did you mean 'copy'"),
            ({"depth": 4, "new_blocks_at": "bottom"}, r"new_blocks_at='bottom' is not known; choose one of after_each"),
        ],
    )
    def test_requests(self, request_, message):
        model = make_tiny()
        with pytest.raises(BadRequestError, match=message):
            grow(model, inplace=True, **request_)
        assert len(model.model.layers) == 2
        assert model.config.growth_history is None

    def test_other_modules(self):
        with pytest.raises(BadRequestError, match=r"depth= is for one TokenFormer or adopted model, and Sequential is"):
            grow(nn.Sequential(Pattention(4, 4, 8)), depth=2)
        with pytest.raises(BadRequestError, match=r"ModuleList holds 2 of them"):
            grow(nn.ModuleList([make_tiny(), make_tiny()]), depth=3)

    def test_hosts_whose_blocks_end_in_a_norm(self):
        with pytest.raises(BadRequestError, match=r"depth= was given for an adopted bert, to which no block can be"):
            grow(adopt(make_host("bert")), depth=3)

    def test_a_host_whose_attention_depends_on_its_place(self):
        model = adopt(make_host("gpt2", scale_attn_by_inverse_layer_idx=True))
        with pytest.raises(BadRequestError, match=r"scale_attn_by_inverse_layer_idx=True, where a new block would"):
            grow(model, depth=3)

    def test_adapters(self):
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(make_tiny(), peft.LoraConfig(target_modules="all-linear"))
        with pytest.raises(BadRequestError, match="has an adapter on its tokens; merge it first"):
            grow(model, depth=3)


def test_a_wrapped_model():
    """Names within the wrapper differ from those of the model; the blocks are found all the same."""
    model = AveragedModel(make_tiny())
    assert torch.equal(grow(model, depth=3)(IDS).logits, model(IDS).logits)
