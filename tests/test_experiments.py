"""The experiments: runs resume bit by bit, share what they have in common and grow without a jump; and each has a plan,
a report and committed results."""

import importlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from conftest import relative_error
from image_files import encoded, picture, table

sys.path.append(str(Path(__file__).parent.parent / "experiments"))

import lab.train
import run as experiments
from lab import data, images, kept, results, sizes, texts
from lab.adapters import with_adapter
from lab.models import GeluL1, SeparateProjections, build, equal_neox, equal_vit, optimizer_of
from lab.net2net import carry_moments, widen, widen_ffn
from lab.pool import train_all
from lab.results import (
    accuracy,
    compute,
    curve,
    final,
    flops,
    last,
    lines,
    non_embedding,
    parameters,
    rise_at_growth,
    shape_at,
)
from lab.spec import Adapter, Growth, NeoX, Run, TokenFormer, TokenViT, ViT
from lab.tables import pages, with_tables
from lab.train import Training, finished_model, first_model, folder_of, task_of

from tokenformer import cost
from tokenformer.training.ladder import build_ladder
from tokenformer.training.recipe import load_recipe

ROOT = Path(__file__).parent.parent
TINY = TokenFormer(8, width=16, layers=2, heads=2)
SHORT = Run(TINY, 4e-3, 10, text="python", warmup=2, batch=2, context=16)
GROWN = replace(SHORT, growths=(Growth(3), Growth(5, method="zero")))
HOST = replace(SHORT, model=NeoX(24, layers=2, heads=2, ffn=41))
ADOPTED = replace(
    HOST,
    growths=(
        Growth(
            4,
            method="rotate",
            sizes=(("*.query_key_value", 72), ("*.dense_h_to_4h", 91)),
            adopts=("ffn", "qkv"),
            lr=1e-3,
        ),
    ),
)
BEGUN = replace(SHORT, text="fiction", seed=1, begins=SHORT, weight_decay=0.0)
ADAPTERS = {
    "own": Adapter("own", (("ffn", 3),)),
    "own, all layers": Adapter("own", (("qkv", 2), ("out", 2), ("ffn", 3))),
    "own, two layers": Adapter("own", (("model.layers.0.ffn", 2), ("model.layers.1.ffn", 3))),
    "own, keys of hidden states": Adapter("own", (("ffn", 3),), keys="hidden"),
    "own, rates by 1/n": Adapter("own", (("ffn", 3),), base=6),
    "shared": Adapter("shared", (("ffn", 3),)),
    "lora": Adapter("lora", (("qkv", 1), ("out", 2), ("ffn", 2))),
    "full": Adapter("full"),
}
PICTURES = Run(TokenViT(8, width=16, layers=2, heads=2), 4e-3, 6, text="cifar10", warmup=2, batch=4)


@pytest.fixture(autouse=True)
def _store(tmp_path, monkeypatch):
    monkeypatch.setattr(lab.train, "STORE", tmp_path / "lab")
    monkeypatch.setattr(lab.train, "MANY", 4)
    monkeypatch.setattr(lab.train, "SOME", 4)
    monkeypatch.setattr(lab.train, "FEW", 2)
    monkeypatch.setattr(lab.train, "SAVE_STEPS", 2)
    monkeypatch.setattr(lab.train, "SMOOTH_STEPS", 2)
    text = torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    monkeypatch.setattr(data, "read", lambda _: text)


def train(run):
    for segment in run.segments():
        folder_of(segment).mkdir(parents=True, exist_ok=True)
        if not (folder_of(segment) / "result.json").exists():
            Training(segment).finish()


def train_with_interruptions(run):
    for segment in run.segments():
        folder_of(segment).mkdir(parents=True)
        training = Training(segment)
        training.make_step()
        training.save("part.pt")
        Training(segment).finish()


def state(segment):
    return torch.load(folder_of(segment) / "state.pt", weights_only=True)


def test_runs_share_their_past_and_nothing_else():
    ends = {segment.end: segment.name for segment in GROWN.segments()}
    longer = {segment.end: segment.name for segment in replace(GROWN, steps=20).segments()}
    assert list(ends) == [3, 5, 8, 10]
    assert list(longer) == [3, 5, 16, 20]
    assert [ends[3], ends[5]] == [longer[3], longer[5]]
    marked = {segment.end: segment.name for segment in replace(GROWN, marks=(4,)).segments()}
    assert list(marked) == [3, 4, 5, 8, 10]
    assert [marked[end] for end in ends] == list(ends.values())
    assert ends[3] != replace(GROWN, seed=1).segments()[0].name
    other = replace(GROWN, growths=(GROWN.growths[0], Growth(5)))
    assert [segment.name for segment in other.segments()][:2] == [ends[3], ends[5]]
    assert not {segment.name for segment in other.segments()[2:]} & {ends[8], ends[10]}


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """A few pictures in the form of CIFAR-10."""
    for part in ("train", "test"):
        drawn = [encoded(picture(i, 32, 32)) for i in range(40)]
        table([i % 10 for i in range(40)], drawn, names=list("abcdefghij")).to_parquet(tmp_path / f"{part}.parquet")
    monkeypatch.setenv("CIFAR10", str(tmp_path))
    images.read.cache_clear()
    yield
    images.read.cache_clear()


@pytest.mark.parametrize("growths", [(), (Growth(3),)])
def test_images_are_trained_on_and_carried_on_bit_by_bit(cifar10, growths, monkeypatch, tmp_path):
    run = replace(PICTURES, growths=growths)
    train(run)
    undisturbed = state(run.segments()[-1])
    measured = [line for line in lines(run) if line["kind"] in ("end", "growth", "test")]
    assert all(0 <= line["accuracy"] <= 1 for line in measured)
    assert accuracy(run) == measured[-2]["accuracy"]
    monkeypatch.setattr(lab.train, "STORE", tmp_path / "again")
    train_with_interruptions(run)
    after = state(run.segments()[-1])
    assert all(torch.equal(after["model"][name], tensor) for name, tensor in undisturbed["model"].items())


