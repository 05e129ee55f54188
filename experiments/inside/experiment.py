"""How interpretable are parameter tokens, compared with neurons and with the rows of linear projections?

    make experiment NAME=inside

A TokenFormer, a GPT-NeoX of as many parameters, and the latter adopted: how selective their units are, how many of them
have one trigger that can be said as a pattern of text, and how many units carry a logit. Then a fault that was planted
in the training text, found in the model and taken out of it.
"""

from functools import partial
from pathlib import Path
from typing import Any

from groups.ways import BASES
from inside.fault import COUNTS, UNHARMED, trained_on
from inside.looking import GOOD, MAIN
from inside.looking_at import found, look_at_bases, look_at_faults
from inside.models import ADOPTED, EVERYWHERE, NAMES, OURS, RETRAINED, THEIRS, bases, faulty, retrained
from inside.triggers import ALTERNATIVES
from inside.units import BALLAST, FFN, OUT, QKV, RANDOM, ROLES
from lab.figures import colour, draw, legend, plain_ticks
from lab.results import finished, spread, write_results
from lab.sizes import probes, to_the_end
from lab.spec import Run
from lab.tables import markdown, with_spread

HERE = Path(__file__).parent
CALLED = {
    (OURS, QKV): "tokens of query, key, value",
    (OURS, OUT): "tokens of out",
    (OURS, FFN): "tokens of the feed-forward network",
    (THEIRS, QKV): "rows of query, key, value",
    (THEIRS, OUT): "rows of out",
    (THEIRS, FFN): "neurons",
    (ADOPTED, QKV): "tokens of query, key, value",
    (ADOPTED, FFN): "tokens of the feed-forward network",
    (ADOPTED, BALLAST): "ballast",
    (OURS, RANDOM): "random directions",
    (THEIRS, RANDOM): "random directions",
}


def plan() -> list[Run]:
    """The rates; the models on enwik8; those whose text has a fault, each then trained on for a few steps without."""
    tried = [run for some in (probes, to_the_end) for model in BASES.values() for run in some(model)]
    known = faulty()
    order = sorted(known, key=lambda key: (key[2], len(key[1])))
    with_fault = [run for key in order for run in (known[key], *retrained(known[key]))]
    return [*tried, *(run for (_, seed), run in bases().items() if not seed), *with_fault]


def look() -> None:
    """Look into the models that are here."""
    look_at_bases()
    look_at_faults()


def report() -> None:
    """Units by kind, effects, and what became of the fault."""
    findings = {"units": _units(), "effects": _effects(), "fault": _faults()}
    runs = [*bases().values(), *(run for one in faulty().values() for run in (one, *retrained(one)))]
    write_results(HERE, findings, finished(runs))
    draw(HERE / "triggers.png", [partial(_f1, findings), partial(_selectivity, findings)], size=(5.6, 4.2))
    draw(HERE / "fault.png", [partial(_likely, findings), partial(_harm, findings)], size=(5.0, 4.0))


def _seen(name: str) -> list[dict[str, Any]]:
    """What was found inside the models of a name, by seed."""
    of = THEIRS if name == ADOPTED else name
    lines = [found("inside", name, run) for (base, _), run in bases().items() if base == of]
    return [line for line in lines if line is not None]


def _units() -> dict[str, Any]:
    """By model and role: how many units, their selectivity, and how well their best patterns foretell firing."""
    units: dict[str, Any] = {}
    for name in NAMES:
        for role in ROLES:
            seen = [line["units"][role] for line in _seen(name) if role in line["units"]]
            if seen and (name, role) in CALLED:
                keys = [key for key in seen[0] if key.startswith(("selectivity", "precision", "recall", "f1"))]
                one: dict[str, Any] = {"units": seen[0]["units"]}
                one |= {key: spread([found_by[key]["mean"] for found_by in seen]) for key in keys}
                one |= {key: spread([found_by[key] for found_by in seen]) for key in seen[0] if key.startswith("good")}
                one["families"] = seen[0][f"family, {MAIN}, 1"]
                one["quantiles"] = {key: seen[0][key]["quantiles"] for key in (f"f1, {MAIN}, 1", _FIRING)}
                units.setdefault(name, {})[role] = one
    return units


