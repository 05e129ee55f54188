"""Plans: a law is found again in what it made, the ladder is the best there is, and the recipe does what it says."""

import itertools
import json

import numpy as np
import pytest
import yaml

from command import ended
from command import run as run_command
from tokenformer import BadRequestError
from tokenformer.planning import (
    PUBLISHED,
    FinishedRun,
    ScalingLaw,
    Size,
    anytime_climb,
    best_climb,
    climbed,
    fit,
    fitted_transfer,
)
from tokenformer.planning.climb import stopped
from tokenformer.planning.plan import make_plan
from tokenformer.planning.runs import FinishedLadder, read_finished
from tokenformer.training import load_recipe
from tokenformer.training.ladder import build_ladder
from training_runs import run, write_recipe

LAW = ScalingLaw("made up", np.array([np.log(40.0), np.log(150.0), np.log(0.75), 0.38, 0.35]))
SIZES = [Size(f"{2**i}x", int(3e5 * 2**i), 2e6 * (1 + 2**i)) for i in range(5)]


def made_by(law, noise=0.0, seed=0):
    random = np.random.default_rng(seed)
    return [
        FinishedRun(
            size.parameters, seen, float(law.loss(size.parameters, seen)) * (1 + noise * random.standard_normal())
        )
        for size, seen in itertools.product(SIZES[:4], (1e6, 4e6, 1.6e7))
    ]


class TestLaw:
    def test_a_law_is_found_again(self):
        found = fit(made_by(LAW))
        for parameters, seen in ((3e5, 1e6), (2e6, 5e7), (1e7, 1e8)):
            assert found.loss(parameters, seen) == pytest.approx(float(LAW.loss(parameters, seen)), rel=0.01)

    @pytest.mark.parametrize("seed", range(4))
    def test_its_uncertainty_is_that_of_its_predictions(self, seed):
        found = fit(made_by(LAW, noise=0.005, seed=seed))
        for parameters, seen in ((2.4e6, 1.6e7), (5e6, 6e7)):
            deviation = found.deviation(lambda law, at=(parameters, seen): float(law.loss(*at)))
            assert 0 < deviation < 0.1
            assert abs(found.loss(parameters, seen) - LAW.loss(parameters, seen)) < 3 * deviation

    def test_the_inverse(self):
        assert LAW.seen_at(1e6, LAW.loss(1e6, 3e6)) == pytest.approx(3e6)
        assert LAW.seen_at(1e6, 0.8) == np.inf  # below what this size can ever reach

    def test_published_laws_say_what_is_known_of_them(self):
        """The Chinchilla paper trains 70e9 parameters on 1.4e12 tokens; its law then gives 1.94."""
        assert PUBLISHED["hoffmann"].loss(70e9, 1.4e12) == pytest.approx(1.94, abs=0.01)
        assert PUBLISHED["besiroglu"].deviation(lambda law: float(law.loss(1e9, 1e9))) is None

    @pytest.mark.parametrize("runs", [[], made_by(LAW)[:3], [FinishedRun(1e6, seen, 2.0) for seen in (1, 2, 3, 4)]])
    def test_too_few_runs(self, runs):
        with pytest.raises(BadRequestError, match=r"a law needs 4 from scratch, of 2 sizes and 2 lengths"):
            fit(runs)


