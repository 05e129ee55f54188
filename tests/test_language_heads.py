"""The heads for classification and question answering: they load from a language model, train, grow and are saved."""

import pytest
import torch
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    pipeline,
)

from conftest import make_tiny
from tokenformer import (
    TokenFormerForQuestionAnswering,
    TokenFormerForSequenceClassification,
    TokenFormerForTokenClassification,
    grow,
)
from tokenformer.models.text import byte_tokenizer

IDS = torch.randint(0, 255, (3, 20), generator=torch.Generator().manual_seed(0))
PAD = 255
HEADS = {
    "sequence": (
        AutoModelForSequenceClassification,
        TokenFormerForSequenceClassification,
        {"labels": torch.tensor([0, 2, 1])},
    ),
    "token": (AutoModelForTokenClassification, TokenFormerForTokenClassification, {"labels": IDS % 3}),
    "answer": (
        AutoModelForQuestionAnswering,
        TokenFormerForQuestionAnswering,
        {"start_positions": torch.tensor([1, 2, 3]), "end_positions": torch.tensor([4, 5, 6])},
    ),
}


@pytest.mark.parametrize("head", HEADS)
def test_from_a_language_model_to_a_grown_and_saved_classifier(head, tmp_path):
    auto, expected, labels = HEADS[head]
    language_model = make_tiny(pad_token_id=PAD)
    language_model.save_pretrained(tmp_path / "language")
    number = {} if head == "answer" else {"num_labels": 3}
    model = auto.from_pretrained(tmp_path / "language", **number).train()
    assert type(model) is expected
    assert torch.equal(model.model.layers[0].ffn.key_tokens, language_model.model.layers[0].ffn.key_tokens)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        losses.append(model(IDS, **labels).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]

    model.eval()
    before = model(IDS, **labels).loss.item()
    grow(model, 2, method="rotate", inplace=True, optimizer=optimizer)
    assert model(IDS, **labels).loss.item() == pytest.approx(before, rel=1e-5)

    model.save_pretrained(tmp_path / "grown")
    assert f"import {auto.__name__}\n" in (tmp_path / "grown" / "README.md").read_text()
    assert expected.__name__ in (tmp_path / "grown" / "load_tokenformer.py").read_text()
    again = auto.from_pretrained(tmp_path / "grown")
    torch.testing.assert_close(
        again(IDS, use_cache=False).to_tuple(), model(IDS, use_cache=False).to_tuple(), rtol=0, atol=0
    )


def test_padding_does_not_count():
    model = TokenFormerForSequenceClassification(make_tiny(pad_token_id=PAD).config).eval()
    padded = torch.cat([IDS, torch.full((3, 5), PAD)], dim=1)
    out = model(padded, attention_mask=padded.ne(PAD).long()).logits
    torch.testing.assert_close(out, model(IDS).logits, rtol=1e-4, atol=1e-6)


def test_the_pipeline_classifies_texts():
    model = TokenFormerForSequenceClassification(make_tiny(num_labels=2).config)
    classify = pipeline("text-classification", model, tokenizer=byte_tokenizer())
    assert {each["label"] for each in classify("to be", top_k=None)} == {"LABEL_0", "LABEL_1"}
