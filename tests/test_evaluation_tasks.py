"""Scoring tasks: the harness's own numbers to the bit, the paper's average, local data, and what is refused."""

import ast
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from command import ended, run
from conftest import make_tiny
from tokenformer import BadRequestError
from tokenformer.evaluation import evaluate_tasks, harness, tasks
from tokenformer.evaluation.tasks import PAPER_METRICS, average
from tokenformer.models.loading import read_model
from tokenformer.models.text import byte_tokenizer, read_tokenizer

ROWS = {
    "lambada_openai": [
        {"text": "The red kettle sang, and so she took the kettle"},
        {"text": "“Nine,” he said. Then again, because nobody had heard: “nine”"},
        {"text": "Down by the mill they kept a grey goose, and the children fed the goose"},
    ],
    "hellaswag": [
        {
            "activity_label": "Baking",
            "ctx_a": "A man opens the oven.",
            "ctx_b": "he",
            "endings": [
                "takes out bread.",
                "sings [laughs] to a fish.",
                "is blue.",
                "paints the sea in two long strokes.",
            ],
            "label": label,
        }
        for label in "0231"
    ],
    "piqa": [
        {"goal": "Dry a wet boot", "sol1": "Fill it with paper.", "sol2": "Fill it with soup.", "label": 0},
        {"goal": "Cut a loaf", "sol1": "Use a pillow, slowly and at length.", "sol2": "Use a knife.", "label": 1},
        {"goal": "Light a room", "sol1": "Open it.", "sol2": "Open the curtains or the shutters.", "label": 1},
        {"goal": "Warm milk", "sol1": "Heat it in a pan.", "sol2": "Read to it.", "label": 0},
    ],
    "arc_easy": [
        {
            "id": str(i),
            "question": f"What do {things} need to grow?",
            "choices": {"text": ["noise", "water and light", "glass", "paint"], "label": ["A", "B", "C", "D"]},
            "answerKey": key,
        }
        for i, (things, key) in enumerate([("ferns", "B"), ("crystals", "A"), ("trees", "B"), ("cities", "D")])
    ],
    "winogrande": [
        {
            "sentence": "The cup did not fit the box as the _ was big.",
            "option1": "cup",
            "option2": "box",
            "answer": "1",
        },
        {"sentence": "Ann thanked Eva, for _ had helped.", "option1": "Ann", "option2": "Eva", "answer": "2"},
        {"sentence": "The rope held the bell until the _ tore.", "option1": "rope", "option2": "bell", "answer": "1"},
    ],
}
ROWS["arc_challenge"] = ROWS["arc_easy"][:3]
ALL = ",".join(PAPER_METRICS)
BYTES = byte_tokenizer()


def write_data(folder, **changes):
    """The six files, with some of them as given: rows, or bytes."""
    folder.mkdir()
    for task, rows in (ROWS | changes).items():
        text = rows if isinstance(rows, bytes) else b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        (folder / f"{task}.jsonl").write_bytes(text)
    return folder


