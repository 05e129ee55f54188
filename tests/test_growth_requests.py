"""Requests for growth that cannot be met: one line that names the numbers, and a model that is untouched."""

import copy
import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

from conftest import make_tiny
from tokenformer import BadFileError, BadRequestError, Pattention, TokenFormerConfig, TokenFormerForCausalLM, grow
from tokenformer.models.loading import read_config


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, r"no size was given; give one of factor=2, num_tokens=\{…\}, to='354m'"),
        ({"factor": 2, "to": "354m"}, r"factor and to was given"),
        ({"factor": 1}, r"factor=1 was given; it must be larger than 1"),
        ({"factor": float("inf")}, r"factor=inf was given; a finite factor"),
        ({"factor": 0.5}, r"factor=0.5 was given"),
        ({"factor": float("nan")}, r"factor=nan was given"),
        ({"factor": 1.001}, r"already has 64 tokens"),
        ({"num_tokens": {}}, r"num_tokens is empty"),
        ({"num_tokens": {"ffn": 255}}, r"layers.0.ffn has 256 tokens and 255 were asked for; growth cannot shrink"),
        ({"num_tokens": {"out": 64}}, r"attention.out already has 64 tokens; ask for more, or leave it out"),
        ({"num_tokens": {"fnn": 512}}, r"the key 'fnn'; did you mean 'ffn'\?"),
        ({"num_tokens": {"attention": 512}}, r"choose one of qkv, out, ffn"),
        ({"num_tokens": 100}, r"layers.0.ffn has 256 tokens and 100 were asked for"),
        ({"to": "354n"}, r"preset '354n' is not known; did you mean '354m'\?"),
        ({"to": "354m"}, r"preset '354m' has hidden_size=768, this model has 64; growth adds tokens and blocks"),
        ({"to": "tiny"}, r"already has the size of preset 'tiny'"),
        ({"factor": 2, "method": "spilt"}, r"method='spilt' is not known; did you mean 'split'\?"),
        ({"factor": 2, "method": "random"}, r"'random' changes what the model computes; say exact=False"),
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_bad_requests(request_, message, inplace):
    model = make_tiny()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BadRequestError, match=message) as error:
        grow(model, inplace=inplace, **request_)
    assert "\n" not in str(error.value)
    assert model.config.growth_history is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_smaller_preset():
    with torch.device("meta"):
        model = TokenFormerForCausalLM(TokenFormerConfig.preset("124m", num_hidden_layers=14))
    with pytest.raises(BadRequestError, match=r"the model has 14 blocks and depth=12 was given; growth cannot shrink"):
        grow(model, to="354m")
    with torch.device("meta"):
        model = TokenFormerForCausalLM(TokenFormerConfig.preset("354m"))
    with pytest.raises(BadRequestError, match=r"query has 2140 tokens and 576 were asked for; growth cannot shrink"):
        grow(model, to="124m")


@pytest.mark.parametrize("history", [[1], [{"x": 1}], [{"method": "zero", "seed": 0, "before": {}, "after": {}}]])
def test_a_damaged_history_is_one_line(tmp_path, history):
    make_tiny().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "growth_history": history}))
    with pytest.raises(BadFileError, match="growth_history is damaged: a step has a method, a seed"):
        read_config(tmp_path)


def test_tokens_that_were_quantised():
    class Quantised(nn.Parameter):
        """As those of torchao, whose class is its own."""

    model = make_tiny()
    layer = model.model.layers[0].ffn
    layer.key_tokens = Quantised(layer.key_tokens.data)
    with pytest.raises(BadRequestError, match=r"ffn\.key_tokens is quantised \(Quantised\); grow first, then quantise"):
        grow(model, 2)


def grow_in_a_group(rank, folder):
    """In each of two processes: what growing a model that both train says."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = make_tiny()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for given, more in ((wrapped, {}), (wrapped, {"optimizer": optimizer}), (model, {"optimizer": optimizer})):
        with pytest.raises(BadRequestError, match="several processes train this model, and DistributedDataParallel"):
            grow(given, 2, inplace=True, **more)
    assert model.config.growth_history is None
    (folder / f"refused-{rank}").touch()
    dist.destroy_process_group()


def test_a_model_that_several_processes_train(tmp_path):
    torch.multiprocessing.spawn(grow_in_a_group, (tmp_path,), nprocs=2)
    assert len(list(tmp_path.glob("refused-*"))) == 2


def test_softmax_with_zero_keys_says_why():
    with pytest.raises(BadRequestError, match=r"a zero key still takes probability mass .* method='split'"):
        grow(make_tiny(pattention_kind="softmax"), 2, method="zero")


@pytest.mark.parametrize("kind", ["gelu_l2", "softmax"])
def test_rotate_is_for_the_papers_kind(kind):
    with pytest.raises(
        BadRequestError,
        match=rf"uses {kind}, and rotate is exact for l2_gelu, l2_gelu_tanh, l2_silu, l2_relu only; use",
    ):
        grow(make_tiny(pattention_kind=kind), 2, method="rotate")


def test_softmax_splits_to_multiples_only():
    with pytest.raises(BadRequestError, match=r"multiple of its 64 tokens, and 160 is not one; ask for 128 or 192"):
        grow(make_tiny(pattention_kind="softmax"), 2.5, method="split")
    with pytest.raises(BadRequestError, match=r"and 96 is not one; ask for 128$"):
        grow(make_tiny(pattention_kind="softmax"), 1.5, method="split")


def test_modules_that_are_not_a_tokenformer():
    with pytest.raises(BadRequestError, match="Linear has no Pattention layer"):
        grow(nn.Linear(4, 4), 2)
    model = nn.ModuleDict({"inner": Pattention(4, 4, 8), "outer": Pattention(4, 4, 8)})
    with pytest.raises(BadRequestError, match=r"no Pattention layer is called 'iner'; did you mean 'inner'\?"):
        grow(model, num_tokens={"iner": 16})
    with pytest.raises(BadRequestError, match="to='354m' needs a TokenFormer model"):
        grow(model, to="354m")
    grown = grow(model, num_tokens={"o*": 16})
    assert (grown["inner"].num_tokens, grown["outer"].num_tokens) == (8, 16)


def test_a_name_may_lack_its_beginning_unless_it_is_whole_already():
    model = nn.ModuleDict({"b": Pattention(4, 4, 8), "a": nn.ModuleDict({"b": Pattention(4, 4, 8)})})
    wrapped = nn.ModuleDict({"host": model})
    assert grow(model, num_tokens={"b": 16})["a"]["b"].num_tokens == 8
    grown = grow(wrapped, num_tokens={"a.b": 16})["host"]
    assert (grown["b"].num_tokens, grown["a"]["b"].num_tokens) == (8, 16)


def test_tokens_shared_between_layers_are_refused():
    model = nn.Sequential(Pattention(4, 4, 8), Pattention(4, 4, 8))
    model[1].key_tokens = model[0].key_tokens
    with pytest.raises(BadRequestError, match=r"1.key_tokens is shared with 0; untie them first"):
        grow(model, 2)
