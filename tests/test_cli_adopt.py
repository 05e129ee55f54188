"""`tokenformer adopt`, and what the other commands make of an adopted folder."""

import copy
import json
import shutil

import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    GPTNeoXForCausalLM,
    ViTImageProcessorPil,
)

from command import ended, run
from conftest import relative_error
from hosts import make_host
from image_files import class_folder
from official_files import write_tokenizer
from tokenformer import cost
from tokenformer.adoption import adopt_folder as adoption_folder
from tokenformer.models import loading
from tokenformer.models.sample import sample_inputs, sample_output
from tokenformer_cli.facts import in_order


@pytest.fixture
def host():
    return make_host("gpt_neox")


@pytest.fixture
def source(tmp_path, host):
    host.save_pretrained(tmp_path / "host")
    return tmp_path / "host"


def rows_of(result):
    return [line.split() for line in result.stdout.splitlines()]


def test_the_adopted_folder_computes_the_same(tmp_path, source, host):
    write_tokenizer(source / "tokenizer.json", 97)
    (source / "optimizer.pt").write_text("large")
    result = run("adopt", source, tmp_path / "out")
    assert (result.exit_code, result.stderr) == (0, "")
    adopted = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(adopted, GPTNeoXForCausalLM)
    inputs = sample_inputs(host)
    assert relative_error(sample_output(adopted, inputs), sample_output(host, inputs)) < 1e-5
    rows = rows_of(result)
    assert rows[0] == ["layer", "kind", "tokens", "ballast", "numbers", "error"]
    assert rows[2][:5] == ["layers.0.attention.query_key_value", "l2_gelu", "72", "0", "2.67x"]
    assert rows[3][:5] == ["layers.0.mlp.dense_h_to_4h", "l2_gelu", "86", "36", "1.72x"]
    assert float(rows[3][5]) < 1e-6
    assert ["parameters", f"{host.num_parameters():,}", "->", f"{adopted.num_parameters():,}"] in rows
    memory = [cost.training_memory(model.config, 1, 40).total for model in (host, adopted)]
    assert (
        f"memory to train on 40 tokens (AdamW, fp32)  {memory[0] / 1e3:.3g}kB -> {memory[1] / 1e3:.3g}kB"
        in result.stdout
    )
    assert rows[-1] == ["written", str(tmp_path / "out")]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    ours = {"README.md", "load_tokenformer.py", "config.json", "generation_config.json", "model.safetensors"}
    assert names == {*ours, "tokenizer.json"}
    assert "import tokenformer" in (tmp_path / "out" / "README.md").read_text()


def test_adopted_and_grown_in_one_go_as_json(tmp_path, source, host):
    arguments = ["--parts", "ffn", "--ballast", "single", "--grow", "1.5x", "--method", "split", "--json"]
    result = run("adopt", source, tmp_path / "out", *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert [layer["num_tokens"] for layer in found["layers"].values()] == [76, 76]
    assert found["difference"] < 1e-5
    assert found["parameters_before"] == host.num_parameters()
    assert found["adopted_layers"]["replaced_flops_per_token"] == 2 * 2 * 2 * 36 * 50
    adopted = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found["parameters_after"] == adopted.num_parameters()


def test_a_vision_model_keeps_its_image_processor_and_scores(tmp_path):
    make_host("vit", num_labels=2).save_pretrained(tmp_path / "host")
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "host")
    assert run("adopt", tmp_path / "host", tmp_path / "out", "--parts", "ffn, qkv").exit_code == 0
    grown = run("grow", tmp_path / "out", tmp_path / "grown", "--tokens", "*.mlp.fc1=100")
    assert (grown.exit_code, grown.stderr) == (0, "")
    assert ["tokens,", "layers.1.mlp.fc1", "86", "100"] in rows_of(grown)
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "grown")
    assert model.vit.layers[1].mlp.fc1.num_tokens == 100
    info = run("info", tmp_path / "grown", "tiny32")
    assert (info.exit_code, info.stderr) == (0, "")
    assert f"{tmp_path / 'grown'}: an adopted vit; in these layers" in info.stdout
    photos = class_folder(tmp_path / "photos")
    scores = [run("eval", tmp_path / name, "--images", photos, "--by-position") for name in ("host", "out", "grown")]
    assert [(score.exit_code, score.stderr) for score in scores] == [(0, "")] * 3
    assert len({score.stdout for score in scores}) == 1


