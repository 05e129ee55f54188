"""What can be wrong with files, recipes and machines, tried on purpose: one line says it, within seconds."""

import builtins
import errno
import fcntl
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml

from command import ended, run
from conftest import make_tiny
from hosts import make_host
from tokenformer import TokenFormerForCausalLM, memory
from tokenformer.data.text import TextSettings, tokenizer
from tokenformer.errors import BadFileError, BadRequestError, BadResultError, one_line
from tokenformer.io import MANIFEST, check_folder, naming, read_json, remove_partials, seal_folder, write_new
from tokenformer.models import loading
from tokenformer.models.loading import read_model
from tokenformer.training import load_recipe
from tokenformer.training.checkpoint import checkpoints
from training_runs import metrics, write_recipe
from training_runs import run as train_quietly

SECRET = "a-secret-of-the-environment"
forked = multiprocessing.get_context("fork")  # which need not import anything


@pytest.fixture
def model(tmp_path):
    make_tiny().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


class TestARecipeIsData:
    @pytest.mark.parametrize("form", ["${oc.env:SECRET}", "x${ oc.env: SECRET }", "${data.seed}", "${${a}:SECRET}"])
    def test_nothing_is_filled_in(self, tmp_path, monkeypatch, form):
        monkeypatch.setenv("SECRET", SECRET)
        refused = run("train", write_recipe(tmp_path, data={"column": form}), "--dry-run")
        ended(refused, 1, "recipe.yaml is not a readable recipe: line", f"{form!r} is not expanded")
        assert SECRET not in refused.stderr
        plain = write_recipe(tmp_path)
        ended(run("train", plain, f"data.column='{form}'", "--dry-run"), 2, f"{form!r} is not expanded")

    def test_an_override_changes_one_of_two_places_that_share_an_alias(self, tmp_path):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text("growth: {stages: [{steps: 2}, &twice {factor: 2, steps: 4}, *twice]}\n")
        stages = load_recipe(recipe, ["growth.stages[1].steps=3"]).growth.stages
        assert [stage.steps for stage in stages] == [2, 3, 4]

    def test_only_the_command_line_publishes(self, tmp_path):
        published = write_recipe(tmp_path, training={"push_to_hub": True})
        ended(run("train", published, "--dry-run"), 2, "training.push_to_hub is true, and a file does not decide")
        assert not load_recipe(published, ["training.push_to_hub=false"]).training.push_to_hub
        recipe = load_recipe(write_recipe(tmp_path), ["training.push_to_hub=true"])
        assert recipe.training.push_to_hub
        assert "push_to_hub" not in recipe.resolved()["training"]
        with pytest.raises(BadRequestError, match="'hub_token' is not for a recipe to decide; log in"):
            load_recipe(write_recipe(tmp_path), ["training.hub_token=x"])

    @pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/b", "..", "''", "'a\\b'", '"a\\nb"', "x" * 300])
    def test_a_name_is_one_folder(self, tmp_path, name):
        ended(run("train", write_recipe(tmp_path), f"name={name}", "--dry-run"), 2, "it names one folder inside runs/")


STAGES_BY_MERGING = """\
growth:
  stages:
    - &first {steps: 4}
    - {<<: *first, factor: 2}
"""