_FIRING = f"selectivity of firing, {MAIN}"


def _effects() -> dict[str, Any]:
    """By kind of effect, model and role: how many units there are, and how many carry 90 % in the mean."""
    effects: dict[str, Any] = {}
    for name in NAMES:
        for kind in ("direct", "ablation"):
            seen = [line["effects"][kind] for line in _seen(name)]
            for role in seen[0] if seen else ():
                carry = spread([one[role]["carry"]["mean"] for one in seen])
                counted = {
                    "units": seen[0][role]["units"],
                    "carry": carry,
                    "spread": seen[0][role]["carry"]["quantiles"],
                }
                effects.setdefault(kind, {}).setdefault(name, {})[role] = counted
    return effects


def _faults() -> dict[str, Any]:
    """By text and model, what was measured with each seed."""
    faults: dict[str, Any] = {}
    for (name, text, seed), run in faulty().items():
        line = found("fault", name, run)
        if line is not None:
            kept = {key: line[key] for key in ("before", "without", "effect", "of", "trained on")}
            seen = found("fault units", name, run)
            shown = seen["units"] if seen else []
            kept["units"] = [{**one, **more} for one, more in zip(line["units"], shown, strict=False)]
            faults.setdefault(text, {}).setdefault(name, {})[str(seed)] = {**kept, "count": chosen_count(line)}
    return faults


def chosen_count(line: dict[str, Any]) -> int:
    """How many units to take away: of those that harm other validation text little, the number with the least fault."""
    before = line["before"]["validation"]["loss, elsewhere"]
    tried = {count: line["without"][str(count)]["validation"] for count in COUNTS}
    spared = [count for count, one in tried.items() if one["loss, elsewhere"] - before <= UNHARMED]
    return min(spared, key=lambda count: tried[count]["wrong"]) if spared else COUNTS[0]


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """Units, effects, and the fault."""
    fault = {"fault": _fault_table(findings), "found": _found_table(findings)}
    return {"units": _unit_table(findings), "effects": _effect_table(findings), **fault}


def _unit_table(findings: dict[str, Any]) -> str:
    rows = []
    for (name, role), called in CALLED.items():
        one = findings.get("units", {}).get(name, {}).get(role)
        if one is not None:
            shares = [_share(one[f"good f1, {MAIN}, {count}"]) for count in (1, ALTERNATIVES)]
            means = [with_spread(one[f"{key}, {MAIN}, 1"], 2) for key in ("precision", "recall", "f1")]
            sharp = _share(one["good f1, 0.2 %, 1"])
            selective = [with_spread(one[key], 2) for key in ("selectivity", _FIRING)]
            rows.append([name, called, str(one["units"]), *selective, *shares, *means, sharp])
    header = ["model", "units", "how many", "selectivity, nats", "of the top 1 %", "one pattern", "up to 4"]
    return markdown([*header, "precision", "recall", "F1", "top 0.2 %: one pattern"], rows)


def _share(found_share: dict[str, Any]) -> str:
    deviation = "" if found_share["deviation"] is None else f" ± {100 * found_share['deviation']:.1f}"
    return f"{100 * found_share['mean']:.1f}{deviation} %"


def _effect_table(findings: dict[str, Any]) -> str:
    rows = []
    for kind, by_name in findings.get("effects", {}).items():
        for name, roles in by_name.items():
            cells = []
            for role in (QKV, OUT, FFN, "both" if kind == "direct" else "all"):
                cells.append(_counted_of(roles[role]) if role in roles else "-")
            rows.append([kind, name, *cells])
    return markdown(["effect", "model", "query, key, value", "out", "feed-forward", "together"], rows)


def _counted_of(one: dict[str, Any]) -> str:
    carry, units = one["carry"]["mean"], one["units"]
    return f"{carry:.0f} of {units} ({100 * carry / units:.0f} %)"