@pytest.mark.parametrize("method", ["zero", "split", "rotate"])
def test_an_adopted_folder_grows(tmp_path, source, host, method):
    run("adopt", source, tmp_path / "out")
    result = run("grow", tmp_path / "out", tmp_path / "grown", "--factor", 2, "--method", method)
    assert (result.exit_code, result.stderr) == (0, "")
    assert ["tokens,", "layers.1.mlp.dense_h_to_4h", "86", "172"] in rows_of(result)
    grown = AutoModelForCausalLM.from_pretrained(tmp_path / "grown")
    inputs = sample_inputs(host)
    assert relative_error(sample_output(grown, inputs), sample_output(host, inputs)) < 1e-5


def test_info_generate_and_eval_know_an_adopted_folder(tmp_path):
    make_host("gpt2", vocab_size=256).save_pretrained(tmp_path / "host")
    run("adopt", tmp_path / "host", tmp_path / "out")
    result = run("info", tmp_path / "out", "tiny")
    assert (result.exit_code, result.stderr) == (0, "")
    line = f"{tmp_path / 'out'}: an adopted gpt2; in these layers numbers 15k -> 33.1k, FLOPs 30k -> 66.2k"
    assert line in result.stdout.splitlines()
    assert ["h.1.attn.c_attn", "l2_gelu", "72", "0", "2.67x"] in [row[:5] for row in rows_of(result)]
    ended(run("info", tmp_path / "out", "--length", 9), 2, "an adopted gpt2, of which only layers are counted; leave")
    facts = json.loads(run("info", tmp_path / "out", "--json").stdout)[str(tmp_path / "out")]
    assert facts["adopted"]["layers"]["h.0.mlp.c_fc"]["num_tokens"] == 86
    written = run("generate", tmp_path / "out", "ab", "--max-new-tokens", 8, "--temperature", 0)
    assert written.exit_code == 0, written.stderr
    (tmp_path / "text").write_text("abc " * 30)
    scores = [run("eval", tmp_path / name, "--text", tmp_path / "text") for name in ("host", "out")]
    assert [(score.exit_code, score.stderr) for score in scores] == [(0, "")] * 2
    assert scores[0].stdout == scores[1].stdout
    ended(run("generate", tmp_path / "host", "ab"), 2, "holds a gpt2 model", "tokenformer adopt makes one")


def test_info_counts_an_adopted_gpt_neox_as_a_whole(tmp_path, source):
    """As transformers counts its parameters; a row beside others, and its layers below."""
    run("adopt", source, tmp_path / "out", "--grow", "2x")
    parameters = AutoModelForCausalLM.from_pretrained(tmp_path / "out").num_parameters()
    facts = json.loads(run("info", tmp_path / "out", "--length", 9, "--json").stdout)[str(tmp_path / "out")]
    assert (facts["parameters"]["total"], facts["length"]) == (parameters, 9)
    result = run("info", source, tmp_path / "out")
    names = [row[0] for row in rows_of(result) if row]
    assert names.count(str(source)) == names.count(str(tmp_path / "out")) == 1
    assert "GPT-NeoX, adopted" in result.stdout
    ended(run("info", tmp_path / "out", "--image-size", 9), 2, "is a language model, and --image-size is for images")


def test_a_model_in_half_precision_is_adopted_in_full_precision_if_asked(tmp_path, host):
    """As many checkpoints on the Hub are saved: their tokens would be rounded."""
    copy.deepcopy(host).half().save_pretrained(tmp_path / "half")
    errors = {}
    for dtype in ("auto", "float32"):
        result = run("adopt", tmp_path / "half", tmp_path / dtype, "--dtype", dtype, "--json")
        assert result.exit_code == 0, result.stderr
        found = json.loads(result.stdout)
        errors[found["dtype"]] = found["difference"]
    assert errors["float32"] < 1e-5 < errors["float16"]


