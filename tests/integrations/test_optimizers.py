"""Optimizers of other packages follow growth, or are refused before model and optimizer are touched."""

import copy

import pytest
import torch

from conftest import make_tiny
from test_growth_optimizer import step
from tokenformer import BadRequestError, grow, grow_optimizer


def trained(make_optimizer):
    model = make_tiny()
    optimizer = make_optimizer(model.parameters(), lr=1e-3)
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize(
    ("name", "inplace"),
    [
        ("AdamW", True),
        ("AdamW", False),
        ("Lion", True),
        ("Lion", False),
        ("RMSprop", False),
        ("Adagrad", False),
        ("SGD", True),
    ],
)
def test_bitsandbytes_in_32_bits(name, inplace):
    optimizers = pytest.importorskip("bitsandbytes").optim

    def make(parameters, lr):
        settings = {"momentum": 0.9} if name == "SGD" else {}
        return getattr(optimizers, name)(parameters, lr=lr, min_8bit_size=12345, **settings)

    model, optimizer = trained(make)
    old = copy.deepcopy(optimizer.state[model.model.layers[0].ffn.key_tokens])
    grown = grow(model, 2, method="split", inplace=inplace)
    new = grow_optimizer(optimizer, model, grown)
    assert type(new) is getattr(optimizers, name)
    assert new.args.min_8bit_size == 12345
    state = new.state[grown.model.layers[0].ffn.key_tokens]
    # The rule for a key that becomes two, with noise 1: 1/c for a first moment, 1/c² + 1 − 1/c for a second one.
    first = 3 / 4 if name in ("RMSprop", "Adagrad") else 1 / 2
    for key, factor in {"state1": first, "state2": 3 / 4}.items():
        if key in old:
            torch.testing.assert_close(state[key], factor * old[key].repeat(2, 1))
    step(grown, new)


@pytest.mark.parametrize("inplace", [True, False])
def test_lion(inplace):
    lion = pytest.importorskip("lion_pytorch").Lion
    model, optimizer = trained(lion)
    old = optimizer.state[model.model.layers[0].ffn.key_tokens]["exp_avg"].clone()
    grown = grow(model, 2, method="split", inplace=inplace)
    new = grow_optimizer(optimizer, model, grown)
    assert type(new) is lion
    assert torch.equal(new.state[grown.model.layers[0].ffn.key_tokens]["exp_avg"], old.repeat(2, 1) / 2)
    step(grown, new)


@pytest.mark.parametrize("name", ["LAMB", "LARS", "AdEMAMix"])
def test_bitsandbytes_without_rules_is_refused(name):
    optimizers = pytest.importorskip("bitsandbytes").optim
    more = {"momentum": 0.9} if name == "LARS" else {}
    model, optimizer = trained(lambda parameters, lr: getattr(optimizers, name)(parameters, lr=lr, **more))
    with pytest.raises(BadRequestError, match=r"there is no rule for how state '\w+' of model.layers.0"):
        grow(model, 2, inplace=True, optimizer=optimizer)
    assert model.model.layers[0].ffn.num_tokens == 256


def test_a_constructor_that_cannot_be_called_again_is_refused():
    """bitsandbytes' SGD keeps its momentum under another name."""
    optimizers = pytest.importorskip("bitsandbytes").optim
    model, optimizer = trained(lambda parameters, lr: optimizers.SGD(parameters, lr=lr, momentum=0.9))
    with pytest.raises(BadRequestError, match=r"a new SGD cannot be made .* grow both in place"):
        grow_optimizer(optimizer, model, grow(model, 2))


def quantised(package, name):
    module = pytest.importorskip(package)
    return getattr(getattr(module, "optim", module), name)


@pytest.mark.parametrize(
    ("package", "name", "form"),
    [
        ("bitsandbytes", "AdamW8bit", "uint8"),
        ("bitsandbytes", "Lion8bit", "uint8"),
        ("torchao.optim", "AdamW8bit", "OptimState8bit"),
        ("torchao.optim", "AdamW4bit", "OptimState4bit"),
        ("torchao.optim", "AdamWFp8", "OptimStateFp8"),
    ],
)
@torch.compiler.set_stance("force_eager")  # torchao would compile its steps
def test_quantised_states_are_refused_before_anything_is_touched(package, name, form):
    model, optimizer = trained(quantised(package, name))
    weights = copy.deepcopy(model.state_dict())
    states = {p: dict(state) for p, state in optimizer.state.items()}
    with pytest.raises(BadRequestError, match=rf"is quantised \({form}\), which cannot grow") as error:
        grow(model, 2, inplace=True, optimizer=optimizer)
    assert "\n" not in str(error.value)
    bigger = grow(model, 2)
    with pytest.raises(BadRequestError, match="is quantised"):
        grow_optimizer(optimizer, model, bigger)
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    assert model.config.growth_history is None
    for p, state in states.items():
        assert all(optimizer.state[p][key] is value for key, value in state.items())
    step(model, optimizer)