class TestHangs:
    def bomb(self, place: str) -> str:
        lists = ["&a0 [x, x, x, x, x, x, x, x, x]"]
        lists += [f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
        return f"data: {{train: [{', '.join(lists)}]}}\n{place}: *a9\n"

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("BOMB name", "its aliases stand for more than 100,000 values"),
            ("BOMB growth", "its aliases stand for more than 100,000 values"),
            ("growth: {stages: &s [{steps: 1}, *s]}", "an alias stands for something that contains it"),
            ("data: &d {train: [*d]}", "an alias stands for something that contains it"),
            ("name: " + "[" * 20_000 + "]" * 20_000, "nested too deeply"),
            ("x" * 2**21, "it has more than"),
            ("name: " + "9" * 5000, "not a readable recipe"),
        ],
    )
    def test_a_hostile_file_gets_a_short_line(self, tmp_path, text, said):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(self.bomb(text.removeprefix("BOMB ")) if text.startswith("BOMB") else text)
        refused = run("train", recipe, "--dry-run")
        ended(refused, 1, recipe, said)
        assert len(refused.stderr) < len(str(recipe)) + 200

    def test_what_is_merged_in_is_no_key(self, tmp_path):
        recipe = write_recipe(tmp_path)
        sections = yaml.safe_load(recipe.read_text())
        del sections["growth"]
        recipe.write_text(yaml.safe_dump(sections) + STAGES_BY_MERGING)
        plan = run("train", recipe, "--dry-run")
        assert plan.exit_code == 0, plan.stderr
        assert "stage 2 of 2" in plan.stdout

    def test_aliases_as_people_use_them_stay(self, tmp_path):
        recipe = write_recipe(tmp_path)
        text = yaml.safe_dump({"growth": {"stages": [{"steps": 2}]}, **yaml.safe_load(recipe.read_text())})
        recipe.write_text(text.replace("growth:", "growth: &g").replace("model:", "model: &m"))
        assert load_recipe(recipe).model["hidden_size"] == 32

    def test_a_long_value_is_cut_short_in_the_message(self, tmp_path):
        recipe = write_recipe(tmp_path, training={"seed": ["x"] * 5000})
        refused = run("train", recipe, "--dry-run")
        ended(refused, 2, "training.seed is ['x', 'x'", "… (25,000 characters); a whole number")
        assert len(refused.stderr) < 600

    @pytest.mark.parametrize("command", ["prepare", "train"])
    def test_a_pipe_is_not_data(self, tmp_path, command):
        os.mkfifo(tmp_path / "pipe.txt")
        arguments = {
            "prepare": [tmp_path / "pipe.txt"],
            "train": [write_recipe(tmp_path), f"data.train={tmp_path}/pipe.txt", f"training.output_dir={tmp_path}/run"],
        }
        ended(run(command, *arguments[command]), 2, "pipe.txt is neither a file nor a folder")

    def test_a_model_that_is_too_deep_is_counted_and_not_built(self, tmp_path, model):
        said = ": num_hidden_layers=1000000 was given; at most 1024"
        ended(run("train", write_recipe(tmp_path), "model.num_hidden_layers=1000000", "--dry-run"), 2, said)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1_000_000}))
        ended(run("generate", model, "x"), 1, f"config.json cannot be read{said}")

    def test_neither_is_one_of_another_family(self, tmp_path):
        make_host("gpt2").save_pretrained(tmp_path / "host")
        path = tmp_path / "host" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "n_layer": 1_000_000}))
        said = "config.json cannot be read: num_hidden_layers=1000000 was given; at most 1024"
        ended(run("adopt", tmp_path / "host", tmp_path / "adopted"), 1, said)

    @pytest.mark.parametrize("key", ["num_labels", "num_hidden_layers"])
    @pytest.mark.parametrize("part", [None, "text_config"])
    def test_what_transformers_would_make_lists_of(self, model, monkeypatch, key, part):
        monkeypatch.setattr(loading, "AutoConfig", None)
        config = json.loads((model / "config.json").read_text())
        config |= {key: 10**9} if part is None else {part: {key: 10**9}}
        (model / "config.json").write_text(json.dumps(config))
        ended(run("generate", model, "x"), 1, f"config.json cannot be read: {key}=1000000000 was given; at most")

    def test_a_model_that_cannot_fit_is_counted_and_not_built(self, model):
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "ffn_tokens": 40_000_000_000}))
        ended(run("generate", model, "x"), 2, "parameters, needs about", "is its config.json right?")

    @pytest.mark.parametrize(
        ("override", "said"),
        [
            (
                "training.gradient_accumulation_steps=50000000",
                "per process, 50,000,000 times a step, needs about",
            ),
            ("training.dataloader_num_workers=100000", "training.dataloader_num_workers is 100000; "),
            ("data.workers=100000", "data.workers is 100000; "),
        ],
    )
    def test_what_takes_all_of_a_machine(self, tmp_path, override, said):
        changes = {"training": {"global_batch": None}}
        recipe = write_recipe(tmp_path, **changes)
        ended(run("train", recipe, override, f"training.output_dir={tmp_path}/run"), 2, said)

    @pytest.mark.parametrize("what", ["recipe", "tokenizer"])
    def test_a_pipe_is_neither_a_recipe_nor_a_tokenizer(self, tmp_path, what):
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "text.txt").write_text("some text")
        commands = {
            "recipe": ["train", tmp_path / "pipe", "--dry-run"],
            "tokenizer": ["prepare", tmp_path / "text.txt", "--tokenizer", tmp_path / "pipe"],
        }
        ended(run(*commands[what]), 2, "is neither a file nor a folder")

    @pytest.mark.parametrize("override", ["training.global_batch=100000000", "model.hidden_size=10000000"])
    def test_what_no_memory_holds_is_refused_before_training(self, tmp_path, monkeypatch, override):
        monkeypatch.setattr(memory.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096}.get(name, 2**22))
        monkeypatch.setattr(memory, "CONTAINER", tmp_path / "none")
        recipe = write_recipe(tmp_path)
        refused = run("train", recipe, override, f"training.output_dir={tmp_path}/run")
        assert refused.exit_code == 2
        assert "error: stage 1, of" in refused.stderr
        assert "GiB of memory, and this machine has 16.0 GiB; use a smaller model" in refused.stderr
        assert not (tmp_path / "run").exists()  # before the data is read
        assert "more than the 16.00 GiB here" in run("train", recipe, override, "--dry-run").stdout

    @pytest.mark.parametrize(("limit", "least"), [(f"{2**20}\n", 2**20), ("max\n", 2**34), (f"{2**50}", 2**34)])
    def test_a_container_has_a_part_of_the_machine(self, tmp_path, monkeypatch, limit, least):
        monkeypatch.setattr(memory.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096}.get(name, 2**22))
        monkeypatch.setattr(memory, "CONTAINER", tmp_path / "memory.max")
        assert memory.machine_memory() == 2**34  # there is no such file
        memory.CONTAINER.write_text(limit)
        assert memory.machine_memory() == least

    @pytest.mark.parametrize("steps", ["1" + "0" * 30])
    def test_a_budget_beyond_counting(self, tmp_path, steps):
        refused = run("train", write_recipe(tmp_path), f"growth.stages.0.steps={steps}", "--dry-run")
        ended(refused, 2, "growth.stages[0] ends at step 1e+30, after more tokens than can be counted")