def test_the_order_of_images_is_the_seed_s_alone(cifar10):
    vit = replace(PICTURES, model=ViT(16, 2, 2), steps=9)
    ours, theirs = task_of(PICTURES), task_of(vit)
    for step in (0, 5):
        assert torch.equal(ours.batch(step)["pixel_values"], theirs.batch(step)["pixel_values"])
    other = task_of(replace(PICTURES, seed=1)).batch(0)
    assert not torch.equal(ours.batch(0)["pixel_values"], other["pixel_values"])
    seen = torch.cat([inputs["labels"] for _, inputs in ours.held_out("test", 5)])
    assert len(seen) == 40


def test_l1_is_the_norm_of_what_gelu_leaves():
    layer = next(
        module
        for module in build(TokenViT(8, width=16, heads=2, kind="gelu_l1")).modules()
        if isinstance(module, GeluL1)
    )
    x = torch.randn(3, 16)
    weights = torch.nn.functional.gelu(x @ layer.key_tokens.T)
    expected = weights / weights.abs().sum(-1, keepdim=True) * len(layer.key_tokens) @ layer.value_tokens
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(
    "run",
    [
        *(replace(GROWN, growths=(Growth(3, method="zero", trains=trains, tau_steps=4),)) for trains in ("all", "new")),
        ADOPTED,
        replace(HOST, growths=(Growth(4, method="net2net", sizes=(("ffn", 77),)),)),
        replace(HOST, growths=(Growth(4, method="net2net"),)),
        replace(GROWN, optimizer="muon"),
    ],
    ids=["all", "new", "adopted", "net2net of FFNs", "net2net", "muon"],
)
def test_a_killed_segment_goes_on_bit_by_bit(run, monkeypatch, tmp_path):
    train(run)
    undisturbed = [state(segment) for segment in run.segments()]
    monkeypatch.setattr(lab.train, "STORE", tmp_path / "again")
    train_with_interruptions(run)
    for segment, before in zip(run.segments(), undisturbed, strict=True):
        after = state(segment)
        assert all(torch.equal(after["model"][name], tensor) for name, tensor in before["model"].items())


def test_the_pool_trains_every_segment_once(monkeypatch, capfd):
    monkeypatch.setattr("lab.pool.time.sleep", lambda _: None)
    train_all(lambda: [GROWN, replace(GROWN, steps=12)])
    started = [line.split()[2] for line in capfd.readouterr().out.splitlines() if " start " in line]
    assert len(started) == len(set(started)) == 6
    assert final(GROWN) is not None
    assert final(GROWN, "test") is not None
    assert final(replace(GROWN, seed=1)) is None


