"""What every test shares: no network, few threads, reproducible property tests, and small models."""

import os
from functools import partial

# One thread a process, before torch starts any: the tests run one process a core, and threads that wait for a
# core that another process has make small models many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# xdist tells its processes how wide the terminal is, and tables would be cut to fit it.
os.environ.pop("COLUMNS", None)

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from transformers.utils import logging

from tokenformer import (
    TokenFormerConfig,
    TokenFormerForCausalLM,
    TokenFormerForImageClassification,
    TokenFormerVisionConfig,
    pattention_layers,
    rank_tokens,
    sort_tokens,
)

logging.disable_progress_bar()
# `make test-cpu` lets this CPU compute as another would: every_cpu.py.
AS_ANOTHER_CPU = os.environ.get("TOKENFORMER_TEST_CPU")
if AS_ANOTHER_CPU == "flush_denormals":
    assert torch.set_flush_denormal(True)
elif AS_ANOTHER_CPU == "no_onednn":
    torch.backends.mkldnn.set_flags(_enabled=False)
# The machine decides how long an example takes, so no deadline; derandomised, so that a failure comes back.
settings.register_profile("house", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("house")

# What a Pattention may be asked for, small and odd: rows [*shape, d_in], n tokens.
ODD_SHAPES = {
    "shape": st.lists(st.integers(1, 5), min_size=0, max_size=3),
    "d_in": st.integers(1, 33),
    "d_out": st.integers(1, 17),
    "n": st.integers(1, 40),
}


# Numbers between two bounds. hypothesis refuses to draw subnormal ones where a CPU flushes them to zero.
whole_floats = partial(st.floats, allow_subnormal=False)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def tiny():
    """A tiny byte-level language model in evaluation mode."""
    return make_tiny()


SMALL = {"vocab_size": 64, "hidden_size": 32, "qkv_tokens": 32, "out_tokens": 32, "ffn_tokens": 128}


def make_tiny(**changes) -> TokenFormerForCausalLM:
    torch.manual_seed(0)
    return TokenFormerForCausalLM(TokenFormerConfig.preset("tiny", **changes)).eval()


def make_small(**changes):
    """A language model of width 32 with few ids."""
    return make_tiny(**{**SMALL, **changes})


def make_sorted(ids, **changes):
    """A small model with something to rank on these ids, its tokens in that order."""
    model = make_small(**changes)
    with torch.no_grad():
        for _, layer in pattention_layers(model):
            layer.value_tokens.mul_(torch.rand(layer.num_tokens, 1) * 2)
    sort_tokens(model, rank_tokens(model, [ids]))
    return model.eval()


def make_tiny_vision(**changes) -> TokenFormerForImageClassification:
    """A classifier of 10 classes for images of 32 pixels, in evaluation mode."""
    torch.manual_seed(0)
    return TokenFormerForImageClassification(TokenFormerVisionConfig.preset("tiny32", **changes)).eval()


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    return ((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max()).item()


def train_step(model, optimizer, ids) -> float:
    """One step on a batch of text. Returns the loss before it."""
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def kept_for_backward(model, work) -> int:
    """Bytes of the tensors that some work keeps for backward, each once, the model's own left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that its address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        assert work().requires_grad
    return sum(storage.nbytes() for storage in kept.values())
