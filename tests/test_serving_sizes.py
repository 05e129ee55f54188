"""Sizes of one model on the server: what each computes, mixed in one batch, and that nothing is held twice."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("transformers", "5.22", reason="tokenformer serve refuses older ones")

import openai

from command import ended, run
from conftest import make_small, make_sorted, relative_error
from serving_models import GROUPS, SIZES, greedy, make_served, running
from tokenformer import (
    BadRequestError,
    Pattention,
    TokenFormerForCausalLM,
    add_tokens,
    for_inference,
    load_tokens,
    pattention_layers,
    save_tokens,
    use_tokens,
)
from tokenformer.models.prefixes import offer_sizes
from tokenformer.pattention.groups import switch_of
from tokenformer.pattention.sizes import WHOLE, sizes_of
from tokenformer.serving import Served, load_served
from tokenformer.serving.limits import RefusalError
from tokenformer.serving.models import Choice

IDS = torch.randint(0, 64, (1, 24), generator=torch.Generator().manual_seed(0))
LENGTHS, ROWS = (7, 1, 11, 5), (0.5, WHOLE, 0.25, 0.5)


def part_of(folder, size):
    return TokenFormerForCausalLM.from_pretrained(folder, token_fraction=size)


@pytest.mark.parametrize("faster", [False, True], ids=["as trained", "for inference"])
@pytest.mark.parametrize("kind", ["l2_gelu", "gelu_l2", "softmax"])
def test_each_position_has_the_layers_of_its_size(tmp_path, kind, faster):
    """Of every Pattention, for positions that stand end to end: what the layers of smaller models compute."""
    model = make_sorted(IDS, pattention_kind=kind)
    model.save_pretrained(tmp_path)
    sizes = offer_sizes(model, SIZES)
    if faster:
        for_inference(model)
    x = torch.randn(1, sum(LENGTHS), model.config.hidden_size)
    smaller = {size: dict(pattention_layers(part_of(tmp_path, size).model)) for size in {*ROWS}}
    with torch.no_grad():
        for name, layer in pattention_layers(model.model):
            whole = layer(x)
            sizes.set_rows(ROWS, LENGTHS)
            parts = [smaller[size][name](some) for size, some in zip(ROWS, x.split(LENGTHS, 1), strict=True)]
            # Taus are kept with six decimals.
            assert relative_error(layer(x), torch.cat(parts, 1)) < 1e-5
            sizes.set_rows([0.25], [sum(LENGTHS)])
            assert relative_error(layer(x), smaller[0.25][name](x)) < 1e-5
            with pytest.raises(ValueError, match="2 positions in a row, and sizes were given for 24"):
                layer(x[:, :2])
            sizes.set_rows([WHOLE] * 4, LENGTHS)
            assert torch.equal(layer(x), whole)


def test_groups_beside_a_size(tmp_path):
    """With a normaliser of their own and with the layer's, switched by position as the sizes are."""
    model = make_sorted(IDS)
    model.save_pretrained(tmp_path / "base")
    for name, norm in (("own", "own"), ("shared", "shared")):
        add_tokens(model, name, 3, where="ffn", norm=norm)
        torch.manual_seed(0)
        for key, tensor in model.named_parameters():
            if f"token_groups.{name}." in key:
                torch.nn.init.normal_(tensor)
        save_tokens(model, name, tmp_path / name)
    use_tokens(model)
    chosen = (("own",), (), ("shared",), ("own", "shared"))
    x = torch.randn(1, sum(LENGTHS), model.config.hidden_size)
    sizes = offer_sizes(model, SIZES)
    sizes.set_rows(ROWS, LENGTHS)
    switch_of(model).set_rows(chosen, LENGTHS)
    found = model.model.layers[0].ffn(x)
    expected = []
    for size, names, some in zip(ROWS, chosen, x.split(LENGTHS, 1), strict=True):
        part = part_of(tmp_path / "base", size)
        for name in ("own", "shared"):
            load_tokens(part, tmp_path / name)
        use_tokens(part, names)
        expected.append(part.model.layers[0].ffn(some))
    assert relative_error(found, torch.cat(expected, 1)) < 1e-5


