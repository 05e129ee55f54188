"""Smaller models: the ranking is what the weights say, sorting is exact, and the tokens that do least cost least."""

import copy
import math

import pytest
import torch
from torch import nn

from conftest import make_tiny, make_tiny_vision, relative_error
from hosts import make_host
from tokenformer import (
    KINDS,
    BadRequestError,
    Pattention,
    TokenFormerConfig,
    TokenFormerForCausalLM,
    add_tokens,
    adopt,
    grow,
    grow_optimizer,
    merge_tokens,
    parameter_groups,
    pattention_layers,
    rank_tokens,
    record_token_weights,
    shrink,
    sort_tokens,
    ungrow,
)
from tokenformer.growth.grow_folder import taus
from tokenformer.growth.rates import shape_at_birth
from tokenformer.models.card import growth_steps, render_card
from tokenformer.shrinking.measure import mean_loss, measure
from tokenformer.shrinking.plan import plan_shrink, sizes_asked
from tokenformer.shrinking.search import as_if

IDS = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
SMALL = {"vocab_size": 64, "hidden_size": 32, "qkv_tokens": 32, "out_tokens": 32, "ffn_tokens": 128}


def make_small(**changes):
    return make_tiny(**{**SMALL, **changes})


def bigrams(rows, seed):
    """Ids of which nine in ten follow from the one before by a fixed table."""
    table = torch.randint(0, 64, (64,), generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    random = torch.randint(0, 64, (rows, 32), generator=generator)
    surprising = torch.rand(rows, 32, generator=generator) < 0.1
    for i in range(1, 32):
        random[:, i] = torch.where(surprising[:, i], random[:, i], table[random[:, i - 1]])
    return random


@pytest.fixture(scope="module")
def trained():
    """A model that has learnt the table, its optimizer, batches to rank on and batches to score on."""
    model = make_small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
    model.train()
    for step in range(250):
        batch = bigrams(16, seed=step)
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), optimizer, [bigrams(32, seed=10_000)], [bigrams(64, seed=20_000)]


def other_choice(growth, uses, scores):
    """The same step with other tokens, whose tau is fitted in the same way."""
    plan = copy.deepcopy(growth)
    for name, step in growth.layers.items():
        kept = scores(name).argsort(descending=True)[: step.after].sort().values
        factor = math.sqrt(uses[name].shares[kept].sum())
        plan.layers[name] = type(step)(step.before, step.after, 1, kept=tuple(kept.tolist()), tau_factor=factor)
    return plan


def rise(model, growth, scored_on):
    with as_if(model, growth):
        return mean_loss(model, scored_on) - mean_loss_of(model, growth, scored_on)


def mean_loss_of(model, growth, scored_on):
    raise NotImplementedError