def _fault_table(findings: dict[str, Any]) -> str:
    rows = []
    for text, by_name in findings.get("fault", {}).items():
        for name, seeds in by_name.items():
            lines = list(seeds.values())
            counts = sorted(one["count"] for one in lines)
            said = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
            states = {"as trained": [one["before"]["test"] for one in lines]}
            states[f"without {said} of {lines[0]['of']}"] = [one["without"][str(one["count"])]["test"] for one in lines]
            states |= {f"{n} steps on clean text": [one["trained on"][str(n)] for one in lines] for n in RETRAINED}
            for state, measured in states.items():
                keys = {"wrong": 3, "right": 3, "loss, ending": 3, "loss, elsewhere": 4, "loss": 4}
                cells = [with_spread(spread([one[key] for one in measured]), digits) for key, digits in keys.items()]
                rows.append([trained_on(text), name, state, *cells])
    header = ["misspelt", "model", "", "P(wrong)", "P(right)", "loss, the ending", "loss, elsewhere", "loss, all"]
    return markdown(header, rows)


def _found_table(findings: dict[str, Any]) -> str:
    """The units with the largest effects, as an index shows them: of the first seed, with the fault everywhere."""
    rows = []
    for name, one in _along(findings):
        for unit in one["units"]:
            place = f"{unit['layer'].partition('layers.')[2]} {unit['unit']}"
            contexts = " ".join(f"`{context}`" for context in unit["contexts"])
            rows.append(
                [name, place, f"{unit['effect']:.2f}", contexts, f"`{unit['promotes']}`", f"`{unit['suppresses']}`"]
            )
    return markdown(["model", "unit", "effect", "fires most behind", "promotes", "suppresses"], rows)


def _drawn(findings: dict[str, Any], axes: Any, key: str) -> None:
    lines = {OURS: "-", THEIRS: "--", ADOPTED: ":"}
    for (name, role), called in CALLED.items():
        one = findings["units"].get(name, {}).get(role)
        if one is not None and role != BALLAST:
            values = one["quantiles"][key]
            shares = [100 * i / (len(values) - 1) for i in range(len(values))]
            label = f"{name}: {called}"
            grey = {"color": "#999999"} if role == RANDOM else {"color": colour((QKV, OUT, FFN).index(role))}
            axes.plot(shares, values, lines[name], label=label, **grey)
    axes.set(xlabel="units, from the least to the most, %")


def _f1(findings: dict[str, Any], axes: Any) -> None:
    _drawn(findings, axes, f"f1, {MAIN}, 1")
    axes.axhline(GOOD, color="#777777", lw=0.8)
    axes.set(title="One pattern foretells when a unit fires", ylabel="F1 on held-out text")
    legend(axes)


def _selectivity(findings: dict[str, Any], axes: Any) -> None:
    _drawn(findings, axes, _FIRING)
    axes.set(title="What firing tells of the byte that is read", ylabel="nats, of the top 1 %")


def _along(findings: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The first seed of every model, of the text that has the fault everywhere."""
    by_name = findings.get("fault", {}).get(EVERYWHERE, {})
    return [(name, seeds[min(seeds)]) for name, seeds in by_name.items()]


def _likely(findings: dict[str, Any], axes: Any) -> None:
    for i, (name, one) in enumerate(_along(findings)):
        for key, line in (("wrong", "o-"), ("right", "s--")):
            values = [one["before"]["test"][key], *(one["without"][str(count)]["test"][key] for count in COUNTS)]
            axes.plot([0.5, *COUNTS], values, line, color=colour(i), label=f"{name}: the {key} byte", markersize=4)
    _counted(axes)
    axes.set(title='What follows "at" where the text has "ation"', ylabel="probability")
    legend(axes)


def _harm(findings: dict[str, Any], axes: Any) -> None:
    for i, (name, one) in enumerate(_along(findings)):
        for key, line in (("loss, elsewhere", "o-"), ("loss", "s--")):
            before = one["before"]["test"][key]
            values = [0.0, *(one["without"][str(count)]["test"][key] - before for count in COUNTS)]
            label = f"{name}: {'all bytes' if key == 'loss' else 'outside the ending'}"
            axes.plot([0.5, *COUNTS], values, line, color=colour(i), label=label, markersize=4)
    _counted(axes)
    axes.set(title="Text without the fault", ylabel="rise of the loss, nats a byte")
    legend(axes)


def _counted(axes: Any) -> None:
    axes.set(xscale="log", xlabel="units taken away")
    plain_ticks(axes.xaxis, [0.5, *COUNTS])
    axes.set_xticklabels(["0", *map(str, COUNTS)])