class TestClimb:
    def test_growth_goes_on_from_the_loss(self):
        climb = climbed(LAW, [(SIZES[0], 4e6), (SIZES[1], 2e6)], transfer=1.0)
        joined = float(LAW.seen_at(SIZES[1].parameters, LAW.loss(SIZES[0].parameters, 4e6)))
        assert climb.loss == pytest.approx(float(LAW.loss(SIZES[1].parameters, joined + 2e6)))
        assert climb.rungs[1].worth == pytest.approx(joined / 4e6)
        assert climb.rungs[1].cost == pytest.approx(SIZES[0].flops_per_unit / SIZES[1].flops_per_unit)
        assert climbed(LAW, [(SIZES[0], 4e6), (SIZES[1], 2e6)], transfer=0.8).loss > climb.loss

    @pytest.mark.parametrize(("budget", "transfer"), [(2e13, 1.0), (3e14, 1.0), (3e14, 0.9), (5e15, 0.85)])
    def test_no_other_ladder_is_better(self, budget, transfer):
        """Against all ladders of up to three sizes, with growth after every twentieth of the budget."""
        best = best_climb(LAW, SIZES, budget, transfer)
        assert best.flops == pytest.approx(budget)
        shares = np.arange(1, 20) / 20
        lowest = min(float(LAW.loss(size.parameters, budget / size.flops_per_unit)) for size in SIZES)
        for count in (2, 3):
            for sizes in itertools.combinations(SIZES, count):
                for cuts in itertools.combinations(shares, count - 1):
                    parts = np.diff([0.0, *cuts, 1.0]) * budget
                    stages = [(size, part / size.flops_per_unit) for size, part in zip(sizes, parts, strict=True)]
                    with np.errstate(over="ignore"):
                        lowest = min(lowest, climbed(LAW, stages, transfer).loss)
        assert best.loss <= lowest * (1 + 5e-4)

    def test_a_budget_too_small_to_grow(self):
        assert len(best_climb(LAW, SIZES, 1e12, 1.0).rungs) == 1

    def test_the_last_size_may_be_given(self):
        best = best_climb(LAW, SIZES, 3e14, 1.0, last=SIZES[4])
        assert best.rungs[-1].size == SIZES[4]

    def test_a_large_step_loses_as_much_as_the_doublings_in_it(self):
        once = climbed(LAW, [(SIZES[0], 4e6), (SIZES[2], 2e6)], transfer=0.9)
        joined = 0.81 * float(LAW.seen_at(SIZES[2].parameters, LAW.loss(SIZES[0].parameters, 4e6)))
        assert once.loss == pytest.approx(float(LAW.loss(SIZES[2].parameters, joined + 2e6)))

    @pytest.mark.parametrize(("budget", "transfer"), [(3e14, 1.0), (3e14, 0.9), (5e15, 0.85)])
    def test_a_ladder_to_stop_anywhere(self, budget, transfer):
        """Against all ladders of three sizes that grow at one of 24 budgets."""
        sizes, budgets = SIZES[1:4], np.geomspace(budget / 32, budget, 16)
        scratch = [min(float(LAW.loss(s.parameters, spent / s.flops_per_unit)) for s in sizes) for spent in budgets]

        def furthest(grows_at):
            ladders = [stopped(LAW, sizes, grows_at, spent, transfer).loss for spent in budgets]
            return max(loss / best for loss, best in zip(ladders, scratch, strict=True))

        found = anytime_climb(LAW, sizes, budget, transfer)
        assert found.flops == pytest.approx(budget)
        seen = {rung.size: rung.seen * rung.size.flops_per_unit for rung in found.rungs}
        grows_at = np.cumsum([seen.get(size, 0.0) for size in sizes])[:-1]
        others = itertools.combinations_with_replacement(np.geomspace(budget / 32, budget, 24), 2)
        assert furthest(grows_at) <= min(map(furthest, others)) + 3e-4
        at_the_end = best_climb(LAW, sizes, budget, transfer)
        assert at_the_end.loss <= found.loss

    def test_what_survives_growth_is_found_again(self):
        stages = ((SIZES[0], 4e6), (SIZES[1], 2e6), (SIZES[2], 8e6))
        ladder = FinishedLadder("one", stages, climbed(LAW, stages, 0.83).loss)
        assert fitted_transfer(LAW, [ladder]) == pytest.approx(0.83)


