"""A saved model's card: front matter that the Hub accepts, a body that is true, and code that runs."""

import re
from dataclasses import replace

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image

from conftest import make_tiny, make_tiny_vision
from hosts import make_host
from tokenformer import adopt, grow
from tokenformer.adoption.adopt_folder import adopt_folder
from tokenformer.data.text import load_tokenizer
from tokenformer.growth.grow_folder import grow_folder
from tokenformer.models.card import CardFacts, StageFacts, public_name, read_facts, write_card
from training_runs import run, write_recipe

FACTS = CardFacts(
    license="apache-2.0",
    base_model="owner/base",
    datasets=("owner/texts", "./notes.txt", "stdlib (built in)"),
    tokenizer="bytes",
    recipe="demo",
    stages=(
        StageFacts(parameters=1000, steps=10, seen=2560, loss=3.25),
        StageFacts(2000, 20, 5120, "rotate", loss_before_growth=3.25, loss_after_growth=3.25, loss=2.5),
    ),
)


def card_of(folder):
    return ModelCard.load(folder / "README.md")


def test_the_front_matter_says_what_the_hub_asks_for(tmp_path):
    model = make_tiny()
    model.save_pretrained(tmp_path)
    data = card_of(tmp_path).data.to_dict()
    assert data == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["tokenformer"]}
    write_card(model, tmp_path, FACTS)
    data = card_of(tmp_path).data
    assert (data.license, data.base_model, data.datasets) == ("apache-2.0", "owner/base", ["owner/texts"])
    assert data.metrics == ["loss"]
    make_tiny_vision().save_pretrained(tmp_path / "vision")
    assert card_of(tmp_path / "vision").data.pipeline_tag == "image-classification"
    assert 'pip install "tokenformer[vision]"' in card_of(tmp_path / "vision").text


def test_the_body_has_data_and_the_losses_of_every_stage(tmp_path):
    write_card(make_tiny(), tmp_path, FACTS)
    text = card_of(tmp_path).text
    assert "- owner/texts\n- ./notes.txt\n- stdlib (built in)\n- tokenizer: bytes" in text
    assert "Started from owner/base." in text
    assert "`demo`" in text
    assert "| 1 | 1,000 | 10 | 2,560 | | | | 3.2500 |" in text
    assert "| 2 | 2,000 | 20 | 5,120 | rotate | 3.2500 | 3.2500 | 2.5000 |" in text
    assert "accuracy" not in text
    assert "## Licence\napache-2.0" in text
    assert "arxiv.org/abs/2410.23168" in text


@pytest.mark.parametrize("facts", [FACTS, CardFacts(), replace(FACTS, base_model="./local", datasets=("a/b",))])
def test_facts_are_read_back(tmp_path, facts):
    write_card(make_tiny(), tmp_path, facts)
    assert read_facts(tmp_path) == facts


def test_facts_follow_a_model_that_is_loaded_grown_and_saved(tmp_path):
    model = make_tiny()
    model.save_pretrained(tmp_path / "small")
    write_card(model, tmp_path / "small", FACTS)
    grow_folder(tmp_path / "small", tmp_path / "large", factor=2)
    grow(type(model).from_pretrained(tmp_path / "large"), 2, method="split").save_pretrained(tmp_path / "larger")
    assert read_facts(tmp_path / "large") == read_facts(tmp_path / "larger") == FACTS
    assert "2. split (seed 0)" in card_of(tmp_path / "larger").text


def test_a_recipe_says_under_which_licence_its_models_are(tmp_path):
    recipe = write_recipe(tmp_path, training={"license": "mit"}, growth={"stages": [{"steps": 1}]})
    assert card_of(run(recipe, tmp_path / "run")).data.license == "mit"


def test_a_card_that_was_edited_is_left_alone(tmp_path):
    model = make_tiny()
    model.save_pretrained(tmp_path)
    ours = (tmp_path / "README.md").read_text()
    edited = ours.replace("## Data\nNot recorded.", "## Data\nMy diary.")
    assert edited != ours
    (tmp_path / "README.md").write_text(edited)
    grow(model, 2).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == edited
    (tmp_path / "README.md").write_text(ours)
    grow(model, 2).save_pretrained(tmp_path)
    assert "1. rotate (seed 0)" in (tmp_path / "README.md").read_text()


def test_an_adopted_model_names_its_original_and_keeps_its_licence(tmp_path):
    make_host("gpt_neox").save_pretrained(tmp_path / "host")
    (tmp_path / "host" / "README.md").write_text("---\nlicense: mit\ndatasets: owner/texts\n---\n# The original\n")
    adopt_folder(tmp_path / "host", tmp_path / "adopted")
    assert read_facts(tmp_path / "adopted") == CardFacts("mit", "./host", ("owner/texts",))
    grow_folder(tmp_path / "adopted", tmp_path / "grown", factor=2, method="split", seed=3)
    assert read_facts(tmp_path / "grown") == read_facts(tmp_path / "adopted")
    card = card_of(tmp_path / "grown")
    assert card.data.pipeline_tag == "text-generation"
    assert "# An adopted gpt_neox" in card.text
    assert 'grow(model, factor=2, method="rotate")' in card.text  # which is exact here, and trains best
    assert "1. split (seed 3)" in card.text
    assert "parameter tokens in each `layers.*.mlp" in card.text


@pytest.mark.parametrize("text", ["no front matter", "---\nlicense: [\n---\n", "---\ntokenformer: 3\n---\n"])
def test_a_card_without_facts_that_can_be_read_has_none(tmp_path, text):
    (tmp_path / "README.md").write_text(text)
    assert read_facts(tmp_path) == CardFacts()


def test_local_names_do_not_tell_where_they_lie(tmp_path):
    assert public_name(str(tmp_path)) == f"./{tmp_path.name}"
    assert public_name("/gone/corpus") == "./corpus"
    assert public_name("/data/*.txt") == "./*.txt"
    assert public_name("owner/name") == "owner/name"


@pytest.mark.parametrize("kind", ["language", "vision", "adopted"])
def test_the_code_in_a_card_runs(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    if kind == "vision":
        Image.new("RGB", (32, 32)).save("picture.png")
        make_tiny_vision().save_pretrained("model")
    else:
        load_tokenizer("bytes").save_pretrained("model")
        model = make_tiny(vocab_size=257) if kind == "language" else adopt(make_host("gpt_neox", vocab_size=257))
        model.save_pretrained("model")
        write_card(model, "model")
    text = (tmp_path / "model" / "README.md").read_text().replace("path/to/this/folder", "model")
    names = {}
    for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(code, names)
    assert names["bigger"].num_parameters() > names["model"].num_parameters()
    if kind != "vision":
        ids = torch.tensor([[1, 2, 3]])
        torch.testing.assert_close(names["bigger"](ids).logits, names["model"](ids).logits, rtol=1e-4, atol=1e-5)