def test_what_is_kept_counts_as_made_on_another_machine(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr("lab.pool.time.sleep", lambda _: None)
    monkeypatch.setattr(kept, "FILE", tmp_path / "measured.jsonl")
    monkeypatch.setattr(lab.train, "KEPT", {})
    longer = replace(GROWN, steps=12)
    train_all(lambda: [GROWN])
    kept.keep()
    made = {kind: final(GROWN, kind) for kind in ("end", "test")}
    rise, points = rise_at_growth(GROWN), curve(GROWN)
    monkeypatch.setattr(lab.train, "STORE", tmp_path / "new machine")
    assert final(GROWN) is None
    kept.take()
    assert {kind: final(GROWN, kind) for kind in ("end", "test")} == made
    assert (rise_at_growth(GROWN), curve(GROWN)) == (rise, points)
    capfd.readouterr()
    train_all(lambda: [GROWN, longer])
    started = [line.split()[2] for line in capfd.readouterr().out.splitlines() if " start " in line]
    assert started == [segment.name for segment in longer.segments()]  # whose first ones it needs the states of
    kept.keep()
    names = [json.loads(line)["segment"] for line in kept.FILE.read_text().splitlines()]
    assert sorted({segment.name for run in (GROWN, longer) for segment in run.segments()}) == names


def test_a_report_does_not_throw_results_away(monkeypatch, tmp_path):
    monkeypatch.setattr(kept, "FILE", tmp_path / "measured.jsonl")
    before = (ROOT / "experiments" / "theta" / "results.json").read_text()
    refusal = r"theta: results.json has (\d+) runs, and \1 of them are not here; it is left as it is"
    with pytest.raises(SystemExit, match=refusal):
        experiments.main(["theta", "--report"])
    assert (ROOT / "experiments" / "theta" / "results.json").read_text() == before


def test_a_segment_that_fails_has_its_reason_in_the_log(monkeypatch):
    monkeypatch.setattr(lab.train, "build", lambda *_: 1 / 0)
    with pytest.raises(SystemExit, match=r"1 segments failed; their log\.txt in .* says why"):
        train_all(lambda: [SHORT])
    assert "ZeroDivisionError" in (folder_of(SHORT.segments()[0]) / "log.txt").read_text()


@pytest.mark.parametrize("method", ["zero", "split"])
@pytest.mark.parametrize("adam", ["carry", "reset"])
def test_growth_does_not_move_the_loss(method, adam):
    run = replace(SHORT, growths=(Growth(4, factor=3, method=method, adam=adam),))
    train(run)
    before, after = (line["loss"] for line in lines(run) if line["step"] == 4 and line["kind"] in ("end", "growth"))
    assert after == pytest.approx(before, rel=1e-5)
    assert shape_at(run, 3).tokens == 8
    assert shape_at(run, 4).tokens == 24


def test_frozen_tokens_do_not_move():
    run = replace(SHORT, growths=(Growth(4, method="zero", trains="new"),))
    train(run)
    before, after = (state(run.segments()[i])["model"] for i in (0, -1))
    for name, tensor in before.items():
        if tensor.ndim:
            assert torch.equal(after[name][: len(tensor)], tensor)
    assert not after["model.layers.0.ffn.key_tokens"][32:].eq(0).all()


def test_tau_rises_to_that_of_the_grown_size():
    run = replace(SHORT, growths=(Growth(4, method="zero", tau_steps=2),))
    train(run)
    assert state(run.segments()[-1])["model"]["model.layers.0.ffn.tau"].item() == pytest.approx(64**0.5)


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_net2net_keeps_the_function(noise):
    model = build(NeoX(24, heads=2)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    larger = widen(model, seed=0, noise=noise)
    ids = torch.randint(0, 256, (2, 20))
    assert larger.num_parameters() > 3.5 * model.num_parameters()
    assert relative_error(larger.double()(ids).logits, model(ids).logits) < 1e-6
    twins = larger.gpt_neox.layers[0].mlp.dense_h_to_4h.weight.chunk(2, dim=1)
    assert torch.equal(*twins) == (noise == 0)


def test_net2net_carries_adam_s_moments():
    """Those of the doubled model are what its own gradients would have made them, where twins are alike."""
    ids = torch.randint(0, 256, (2, 20))

    def gradients(model):
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return dict(model.named_parameters())

    model = build(NeoX(24, heads=2)).double()
    optimizer = optimizer_of(model, HOST)
    for parameter in gradients(model).values():
        optimizer.state[parameter] = {
            "step": torch.tensor(7.0),
            "exp_avg": parameter.grad.clone(),
            "exp_avg_sq": parameter.grad.square(),
        }
    larger = widen(model, seed=0, noise=0.0).double()
    carried = optimizer_of(larger, HOST)
    carry_moments(optimizer, model, carried, larger, noise=0.0)
    for name, parameter in gradients(larger).items():
        moments = carried.state[parameter]
        assert relative_error(moments["exp_avg"], parameter.grad) < 1e-6, name
        assert relative_error(moments["exp_avg_sq"], parameter.grad.square()) < 1e-6, name
        assert moments["step"] == 7


@pytest.mark.parametrize("size", [38, 61, 200])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_net2net_gives_ffns_any_size_and_keeps_the_function(size, noise):
    model = build(NeoX(20, heads=2, ffn=37)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    ids = torch.randint(0, 256, (2, 20))
    larger = widen_ffn(model, size, seed=0, noise=noise)
    assert relative_error(larger(ids).logits, model(ids).logits) < 1e-5
    assert (
        relative_error(widen_ffn(model.double(), size, seed=0, noise=noise).double()(ids).logits, model(ids).logits)
        < 1e-6
    )
    mlp = larger.gpt_neox.layers[0].mlp
    units, origin = mlp.dense_h_to_4h.weight.unique(dim=0, return_inverse=True)
    assert len(units) == 37
    drawn = mlp.dense_4h_to_h.weight[:, origin == origin[37]]  # all copies of the unit that was drawn first
    assert drawn.shape[1] > 1
    assert torch.equal(drawn[:, 0], drawn[:, -1]) == (noise == 0)
    run = replace(HOST, growths=(Growth(4, method="net2net", sizes=(("ffn", size),)),))
    assert parameters(run) == build(replace(HOST.model, ffn=size)).num_parameters()


def test_an_adopted_model_grows_where_it_was_and_trains_at_its_own_rate():
    train(ADOPTED)
    assert rise_at_growth(ADOPTED) == pytest.approx(0, abs=1e-5)
    assert [ADOPTED.learning_rate(step) for step in (3, 4)] == [4e-3, 1e-3]
    assert ADOPTED.segments()[0].name == replace(HOST, marks=(4,)).segments()[0].name
    model = finished_model(ADOPTED)
    record = model.config.adopted
    assert {name.rpartition(".")[2]: (n["num_tokens"], n["ballast"]) for name, n in record.layers.items()} == {
        "query_key_value": (72, 0),
        "dense_h_to_4h": (91, 24),
    }
    assert parameters(ADOPTED) == model.num_parameters()
    assert non_embedding(ADOPTED) == model.num_parameters() - 256 * 24
    before, after = (state(ADOPTED.segments()[i])["optimizer"]["state"] for i in (0, 1))
    assert len(before) != len(after)  # the optimizer started afresh


@pytest.mark.parametrize(
    "growth",
    [*ADOPTED.growths, Growth(4, method="split", sizes=(("*.dense_h_to_4h", 90),), adopts=("ffn",), ballast="single")],
)
def test_the_flops_of_an_adopted_model_are_torchs(growth):
    run = replace(ADOPTED, growths=(growth,))
    train(run)
    model, ids = finished_model(run), torch.randint(0, 256, (run.batch, run.context))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids, labels=ids, use_cache=False).loss.backward()
    assert flops(run, 5, since=4) == pytest.approx(counter.get_total_flops(), rel=0.01)
    host = cost.training_flops_per_token(lab.models.config_of(HOST.model), 16)
    assert flops(run, 5, since=3) == flops(run, 5, since=4) + 32 * host


@pytest.fixture
def adoption(monkeypatch):
    """The experiment, its rates known."""
    experiment = importlib.import_module("adopt.experiment")
    monkeypatch.setattr(experiment, "rate_of", lambda _: 4e-3)
    monkeypatch.setattr(experiment, "best", lambda runs: list(runs)[1])
    return experiment


def test_all_ways_on_from_a_transformer_have_equal_compute_and_size(adoption, monkeypatch):
    net2net = importlib.import_module("net2net.experiment")
    monkeypatch.setattr(net2net, "rate_of", lambda _: 4e-3)
    shared = net2net.runs("Transformer, Net2Net")[250]
    ways = {way: adoption.runs(way) for way in (*adoption.WAYS, adoption.SCRATCH)}
    for budget in adoption.BUDGETS:
        spent = flops(ways[adoption.FFN_ADOPTED][budget][0])
        for way, run in ((way, run) for way, found in ways.items() for run in found[budget][:1]):
            assert flops(run) == pytest.approx(spent, rel=0.001)
            if way != adoption.SCRATCH:
                since = spent - flops(run, adoption.BASE)
                assert flops(run, since=adoption.BASE) == pytest.approx(since, rel=0.02)
                assert run.segments()[0].name == shared[0].segments()[0].name
                assert run.steps - run.decay_start == round((run.steps - adoption.BASE) / 5)
    sizes = {way: non_embedding(found[1000][0]) for way, found in ways.items()}
    host = sizes.pop("trained on")
    assert sizes.pop("trained on, Adam afresh") == host < sizes.pop("FFN adopted, hardly grown") < 1.25 * host
    assert all(size == pytest.approx(2.08 * host, rel=0.01) for size in sizes.values())
    assert [way for way, found in ways.items() if found[adoption.LONG]] == list(adoption.LONGER)
    first, second, third = (ways[adoption.FFN_ADOPTED][budget][0].segments() for budget in adoption.BUDGETS)
    assert [segment.name for segment in first[:2]] == [segment.name for segment in second[:2]]
    assert [segment.name for segment in second[:3]] == [segment.name for segment in third[:3]]
    assert all(run in adoption.plan() for way in adoption.RATED for run in adoption.rates(way, 4e-3))
    for way, (growth, _, _) in adoption.WAYS.items():
        starts = [ways[way][1000][0].learning_rate(adoption.BASE + step) for step in (0, 49, 99, 200)]
        rate = starts[-1]
        rising = [rate / 100, rate / 2, rate, rate] if growth.rewarm else [rate] * 4
        assert starts == pytest.approx(rising)


@pytest.mark.parametrize(
    ("best_rate", "tried"),
    [(2e-3, [1e-3, 2e-3, 4e-3]), (5e-4, [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3]), (8e-3, [1e-3, 2e-3, 4e-3, 8e-3, 16e-3])],
)
def test_rates_are_tried_until_the_best_has_one_on_either_side(monkeypatch, best_rate, tried):
    monkeypatch.setattr(sizes, "best", lambda runs: min(runs, key=lambda run: abs(run.lr - best_rate)))
    runs = sizes.at_rates(lambda rate: Run(sizes.neox(72), rate, 10), (1e-3, 2e-3, 4e-3))
    assert [run.lr for run in runs] == tried
    monkeypatch.setattr(sizes, "best", lambda runs: None)  # not all are finished
    assert len(sizes.at_rates(lambda rate: Run(sizes.neox(72), rate, 10), (1e-3, 2e-3, 4e-3))) == 3


def test_growth_on_images_has_peers_of_as_many_flops_that_share_their_past():
    growth = importlib.import_module("vision_growth.experiment")
    small, grown = growth.scratch(growth.SMALL, 1e-3), growth.grown("rotate", 1e-3, 0)
    shorter = growth.scratch(growth.LARGE, 1e-3, steps=growth.SHORTER)
    longer_small = growth.scratch(growth.SMALL, 1e-3, steps=growth.LONGER)
    for peer in (shorter, longer_small):
        assert flops(peer) == pytest.approx(flops(grown), rel=1e-3)
    for run, longer in ((shorter, growth.scratch(growth.LARGE, 1e-3)), (small, grown), (small, longer_small)):
        trunk = [segment.name for segment in run.segments() if segment.end <= run.decay_start]
        assert trunk == [segment.name for segment in longer.segments()][: len(trunk)]


def test_weight_decay_spares_what_it_does_in_tokenformer_train():
    for shape in (PICTURES.model, ViT(16, layers=1, heads=2)):
        model = build(shape)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        decayed, spared = (
            {names[id(p)] for p in group["params"]} for group in optimizer_of(model, PICTURES).param_groups
        )
        assert {name.rpartition(".")[2] for name in spared} >= {"bias", "position_embeddings"}
        assert not any("position" in name or "cls" in name or "class_token" in name for name in decayed)


def test_what_becomes_of_ballast(adoption):
    """Its values are zero when it is adopted, and a step of training gives it some."""
    still, moved = (replace(ADOPTED, growths=(replace(ADOPTED.growths[0], lr=lr),)) for lr in (0.0, 1e-2))
    for run in (still, moved):
        train(run)
    before, after = adoption.ballast_use(still), adoption.ballast_use(moved)
    assert [layer["share"] for layer in before["layers"]] == [0, 0]
    assert [layer["values"]["ballast"] for layer in before["layers"]] == [0, 0]
    assert before["loss"] == before["without_values"] != before["dropped"] != before["others_dropped"]
    for layer in after["layers"]:
        assert 0 < layer["share"] < 1
        assert 0 < layer["values"]["ballast"] < layer["values"]["host"]
    assert after["loss"] != after["without_values"]
    (layer, places), *_ = adoption.tokens_of(finished_model(moved)).values()
    kinds = {kind: some.tolist() for kind, some in places.items()}
    assert kinds == {"host": [*range(41)], "ballast": [*range(41, 65)], "new": [*range(65, 91)]}
    assert layer.num_tokens == 91


@pytest.mark.parametrize(
    ("change", "places"),
    [
        ({"method": "split", "sizes": (("*.dense_h_to_4h", 140),)}, [*range(41, 65), *range(106, 130)]),
        ({"method": "split", "ballast": "single", "sizes": (("*.dense_h_to_4h", 90),)}, [41, 83]),
        ({"method": "zero", "sizes": (("*.dense_h_to_4h", 67),)}, [*range(41, 65)]),
    ],
)
def test_where_ballast_is(adoption, change, places):
    run = replace(ADOPTED, growths=(replace(ADOPTED.growths[0], **change, adopts=("ffn",)),))
    train(run)
    (layer, found), *_ = adoption.tokens_of(finished_model(run)).values()
    assert found["ballast"].tolist() == places
    assert sorted(place for some in found.values() for place in some.tolist()) == list(range(layer.num_tokens))
    assert ("dropped" in adoption.ballast_use(run)) == (run.growths[0].ballast == "spread")


def test_what_became_of_ballast_is_kept_with_the_losses(adoption, monkeypatch, tmp_path):
    monkeypatch.setattr(kept, "FILE", tmp_path / "measured.jsonl")
    monkeypatch.setattr(lab.train, "KEPT", {})
    monkeypatch.setattr(adoption, "runs", lambda way: {1000: [ADOPTED]} if way == adoption.ADOPTED else {})
    adoption.look()
    train(ADOPTED)
    for _ in range(2):  # the second time there is nothing left to look at
        experiments.look_and_keep([adoption])
    end, found = ADOPTED.segments()[-1], {"kind": "ballast", **adoption.ballast_use(ADOPTED)}
    assert [line["kind"] for line in lab.train.trained(end)["lines"]].count("ballast") == 1
    monkeypatch.setattr(lab.train, "STORE", tmp_path / "new machine")
    assert last(ADOPTED, "ballast") is None
    kept.take()
    adoption.look()
    assert last(ADOPTED, "ballast") == found


def test_the_transformer_has_as_many_parameters():
    for tokens in (32, 64, 128, 256, 512):
        ours, theirs = (
            build(shape).num_parameters() for shape in (TokenFormer(tokens), equal_neox(TokenFormer(tokens)))
        )
        assert theirs == pytest.approx(ours, rel=0.02)
    ours = TokenViT(72, width=96, heads=3)
    assert build(equal_vit(ours)).num_parameters() == pytest.approx(build(ours).num_parameters(), rel=0.02)


def test_replaced_layers_have_as_many_parameters():
    plain = build(NeoX(24)).num_parameters()
    for parts in (("query",), ("key", "value"), ("dense",), ("mlp",), ("query", "key", "value", "dense", "mlp")):
        model = build(NeoX(24, replaced=parts))
        assert model.num_parameters() == pytest.approx(plain, rel=0.03)  # the biases go
        assert sum("key_tokens" in name for name, _ in model.named_parameters()) == 4 * len(parts)


def test_separate_projections_are_the_joint_one():
    joint = build(NeoX(24)).gpt_neox.layers[0].attention.query_key_value
    separate = SeparateProjections(24, heads=4, std=0.02)
    parts = joint.weight.detach().view(4, 3, 6, 24).transpose(0, 1).reshape(3, 24, 24)
    for part, name in zip(parts, ("query", "key", "value"), strict=True):
        getattr(separate, name).weight.data = part
    x = torch.randn(5, 24)
    assert torch.allclose(separate(x), joint(x))


def test_the_rates_are_those_of_tokenformer_train():
    changes = ["growth.warmup_steps=20", "growth.decay_steps=100", "training.learning_rate=0.5"]
    changes.append("growth.stages.2.learning_rate=0.25")
    recipe = load_recipe(ROOT / "recipes" / "enwik8_ladder.yaml", changes)
    ladder = build_ladder(recipe, 1)
    steps = ladder.stages[-1].end
    growths = [Growth(stage.start) for stage in ladder.stages[1:]]
    growths[1] = replace(growths[1], lr=0.25)
    run = Run(TINY, 0.5, steps, growths=tuple(growths), warmup=20, decay=100 / steps)
    for step in (0, 5, 19, 20, 1000, 2399, 2400, 3300, steps - 100, steps - 50, steps - 1):
        assert run.learning_rate(step) == pytest.approx(0.5 * ladder.rate_factor(step))
    assert [ladder.rate_factor(step) for step in (2399, 2400)] == [1, 0.5]


def test_rates_are_tried_to_the_end_until_a_lower_one_is_worse(monkeypatch):
    """What is best after PROBE steps need not be best in the end; as long as a run is missing nothing is chosen."""
    model, ends = sizes.token_former(128), {}

    def loss(run):
        return {1e-3: 3.0, 2e-3: 2.0, 4e-3: 2.5}[run.lr] if run.steps == sizes.PROBE else ends.get(run.lr)

    for module in (results, sizes):
        monkeypatch.setattr(module, "final", loss)
    for lr, rates in ((2e-3, [1e-3, 2e-3]), (1e-3, [5e-4, 1e-3, 2e-3]), (5e-4, [5e-4, 1e-3, 2e-3])):
        assert sizes.rate_of(model) is None
        assert sizes.seeded(model) == []
        ends[lr] = {2e-3: 1.6, 1e-3: 1.5, 5e-4: 1.55}[lr]
        assert [run.lr for run in sizes.to_the_end(model)] == rates
    assert sizes.rate_of(model) == 1e-3
    assert [(run.lr, run.steps, run.seed) for run in sizes.seeded(model)] == [(1e-3, 2000, seed) for seed in (0, 1, 2)]


def test_seeds_decide_between_rates_that_tie(monkeypatch):
    model, found = sizes.token_former(128), {}

    def loss(run):
        if run.steps == sizes.PROBE:
            return {1e-3: 3.0, 2e-3: 2.0, 4e-3: 2.5}[run.lr]
        return found.get((run.lr, run.seed))

    for module in (results, sizes):
        monkeypatch.setattr(module, "final", loss)
    found |= {(1e-3, 0): 1.501, (2e-3, 0): 1.5}
    assert [[run.lr for run in runs] for runs in sizes.contenders(model)] == [[2e-3] * 3, [1e-3] * 3]
    assert {run.lr for run in sizes.seeded(model)} == {2e-3}
    found |= {(lr, seed): {1e-3: 1.48, 2e-3: 1.49}[lr] for lr in (1e-3, 2e-3) for seed in (1, 2)}
    assert {run.lr for run in sizes.seeded(model)} == {1e-3}
    found[1e-3, 0] = 1.52
    assert [runs[0].lr for runs in sizes.contenders(model)] == [2e-3]


@pytest.mark.parametrize(("narrow", "expected"), [(1.5, sizes.NARROW), (1.9, 148**-0.5)])
def test_a_peer_has_the_better_of_two_initialisations(monkeypatch, narrow, expected):
    """Both go to the end at the best rate of the first, and the better is then tried at all rates."""
    model, wide, known = sizes.models(128)[1], 148**-0.5, {}
    monkeypatch.setattr(results, "final", lambda run: known.get((run.model.init, run.lr, run.steps)))
    known |= {(wide, 2e-3, 600): 2.0, (wide, 4e-3, 600): 1.8}
    assert [(run.model.init, run.steps) for run in sizes.probes(model)] == [(wide, 600)] * 3
    known[wide, 8e-3, 600] = 2.1
    both = [(wide, 4e-3, 2000), (sizes.NARROW, 4e-3, 2000)]
    assert [(run.model.init, run.lr, run.steps) for run in sizes.probes(model)][3:] == both
    known[both[0]] = 1.7
    assert sizes.initialised(model) is None
    assert sizes.to_the_end(model) == []
    known[both[1]] = narrow
    assert sizes.initialised(model).init == expected
    assert {run.lr for run in sizes.probes(model) if run.model.init == expected} == {2e-3, 4e-3, 8e-3}
    known |= {(sizes.NARROW, 2e-3, 600): 2.0, (sizes.NARROW, 4e-3, 600): 1.9, (sizes.NARROW, 8e-3, 600): 2.0}
    assert {(run.model.init, run.lr) for run in sizes.to_the_end(model)} == {(expected, 2e-3), (expected, 4e-3)}


def test_flops_follow_the_growth():
    small, large = (cost.training_flops_per_token(lab.models.config_of(replace(TINY, tokens=n)), 16) for n in (8, 16))
    run = replace(SHORT, growths=(Growth(3),))
    assert flops(run) == 32 * (3 * small + 7 * large)
    assert flops(run, 5, since=2) == 32 * (small + 2 * large)
    assert parameters(run) == build(replace(TINY, tokens=16)).num_parameters()


def test_the_flops_of_muon_are_torchs():
    run = replace(SHORT, optimizer="muon")
    model = build(TINY)
    optimizer = optimizer_of(model, run)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with FlopCounterMode(display=False) as counted:
        optimizer.step()
    assert flops(run) - flops(SHORT) == run.steps * counted.get_total_flops()


def test_momentum_is_carried_across_growth():
    run = replace(GROWN, optimizer="muon", growths=(Growth(3, method="rotate"),))
    train(run)
    before, after = (Training(segment) for segment in run.segments()[:2])
    before._load(folder_of(before.segment) / "state.pt")
    for name, parameter in before.model.named_parameters():
        momentum = before.optimizer.state[parameter].get("momentum_buffer")
        grown = after.optimizer.state[after.model.get_parameter(name)].get("momentum_buffer")
        assert (momentum is None) == (grown is None) == (not name.endswith(("key_tokens", "value_tokens")))
        if momentum is not None:
            torch.testing.assert_close(grown[: len(momentum)], momentum)


def test_a_branch_of_a_ladder_spends_its_budget_and_shares_its_past():
    frontier = importlib.import_module("frontier.experiment")
    steps = [Growth(1500, 2, method="rotate"), Growth(3000, 2, method="rotate", depth=8)]
    ladder = frontier.Ladder(("32 tokens", "64 tokens", "128 tokens"), tuple(steps), 2e-3)
    branches = ladder.branches()
    for budget, run in zip(frontier.BUDGETS, branches, strict=True):
        assert flops(run) == pytest.approx(budget, rel=2e-3)
        assert all(growth.step <= run.decay_start for growth in run.growths)
    assert [len(run.growths) for run in branches] == [0, 0, 0, 1, 2, 2]
    trunk = {segment.name for segment in branches[-1].segments()}
    assert all(segment.name in trunk for run in branches for segment in run.segments()[:-1])


def test_what_runs_are_called_does_not_change():
    """Else what is kept of them would be lost."""
    run = sizes.scratch(sizes.token_former(64), 2e-3)
    assert [segment.name for segment in run.segments()] == ["13a89386a466ace3", "1177490ae8199076", "73ac36ad13b23f54"]
    measured = {json.loads(line)["segment"] for line in kept.FILE.read_text().splitlines()}
    for name in ("net2net", "progressive_scaling", "adopt", "vision_growth"):
        committed = json.loads((ROOT / "experiments" / name / "results.json").read_text())["runs"]
        assert {results.run_of(facts).segments()[-1].name for facts in committed} <= measured


def test_a_run_that_begins_with_another_has_its_own_schedule():
    ways = importlib.import_module("groups.ways")
    begins = sizes.scratch(sizes.token_former(64), 1e-3)
    run = ways.adapted(begins, ADAPTERS["own"], "fiction", 3e-3)
    rates = [run.learning_rate(step) for step in (0, 9, 19, 100, 199, 250, 299)]
    assert rates == pytest.approx([0.05 * 3e-3, 0.5 * 3e-3, 3e-3, 3e-3, 3e-3, 0.5 * 3e-3, 0.01 * 3e-3])
    assert [segment.end for segment in run.all_segments()] == [480, 1600, 2000, 300]
    assert run.all_segments()[:-1] == begins.segments()
    assert run.segments()[0].before is None
    assert run.old_text == replace(run, begins=run).old_text == "enwik8"
    (name,) = {segment.name for segment in run.segments()}
    other = replace(begins, seed=1)
    changed = [{"begins": other}, {"adapter": ADAPTERS["shared"]}, {"text": "questions"}, {"lr": 1e-3}, {"begins": run}]
    names = {replace(run, **change).segments()[-1].name for change in changed}
    assert len(names) == len(changed)
    assert name not in names
    assert results.run_of(json.loads(json.dumps(results.facts(run)))) == run


@pytest.mark.parametrize(
    ("model", "way"),
    [
        *(pytest.param(TINY, way, id=f"TokenFormer-{way}") for way in ADAPTERS),
        *(
            pytest.param(NeoX(24, layers=2, heads=2), way, id=f"GPT-NeoX-{way}")
            for way in ADAPTERS
            if way not in ("own, two layers", "shared")
        ),
    ],
)
def test_only_an_adapter_learns_and_both_texts_are_measured(model, way):
    begins = replace(SHORT, model=model)
    run = replace(BEGUN, model=model, begins=begins, adapter=ADAPTERS[way])
    train(begins)
    first = first_model(run)
    ids = data.held_out("fiction", "test", 16, 2)
    torch.testing.assert_close(first(ids).logits, finished_model(begins)(ids).logits)
    learning = {name for name, p in first.named_parameters() if p.requires_grad}
    assert (len(learning) == len(list(first.parameters()))) == (way == "full")
    start = {name: p.detach().clone() for name, p in first.named_parameters()}
    train(run)
    end = state(run.segments()[-1])["model"]
    assert {name for name, tensor in start.items() if not torch.equal(tensor, end[name])} == learning
    assert last(run, "end")["trained"] == sum(start[name].numel() for name in learning)
    for line in lines(run):
        assert ("old_loss" in line) == (line["kind"] in ("validation", "end", "test"))


def test_what_a_run_begins_with_is_measured_by_a_step_at_no_rate(monkeypatch):
    ways = importlib.import_module("groups.ways")
    monkeypatch.setattr(ways, "base", lambda name, seed=0: replace(SHORT, seed=seed))
    (before,) = ways.before("TokenFormer", "fiction", seed=1)
    train(before.begins)
    train(before)
    for kind in ("end", "test"):
        assert last(before, kind)["old_loss"] == final(before.begins, kind)


@pytest.mark.parametrize("way", ["own", "lora", "full"])
def test_a_killed_adapter_goes_on_bit_by_bit(way):
    train(SHORT)
    run = replace(BEGUN, adapter=ADAPTERS[way])
    train_with_interruptions(run)
    interrupted = state(run.segments()[-1])["model"]
    shutil.rmtree(folder_of(run.segments()[-1]))
    train(run)
    undisturbed = state(run.segments()[-1])["model"]
    assert all(torch.equal(interrupted[name], tensor) for name, tensor in undisturbed.items())


def test_the_pool_trains_what_a_run_begins_with_first(monkeypatch, capfd):
    monkeypatch.setattr("lab.pool.time.sleep", lambda _: None)
    run = replace(BEGUN, adapter=ADAPTERS["own"])
    train_all(lambda: [run])
    started = [line.split()[2] for line in capfd.readouterr().out.splitlines() if " start " in line]
    assert started == [segment.name for segment in (*SHORT.segments(), *run.segments())]


def test_keys_are_hidden_states_as_long_as_random_ones():
    run = replace(BEGUN, adapter=ADAPTERS["own, keys of hidden states"])
    model, ids = build(TINY), data.TrainingBlocks("fiction", 16, 1).batch(0, 32)
    seen = []
    model.model.layers[0].ffn.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().flatten(0, 1)))
    model(ids)
    keys = with_adapter(model, run).model.layers[0].ffn.token_groups["fiction"].key_tokens
    hidden = torch.nn.functional.normalize(seen[0], dim=-1)
    assert (hidden @ keys.T).max(dim=0).values.tolist() == pytest.approx([1.0] * 3, abs=1e-5)
    assert keys.norm(dim=-1).tolist() == pytest.approx([1.0] * 3)