class TestNotAccepted:
    @pytest.mark.parametrize("size", [2**20 + 1, 10**23])
    def test_a_vocabulary_that_no_memory_holds(self, tmp_path, monkeypatch, size):
        monkeypatch.setattr(tokenizer.trainers, "BpeTrainer", None)  # which ends the process if it is reached
        sizes = ["--train-tokenizer", size, "--tokenizer-out", tmp_path / "tokenizer"]
        ended(run("prepare", __file__, *sizes), 2, "--train-tokenizer", size)
        with pytest.raises(BadRequestError, match=f"a vocabulary of {size} was asked for; at most 1,048,576"):
            tokenizer.train_tokenizer(TextSettings(train=__file__), size)

    @pytest.mark.parametrize("rate", [".inf", "1e400", ".nan"])
    def test_rates_are_finite(self, tmp_path, rate):
        ended(
            run("train", write_recipe(tmp_path), f"training.learning_rate={rate}", "--dry-run"),
            2,
            "a finite number above 0",
        )

    def test_a_warm_up_longer_than_the_run_is_pointed_out(self, tmp_path):
        recipe = write_recipe(tmp_path)
        said = "growth.warmup_steps is 400, and there are 27 steps: the learning rate never reaches training"
        assert said in run("train", recipe, "growth.warmup_steps=400", "--dry-run").stdout
        assert "warning" not in run("train", recipe, "growth.warmup_steps=26", "--dry-run").stdout
        short = ["growth.warmup_steps=10", "growth.schedule=cosine", "--dry-run"]  # its stages have 10, 8 and 9 steps
        assert "and there are 8 steps" in run("train", recipe, *short).stdout

    @pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes in fp16")
    def test_fp16_needs_a_gpu(self, tmp_path):
        recipe = write_recipe(tmp_path)
        with pytest.raises(BadRequestError, match=r"training.fp16 is true, but no GPU was found; use training.bf16"):
            train_quietly(recipe, tmp_path / "run", "training.fp16=true")
        assert run("train", recipe, "training.fp16=true", "--dry-run").exit_code == 0  # for a machine that has one

    @pytest.mark.parametrize(
        ("given", "said"),
        [("", "has no value; write training.output_dir=null"), ("''", "not empty"), ("' '", "not empty")],
    )
    def test_an_empty_folder_name(self, tmp_path, given, said):
        ended(run("train", write_recipe(tmp_path), f"training.output_dir={given}", "--dry-run"), 2, said)

    @pytest.mark.parametrize("arguments", [["prepare", ""], ["prepare", __file__, "--validation", " "]])
    def test_a_source_without_a_name(self, arguments):
        ended(run(*arguments), 2, "a source has an empty name")

    def test_growth_beyond_memory(self, tmp_path, model, monkeypatch):
        refused = run("grow", model, tmp_path / "large", "--factor", 1e9)
        ended(refused, 2, "which no memory holds; ask for fewer")
        ended(
            run("train", write_recipe(tmp_path), "growth.stages.1.factor=1e9", "--dry-run"), 2, "which no memory holds"
        )
        monkeypatch.setattr(memory.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096}.get(name, 2**10))
        ended(
            run("grow", model, tmp_path / "large", "--factor", 1000),
            2,
            "the grown model, of",
            "and this machine has 0.0 GiB",
        )
        assert not (tmp_path / "large").exists()

    @pytest.mark.parametrize("command", ["grow", "adopt"])
    def test_nothing_is_written_into_what_is_read(self, model, command):
        more = ["--factor", 2] if command == "grow" else []
        ended(run(command, model, model / "inner" / "larger", *more), 2, "larger is inside", "which is read")

    @pytest.mark.parametrize("key", ["growth.seed", "data.seed", "data.split_seed", "training.seed"])
    def test_seeds_have_64_bits(self, tmp_path, key):
        ended(
            run("train", write_recipe(tmp_path), f"{key}={2**65}", "--dry-run"), 2, f"{key} is {2**65}; a whole number"
        )


