"""`tokenformer info`: presets and folders, as a table and as JSON."""

import json

import pytest

from command import ended, run
from conftest import make_tiny, make_tiny_vision
from tokenformer import PRESETS, VISION_PRESETS, TokenFormerConfig, TokenFormerVisionConfig, cost, grow
from tokenformer.growth.grow_folder import taus
from tokenformer.pattention import pattention_layers
from tokenformer_cli.terminal import short


def test_all_presets_in_a_table():
    result = run("info")
    assert (result.exit_code, result.stderr) == (0, "")
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert PRESETS.keys() <= rows.keys()
    numbers = "354M 316M 2140/2140/8560 1,024 746M 2.24G 37.7MB 6.97GB 15 1.041"
    assert " ".join(rows["354m"].split()) == f"354m {numbers}"
    assert rows["124m"].split()[-2:] == ["never", "0.999"]
    assert "fewer FLOPs per token than a GPT-NeoX of equal parameters" in result.stdout
    assert "…" not in result.stdout


def test_a_table_that_is_too_wide_goes_on_below(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("info").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split() for line in lines if line.startswith("354m ")] == [
        ["354m", "354M", "316M", "2140/2140/8560", "1,024", "746M", "2.24G", "37.7MB", "6.97GB"],
        ["354m", "15", "1.041"],
    ]


def test_json_has_the_numbers():
    result = run("info", "124m", "tiny", "--length", 4096, "--json")
    found = json.loads(result.stdout)
    config = TokenFormerConfig.preset("124m")
    assert list(found) == ["124m", "tiny"]
    assert found["124m"]["length"] == 4096
    assert found["124m"]["parameters"]["total"] == cost.parameters(config).total
    assert found["124m"]["training_flops_per_token"] == cost.training_flops_per_token(config, 4096)
    assert found["124m"]["kv_cache_bytes"] == cost.kv_cache_bytes(config, 4096)
    assert found["124m"]["training_memory_bytes"]["total"] == cost.training_memory(config, 1, 4096).total
    assert "tau" not in found["124m"]
    assert found["124m"]["crossing_length"] is None
    assert found["tiny"]["crossing_length"] == cost.crossing_length(TokenFormerConfig.preset("tiny")) == 55
    assert found["124m"]["equal_neox_flops_ratio"] == cost.flops_ratio(config, 4096)


def test_a_folder_is_read_without_its_weights(tmp_path, tiny):
    grown = grow(grow(tiny, 3, method="split"), num_tokens={"ffn": 1000}, method="zero")
    grown.save_pretrained(tmp_path / "grown")
    tiny.save_pretrained(tmp_path / "fresh")
    for name in ("grown", "fresh"):
        (tmp_path / name / "model.safetensors").unlink()
    result = run("info", tmp_path / "grown", tmp_path / "fresh", "tiny")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    steps = "split (seed 0): 64/64/256 -> 192/192/768; then zero (seed 0): 192/192/768 -> 192/192/1000"
    assert f"{tmp_path / 'grown'}: tau qkv 13.86, out 13.86, ffn 27.71; {steps}" in lines
    assert f"{tmp_path / 'fresh'}: tau qkv 8, out 8, ffn 16; trained at this size from the start" in lines