def test_values_have_a_share_of_the_rate():
    run = replace(BEGUN, adapter=ADAPTERS["own, rates by 1/n"])
    model = with_adapter(build(TINY), run)
    names = {id(parameter): name.rpartition(".")[2] for name, parameter in model.named_parameters()}
    shares = {names[id(p)]: group["share"] for group in optimizer_of(model, run).param_groups for p in group["params"]}
    assert shares == {"key_tokens": 1.0, "value_tokens": 2.0}


def test_ways_to_learn_have_as_many_parameters():
    ways = importlib.import_module("groups.ways")
    wanted = dict(zip(ways.BUDGETS, (13_312, 53_248, 199_680), strict=True))
    for name, way in ways.WAYS.items():
        for budget, given in way.sizes.items():
            run = replace(BEGUN, model=ways.BASES[way.base], adapter=Adapter(way.adapter, given))
            model = with_adapter(build(run.model), run)
            learning = sum(p.numel() for p in model.parameters() if p.requires_grad)
            assert learning == pytest.approx(wanted.get(budget, model.num_parameters()), rel=0.04), name
    for budget in ways.BUDGETS:
        for idea in ways.IDEAS.values():
            run = replace(BEGUN, model=ways.BASES["TokenFormer"], adapter=idea(ways.WAYS[ways.OWN].sizes[budget][0][1]))
            model = with_adapter(build(run.model), run)
            assert sum(p.numel() for p in model.parameters() if p.requires_grad) == wanted[budget]


