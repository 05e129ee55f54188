"""The page of what tokens do: its pieces, its numbers against those of `watch`, its size, and the command line."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import tokenformer
from conftest import make_tiny, make_tiny_vision
from hosts import make_host
from inside_models import with_groups
from inspecting_models import HOSTILE, TEXT, save_run
from tokenformer import BadRequestError, watch
from tokenformer.inside import token_ages
from tokenformer.inside.ages import earlier_layer
from tokenformer.inside.places import find_places
from tokenformer.inspecting import load_inspection
from tokenformer.inspecting.folder import fitting
from tokenformer.inspecting.packing import as_bytes, as_roots, pack, unpack
from tokenformer.inspecting.page import SCRIPTS, STYLES, make_page, policy
from tokenformer.inspecting.pieces import byte_pieces, cut_into_pieces, label, visible
from tokenformer.inspecting.reading import read_bits, windows
from tokenformer.inspecting.sheet import make_sheet
from tokenformer.inspecting.sources import text_source
from tokenformer.inspecting.subject import Subject
from tokenformer.models.text import byte_tokenizer
from tokenformer_cli import app

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def inspection(folder):
    return load_inspection(folder, prompt=TEXT.encode())


def word_pieces(text=TEXT * 20):
    """A byte-level tokenizer of 300 entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def subject_of(model, reads, layers=None, tmp="model"):
    return Subject(Path(tmp), model, reads, find_places(model, layers, "inspect"))


class TestPieces:
    def test_a_piece_for_every_byte(self):
        assert byte_pieces("aé\n🎉\t".encode()) == ["a", "é", "", "⏎\n", "🎉", "", "", "", "⇥\t"]
        assert byte_pieces(b"\xff\xc3x\x00\xe2\x82") == ["⟨FF⟩", "⟨C3⟩", "x", "⟨00⟩", "⟨E2⟩", "⟨82⟩"]

    @pytest.mark.parametrize("text", [HOSTILE, "".join(map(chr, range(0x180))), "\ud800 \u0301 \U000e0041 ⁦"])
    def test_nothing_that_commands_is_left(self, text):
        assert not CONTROL.search(visible(text))
        assert not CONTROL.search("".join(byte_pieces(text.encode(errors="replace"))))

    def test_a_lone_accent_does_not_change_the_piece_before(self):
        assert visible("\u0301x") == "◌\u0301x"

    def test_word_pieces_are_the_text(self):
        tokenizer, text = word_pieces(), "to be é or\tnot 🎉 that"
        found = cut_into_pieces(tokenizer, text.encode(), 300, 1000)
        assert found.ids == tokenizer(text)["input_ids"]
        assert "".join(found.shown).replace("⇥", "") == text
        assert found.left_out == 0
        assert len(found.ids) < len(text)
        assert cut_into_pieces(tokenizer, text.encode(), 300, 3).left_out == len(text) - len("".join(found.shown[:3]))

    def test_labels_can_be_seen(self):
        for tokenizer, vocabulary in ((byte_tokenizer(), 257), (word_pieces(), 300)):
            labels = [label(tokenizer, token) for token in range(vocabulary + 3)]
            assert all(one.strip() and not CONTROL.search(one) for one in labels)
        assert labels[-1] == "id 302"
        assert [label(byte_tokenizer(), one) for one in (32, 10, 0xE9, 0, 97)] == ["␣", "⏎", "⟨E9⟩", "⟨00⟩", "a"]


def test_arrays_come_back():
    arrays = {
        "a": np.arange(7, dtype=np.uint16),
        "b": np.array([1.5, np.nan], np.float32),
        "c": np.zeros(0, np.int8),
        "d": np.array([2**31], np.uint32),
    }
    for name, found in unpack(json.loads(json.dumps(pack(arrays)))).items():
        np.testing.assert_array_equal(found, arrays[name])
    assert as_bytes(np.array([-2.0, 1.0, 5.0]), 2.0).tolist() == [-127, 64, 127]
    assert as_roots(np.array([-1.0, 0.25, 0.0]), 1.0).tolist() == [-127, 64, 0]
    assert as_bytes(np.array([3.0]), 0.0).tolist() == [0]


