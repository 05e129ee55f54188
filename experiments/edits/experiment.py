"""Facts written into a model: as one token, by ROME's rank-one change, and by training; what holds and what drifts.

    make experiment NAME=edits

A TokenFormer and a GPT-NeoX of as many parameters, which have learnt 720 facts from made text. A hundred of them are
changed, each from the unedited model: is the new one said, also in other words; is what was known of others still
there; and how far does the loss on other text move?
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from edits.looking import found, look_at
from edits.models import knowing, trials
from edits.ways import PROMPT, RANK_ONE, SUBJECT, TOKEN, TRAINED
from groups.ways import BASES
from lab.figures import colour, draw, legend
from lab.results import finished, spread, write_results
from lab.spec import Run
from lab.tables import markdown, number

HERE = Path(__file__).parent
WAYS = (f"{TOKEN}, {PROMPT}", f"{RANK_ONE}, {PROMPT}", TRAINED, f"{TOKEN}, {SUBJECT}", f"{RANK_ONE}, {SUBJECT}")
CALLED = {
    f"{TOKEN}, {PROMPT}": "one token",
    f"{RANK_ONE}, {PROMPT}": "rank one, the same key and value",
    TRAINED: "all weights trained",
    f"{TOKEN}, {SUBJECT}": "one token at the subject",
    f"{RANK_ONE}, {SUBJECT}": "rank one at the subject (ROME)",
}
SHARES = ("success", "in context", "paraphrase", "neighbours", "same subject")
DRIFTS = ("drift", "drift, all text")
GOAL = 0.001  # nats a word


def plan() -> list[Run]:
    """What finds the rates, and the models that know the facts."""
    return [*trials(), *knowing().values()]


def look() -> None:
    """Edit the models that are here."""
    look_at()


def report() -> None:
    """By model and way, means over all edits with their spread."""
    findings: dict[str, Any] = {}
    for (name, _), run in knowing().items():
        line = found(run)
        if line is not None:
            one = findings.setdefault(name, {"layer": line["layer"], "models": [], "edits": {}})
            one["models"].append({key: line[key] for key in ("known", "rate", "rates")} | {"seed": run.seed})
            for edit in line["edits"]:
                for way, measured in edit.items():
                    for key, value in measured.items():
                        one["edits"].setdefault(way, {}).setdefault(key, []).append(value)
    for one in findings.values():
        one["edits"] = {
            way: {key: _rounded(values) for key, values in by_key.items()} for way, by_key in one["edits"].items()
        }
    write_results(HERE, findings, finished(knowing().values()))
    draw(HERE / "edits.png", [partial(_panel, findings, name) for name in BASES], size=(5.4, 4.0))


def _rounded(values: list[float]) -> dict[str, Any]:
    found_spread = spread(values)
    return {**found_spread, "values": [round(value, 6) for value in values]}


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """What was said after the edits, and how far the loss moved."""
    long = {"edits": _table(findings, SHARES, _percent), "drift": _table(findings, DRIFTS, _nats, more=_quiet)}
    return {**long, "short": _short(findings)}


def _short(findings: dict[str, Any]) -> str:
    """Means alone, for the page of the library."""
    rows = []
    for name, one in findings.items():
        for way in (way for way in WAYS if way in one["edits"]):
            measured = one["edits"][way]
            shares = [f"{100 * measured[key]['mean']:.0f} %" for key in ("success", "paraphrase", "neighbours")]
            rows.append([name, CALLED[way], *shares, f"{measured['drift']['mean']:.5f}"])
    return markdown(
        ["model", "written as", "said", "in other words", "of others as before", "drift, nats a word"], rows
    )


def _table(
    findings: dict[str, Any], keys: tuple[str, ...], cell: Callable[[dict[str, Any]], str], more: Any = None
) -> str:
    rows = []
    for name, one in findings.items():
        for way in WAYS:
            measured = one["edits"].get(way)
            if measured is not None:
                count = len(measured["success"]["values"])
                cells = [cell(measured[key]) for key in keys]
                rows.append([name, CALLED[way], str(count), *cells, *(more(measured) if more else ())])
    header = ["model", "written as", "edits", *keys]
    return markdown([*header, *(["within 0.001", "fires on"] if more else [])], rows)


def _percent(one: dict[str, Any]) -> str:
    return f"{100 * one['mean']:.0f} ± {100 * (one['deviation'] or 0):.0f} %"


def _nats(one: dict[str, Any]) -> str:
    return f"{one['mean']:.5f} ± {one['deviation'] or 0:.5f}"


def _quiet(measured: dict[str, Any]) -> list[str]:
    """The share of edits whose drift is within the goal, and on how much of the other text the token fires."""
    drifts = measured["drift"]["values"]
    within = sum(abs(drift) <= GOAL for drift in drifts) / len(drifts)
    return [f"{100 * within:.0f} %", number(measured["fires on"]["mean"], 5) if "fires on" in measured else "-"]


def _panel(findings: dict[str, Any], name: str, axes: Any) -> None:
    """Of every way the shares, beside each other."""
    by_way = findings.get(name, {}).get("edits", {})
    shown = [way for way in WAYS if way in by_way]
    for i, way in enumerate(shown):
        at = [place + 0.8 * (i - (len(shown) - 1) / 2) / len(shown) for place in range(len(SHARES))]
        heights = [100 * by_way[way][key]["mean"] for key in SHARES]
        drift = by_way[way]["drift"]["mean"]
        axes.bar(at, heights, 0.8 / len(shown), color=colour(i), label=f"{CALLED[way]}: {drift:.5f}")
    axes.set(title=f"{name}: drift in nats a word", ylabel="edits, %", ylim=(0, 135))
    axes.set_xticks(range(len(SHARES)), SHARES, fontsize=8)
    legend(axes)
