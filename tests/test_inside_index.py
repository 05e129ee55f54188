"""An index of what makes every token fire: what it holds, and that an interrupted call goes on."""

import json
import shutil
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

import tokenformer
from conftest import make_tiny, make_tiny_vision, relative_error
from hosts import make_host
from inside_models import CLOSE, with_groups
from tokenformer import BadFileError, BadRequestError, TokenIndex, index_tokens, token_statistics, watch
from tokenformer.inside import indexing
from tokenformer.models.text import byte_tokenizer
from tokenformer_cli import app

TEXT = torch.randint(97, 123, (40 * 32,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    monkeypatch.setattr(indexing, "ROWS", 5 * 32)  # of which 40 windows are no multiple


@pytest.fixture
def index(tiny, tmp_path):
    return index_tokens(tiny, TEXT, tmp_path / "index", length=32, examples=4, tokenizer=byte_tokenizer(256))


def test_the_examples_are_where_a_token_fires_most(tiny, index):
    with watch(tiny, "layers.1.ffn") as seen, torch.no_grad():
        tiny(TEXT.view(40, 32))
    weights = seen["layers.1.ffn"].weights  # [40, 32, n]
    best = weights.abs().amax(1).topk(4, dim=0)
    for token in (0, 7, 255):
        found = index["layers.1.ffn", token].examples
        assert [example.window for example in found] == best.indices[:, token].tolist()
        for example in found:
            own = weights[example.window, :, token]
            assert example.position == own.abs().argmax()
            assert example.weight == pytest.approx(own[example.position].item(), rel=1e-4)
            assert example.ids[example.at] == TEXT.view(40, 32)[example.window, example.position]
            assert "".join(example.text) == bytes(example.ids).decode()


def test_the_statistics_are_those_of_the_data(tiny, index):
    expected = token_statistics(tiny, [TEXT.view(40, 32)])
    for name, statistics in expected.items():
        for what in ("use", "mean", "largest", "density", "selectivity"):
            assert relative_error(index.array(name, what), getattr(statistics, what)) < 10 * CLOSE
    one = index["layers.0.ffn", 3]
    assert one.statistics["use"] == pytest.approx(expected["model.layers.0.ffn"].use[3].item(), rel=1e-4)
    assert one.statistics["alive"] is True
    assert list(one.quantiles.values()) == sorted(one.quantiles.values())
    assert one.neighbours == [
        (token, pytest.approx(cosine, abs=1e-6))
        for token, cosine in tokenformer.inside.neighbours(tiny, "layers.0.ffn", 3, 8)
    ]
    assert len(index) == sum(layer.num_tokens for _, layer in tokenformer.pattention_layers(tiny))


def test_a_token_promotes_what_its_value_points_to(tiny, tmp_path):
    with torch.no_grad():
        tiny.lm_head.weight.copy_(
            torch.nn.functional.normalize(tiny.lm_head.weight - tiny.lm_head.weight.mean(1, True))
        )
        tiny.model.layers[0].ffn.value_tokens[5] = 3 * tiny.lm_head.weight[104]
    index = index_tokens(tiny, TEXT[:320], tmp_path / "index", length=32, tokenizer=byte_tokenizer(256))
    word = index["layers.0.ffn", 5].promotes[0]
    assert (word.id, word.text) == (104, "h")
    assert word.logit == pytest.approx(3, rel=1e-4)
    assert index["layers.0.ffn", 5].suppresses[0].logit < 0
    assert index["layers.0.attention.query", 5].promotes == []


def test_of_a_million_rows_less_than_one_percent_is_kept():
    step = max(indexing.SPARSE, -(-1_000_000 // indexing.MOST_SAMPLED))
    assert 1 / step + indexing.EXAMPLES / 1_000_000 < 0.01


def test_an_interrupted_call_goes_on(tiny, tmp_path, monkeypatch):
    whole = index_tokens(tiny, TEXT, tmp_path / "whole", length=32)
    monkeypatch.setattr(indexing, "SECONDS", -1)
    read = []

    def interrupt(positions, total, seconds):
        read.append(positions)
        if positions == 5 * 160:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index_tokens(tiny, TEXT, tmp_path / "index", length=32, show=interrupt)
    with pytest.raises(BadRequestError, match="not finished"):
        TokenIndex(tmp_path / "index")
    assert not any(layer._forward_hooks for _, layer in tokenformer.pattention_layers(tiny))
    index = index_tokens(tiny, TEXT, tmp_path / "index", length=32, show=lambda *now: read.append(now[0]))
    assert read == [160 * i for i in range(1, 9)]
    for name in index.layers:
        for what in ("use", "selectivity", "quantiles"):
            assert torch.equal(index.array(name, what), whole.array(name, what))
        assert index[name, 1].examples == whole[name, 1].examples
    again = index_tokens(tiny, TEXT, tmp_path / "index", length=32, show=lambda *now: read.append(now[0]))
    assert len(read) == 8
    assert again.facts == index.facts


def test_an_index_of_something_else_is_left_alone(tiny, tmp_path):
    folder = tmp_path / "index"
    index_tokens(tiny, TEXT[:320], folder, length=32)
    with pytest.raises(BadRequestError, match=r"index of something else \(other data"):
        index_tokens(tiny, TEXT[1:321], folder, length=32)
    with torch.no_grad():
        tiny.model.layers[0].ffn.value_tokens[0, 0] += 1
    with pytest.raises(BadRequestError, match=r"index of something else \(other model"):
        index_tokens(tiny, TEXT[:320], folder, length=32)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(BadRequestError, match="exists and is not an index"):
        index_tokens(tiny, TEXT[:320], tmp_path / "mine", length=32)


def test_neurons_groups_images_and_datasets(tmp_path):
    host = index_tokens(make_host("gpt_neox"), TEXT[:256] % 97, tmp_path / "host", layers="*.dense_4h_to_h", length=16)
    assert len(host["layers.0.mlp.dense_4h_to_h", 3].examples) == 16
    assert host["layers.1.mlp.dense_4h_to_h", 3].promotes
    model = with_groups(make_tiny(), "own")
    rows = [{"input_ids": TEXT[start : start + 20 + start % 7].tolist()} for start in range(0, 300, 25)]
    index = index_tokens(model, rows, tmp_path / "groups", layers="*.ffn")
    assert index["layers.0.ffn.token_groups.law", 1].examples
    assert "model.layers.0.ffn.token_groups.off" not in index.layers
    assert all(
        len(rows[example.window]["input_ids"]) > example.position for example in index["layers.1.ffn", 0].examples
    )
    assert index_tokens(model, rows, tmp_path / "groups", layers="*.ffn").layers == index.layers
    images = [{"pixel_values": torch.randn(3, 32, 32)} for _ in range(6)]
    vision = index_tokens(make_tiny_vision(), images, tmp_path / "images", layers="*.ffn")
    example = vision["layers.0.ffn", 0].examples[0]
    assert 0 <= example.position < 65
    assert example.ids == []
    assert vision["layers.1.ffn", 0].promotes


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"data": "text"}, "the data is a str; give ids"),
        ({"data": torch.randn(8)}, "ids are needed"),
        ({"data": torch.zeros(0, dtype=torch.long)}, "the data is empty"),
        ({"data": [{"text": "a"}]}, "input_ids or pixel_values are needed"),
        ({"examples": 0}, "at least 1 is needed"),
        ({"layers": "*.fnn"}, "no layer is called"),
    ],
)
def test_a_bad_request_leaves_no_folder(tiny, tmp_path, asked, said):
    with pytest.raises(BadRequestError, match=said):
        index_tokens(tiny, **{"data": TEXT, "folder": tmp_path / "index", **asked})
    assert not (tmp_path / "index").exists()