def with_tokenizer(model, folder, tokenizer=None):
    """Save a model whose predictions differ from token to token, and a tokenizer beside it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.save_pretrained(folder)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return folder


def tiny_peer(**changes):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(vocab_size=257, max_position_embeddings=256, eos_token_id=256, **sizes, **changes)
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "rows")


@pytest.fixture
def folder(tmp_path):
    return with_tokenizer(make_tiny(vocab_size=257), tmp_path / "model")


def stock_results(folder, data, **options):
    """What the harness says by itself: its own loading of the folder, its own splits, its own defaults."""
    from lm_eval import simple_evaluate

    local = []
    for task in PAPER_METRICS:
        split = "test" if task.startswith(("arc", "lambada")) else "validation"
        splits = {"training_split": None, "validation_split": None, "test_split": None, f"{split}_split": split}
        files = {"data_files": {split: str(data / f"{task}.jsonl")}, "cache_dir": str(folder / "cache")}
        local.append({"task": task, "dataset_path": "json", "dataset_name": None, "dataset_kwargs": files, **splits})
    return simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder)},
        tasks=[{"group": "local", "task": local}],
        task_manager=harness.paper_manager(),
        device="cpu",
        **options,
    )["results"]


def recorded_answers(monkeypatch):
    """What the harness will ask its models, and the log-likelihoods that it gets."""
    from lm_eval.models.huggingface import HFLM

    answers, ask = {}, HFLM._loglikelihood_tokens

    def recording(self, requests, **options):
        found = ask(self, requests, **options)
        answers.update(zip((request[0] for request in requests), found, strict=True))
        return found

    monkeypatch.setattr(HFLM, "_loglikelihood_tokens", recording)
    return answers


def test_the_harness_s_command_gives_the_same(tmp_path, data, folder, monkeypatch):
    """The one in docs/evaluation.md, which knows nothing of us but the model's folder."""
    from lm_eval import tasks as stock_tasks

    stock = Path(stock_tasks.__file__).parent / "piqa" / "piqa.yaml"
    local = {"include": str(stock), "task": "piqa_here", "dataset_path": "json", "training_split": None}
    local["dataset_kwargs"] = {"data_files": {"validation": str(data / "piqa.jsonl")}, "cache_dir": str(tmp_path)}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "piqa_here.yaml").write_text(json.dumps(local))
    command = f"-m lm_eval run --model hf --model_args pretrained={folder},trust_remote_code=True --batch_size 3"
    command += (
        f" --device cpu --tasks piqa_here --include_path {tmp_path / 'tasks'} --output_path {tmp_path} --log_samples"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(
        [sys.executable, *command.split()], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    (results,), (samples,) = (list(tmp_path.rglob(name)) for name in ("results_*.json", "samples_*.jsonl"))
    answers = recorded_answers(monkeypatch)
    mine = evaluate_tasks(read_model(folder), byte_tokenizer(), "piqa", data=data, batch_size=3).harness["results"]
    theirs = json.loads(results.read_text())["results"]
    for metric in ("acc,none", "acc_norm,none", "acc_stderr,none"):
        assert mine["piqa"][metric] == theirs["piqa_here"][metric]
    likelihoods = [
        float(answer[0][0]) for line in samples.read_text().splitlines() for answer in json.loads(line)["resps"]
    ]
    assert sorted(likelihoods) == sorted(likelihood for likelihood, _ in answers.values())
    assert len(likelihoods) == 2 * len(ROWS["piqa"])


@pytest.mark.parametrize("make_model", [lambda: make_tiny(vocab_size=257), tiny_peer], ids=["tokenformer", "gpt_neox"])
def test_the_scores_are_the_harness_s_own_to_the_bit(tmp_path, data, make_model, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)  # no checkout, of which git would complain
    torch.manual_seed(1)
    folder, out = with_tokenizer(make_model(), tmp_path / "model"), tmp_path / "scores.json"
    answers = recorded_answers(monkeypatch)
    result = run("eval", folder, "--tasks", ALL, "--data", data, "--batch-size", 3, "--json", out, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == capfd.readouterr().err == ""
    written = json.loads(out.read_text())
    mine = answers.copy()
    answers.clear()
    stock = stock_results(folder, data, batch_size=3)
    assert len(mine) > 30
    assert mine == answers
    for task in PAPER_METRICS:
        ours, theirs = ({k: v for k, v in r[task].items() if "," in k} for r in (written["harness"]["results"], stock))
        assert ours == theirs
        assert all(isinstance(value, float) for value in ours.values()), ours
    chosen = [stock[task][f"{metric},none"] for task, metric in PAPER_METRICS.items()]
    assert written["average"]["value"] == pytest.approx(sum(chosen) / 6, rel=1e-12)
    assert 0 < written["average"]["value"] < 1
    assert written["average"]["complete"]
    assert f"average     {sum(chosen) / 6:.4f}, over the paper's 6 tasks: lambada_openai acc, " in result.stdout
    assert result.stdout.startswith("|    Tasks     |Version|Filter|n-shot|")
    assert (written["model"], written["tasks"], written["data"]) == (str(folder), list(PAPER_METRICS), str(data))
    assert (written["limit"], written["batch_size"], written["truncated"]) == (None, 3, 0)
    assert written["seeds"] == {"random_seed": 0, "numpy_seed": 1234, "torch_seed": 1234, "fewshot_seed": 1234}
    assert written["versions"]["lm_eval"] == importlib.metadata.version("lm_eval")
    assert set(written["data_sha256"]) == set(PAPER_METRICS)


def test_the_average_is_the_paper_s():
    results = {task: {"acc,none": i / 10, "acc_norm,none": i / 10 + 0.3} for i, task in enumerate(PAPER_METRICS)}
    whole = average(results)
    assert whole.complete
    assert whole.acc == pytest.approx(0.25)
    assert whole.value == pytest.approx(0.25 + 2 * 0.3 / 6)  # HellaSwag and ARC-challenge by length
    some = average({"hellaswag": results["hellaswag"], "piqa": results["piqa"], "sciq": {"acc,none": 1.0}})
    assert not some.complete
    assert some.metrics == {"hellaswag": "acc_norm", "piqa": "acc"}
    assert some.value == pytest.approx((0.4 + 0.2) / 2)
    assert average({"sciq": {"acc,none": 1.0}}) is None


def test_limit_and_batch_size_by_themselves(data, folder):
    result = run("eval", folder, "--tasks", "piqa, arc_easy,piqa", "--data", data, "--limit", 2, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert "over 2 of the paper's 6 tasks: piqa acc, arc_easy acc\n" in result.stdout
    assert "limit       the first 2 rows of each task" in result.stdout
    assert f"batch size  {tasks.AUTO_ON_CPU}\n" in result.stdout


def test_bytes_need_no_tokenizer_in_the_folder(tmp_path, data, folder):
    model = make_tiny(vocab_size=257).train()
    tokenizers = [read_tokenizer(where, model.config) for where in (tmp_path, folder)]
    scores = [evaluate_tasks(model, t, ["piqa"], data=data).harness["results"] for t in tokenizers]
    assert scores[0] == scores[1]
    assert model.training
    with pytest.raises(BadRequestError, match="raw bytes: train with a vocabulary of 257"):
        evaluate_tasks(make_tiny(), byte_tokenizer(256), ["piqa"], data=data)


def test_a_bare_tokenizer_takes_its_end_from_the_configuration(data):
    bare = byte_tokenizer()
    bare.eos_token = bare.pad_token = None
    told, untold = make_tiny(vocab_size=257, eos_token_id=256), make_tiny(vocab_size=257)
    scores = [evaluate_tasks(told, t, ["piqa"], data=data).harness["results"] for t in (bare, byte_tokenizer())]
    assert scores[0] == scores[1]
    assert bare.eos_token is None
    assert bare.pad_token is None
    untold.config.eos_token_id = None
    with pytest.raises(BadRequestError, match="neither the tokenizer nor config"):
        evaluate_tasks(untold, bare, ["piqa"], data=data)
    with pytest.raises(BadRequestError, match="the tokenizer has 256 ids, and the model 100 rows"):
        evaluate_tasks(make_tiny(vocab_size=100), byte_tokenizer(), ["piqa"], data=data)


def test_what_the_context_is_too_short_for(data):
    short = make_tiny(vocab_size=257, max_position_embeddings=36)
    assert evaluate_tasks(short, BYTES, ["lambada_openai"], data=data).truncated == 3
    with pytest.raises(BadRequestError, match="row 2 of task piqa has an answer of 36 tokens, and the model's context"):
        evaluate_tasks(make_tiny(vocab_size=257, max_position_embeddings=35), BYTES, ["piqa"], data=data)


def test_a_broken_model_has_no_score(data, folder):
    broken = make_tiny(vocab_size=257)
    torch.nn.init.constant_(broken.lm_head.weight, float("nan"))
    broken.save_pretrained(folder)
    ended(run("eval", folder, "--tasks", "piqa", "--data", data), 1, "a log-likelihood is NaN")


def test_mistakes_in_the_request(tmp_path, data, folder, monkeypatch):
    monkeypatch.setattr(harness, "full_manager", harness.paper_manager)  # to index every task takes a while
    text = tmp_path / "text.txt"
    text.write_text("some text")
    piqa = ("eval", folder, "--tasks", "piqa", "--data", data)
    ended(run("eval", folder), 2, "none of --text, --tasks, --images were given; pass one of them")
    ended(run("eval", folder, "--tasks", "piqa", "--text", text), 2, "2 of --text, --tasks, --images were given")
    ended(run("eval", folder, "--text", text, "--limit", 3), 2, "--limit was given, but it only works with --tasks")
    ended(run("eval", folder, "--text", text, "--data", data), 2, "--data was given, but it only works with --tasks")
    ended(run(*piqa, "--stride", 3), 2, "--stride was given, but it only works with --text")
    ended(run(*piqa, "--limit", 0), 2, "limit 0 was given; at least 1 row")
    ended(run(*piqa, "--limit", 10**26), 2, f"limit {10**26} was given; at most")
    for size in (0, "many", "-3", "2.5"):
        ended(run(*piqa, f"--batch-size={size}"), 2, f"batch size {size} was given; a number of at least 1, or auto")
    ended(run("eval", folder, "--tasks", " ,"), 2, "no task was given")
    ended(run("eval", folder, "--tasks", "arc-easy"), 2, "task 'arc-easy' is not", "did you mean 'arc_easy'?")
    ended(run("eval", folder, "--tasks", "zzz"), 2, "`lm_eval ls tasks` lists them, the paper's are lambada_openai,")
    ended(run("eval", folder, "--tasks", "ai2_arc", "--data", data), 2, "ai2_arc is a group of tasks")
    ended(run("eval", tmp_path / "no", "--tasks", "piqa", "--data", data), 2, "no does not exist; check the path")
    ended(run(*piqa, "--json", text), 2, "text.txt exists already")
    ended(run("eval", "nobody/nothing", *piqa[2:]), 2, "nobody/nothing does not exist here, and no model of that name")


OWN_TASK = """
task: kettles
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{goal}}}}"
doc_to_choice: ["{{{{sol1}}}}", "{{{{sol2}}}}"]
doc_to_target: label
metric_list: [{{metric: acc}}]
"""


def test_task_files_of_ones_own(tmp_path, data, folder, monkeypatch):
    """A task that asks as piqa does, defined by a file in the harness's format."""
    monkeypatch.setattr(harness, "full_manager", harness.paper_manager)
    own = tmp_path / "own"
    own.mkdir()
    (own / "kettles.yaml").write_text(OWN_TASK.format(rows=data / "piqa.jsonl"))
    out = run("eval", folder, "--tasks", "kettles,piqa", "--include-path", own, "--data", data)
    ended(out, 2, "kettles.jsonl does not exist")
    (own / "kettles.jsonl").write_bytes((data / "piqa.jsonl").read_bytes())
    out = run("eval", folder, "--tasks", "kettles", "--include-path", own)
    assert out.exit_code == 0, out.stderr
    assert "|kettles|" in out.output
    scores = evaluate_tasks(make_tiny(vocab_size=257), BYTES, "kettles", include_path=own, data=own)
    assert scores.harness["results"]["kettles"]["sample_len"] == 4
    given = ("eval", folder, "--tasks", "kettle", "--include-path")
    ended(run(*given, own), 2, f"nor defined in {own}; did you mean 'kettles'?")
    ended(run(*given, own / "kettles.yaml"), 2, "kettles.yaml is not a folder; --include-path takes one")
    text = ("eval", folder, "--text", own / "kettles.yaml", "--include-path", own)
    ended(run(*text), 2, "--include-path was given, but it only works with --tasks")
    os.mkfifo(own / "pipe.yaml")
    ended(run(*given, own), 2, "pipe.yaml is neither a file nor a folder")


def test_without_a_network_it_names_the_way_out(folder):
    ended(
        run("eval", folder, "--tasks", "piqa"),
        2,
        "the data of task piqa could not be read",
        "--data DIR (DIR/piqa.jsonl)",
    )


def test_without_the_harness(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    ended(run("eval", folder, "--tasks", "piqa"), 2, 'pip install "tokenformer[eval]"')


def test_the_harness_is_imported_when_it_is_asked_for():
    """By one file, which the others import inside functions."""
    for path in Path(tasks.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [name.name for name in getattr(node, "names", [])] + [getattr(node, "module", None) or ""]
            forbidden = {"datasets"} if path.stem == "harness" else {"lm_eval", "datasets", "harness"}
            assert not forbidden & {name.split(".")[0] for name in names}, path


@pytest.mark.parametrize(
    ("task", "rows", "words"),
    [
        ("piqa", b"", ["piqa.jsonl has no rows"]),
        ("piqa", b'{"goal": "a"\n', ["piqa.jsonl line 1 is not JSON"]),
        ("piqa", b'{"goal": "\xff"}\n', ["piqa.jsonl line 1 is not JSON"]),
        ("piqa", b"[" * 20_000, ["piqa.jsonl line 1 nests its brackets too deeply"]),
        ("piqa", [ROWS["piqa"][0], ["a"]], ["line 2 is not a row"]),
        ("piqa", [{"goal": "a", "sol1": "b"}], ["line 1 has no column 'sol2'; piqa needs goal, sol1, sol2, label"]),
        ("piqa", [ROWS["piqa"][0] | {"label": 2}], ["line 1: label must be 0 or 1"]),
        ("piqa", [ROWS["piqa"][0] | {"goal": None}], ["line 1: goal must be a str, not null"]),
        ("arc_easy", [ROWS["arc_easy"][0] | {"answerKey": "E"}], ["line 1: choices must have"]),
        ("arc_easy", [ROWS["arc_easy"][0] | {"choices": {"text": ["a"]}}], ["line 1: choices must have"]),
        (
            "arc_easy",
            [ROWS["arc_easy"][0], ROWS["arc_easy"][0] | {"choices": {"text": ["a"], "label": ["A", "B"]}}],
            ["line 2: choices must have"],
        ),
        ("hellaswag", [ROWS["hellaswag"][0] | {"label": "4"}], ["line 1: label must be the number"]),
        ("hellaswag", [ROWS["hellaswag"][0] | {"label": ""}], ["line 1: label must be the number"]),
        ("winogrande", [ROWS["winogrande"][0] | {"sentence": "no gap"}], ["line 1: sentence must have a _"]),
        ("winogrande", [ROWS["winogrande"][0] | {"answer": "3"}], ['answer be "1" or "2"']),
        ("lambada_openai", [{"text": "word"}], ["line 1: text must have two words"]),
        ("lambada_openai", [{"text": "two words "}], ["line 1: text must have two words or more, and end with one"]),
    ],
)
def test_rows_that_do_not_fit(tmp_path, task, rows, words):
    """Refused before a model is read, so none is needed here."""
    data = write_data(tmp_path / "data", **{task: rows})
    ended(run("eval", tmp_path / "model", "--tasks", task, "--data", data), 1, *words)


def test_files_that_are_not_there(tmp_path):
    ended(run("eval", "m", "--tasks", "piqa", "--data", tmp_path / "no"), 2, "no does not exist; check --data")
    ended(run("eval", "m", "--tasks", "piqa", "--data", tmp_path), 2, "piqa.jsonl does not exist; --data needs a file")
