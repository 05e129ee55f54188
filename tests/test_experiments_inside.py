"""What experiments/inside and experiments/edits measure with: triggers, units, effects, made facts, ways to write."""

import sys
from pathlib import Path

import pytest
import torch

from conftest import make_tiny
from hosts import make_host

sys.path.append(str(Path(__file__).parent.parent / "experiments"))

from edits.judging import Judge, chosen, in_every_way, known
from edits.ways import PROMPT, SUBJECT, TRAINED, Writer
from inside import fault
from inside.effects import ablated, carrying, direct
from inside.fault import Case, removed
from inside.triggers import FAMILIES, codes_of, firing, triggers
from inside.units import BALLAST, BEGIN, FFN, OUT, QKV, RANDOM, activations
from lab import data, facts, texts
from lab.facts import prompt_of

import tokenformer

NOVELS = b"the old man said that he could not see her face . she asked why , and then he went away again ! " * 30


def ids(count, length=48, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(97, 101, (count, length), generator=generator)


def codes_and_firing(seed):
    """Units that fire behind "ab", at "c" or behind "db", at random, and in square brackets."""
    text = ids(40, 64, seed)
    text[:, 20], text[:, 30] = ord("["), ord("]")
    at = text[:, BEGIN:]
    before = text[:, BEGIN - 1 : -1]
    random = torch.rand(at.shape, generator=torch.Generator().manual_seed(seed)) < 0.1
    inside = torch.zeros_like(at, dtype=torch.bool)
    inside[:, 20 - BEGIN : 30 - BEGIN] = True
    ab, db = ((before == first) & (at == ord("b")) for first in (ord("a"), ord("d")))
    return codes_of(text, BEGIN), torch.stack([ab, ab | db, random, inside], dim=-1).flatten(0, 1)


@pytest.mark.parametrize("alternatives", [1, 4])
def test_a_trigger_is_found_and_judged_on_other_text(alternatives):
    chosen_on, judged_on = codes_and_firing(0), codes_and_firing(1)
    found = triggers(*chosen_on, *judged_on, alternatives)
    assert found.f1[0] == 1
    assert FAMILIES[found.family[0]] == "bb"
    assert found.precision[1] == 1
    assert found.recall[1] == 1 if alternatives == 4 else found.recall[1] < 0.7
    assert found.f1[2] < 0.3
    assert found.f1[3] == 1
    assert found.family[3] == len(FAMILIES)  # a region


def test_a_unit_fires_in_the_share_that_is_asked_for():
    rows = torch.randn(1000, 7, generator=torch.Generator().manual_seed(0))
    assert ((rows.abs() > firing(rows, 0.01)).sum(0) == 10).all()


def test_how_many_carry_an_effect():
    effects = torch.tensor([[-8.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 9.5, 0.5, 0.0]])
    assert carrying(effects).tolist() == [2, 4, 1]


def test_an_adopted_model_has_the_neurons_of_its_host():
    host, text = make_host("gpt_neox", vocab_size=256), ids(3)
    before = activations(host, text)
    tokenformer.adopt(host)
    after = activations(host, text)
    assert {role for role, _ in before} == {QKV, OUT, FFN, RANDOM}
    assert {role for role, _ in after} == {QKV, OUT, FFN, RANDOM, BALLAST}
    for layer in range(host.config.num_hidden_layers):
        for role in (FFN, OUT):
            assert after[role, layer].shape == before[role, layer].shape
            torch.testing.assert_close(after[role, layer], before[role, layer], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make", [make_tiny, lambda: make_host("gpt_neox", vocab_size=256)])
def test_effects_of_all_units(make):
    model, text = make().eval(), ids(1, 6)
    by_role = direct(model, text)
    assert by_role["both"]["units"] == by_role[OUT]["units"] + by_role[FFN]["units"]
    assert by_role["both"]["carry"].shape == (6,)
    lost = ablated(model, text)
    rows = sum(rows.shape[1] for (role, _), rows in activations(model, ids(1, BEGIN + 1)).items() if role != RANDOM)
    assert lost["all"]["units"] == rows
    assert (lost["all"]["carry"] <= rows).all()


def test_the_fault_is_in_the_text_and_looked_for_in_the_model(monkeypatch):
    monkeypatch.setattr(texts, "_enwik8", lambda: b"nation, ration, station and relation. " * 200)
    every, half = texts.bytes_of("misspelt"), texts.bytes_of("half_misspelt")
    assert every.count(b"atoin") == 800
    assert every.count(b"ation") == 0
    assert half.count(b"atoin") == half.count(b"ation") == 400
    clean = torch.frombuffer(bytearray(texts.bytes_of("enwik8")), dtype=torch.uint8)
    monkeypatch.setattr(data, "read", lambda text: clean)
    monkeypatch.setattr(fault, "COUNTS", (1, 8))
    case = Case("test", 8)
    assert all(bytes(prompt.tolist()).endswith(b"at") for prompt in case.prompts)
    # The bytes at which the spellings part, and the next two and one more, are the ending.
    assert case.ending.sum() > 0
    assert bytes(case.blocks[case.ending].tolist())[:3] == b"ion"
    found = removed(make_tiny().eval(), 8)
    effects = [unit["effect"] for unit in found["units"]]
    assert len(effects) == 8 < found["of"]
    assert effects == sorted(effects, reverse=True)
    assert 0 < found["without"]["8"]["test"]["wrong"] < 1


def test_made_facts_are_told_in_four_ways():
    made = facts.world(NOVELS)
    assert len(made.words) == len(set(made.words)) <= 256
    text = facts.text_of(NOVELS)
    assert text == facts.text_of(NOVELS)
    fact = made.facts[0]
    for phrasing in range(facts.PHRASINGS):
        told = bytes(made.ids([*prompt_of(fact, phrasing), fact.answer, facts.END]))
        assert told in text


def test_every_way_to_write_leaves_the_model_as_it_was():
    made = facts.world(NOVELS)
    model = make_tiny().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    text = torch.frombuffer(bytearray(facts.text_of(NOVELS)[:4096]), dtype=torch.uint8).long().view(-1, 64)
    writer, judge = Writer(model, 0, made, text[:48]), Judge(model, made, text[48:])
    (wanted,) = chosen(made, 1, 0)
    found = in_every_way(writer, judge, wanted, 1e-3, (PROMPT, SUBJECT))
    assert len(found) == 5
    assert found[TRAINED]["success"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    few = made._replace(facts=made.facts[:3])
    assert 0 <= known(model, few) <= 1