def test_a_gpt_neox_stands_in_the_same_table(tmp_path):
    peer = cost.equal_neox(TokenFormerConfig.preset("354m"))
    peer.save_pretrained(tmp_path)
    result = run("info", "354m", tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
    row = next(line for line in result.stdout.splitlines() if line.startswith(str(tmp_path))).split()
    assert row[1:5] == [
        short(cost.parameters(peer).total),
        short(cost.parameters(peer).non_embedding),
        "GPT-NeoX",
        "1,024",
    ]
    assert row[5] == short(cost.forward_flops_per_token(peer, 1024))
    assert row[-3:] == [short(cost.training_memory(peer, 1, 1024).total, "B"), "-", "-"]
    assert f"{tmp_path}: tau" not in result.stdout
    facts = json.loads(run("info", tmp_path, "--length", 300, "--json").stdout)[str(tmp_path)]
    assert facts["model_type"] == "gpt_neox"
    assert facts["parameters"]["total"] == cost.parameters(peer).total
    assert facts["forward_flops_per_token"] == cost.forward_flops_per_token(peer, 300)
    assert facts["training_memory_bytes"]["total"] == cost.training_memory(peer, 1, 300).total
    assert not {"tokens", "crossing_length", "tau"} & facts.keys()


@pytest.mark.parametrize("kind", ["l2_gelu", "softmax"])
def test_tau_from_the_history_is_the_layers_tau(kind):
    model = make_tiny(pattention_kind=kind)
    for step in (
        {"factor": 3, "method": "split"},
        {"num_tokens": {"qkv": 500, "ffn": 1000}, "method": "random", "exact": False},
        {"num_tokens": {"out": 384}, "method": "split"},
    ):
        grow(model, **step, inplace=True)
        expected = taus(model.config)
        for name, layer in pattention_layers(model):
            role = next(role for role, parts in model.config.token_roles.items() if name.rpartition(".")[2] in parts)
            assert layer.tau.item() == pytest.approx(expected[role], rel=1e-6)


def test_refusals(tmp_path):
    ended(run("info", "tinny"), 2, "tinny is neither a preset nor a folder; did you mean 'tiny'?")
    ended(run("info", tmp_path), 2, "is not a model folder: it has no config.json")
    ended(run("info", "--length", 0), 2, "--length")
    (tmp_path / "config.json").write_text("{")
    ended(run("info", tmp_path), 1, "config.json cannot be read")
    (tmp_path / "config.json").write_text('{"model_type": "gpt_neox", "hidden_size": "wide"}')
    ended(run("info", tmp_path), 1, "config.json cannot be read", "hidden_size")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    ended(run("info", tmp_path), 2, "holds a llama model")


def test_presets_of_images_have_a_table_of_their_own():
    lines = [line.split() for line in run("info").stdout.splitlines() if line.strip()]
    rows = {line[0]: line[1:] for line in lines}
    assert VISION_PRESETS.keys() <= rows.keys()
    config = TokenFormerVisionConfig.preset("b16")
    assert rows["b16"] == [
        "109M",
        "107M",
        "728/728/2912",
        "224",
        "197",
        short(cost.forward_flops_per_image(config)),
        short(cost.training_flops_per_image(config)),
        short(cost.training_memory(config, 1).total, "B"),
        f"{cost.image_flops_ratio(config):.3f}",
    ]
    assert "124m" not in run("info", "--image-size", 64).stdout
    assert "b16" not in run("info", "--length", 64).stdout


def test_json_of_images(tmp_path):
    peer = cost.equal_vit(TokenFormerVisionConfig.preset("b16"))
    peer.save_pretrained(tmp_path)
    found = json.loads(run("info", "b16", tmp_path, "--image-size", 384, "--json").stdout)
    config = TokenFormerVisionConfig.preset("b16")
    assert found["b16"]["model_type"] == "tokenformer_vision"
    assert (found["b16"]["image_size"], found["b16"]["length"]) == (384, 577)
    assert found["b16"]["training_flops_per_image"] == cost.training_flops_per_image(config, 384)
    assert found["b16"]["equal_vit_flops_ratio"] == cost.image_flops_ratio(config, 384)
    assert found[str(tmp_path)]["parameters"]["total"] == cost.parameters(peer).total
    assert not {"tokens", "equal_vit_flops_ratio", "tau"} & found[str(tmp_path)].keys()


def test_a_folder_of_images(tmp_path):
    grow(make_tiny_vision(), 2, method="split").save_pretrained(tmp_path)
    result = run("info", tmp_path, "tiny32", "124m")
    assert (result.exit_code, result.stderr) == (0, "")
    steps = "split (seed 0): 48/48/192 -> 96/96/384"
    assert f"{tmp_path}: tau qkv 9.798, out 9.798, ffn 19.6; {steps}" in result.stdout.splitlines()


def test_options_of_the_other_kind_are_refused():
    ended(run("info", "b16", "--length", 9), 2, "b16 takes images", "use --image-size")
    ended(run("info", "124m", "--image-size", 9), 2, "124m is a language model", "use --length")
    ended(run("info", "b16", "--image-size", 9), 2, "image_size=9 was given; a patch has 16 pixels")
    ended(run("info", "b17"), 2, "neither a preset nor a folder; did you mean 'b16'?")
