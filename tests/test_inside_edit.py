"""edit(): one token more, which says what it was told to, and is quiet elsewhere."""

import pytest
import torch

import tokenformer
from conftest import make_tiny, train_step
from hosts import make_host
from inside_models import with_groups
from tokenformer import BadRequestError, edit, remove_tokens, watch
from tokenformer.models.text import byte_tokenizer

TEXT = torch.randint(97, 123, (2000,), generator=torch.Generator().manual_seed(5))
# It ends unlike anything in the text, of which so small a model sees little but the last byte; and what follows it
# follows at once, because so small a model hardly looks back.
SUBJECT = b"zyX"
PROMPT = b"of zyX"


@pytest.fixture(scope="module")
def model():
    """It has seen enough text to expect one letter after another."""
    model = make_tiny().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(20):
        train_step(model, optimizer, TEXT[step * 64 : step * 64 + 256].view(4, 64))
    return model.eval()


def written(model, **changes):
    asked = {"prompt": list(PROMPT), "subject": list(SUBJECT), "target": list(b"!"), "data": [TEXT[:1920].view(30, 64)]}
    return edit(model, "layers.0.ffn", **{**asked, **changes})


@pytest.fixture(autouse=True)
def _undone(model):
    yield
    for facts in tokenformer.token_groups(model):
        remove_tokens(model, facts.name)


def test_it_says_what_it_was_told_and_nothing_else_changes(model, tmp_path):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prompt, text = torch.tensor([list(PROMPT)]), TEXT[1920:1984].view(1, 64)
    plain, expected = model(text).logits, model(prompt).logits
    found = written(model)
    assert found.fires_on == 0
    assert found.margin > 1
    assert found.before < 0.05
    assert found.after > 0.5
    assert model(prompt).logits[0, -1].argmax() == ord("!")
    with watch(model, "*.token_groups.edit") as seen:
        logits = model(text).logits
    (token,) = seen.values()
    assert not token.weights.any()  # of all that it does not fire on
    assert torch.equal(logits, plain)
    # Saved, undone, and loaded again.
    edited = model(prompt).logits
    tokenformer.save_tokens(model, "edit", tmp_path / "edit")
    remove_tokens(model, "edit")
    assert torch.equal(model(prompt).logits, expected)
    tokenformer.load_tokens(model, tmp_path / "edit")
    assert torch.equal(model(prompt).logits, edited)
    with pytest.raises(BadRequestError, match="has thresholds"):
        tokenformer.merge_tokens(model, "edit")
    remove_tokens(model, "edit")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_it_fires_at_the_end_of_the_prompt_or_of_the_subject(model):
    prompt = torch.tensor([list(b"of zyX is:")])
    for at, position in (("prompt", -1), ("subject", 5)):
        found = written(model, prompt=prompt[0].tolist(), at=at, steps=30)
        with watch(model, "*.token_groups.edit") as seen:
            model(prompt)
        (token,) = seen.values()
        assert token.weights[0, :, 0].nonzero().flatten().tolist() == [position % prompt.shape[1]]
        if at == "prompt":  # what follows need not follow the subject at once
            assert found.after > 0.5
        remove_tokens(model, "edit")


def test_where_the_data_has_the_prompt_it_fires_too(model):
    data = TEXT[:1920].view(30, 64).clone()
    data[3, 10:13] = data[7, 40:43] = torch.tensor(list(SUBJECT))
    found = written(model, data=[data])
    assert found.fires_on == 0  # of all else
    with watch(model, "*.token_groups.edit") as seen:
        model(data)
    (token,) = seen.values()
    assert token.weights[..., 0].nonzero().tolist() == [[3, 12], [7, 42]]


def test_two_edits_stand_beside_each_other(model):
    written(model, steps=3)
    written(model, prompt=list(b"in QQ"), subject=list(b"QQ"), name="second", steps=3)
    assert [facts.name for facts in tokenformer.token_groups(model)] == ["edit", "second"]


def test_the_same_write_in_another_model_and_as_text():
    host = make_host("gpt_neox", vocab_size=256)
    data = [TEXT[:960].view(30, 32)]
    found = edit(host, "layers.0.mlp", "of zyxzyx:", "zyxzyx", "!", data=data, tokenizer=byte_tokenizer(256), steps=30)
    assert found.layer == "gpt_neox.layers.0.mlp"
    assert found.after > found.before
    remove_tokens(host, "edit")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"subject": list(b"none")}, "is not in the prompt"),
        ({"subject": []}, "is not in the prompt"),
        ({"target": []}, "the target is empty"),
        ({"prompt": "text"}, "texts need a tokenizer"),
        ({"steps": 0}, "at least 1 is needed"),
        ({"data": TEXT}, "give a list of batches"),
        ({"name": "no name"}, "cannot be called"),
        ({"at": "subjekt"}, "did you mean 'subject'"),
    ],
)
def test_a_bad_request_changes_nothing(tiny, changes, said):
    with pytest.raises(BadRequestError, match=said):
        written(tiny, **changes)
    assert not tokenformer.token_groups(tiny)


def test_what_cannot_be_edited_is_named(tiny):
    with pytest.raises(BadRequestError, match=r"did you mean 'layers.0.ffn'"):
        edit(tiny, "layers.0.fnn", [1, 2], [1], [3], data=[TEXT[:64].view(1, 64)])
    with pytest.raises(BadRequestError, match="of kind softmax"):
        written(make_tiny(pattention_kind="softmax"))
    with pytest.raises(BadRequestError, match="has a token group 'law' already"):
        written(with_groups(make_tiny(), "own"), name="law")