def dense(sheet, arrays, layer):
    """The weights of a layer's entries, [tokens with a card, positions], NaN where there is none; and their ids."""
    first = int(arrays["token_counts"][:layer].sum())
    rows = np.arange(first, first + int(arrays["token_counts"][layer]))
    starts = np.concatenate([[0], arrays["entry_counts"].astype(int).cumsum()])
    found = np.full((len(rows), len(sheet["pieces"])), np.nan)
    for i, row in enumerate(rows):
        entries = slice(starts[row], starts[row + 1])
        found[i, arrays["entry_positions"][entries]] = arrays["entry_weights"][entries] / 127 * arrays["largest"][row]
    return found, arrays["token_ids"][rows]


class TestSheet:
    def test_its_weights_are_those_of_watch(self, inspection):
        sheet, arrays, model = inspection.sheet, unpack(inspection.sheet["arrays"]), inspection.subject.model
        ids = torch.tensor([inspection.source.ids])
        assert ids.shape[1] < inspection.subject.context
        with watch(model) as seen, torch.no_grad():
            model(ids)
        for number in (0, 4):
            name = sheet["layers"][number]["name"]
            found, tokens = dense(sheet, arrays, number)
            weights, norms = seen[name].weights[0].numpy(), seen[name].norms[0]
            expected = weights[:, tokens].T
            step = np.abs(weights).max(0)[tokens][:, None] / 127
            there = ~np.isnan(found)
            assert (np.abs(found - expected) <= 0.51 * step + 1e-6)[there].all()
            best = norms.topk(8, dim=1).indices.numpy()  # all of them have an entry
            rows = np.searchsorted(tokens, best)
            assert (tokens[rows] == best).all()
            assert there[rows, np.arange(len(best))[:, None]].all()
            strongest = np.nanargmax(np.abs(found), axis=1)
            assert np.allclose(np.abs(expected).max(1), np.abs(expected)[np.arange(len(tokens)), strongest], rtol=0.01)

    def test_the_surprise_is_the_loss(self, inspection):
        ids, bits = torch.tensor([inspection.source.ids]), unpack(inspection.sheet["arrays"])["bits"]
        loss = inspection.subject.model(ids, labels=ids).loss.item()
        assert np.isnan(bits[0])
        assert bits[1:].mean() * np.log(2) == pytest.approx(loss, rel=1e-4)

    def test_growth_is_told_apart(self, inspection):
        sheet, arrays = inspection.sheet, unpack(inspection.sheet["arrays"])
        assert (sheet["stages"], sheet["before"], sheet["new_after"]) == (
            ["stage 1"],
            {"title": "stage 1", "steps": 0},
            0,
        )
        assert len(sheet["growth"]) == 1
        assert "ffn" in sheet["growth"][0]
        for layer in sheet["layers"]:
            assert layer["new"] == layer["tokens"] // 2
        old = arrays["token_ids"] < np.repeat(
            [layer["tokens"] // 2 for layer in sheet["layers"]], arrays["token_counts"]
        )
        assert (arrays["ages"] == np.where(old, 0, 1)).all()
        use = arrays["stage_use"].reshape(-1, 2)
        assert (use[~old, 0] == 0).all()
        assert use[old, 0].mean() > 0
        before = inspection.subject.before.model
        np.testing.assert_allclose(
            arrays["before_bits"][1:], read_bits(before, inspection.source.ids, 256)[1:], rtol=1e-4
        )
        assert 0 < arrays["new_shares"].mean() < 255

    def test_a_text_longer_than_the_context(self):
        model = make_tiny(max_position_embeddings=16)
        ids = list(range(41))
        found = read_bits(model, ids, 16)
        assert len(found) == 41
        for window in windows(ids, 16):
            alone = read_bits(model, window.batch[0].tolist(), 16)
            first = window.first + window.skip
            torch.testing.assert_close(found[max(1, first) : window.first + 16], alone[max(1, window.skip) :])
            assert window.following == (None if window.first + 16 >= 41 else ids[window.first + 16])
        source = text_source(subject := subject_of(model, byte_tokenizer(256)), bytes(ids), "x")
        arrays = unpack(make_sheet(subject, source)["arrays"])
        assert arrays["guess_ids"].size == 41 * 6
        assert arrays["entry_positions"].max() == 40

    @pytest.mark.parametrize("kind", ["words", "groups", "GPT-NeoX", "adopted"])
    def test_other_models(self, kind):
        tokenizer, layers = byte_tokenizer(256), None
        if kind == "words":
            model, tokenizer = make_tiny(vocab_size=300), word_pieces()
        elif kind == "groups":
            model = with_groups(make_tiny(), "own")
        else:
            model = make_host("gpt_neox", vocab_size=256)
            layers = ["*.dense_4h_to_h"] if kind == "GPT-NeoX" else None
            if kind == "adopted":
                tokenformer.adopt(model)
        subject = subject_of(model.eval(), tokenizer, layers)
        sheet = make_sheet(subject, text_source(subject, b"that is to be", "x"))
        arrays = unpack(sheet["arrays"])
        assert arrays["entry_weights"].any()
        assert sheet["unit"] == ("token" if kind == "words" else "byte")
        assert sheet["groups"] == (["law", "off"] if kind == "groups" else [])
        json.dumps(sheet, allow_nan=False)

    def test_an_image(self, tmp_path):
        pytest.importorskip("PIL")
        from PIL import Image

        model = make_tiny_vision()
        model.save_pretrained(tmp_path / "model")
        Image.effect_noise((50, 40), 90).convert("RGB").save(tmp_path / "image.png")
        found = load_inspection(tmp_path / "model", image=tmp_path / "image.png")
        arrays, image = unpack(found.sheet["arrays"]), found.sheet["image"]
        assert len(found.sheet["pieces"]) == image["rows"] * image["columns"] + image["extra"]
        assert image["url"].startswith("data:image/png;base64,")
        assert arrays["guess_ids"].size == 6
        assert arrays["entry_effects"].any()
        with pytest.raises(BadRequestError, match="takes an image; give --image FILE"):
            load_inspection(tmp_path / "model", prompt=b"x")
        with pytest.raises(BadRequestError, match=r"none\.png does not exist"):
            load_inspection(tmp_path / "model", image=tmp_path / "none.png")


def test_layers_keep_track_through_growth_in_depth():
    small = make_tiny()
    large = tokenformer.grow(tokenformer.grow(small, depth=4), factor=2)
    ages = token_ages(large)
    for name in find_places(large, ["*.ffn"], "x"):
        earlier = earlier_layer(large, name, 0)
        assert (earlier is None) == bool((ages[name] == 1).any()), name
        assert earlier_layer(large, name, 2) == name
    assert [earlier_layer(large, f"model.layers.{i}.ffn", 0) for i in range(4)].count(None) == 2


class TestPage:
    def test_hostile_text_is_data(self, inspection):
        source = text_source(inspection.subject, HOSTILE.encode(), HOSTILE)
        page = make_page({**inspection.sheet, "pieces": source.pieces, "of": HOSTILE, "model": {"name": HOSTILE}})
        assert page.count("<script") == page.count("</script") == 2
        assert "<img" not in page
        assert json.loads(re.search(r'id="sheet">(.*?)</script>', page, re.DOTALL).group(1))["of"] == HOSTILE

    def test_it_asks_nobody(self, inspection):
        page = inspection.page
        assert not re.search(r"https?://|@import|innerHTML|insertAdjacentHTML|document\.write|eval\(|outerHTML", page)
        assert page.count("<style>") == page.count('<script type="module">') == 1
        assert "connect-src" not in policy(False)
        assert "unsafe" not in policy(True)
        assert len(SCRIPTS) > len(STYLES)

    def test_what_does_not_fit_is_left_out_and_said(self, inspection):
        whole = len(inspection.page)
        source, sheet, page = fitting(inspection.subject, inspection.source, most=whole - 10_000)
        assert len(page.encode()) <= whole - 10_000
        assert len(sheet["pieces"]) == len(source.ids) < len(inspection.source.ids)
        assert f"first {len(source.ids):,} bytes of {len(inspection.source.ids):,}: a page has" in sheet["notes"][0]
        with pytest.raises(BadRequestError, match="choose fewer layers"):
            fitting(inspection.subject, inspection.source, most=1000)

    def test_a_line_of_a_megabyte(self, folder, tmp_path, monkeypatch):
        monkeypatch.setattr("tokenformer.inspecting.sources.MOST", 300)
        (tmp_path / "long.txt").write_bytes(b"x" * 10**6)
        found = load_inspection(folder, text=tmp_path / "long.txt", layers=["*.ffn"])
        assert len(found.sheet["pieces"]) == 300
        assert found.sheet["notes"] == ["Shown are the first 300 bytes of a file of 1,000,000 bytes."]


class TestCommand:
    def run(self, *arguments, ok=True):
        done = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
        assert (done.exit_code == 0) == ok, done.output
        return " ".join(done.output.split())

    def test_a_page_is_written_and_replaced(self, folder, tmp_path):
        out = tmp_path / "pages" / "page.html"
        for prompt in ("to be", "or not"):
            said = self.run(folder, "--prompt", prompt, "--out", out, "--layers", "*.ffn")
            assert f"bytes shown {len(prompt)}" in said
        assert "Inside" in out.read_text()

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ([], "nothing to look at was given; give --text FILE or --prompt TEXT"),
            (["--text", "a", "--prompt", "b"], "--text and --prompt exclude each other"),
            (["--promt", "b"], "No such option"),
            (["--prompt", "b", "--port", "1"], "--port is for the live page"),
            (["--prompt", "b", "--serve", "--out", "x"], "--serve writes no file"),
            (["--prompt", ""], "the prompt is empty; give at least one character"),
            (["--text", "missing.txt"], "missing.txt does not exist"),
            (["--image", "pyproject.toml"], "which takes text; give --text FILE or --prompt TEXT"),
            (["--prompt", "b", "--layers", "*.fn"], "no layer is called '*.fn'"),
            (["--prompt", "b", "--before", "nowhere"], "nowhere does not exist"),
            (["--prompt", "b", "--index", "nowhere"], "nowhere is not an index"),
        ],
    )
    def test_a_wrong_request_gets_one_line(self, folder, tmp_path, arguments, said):
        assert said in self.run(folder, *arguments, ok=False)

    def test_paths_that_are_not_ours(self, folder, tmp_path):
        (tmp_path / "mine.html").write_text("<p>mine</p>")
        said = self.run(folder, "--prompt", "b", "--out", tmp_path / "mine.html", ok=False)
        assert "was not written by this command" in said
        assert "is a folder; name a file" in self.run(folder, "--prompt", "b", "--out", tmp_path, ok=False)
        assert "does not exist" in self.run(tmp_path / "none", "--prompt", "b", ok=False)
        assert "is the model itself" in self.run(folder, "--prompt", "b", "--before", folder, ok=False)

    def test_contexts_of_an_index(self, folder, tmp_path):
        pytest.importorskip("pyarrow")
        (tmp_path / "text.txt").write_text(TEXT)
        out = CliRunner().invoke(
            app, ["index", str(folder), str(tmp_path / "index"), "--text", str(tmp_path / "text.txt")]
        )
        assert out.exit_code == 0, out.output
        found = load_inspection(folder, prompt=b"to be or not", index=tmp_path / "index")
        contexts = found.sheet["index"]
        assert len(contexts) == found.tokens
        before, here, after = contexts[0][0]
        assert len(here) == 1
        assert before + here + after in TEXT.replace("\n", "⏎")
        with pytest.raises(BadRequestError, match="of another model"):
            load_inspection(folder.parents[1] / "stage-1" / "model", prompt=b"x", index=tmp_path / "index")