def test_refusals_leave_nothing_behind(tmp_path, source):
    (source / "model.safetensors").write_bytes(b"broken")
    out = tmp_path / "out"
    ended(run("adopt", tmp_path / "no", out), 2, "no does not exist")
    ended(run("adopt", source, source), 2, "host exists already and would be overwritten")
    ended(run("adopt", source, out, "--parts", "ffn,attention"), 2, "'attention' of a gpt_neox cannot be adopted")
    ended(run("adopt", source, out, "--grow", "much"), 2, "--grow much was given; a factor such as 1.5x is needed")
    ended(run("adopt", source, out, "--grow", "0.5x"), 2, "factor=0.5 was given; it must be larger than 1")
    ended(run("adopt", source, out, "--grow", "2x", "--method", "zeros"), 2, "did you mean 'zero'?")
    ended(run("adopt", source, out, "--grow", "2x", "--method", "random"), 2, "adopt is exact; it takes zero, split or")
    ended(run("adopt", source, out, "--dtype", "float3"), 2, "dtype 'float3' is not known; did you mean 'float32'?")
    ended(run("adopt", source, out, "--ballast", "singel"), 2, "ballast='singel' is not known; did you mean 'single'?")
    ended(run("adopt", source, out, "--tolerance", "-1"), 2, "tolerance=-1.0 was given; a number of at least 0")
    single = ("--ballast", "single", "--grow", "2x", "--method", "rotate")
    ended(run("adopt", source, out, *single), 2, "ballast='single' has a token whose large bias rotate would spread")
    ended(run("adopt", source, out, "--method", "split"), 2, "--method split was given, but it only works with --grow")
    ended(run("adopt", source, out), 1, "the weights in", "cannot be read")
    config = (source / "config.json").read_text()
    for method, said in (("gptq", "weights are quantised (gptq)"), ("tokenformer", "is adopted already; grow it")):
        record = {"quant_method": method, "bits": 4, "layers": {}, "norms": {}, "removed": [], "ballast": "spread"}
        (source / "config.json").write_text(json.dumps({**json.loads(config), "quantization_config": record}))
        ended(run("adopt", source, out), 2, said)
    (source / "config.json").write_text('{"model_type": "opt"}')
    ended(run("adopt", source, out), 2, "a opt model was given; the supported families are bert")
    ended(run("grow", source, out, "--factor", 2), 2, "holds a opt model, but a TokenFormer is needed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["host"]


def test_a_tolerance_below_rounding_is_a_result_not_a_request(tmp_path, source):
    ended(run("adopt", source, tmp_path / "out", "--tolerance", "1e-12"), 1, "would differ", "1e-12 is allowed")
    assert not (tmp_path / "out").exists()


def test_a_class_that_transformers_has_not_is_refused_lest_its_head_be_lost(tmp_path, source):
    config = json.loads((source / "config.json").read_text())
    for named, said in ((["Mine"], "Mine"), (None, "no class")):
        (source / "config.json").write_text(json.dumps({**config, "architectures": named}))
        ended(run("adopt", source, tmp_path / "out"), 2, f"names {said} under architectures, and transformers has no")
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_found_before_the_work(tmp_path, source):
    (tmp_path / "file").write_text("")
    (source / "model.safetensors").write_bytes(b"broken")
    ended(run("adopt", source, tmp_path / "file" / "out"), 2, "cannot be written", "file is not a writable folder")


def test_a_model_that_would_change_is_not_written(tmp_path, source, monkeypatch):
    real = adoption_folder.apply_growth

    def grow_wrongly(model, growth, inplace):
        real(model, growth, inplace=inplace)
        model.gpt_neox.layers[0].mlp.dense_h_to_4h.tau *= 1.1

    monkeypatch.setattr(adoption_folder, "apply_growth", grow_wrongly)
    arguments = ("adopt", source, tmp_path / "out", "--grow", "2x")
    ended(run(*arguments), 1, "the grown model's output differs", "nothing was written")
    assert not (tmp_path / "out").exists()
    result = run(*arguments, "--no-verify")
    assert result.exit_code == 0, result.stderr
    assert ["relative", "difference", "of", "the", "output", "not", "compared"] in rows_of(result)
    assert rows_of(result)[2][-1] == "-"


def test_an_interrupted_command_leaves_nothing(tmp_path, source, monkeypatch):
    def interrupted(source, partial):
        assert (partial / "model.safetensors").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(adoption_folder, "copy_beside_weights", interrupted)
    ended(run("adopt", source, tmp_path / "out"), 130)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["host"]


def test_a_name_on_the_hub_is_fetched(tmp_path, source, monkeypatch):
    shutil.move(source, tmp_path / "fetched")
    asked = []

    def fetch(name, allow_patterns):
        asked.append((name, "*.safetensors" in allow_patterns, "*.bin" in allow_patterns))
        return str(tmp_path / "fetched")

    monkeypatch.setattr(loading, "snapshot_download", fetch)
    assert run("adopt", "owner/name", tmp_path / "out", "--parts", "ffn").exit_code == 0
    assert asked == [("owner/name", True, False)]
    monkeypatch.undo()
    ended(
        run("adopt", "owner/name", tmp_path / "other"), 2, "owner/name does not exist here, and no model of that name"
    )


def test_layers_come_in_their_order():
    assert in_order(["h.10.mlp", "h.9.mlp", "h.9.attn"]) == ["h.9.attn", "h.9.mlp", "h.10.mlp"]