class TestGenerate:
    def test_a_short_context_is_filled_and_no_more(self, tmp_path):
        make_tiny(max_position_embeddings=16).save_pretrained(tmp_path)
        done = run("generate", tmp_path, "0123456789", "--temperature", 0)
        assert done.exit_code == 0, done.stderr
        asked = run("generate", tmp_path, "0123456789", "--max-new-tokens", 7)
        ended(
            asked,
            2,
            "has 10 tokens, and 7 more would pass the model's context of 16; use --max-new-tokens of at most 6",
        )
        ended(
            run("generate", tmp_path, "x" * 16), 2, "and one more would pass the model's context of 16; use a shorter"
        )

    def test_weights_that_are_not_numbers(self, tmp_path, model):
        broken = TokenFormerForCausalLM.from_pretrained(model)
        with torch.no_grad():
            broken.model.layers[0].attention.query.key_tokens[0, 0] = torch.nan
        broken.save_pretrained(tmp_path / "broken")
        ended(
            run("generate", tmp_path / "broken", "x"),
            1,
            "NaN or infinite, in model.layers.0.attention.query.key_tokens",
        )

    def test_a_device_without_numbers(self, model):
        ended(run("generate", model, "x", "--device", "meta"), 2, "device 'meta' cannot be used")

    def test_a_seed_beyond_64_bits(self, model):
        ended(run("generate", model, "x", "--seed", 2**65), 2, "--seed", str(2**65))

    @pytest.mark.parametrize("given", ["inf", "nan", "1e30"])
    def test_a_temperature_without_bounds(self, model, given):
        ended(run("generate", model, "x", "--temperature", given), 2, "--temperature", given)

    def test_an_index_of_weights_without_what_it_must_have(self, tmp_path, model):
        (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
        (model / "model.safetensors.index.json").write_text('{"weight_map": {}}')
        ended(run("generate", model, "x"), 1, "cannot be read: it has no 'metadata'")


def test_weights_of_another_shape_are_named(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "ffn_tokens": config["ffn_tokens"] * 2}))
    with pytest.raises(
        BadFileError, match=r"has model.layers.0.ffn.key_tokens of shape \[\d+, 64\], and its config.json"
    ):
        read_model(model)