def test_sizes_and_groups_are_mixed_in_one_batch(tmp_path):
    served, prompts = make_served(sizes=SIZES), ("hello", "To be, or not", "x")
    whole = make_served()
    expected = {}
    for size in ("", "@0.5", "@0.25"):
        one = make_served()
        if size:
            for group in GROUPS:
                save_tokens(one.model, group, tmp_path / size / group)
                one.model.delete_adapter(group)
            one.model.save_pretrained(tmp_path / size / "base")
            one.model = part_of(tmp_path / size / "base", float(size[1:]))
            for group in GROUPS:
                load_tokens(one.model, tmp_path / size / group)
            use_tokens(one.model)
        for groups in ("", ":law", ":law+fr"):
            for prompt in prompts:
                expected[f"base{size}{groups}", prompt] = greedy(one, f"base{groups}", prompt, 12)
    answers = {expected[name, "hello"] for name, _ in expected}
    assert len(answers) >= 6  # clearly different
    addresses = {name: tensor.data_ptr() for name, tensor in served.model.named_parameters()}
    with running(served) as server, openai.OpenAI(base_url=f"{server.address}/v1", api_key="none") as client:

        def ask(case):
            name, prompt = case
            asked = {"temperature": 0, "max_tokens": 12}
            return client.completions.create(model=name, prompt=prompt, **asked).choices[0].text

        with ThreadPoolExecutor(8) as pool:
            assert dict(zip(expected, pool.map(ask, expected), strict=True)) == expected
        assert [model.id for model in client.models.list()] == ["base", "base@0.5", "base@0.25", "base:law", "base:fr"]
        assert client.models.retrieve("base@0.5:fr").id == "base@0.5:fr"
        with pytest.raises(openai.NotFoundError, match=r"did you mean 'base@0\.5'"):
            client.models.retrieve("base@0.6")
    # Nothing is held twice: no layer has tensors of its own for a size.
    assert {name: tensor.data_ptr() for name, tensor in served.model.named_parameters()} == addresses
    assert served.model.get_memory_footprint() == whole.model.get_memory_footprint()


def test_a_size_is_a_view(monkeypatch):
    model, seen = make_sorted(IDS), []
    sizes = offer_sizes(model, [0.5])
    sizes.set_rows([0.5], [4])
    attend = Pattention._attend
    monkeypatch.setattr(Pattention, "_attend", lambda *args: seen.append(args[2]) or attend(*args))
    layer = model.model.layers[0].ffn
    layer(torch.randn(1, 4, 32))
    (tokens,) = seen
    assert tokens.keys.data_ptr() == layer.key_tokens.data_ptr()
    assert tokens.values.data_ptr() == layer.value_tokens.data_ptr()
    assert len(tokens.keys) == layer.num_tokens // 2


@pytest.mark.parametrize(
    ("asked", "choice"),
    [
        ("a:b", Choice()),
        ("a:b@0.5", Choice((), 0.5)),
        ("a:b:x", Choice(("x",))),
        ("a:b@0.125:x+y", Choice(("x", "y"), 0.125)),
        ("a:b@0.5:x+x", Choice(("x",), 0.5)),
    ],
)
def test_names(tiny, asked, choice):
    served = Served(tiny, None, "a:b", ("x", "y"), sizes=(0.5, 0.125))
    assert served.choice(asked) == choice


@pytest.mark.parametrize("asked", ["a", "a:b@", "a:b@0.25", "a:b@1", "a:b@0.5:", "a:b@0.5:z", "a:b:x@0.5", "a:b@0.5+x"])
def test_names_that_nothing_has(tiny, asked):
    served = Served(tiny, None, "a:b", ("x", "y"), sizes=(0.5, 0.125))
    with pytest.raises(RefusalError, match="is not served here"):
        served.choice(asked)


def test_a_folder_is_served_in_sizes(tmp_path):
    make_sorted(IDS, vocab_size=256).save_pretrained(tmp_path / "sorted")
    served = load_served(tmp_path / "sorted", sizes=[0.5, 1, 0.25, 0.5])
    assert served.names == ["sorted", "sorted@0.5", "sorted@0.25"]
    assert set(sizes_of(served.model).prefixes) == {0.5, 0.25}
    with running(served) as server:
        assert server.engine.manager.logit_processor.sizes is sizes_of(served.model)


def test_what_has_no_sizes(tmp_path):
    make_small(vocab_size=256).save_pretrained(tmp_path / "unsorted")
    make_sorted(IDS, vocab_size=256).save_pretrained(tmp_path / "sorted")
    with pytest.raises(BadRequestError, match=r"size=0.5 was given, and the tokens in .*unsorted are not sorted"):
        load_served(tmp_path / "unsorted", sizes=[0.5])
    for size in (0, 1.5, -1, float("nan")):
        with pytest.raises(BadRequestError, match="a number above 0 and at most 1"):
            load_served(tmp_path / "sorted", sizes=[size])
    with pytest.raises(BadRequestError, match="sizes and int8 were given"):
        load_served(tmp_path / "sorted", sizes=[0.5], int8=True)
    load_served(tmp_path / "unsorted", sizes=[1])  # which is what is served anyway


def test_the_command(tmp_path):
    make_small(vocab_size=256).save_pretrained(tmp_path / "unsorted")
    ended(run("serve", tmp_path / "unsorted", "--sizes", "0.5"), 2, "not sorted")
    ended(run("serve", tmp_path / "unsorted", "--sizes", "half"), 2, "numbers are expected")