def test_groups_that_were_learnt_apart_compute_together_what_they_did(monkeypatch):
    domains = importlib.import_module("groups.domains")
    monkeypatch.setattr(domains, "PROMPT", 4)
    monkeypatch.setattr(domains, "BLOCKS", 40)
    learnt = [replace(BEGUN, text=text, seed=0, adapter=ADAPTERS["own"], lr=0.1) for text in domains.DOMAINS]
    turned = [replace(BEGUN, text=domains.DOMAINS[0], seed=0, adapter=ADAPTERS["full"])]
    turned.append(replace(turned[0], text=domains.DOMAINS[1], begins=turned[0]))
    train(SHORT)
    for run in (*learnt, *turned):
        train(run)
    found = domains.losses_by_text(learnt, turned[-1])
    assert list(found) == ["enwik8", *domains.DOMAINS]
    ids = data.held_out("python", "test", 16, 40)

    def loss(run):
        return pytest.approx(domains.loss_after_prompt(finished_model(run), ids), rel=1e-5)

    for run in learnt:  # in these tests all texts are the same
        assert found[run.text]["losses"]["right"] == loss(run)
        assert found[run.text]["losses"]["none"] == found["enwik8"]["losses"]["right"] == loss(SHORT)
        assert found[run.text]["losses"]["in turn"] == loss(turned[-1])
        assert found[run.text]["losses"]["all"] != found[run.text]["losses"]["chosen"]
        assert sum(found[run.text]["chosen"].values()) == 40
    assert sum(one["accuracy"] for one in found.values()) == pytest.approx(1)