def test_an_index_that_cannot_be_read_is_named(index, tmp_path):
    with pytest.raises(BadRequestError, match=r"'layers.1.fnn'; did you mean 'layers.1.ffn'"):
        _ = index["layers.1.fnn", 3]
    with pytest.raises(BadRequestError, match="has 256 tokens, 0 to 255, and 256 was asked for"):
        _ = index["layers.1.ffn", 256]
    with pytest.raises(BadRequestError, match="give a layer and a token"):
        _ = index["layers.1.ffn"]
    with pytest.raises(BadRequestError, match="is not an index"):
        TokenIndex(tmp_path)
    shutil.copytree(index.folder, tmp_path / "cut")
    (tmp_path / "cut" / "statistics.safetensors").write_bytes(b"")
    (tmp_path / "cut" / "examples.parquet").write_bytes(b"PAR1")
    for ask in (lambda cut: cut.array("layers.1.ffn", "use"), lambda cut: cut["layers.1.ffn", 0].examples):
        with pytest.raises(BadFileError):
            ask(TokenIndex(tmp_path / "cut"))


def test_the_command(tiny, tmp_path):
    tiny.save_pretrained(tmp_path / "model")
    (tmp_path / "book.txt").write_bytes(bytes(TEXT.tolist()))
    words = ["index", str(tmp_path / "model"), str(tmp_path / "out"), "--text", str(tmp_path / "book.txt")]
    run = CliRunner().invoke(app, [*words, "--limit", "600", "--layers", "*.ffn"])
    assert run.exit_code == 0, run.output
    assert "1 GB" in run.output
    index = TokenIndex(tmp_path / "out")
    assert set(index.layers) == {"model.layers.0.ffn", "model.layers.1.ffn"}
    assert index["layers.1.ffn", 2].examples[0].text
    assert CliRunner().invoke(app, [*words[:-1], str(tmp_path / "nothing")]).exit_code == 2


@pytest.mark.slow
def test_a_killed_process_goes_on(tiny, tmp_path):
    tiny.save_pretrained(tmp_path / "model")
    (tmp_path / "book.txt").write_bytes(bytes(TEXT.tolist()) * 400)
    words = ["index", str(tmp_path / "model"), str(tmp_path / "out"), "--text", str(tmp_path / "book.txt")]
    code = (
        f"from tokenformer.inside import indexing; indexing.SECONDS = 0; from tokenformer_cli import app; app({words})"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    while not (tmp_path / "out" / "index.json").exists():
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(1)
    process.kill()
    process.wait()
    assert "seconds" not in json.loads((tmp_path / "out" / "index.json").read_text())
    assert CliRunner().invoke(app, words).exit_code == 0
    assert TokenIndex(tmp_path / "out")["layers.1.ffn", 0].examples