@contextmanager
def files_of_at_most(size):
    """The disk as good as full: the system refuses to write beyond `size` bytes of any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short run of two stages, and its recipe."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(folder, growth={"stages": [{"steps": 4}, {"factor": 2, "steps": 4}]})
    train_quietly(recipe, folder / "run")
    return recipe, folder / "run"


@pytest.fixture
def again(trained, tmp_path):
    """A copy of that run whose last step is still to be made."""
    recipe, out = trained
    shutil.copytree(out, tmp_path / "run")
    (tmp_path / "run" / "stage-2" / "result.json").unlink()
    return recipe, tmp_path / "run"


class TestAFullDisk:
    def test_growing(self, tmp_path, model):
        with files_of_at_most(2000):
            failed = run("grow", model, tmp_path / "large", "--factor", 2)
        ended(
            failed, 1, "large could not be written:", "File too large", "free some space and run the same command again"
        )
        assert [path.name for path in tmp_path.iterdir()] == ["model"]

    def test_preparing(self, tmp_path):
        (tmp_path / "text.txt").write_text("some text\n" * 9000)
        with files_of_at_most(2000):
            failed = run("prepare", tmp_path / "text.txt", "--cache", tmp_path / "cache")
        assert failed.exit_code == 1
        assert "could not be written:" in failed.stderr.splitlines()[-1]

    def test_a_trained_tokenizer(self, tmp_path):
        (tmp_path / "text.txt").write_text("some text\n" * 9000)
        sizes = ["--train-tokenizer", 300, "--tokenizer-out", tmp_path / "tokenizer"]
        with files_of_at_most(2000):
            ended(run("prepare", tmp_path / "text.txt", *sizes), 1, "tokenizer could not be written:")
        assert not (tmp_path / "tokenizer").exists()

    def test_a_report_is_written_whole_or_not_at_all(self, trained, tmp_path):
        _, out = trained
        assert run("report", out, "--out", tmp_path / "report").exit_code == 0
        before = {path.name: path.read_bytes() for path in (tmp_path / "report").iterdir()}
        for size in (2000, len(before["report.html"]) + 10):  # room for the page and not for the pictures
            with files_of_at_most(size):
                ended(run("report", out, "--out", tmp_path / "report", "--log"), 1, "could not be written:")
            assert {path.name: path.read_bytes() for path in (tmp_path / "report").iterdir()} == before

    def test_a_report_leaves_no_folder(self, trained, tmp_path):
        _, out = trained
        (tmp_path / "empty").mkdir()
        for target in ("new/report", "empty"):
            with files_of_at_most(2000):
                ended(run("report", out, "--out", tmp_path / target), 1, "could not be written:")
        assert [path.name for path in tmp_path.rglob("*")] == ["empty"]

    def test_the_model_of_a_stage(self, again):
        recipe, out = again
        shutil.rmtree(out / "stage-2" / "model")
        with (
            files_of_at_most(20_000),
            pytest.raises(BadResultError, match=r"stage-2/model could not be written: .*again"),
        ):
            train_quietly(recipe, out)
        train_quietly(recipe, out)
        assert (out / "stage-2" / "model" / "model.safetensors").exists()


def test_a_report_where_nothing_can_be_written(trained, tmp_path):
    (tmp_path / "file").touch()
    ended(run("report", trained[1], "--out", tmp_path / "file" / "report"), 2, "file/report cannot be written:")


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), BadRequestError, "place cannot be written: .*denied"),
        (OSError(errno.EROFS, "Read-only file system"), BadRequestError, "place cannot be written: .*Read-only"),
        (OSError(errno.EDQUOT, "Quota exceeded"), BadResultError, "place could not be written: .*; free some space"),
        (OSError(errno.ENOSPC, "No space", "place"), BadResultError, "written: No space left on device; free some"),
        (RuntimeError("[enforce fail at inline_container.cc:672]"), BadResultError, "written: the disk is full or the"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a source"), FileNotFoundError, "a source"),  # was read
        (BadFileError("a file is broken"), BadFileError, "a file is broken"),
    ],
)
def test_what_goes_wrong_while_something_is_written(error, kind, said):
    with pytest.raises(kind, match=said), naming(Path("place")):
        raise error


def test_another_file_is_not_taken_for_the_one_that_is_written(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with pytest.raises(IsADirectoryError), naming(tmp_path / "place"):
        elsewhere.read_bytes()


@contextmanager
def another_process_writing(*targets):
    """Half-way through `write_new`, as long as the context lasts; then killed."""
    started = forked.Event()

    def write():
        with write_new(*targets) as partials:
            for partial in partials:
                partial.mkdir()
                (partial / "half").write_text("half")
            started.set()
            signal.pause()

    process = forked.Process(target=write)
    process.start()
    assert started.wait(60)
    try:
        yield
    finally:
        process.kill()
        process.join()


def write_quickly(*targets):
    with write_new(*targets) as partials:
        for partial in partials:
            partial.write_text("new")


class TestWhatIsHalfWritten:
    def test_what_a_killed_process_left_is_removed_when_its_targets_are_written(self, tmp_path):
        targets = tmp_path / "new" / "a", tmp_path / "new" / "b"
        with another_process_writing(*targets):
            pass
        assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [".a.partial", ".b.partial"]
        write_quickly(*targets)
        assert {path.name: path.read_text() for path in (tmp_path / "new").iterdir()} == {"a": "new", "b": "new"}

    def test_a_killed_command(self, tmp_path, model):
        def die(*_, **__):
            os.kill(os.getpid(), signal.SIGKILL)

        def grow_and_die():
            TokenFormerForCausalLM.save_pretrained = die
            run("grow", model, tmp_path / "large", "--factor", 2)

        process = forked.Process(target=grow_and_die)
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert (tmp_path / ".large.partial").exists()
        assert run("grow", model, tmp_path / "large", "--factor", 2).exit_code == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "model"]

    def test_two_processes_may_write_different_targets_of_a_folder(self, tmp_path):
        with another_process_writing(tmp_path / "theirs"):
            write_quickly(tmp_path / "ours")
            assert (tmp_path / ".theirs.partial" / "theirs" / "half").exists()
        assert (tmp_path / "ours").read_text() == "new"

    def test_one_of_two_processes_writes_a_target(self, tmp_path):
        said = "another process is writing .*target; wait for it, or choose a new name"
        with another_process_writing(tmp_path / "target"):
            with pytest.raises(BadRequestError, match=said):
                write_quickly(tmp_path / "other", tmp_path / "target")
            assert (tmp_path / ".target.partial" / "target" / "half").exists()
        assert [path.name for path in tmp_path.iterdir()] == [".target.partial"]

    def test_only_the_dead_are_cleared_away(self, tmp_path):
        (tmp_path / ".checkpoint-4.partial").mkdir()
        with another_process_writing(tmp_path / "target"):
            remove_partials(tmp_path)
            assert [path.name for path in tmp_path.iterdir()] == [".target.partial"]
        remove_partials(tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_a_file_system_without_locks(self, tmp_path, monkeypatch):
        def not_here(*_):
            raise OSError(errno.ENOSYS, "Function not implemented")

        monkeypatch.setattr(fcntl, "lockf", not_here)
        write_quickly(tmp_path / "target")
        assert [path.name for path in tmp_path.iterdir()] == ["target"]


class TestDamagedFilesOfARun:
    @pytest.mark.parametrize("content", ["", "{", "[]", '{"step": "four"}', "[" * 50_000])
    @pytest.mark.parametrize("stage", [1, 2])
    def test_the_start_of_a_stage_is_known_elsewhere_too(self, trained, again, capsys, content, stage):
        recipe, out = again
        (out / f"stage-{stage}" / "start.json").write_text(content)
        train_quietly(recipe, out)
        assert metrics(out) == metrics(trained[1])

    def test_and_the_line_names_the_file(self, again):
        recipe, out = again
        (out / "stage-2" / "start.json").write_text("{")
        done = run("train", recipe, f"training.output_dir={out}")
        assert done.exit_code == 0
        assert f"warning: {out}/stage-2/start.json is damaged; the stage starts at step 4, as it did" in done.stderr

    def test_lines_of_metrics(self, trained, again):
        recipe, out = again
        lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        bad = [b"\xff\xfe\n", b"42\n", b"{}\n", b"[" * 50_000 + b"\n", b'{"kind": "train", "stage": "1", "step": 2}\n']
        (out / "metrics.jsonl").write_bytes(b"".join([lines[0], *bad, *lines[1:]]))
        done = run("train", recipe, f"training.output_dir={out}")
        assert done.exit_code == 0, done.stderr
        assert f"warning: damaged lines in {out}/metrics.jsonl were dropped: 5" in done.stderr
        assert metrics(out) == metrics(trained[1])

    def test_a_transformers_that_is_newer_than_what_was_tried(self, trained, monkeypatch):
        recipe, out = trained
        monkeypatch.setattr("transformers.__version__", "5.99.0")
        done = run("train", recipe, f"training.output_dir={out}")
        assert done.exit_code == 0, done.stderr
        assert re.search(r"^warning: training was tried with transformers .*, and 5.99.0 is ins", done.stderr, re.M)

    @pytest.mark.parametrize("left", [None, ""])
    def test_a_run_that_is_done_needs_no_metrics(self, trained, tmp_path, left):
        recipe, out = trained
        shutil.copytree(out, tmp_path / "run")
        (tmp_path / "run" / "metrics.jsonl").unlink()
        if left is not None:
            (tmp_path / "run" / "metrics.jsonl").write_text(left)
        done = run("train", recipe, f"training.output_dir={tmp_path / 'run'}")
        assert done.exit_code == 0, done.stderr
        assert "run/stage-2/model" in done.stdout
        gone = left is None
        assert ("warning: " in done.stderr and "run/metrics.jsonl is gone, so there is nothing" in done.stderr) == gone
        assert ("metrics.jsonl" not in done.stdout and "loss at" not in done.stdout) == gone

    def test_a_pipe_in_the_place_of_metrics(self, again):
        recipe, out = again
        (out / "metrics.jsonl").unlink()
        os.mkfifo(out / "metrics.jsonl")
        done = run("train", recipe, f"training.output_dir={out}")
        ended(done, 2, "metrics.jsonl is neither a file nor a folder")

    @pytest.mark.parametrize("content", ["[" * 20_000, "{", '"x"', '{"a": 1}'])
    def test_a_manifest_that_says_nothing(self, trained, again, content):
        recipe, out = again
        newest = checkpoints(out / "stage-2")[-1]
        (newest / MANIFEST).write_text(content)
        with pytest.raises(BadFileError, match="is missing or broken"):
            check_folder(newest)
        train_quietly(recipe, out)
        assert metrics(out) == metrics(trained[1])

    def test_the_end_of_a_stage_is_measured_again(self, trained, again):
        recipe, out = again
        shutil.rmtree(out / "stage-2")
        (out / "stage-1" / "result.json").write_text("{")
        done = run("train", recipe, f"training.output_dir={out}")
        assert done.exit_code == 0, done.stderr
        assert "stage-1/result.json is damaged; measuring the end of stage 1 again" in done.stderr
        assert metrics(out) == metrics(trained[1])

    def test_the_recipe_of_a_run(self, again):
        recipe, out = again
        (out / "recipe.yaml").unlink()
        ended(
            run("train", recipe, f"training.output_dir={out}"),
            1,
            "run/recipe.yaml is missing, so the run cannot be checked",
        )

    def test_a_stage_that_differs_is_named_by_its_field(self, again):
        recipe, out = again
        changed = run("train", recipe, f"training.output_dir={out}", "growth.stages.1.steps=5")
        ended(changed, 2, "was started with growth.stages[1].steps=4, and now it is 5; choose another")

    def test_random_numbers_that_are_none(self, again):
        """With a manifest that fits: what is read is only ever tensors, and what is wrong is said."""
        recipe, out = again
        newest = checkpoints(out / "stage-2")[-1]
        shutil.rmtree(newest)
        newest = checkpoints(out / "stage-2")[-1]
        for content in (b"cos\nsystem\n(S'touch /tmp/owned'\ntR.", b"junk"):
            (newest / "rng_state.pth").write_bytes(content)
            (newest / MANIFEST).unlink()
            seal_folder(newest.rename(newest.with_name("being-written")), newest)
            with pytest.raises(BadFileError, match=rf"the random numbers in .*{newest.name} \(rng_state"):
                train_quietly(recipe, out)

    def test_what_is_said_when_there_is_no_checkpoint_before(self, again):
        recipe, out = again
        for checkpoint in checkpoints(out / "stage-2"):
            (checkpoint / "model.safetensors").write_bytes(b"")
        done = run("train", recipe, f"training.output_dir={out}")
        assert done.exit_code == 1
        assert "has no good checkpoint" in done.stderr
        assert "is used" not in done.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 20_000, "file.json nests its brackets too deeply"),
        ("{", "file.json is not JSON: Expecting"),
        (b"\xff", "file.json is not JSON: 'utf-8'"),
        (None, "file.json is missing"),
        ("pipe", "file.json is not a file"),
    ],
)
def test_json_that_cannot_be_read(tmp_path, content, said):
    path = tmp_path / "file.json"
    if content == "pipe":
        os.mkfifo(path)
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadFileError, match=said):
        read_json(path)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("metadata"), "it has no 'metadata'"),
        (MemoryError(), "there is not enough memory"),
        (RecursionError("maximum recursion depth exceeded"), "its brackets are nested too deeply"),
        (AssertionError(), "AssertionError"),
        (ValueError("two\n lines"), "two lines"),
    ],
)
def test_errors_without_words_get_some(error, said):
    assert one_line(error) == said


def test_a_folder_is_not_a_recipe(tmp_path):
    ended(run("train", tmp_path), 2, f"{tmp_path} is a folder; give the path of a recipe")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "table.parquet").write_bytes(b"PAR1")
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "pyarrow":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    ended(run("prepare", tmp_path / "table.parquet"), 1, "the Python package pyarrow is not installed")


def test_an_absurd_length(model):
    ended(run("info", "tiny", "--length", 10**30), 2, "--length", str(10**30))
    assert run("info", "tiny", "--length", 2**40).exit_code == 0


def test_the_parts_of_a_folder_of_images_are_told_apart(tmp_path):
    for part in ("test", "train"):
        (tmp_path / part / "cat").mkdir(parents=True)
        (tmp_path / part / "cat" / "1.png").touch()
    recipe = tmp_path / "images.yaml"
    recipe.write_text(f"data: {{images: {tmp_path}}}\ntraining: {{max_steps: 1, output_dir: {tmp_path}/run}}\n")
    said = f"set images={tmp_path}/train and validation={tmp_path}/test"
    assert said in run("train", recipe).stderr