class TestPlan:
    @pytest.fixture
    def recipe(self, tmp_path):
        return write_recipe(tmp_path, growth={"stages": []}, training={"max_steps": 10})

    @pytest.mark.parametrize("by", ["tokens", "depth"])
    def test_the_recipe_does_what_the_plan_says(self, recipe, tmp_path, by):
        plan = make_plan(load_recipe(recipe), LAW, 3e13, transfer=1.0, by=by)
        assert plan.grows
        path = tmp_path / "planned.yaml"
        path.write_text(plan.to_yaml())
        planned = load_recipe(path)
        assert [stage.steps for stage in planned.growth.stages] == plan.steps(plan.climb)
        assert planned.training.max_steps is None
        planned.data.inspect(count_samples=False)
        ladder = build_ladder(planned, 1)
        assert [stage.parameters for stage in ladder.stages] == [rung.size.parameters for rung in plan.climb.rungs]
        assert ladder.flops(ladder.stages[-1].end) == pytest.approx(3e13, rel=0.01)

    def test_a_plan_to_stop_anywhere(self, recipe):
        plan, at_the_end = (make_plan(load_recipe(recipe), LAW, 3e13, anytime=anytime) for anytime in (True, False))
        assert plan.grows
        assert plan.climb.rungs[0].seen > at_the_end.climb.rungs[0].seen
        assert len(yaml.safe_load(plan.to_yaml())["growth"]["stages"]) == len(plan.climb.rungs)

    def test_when_growing_does_not_pay_it_trains_the_best_size(self, recipe):
        plan = make_plan(load_recipe(recipe), LAW, 3e13, transfer=0.3)
        assert not plan.grows
        values = yaml.safe_load(plan.to_yaml())
        assert len(values["growth"]["stages"]) == 1
        factor = int(plan.best_from_scratch.rungs[0].size.name.partition("x")[0])
        assert factor > 1
        assert values["model"]["ffn_tokens"] == 64 * factor
        assert values["training"]["rate_base"] == {"hidden_size": 32, "qkv": 16, "out": 16, "ffn": 64}

    def test_the_largest_size_whatever_it_costs(self, recipe):
        plan = make_plan(load_recipe(recipe), LAW, 3e12, largest=2e6, at_largest=True)
        assert plan.climb.rungs[-1].size == plan.scratch[-1].rungs[0].size
        assert plan.best_from_scratch is plan.scratch[-1]
        assert plan.grows

    def test_a_model_that_was_trained_before_is_refused(self, recipe, tmp_path):
        loaded = load_recipe(recipe, [f"model={{checkpoint: {tmp_path}}}"])
        with pytest.raises(
            BadRequestError, match=r"model\.checkpoint is given, and a law knows models from scratch only"
        ):
            make_plan(loaded, LAW, 3e13)

    def test_text_that_runs_out_asks_for_larger_sizes(self, recipe):
        free, bound = (make_plan(load_recipe(recipe), LAW, 3e13, units=units) for units in (None, 2e6))
        assert bound.climb.rungs[0].size.parameters > free.climb.rungs[0].size.parameters
        assert bound.scratch[0].rungs[0].seen == 2e6

    def test_a_law_of_ones_own_runs(self, recipe, tmp_path):
        folders = []
        for tokens, steps in itertools.product((16, 32), (6, 12)):
            out = tmp_path / f"run-{tokens}-{steps}"
            size = [f"model.{role}_tokens={tokens}" for role in ("qkv", "out")]
            run(recipe, out, f"training.max_steps={steps}", *size, f"model.ffn_tokens={4 * tokens}")
            folders.append(out)
        ladder = tmp_path / "ladder"
        run(recipe, ladder, "training.max_steps=null", "growth.stages=[{steps: 6}, {factor: 2, steps: 6}]")
        scratch, ladders = read_finished([*folders, ladder])
        assert len(scratch) == 4
        assert [one.label for one in ladders] == ["ladder"]
        result = run_command(
            "plan", recipe, "--flops", 1e12, *(x for folder in (*folders, ladder) for x in ("--runs", folder)),
            "--out", tmp_path / "planned.yaml",
        )  # fmt: skip
        assert result.exit_code == 0, result.stderr
        assert "fitted: parameters^-" in result.stdout
        assert " ± " in result.stdout
        assert load_recipe(tmp_path / "planned.yaml").growth.stages
        lines = (ladder / "metrics.jsonl").read_text().splitlines()
        (ladder / "metrics.jsonl").write_text(
            "\n".join(line for line in lines if json.loads(line)["stage"] == 1) + "\n"
        )
        with pytest.raises(BadRequestError, match=r"ladder is in stage 1 of 2; train it to the end, or leave it out"):
            read_finished([ladder])


def test_the_command_says_when_not_to_grow(tmp_path):
    recipe = write_recipe(tmp_path, growth={"stages": []}, training={"max_steps": 10})
    result = run_command("plan", recipe, "--hours", 1, "--speed", 1e9, "--law", "hoffmann", "--transfer", 0.2)
    assert result.exit_code == 0, result.stderr
    assert "Do not grow" in result.stdout
    assert "3.6e+12 FLOPs, 1 h\n" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--law", "hoffmann"], "give the budget as --flops, or as --hours with --speed"),
        (["--hours", 3, "--law", "hoffmann"], "give the budget as --flops, or as --hours with --speed"),
        (["--flops", -1, "--law", "hoffmann"], "the budget is -1 FLOPs; a positive number is needed"),
        (["--flops", 1e14], "neither of --runs and --law given; choose one of them"),
        (["--flops", 1e14, "--law", "hofmann"], "--law hofmann is not known; did you mean 'hoffmann'"),
        (["--flops", 1e14, "--law", "hoffmann", "--by", "deepth"], "--by deepth is not known; did you mean 'depth'"),
        (["--flops", 10, "--law", "hoffmann"], "a budget of 10 FLOPs is fewer than 100 steps of the smallest size"),
        (["--flops", 1e14, "--law", "hoffmann", "--largest", 5], "the largest size is 5 parameters, within which"),
        (["--flops", 1e14, "--law", "hoffmann", "--to-largest"], "--to-largest was given without --largest"),
        (
            ["--flops", 1e14, "--law", "hoffmann", "--largest", 1e9, "--to-largest", "--anytime"],
            "a ladder to stop anywhere (anytime) cannot be told where to end (to the largest size); choose one of them",
        ),
        (["--flops", 1e14, "--runs", "nowhere"], "nowhere does not exist"),
        (["--flops", 1e14, "--law", "hoffmann", "--out", "."], "--out . exists; choose a new name"),
    ],
)
def test_what_cannot_be_planned(tmp_path, arguments, message):
    recipe = write_recipe(tmp_path, growth={"stages": []}, training={"max_steps": 10})
    ended(run_command("plan", recipe, *arguments), 2, message)