def test_texts_are_found_or_named(monkeypatch, tmp_path):
    monkeypatch.setenv("ZERO_SHOT", str(tmp_path))
    for text, file in (("fiction", "lambada_openai.jsonl"), ("questions", "arc_easy.jsonl")):
        with pytest.raises(SystemExit, match=f"{file} does not exist; let ZERO_SHOT name a folder with {file}$"):
            texts.bytes_of(text)
    rows = {
        "lambada_openai.jsonl": [{"text": "One\u2028two."}, {"text": "Three."}],
        "arc_easy.jsonl": [{"question": "Which?", "choices": {"text": ["this", "that"]}}],
        "piqa.jsonl": [{"goal": "To sit", "sol1": "a chair", "sol2": "a nail"}],
    }
    for name, lines_of_one in rows.items():
        (tmp_path / name).write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in lines_of_one))
    assert texts.bytes_of("fiction").decode() == "One\u2028two.\n\nThree."
    assert texts.bytes_of("questions") == b"Which?\nthis\nthat\n\nTo sit\na chair\na nail"
    assert b"#pragma once" in texts.bytes_of("cpp")
    assert b"def " in texts.bytes_of("stubs")
    assert texts.edition("enwik8") == "enwik8"
    assert texts.edition("cpp") == f"cpp {torch.__version__}"
    with pytest.raises(SystemExit, match="'novels' is not a text; choose from enwik8, python, fiction"):
        texts.bytes_of("novels")


def test_compute_counts_what_runs_share_once():
    grown = replace(SHORT, growths=(Growth(3),))
    assert [segment.end for segment in SHORT.segments()] == [8, 10]  # the other leaves it in the middle of the first
    assert compute([SHORT, grown, SHORT]) == flops(SHORT) + flops(grown, since=3)


def test_held_out_text_is_not_trained_on():
    trained = set(data.TrainingBlocks("python", 16, 0).blocks.flatten().data_ptr() + torch.arange(3600).numpy())
    for part in ("validation", "test"):
        begin = data.split("python", part).data_ptr()
        assert not trained & set(range(begin, begin + 200))
    first, second = (data.TrainingBlocks("python", 16, seed).batch(0, 8) for seed in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", experiments.names())
def test_an_experiment_plans_and_reports(name, tmp_path, monkeypatch):
    experiment = importlib.import_module(f"{name}.experiment")
    monkeypatch.setattr(experiment, "HERE", tmp_path)
    if hasattr(experiment, "measure"):
        experiment.measure(quick=True)
    else:
        assert experiment.plan()
    assert f"make experiment NAME={name}" in experiment.__doc__
    experiment.report()
    assert experiment.tables(json.loads((tmp_path / "results.json").read_text())["findings"])
    assert json.loads((tmp_path / "results.json").read_text())["runs"] == []


@pytest.mark.parametrize("name", experiments.names())
def test_an_experiment_has_its_results(name):
    folder = ROOT / "experiments" / name
    row = next(line for line in (ROOT / "experiments" / "README.md").read_text().splitlines() if f"]({name})" in line)
    if row.endswith("| not run yet |"):
        assert not (folder / "results.json").exists()
        return
    assert json.loads((folder / "results.json").read_text())["findings"]
    readme = (folder / "README.md").read_text()
    assert f"make experiment NAME={name}" in readme
    for figure in folder.glob("*.png"):
        assert figure.name in readme


def test_tables_say_what_the_results_say():
    for page in pages():
        assert with_tables(page.read_text(), experiments.tables_of) == page.read_text(), page


def test_a_wrong_name_is_one_line():
    with pytest.raises(SystemExit, match="'thetta' is not an experiment; choose from"):
        experiments.main(["thetta"])
    with pytest.raises(SystemExit, match="say which experiment"):
        experiments.main([])
