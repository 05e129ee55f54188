"""The model card: what a model is, how it was grown and trained, and how to use it, as a README.md beside its weights.

Enters: a TokenFormer or an adopted model, and `CardFacts` for what the model itself cannot know. Leaves: README.md. Its
front matter, which the Hub reads, holds the facts as well, so that they follow the model when it is loaded, grown and
saved elsewhere. A card that somebody has edited is never overwritten: the last line holds a digest of what we wrote.
"""

import glob
import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from ..pattention import pattention_layers
from .adopted import Adopted, record_of
from .config import TokenFormerBaseConfig
from .side_files import MODEL_KINDS

CARD_FILE = "README.md"
# `owner/name`, or the name alone of the Hub's oldest models.
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
OUR_KEY = "tokenformer"  # of the front matter: the facts for which the Hub has no field
SIGNED = "<!-- Written by tokenformer ({digest}). Once edited, this card is left as it is. -->\n"

TEMPLATE = """\
# {title}

{summary}

## Size
{size}

## Load
After `pip install {package}`:

```python
import tokenformer  # registers the model with transformers
from transformers import {loader}

model = {loader}.from_pretrained("path/to/this/folder")  # or its name on the Hub
```
{use}
## Grow it further
```python
bigger = tokenformer.grow(model, factor=2, method="{method}")  # twice the parameter tokens, the same outputs
```

## How it was grown
{growth}

## Data
{data}

## Training
{training}

## Licence
{licence}

## Cite
```bibtex
@inproceedings{{wang2025tokenformer,
  title     = {{TokenFormer: Rethinking Transformer Scaling with Tokenized Model Parameters}},
  author    = {{Wang, Haiyang and Fan, Yue and Naeem, Muhammad Ferjad and Xian, Yongqin and Lenssen, Jan Eric and
               Wang, Liwei and Tombari, Federico and Schiele, Bernt}},
  booktitle = {{International Conference on Learning Representations}},
  year      = {{2025}},
  url       = {{https://arxiv.org/abs/2410.23168}}
}}
```

"""

# Steps for which no seed decides anything.
DRAWS_NOTHING = ("shrink", "sort")
# More scales than this are shown as a range.
MOST_TAUS = 4

PIPELINES = {
    "ForImageClassification": "image-classification",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
}

USES = {
    "text-generation": """
## Generate text
```python
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
prompt = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))
```
""",
    "image-classification": """
## Classify images
```python
from transformers import pipeline

classify = pipeline("image-classification", "path/to/this/folder")
print(classify("picture.png"))
```
""",
}


@dataclass(frozen=True)
class StageFacts:
    """One stage of training: the model's size, the steps and tokens or images so far, and the losses on held-out data.

    The losses are those of the weights that were saved, be they the last or the averaged ones.
    """

    parameters: int
    steps: int
    seen: int
    method: str | None = None
    loss_before_growth: float | None = None
    loss_after_growth: float | None = None
    loss: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True)
class CardFacts:
    """What a card says that the model itself does not know.

    license: as the Hub abbreviates it, for example apache-2.0. base_model: the model that it was adopted from or
    fine-tuned from. datasets: what it was trained on. Names in these two are the Hub's; local ones start with `./`.
    unit: what the stages' `seen` counts.
    """

    license: str | None = None
    base_model: str | None = None
    datasets: tuple[str, ...] = ()
    tokenizer: str | None = None
    recipe: str | None = None
    unit: str = "tokens"
    stages: tuple[StageFacts, ...] = ()


def write_card(model: PreTrainedModel, folder: str | os.PathLike, facts: CardFacts | None = None) -> None:
    """Write the card of a model into its folder, unless there is one that we did not write or that was edited.

    Without `facts`, those of the folder from which the model was loaded are kept.
    """
    path = Path(folder) / CARD_FILE
    if path.exists() and not _is_ours(path.read_text(errors="replace")):
        return
    text = render_card(model, read_facts(model.name_or_path or "") if facts is None else facts)
    path.write_text(text + SIGNED.format(digest=_digest(text)))


def read_facts(folder: str | os.PathLike) -> CardFacts:
    """The facts in a folder's card, whoever wrote it; empty if there is no card, or it cannot be read."""
    path = Path(folder) / CARD_FILE
    if not str(folder) or not path.is_file():
        return CardFacts()
    try:
        found = ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
        ours = dict(found.get(OUR_KEY) or {})
        ours["stages"] = tuple(StageFacts(**stage) for stage in ours.get("stages") or ())
        ours["datasets"] = tuple(ours.get("datasets") or _listed(found.get("datasets")))
        base = ours.pop("base_model", None) or next(iter(_listed(found.get("base_model"))), None)
        return CardFacts(license=found.get("license"), base_model=base, **ours)
    except (ValueError, TypeError, yaml.YAMLError):  # front matter that is not ours, or that was edited
        return CardFacts()


def derived_facts(source: str | os.PathLike, name: str) -> CardFacts:
    """The facts of a model made from the one in the folder `source`, which is called `name`, on the Hub or here."""
    return replace(read_facts(source), base_model=public_name(name), recipe=None, stages=())


def public_name(name: str) -> str:
    """The name of a model or dataset as a card shows it: for a local path, `./` and its last part."""
    path = Path(name).expanduser()
    return f"./{path.name}" if path.exists() or path.is_absolute() or glob.has_magic(name) else name


def render_card(model: PreTrainedModel, facts: CardFacts) -> str:
    """The card's text."""
    config: Any = model.config
    record = record_of(config)
    pipeline = _pipeline(model)
    body = TEMPLATE.format(
        **(_describe(model) if record is None else _describe_adopted(model, record)),
        package='"tokenformer[vision]"' if pipeline == "image-classification" else "tokenformer",
        use=USES.get(pipeline or "", ""),
        growth=_growth(config, record),
        data=_data(facts),
        training=_training(facts),
        licence=facts.license or "Not recorded. Before publishing the model, add `license:` to the front matter.",
    )
    return f"---\n{_front_matter(facts, pipeline)}\n---\n{body}"


def growth_steps(config: TokenFormerBaseConfig) -> list[str]:
    """One line for each growth step: the method, the seed, and the token counts and blocks before and after."""
    return [_growth_step(step, config) for step in config.growth_history or []]


def _growth_step(step: dict[str, Any], config: TokenFormerBaseConfig | None = None) -> str:
    """An adopted model has no configuration of ours, and its steps say nothing of token counts."""
    blocks, parts = step.get("blocks"), []
    method = step["method"] if step["method"] in DRAWS_NOTHING else f"{step['method']} (seed {step['seed']})"
    if config is None or step["method"] == "sort":
        parts.append(method)
    elif step["before"] != step["after"]:
        parts.append(f"{method}: {_counts(config, step['before'])} -> {_counts(config, step['after'])}")
    if "group" in step:
        parts.append(f"token group {step['group']} (seed {step['seed']})")
    if blocks is not None:
        where = blocks["new_blocks_at"].replace("_", " ")
        parts.append(f"{blocks['before']} -> {blocks['after']} blocks ({blocks['new_blocks']}, {where})")
    return ", ".join(parts)


def _counts(config: TokenFormerBaseConfig, tokens: dict[str, int]) -> str:
    # config.json sorts its keys alphabetically; the card's table has them in the order of token_roles.
    return "/".join(str(tokens[role]) for role in config.token_roles)


def _front_matter(facts: CardFacts, pipeline: str | None) -> str:
    base_model, datasets = _on_the_hub([facts.base_model or ""]), _on_the_hub(facts.datasets)
    ours: dict[str, Any] = {"recipe": facts.recipe, "tokenizer": facts.tokenizer}
    # The Hub refuses names in its own fields that cannot be one of its names.
    ours["base_model"] = None if base_model else facts.base_model
    ours["datasets"] = None if len(datasets) == len(facts.datasets) else list(facts.datasets)
    if facts.stages:
        ours |= {"unit": facts.unit, "stages": [_without_none(asdict(stage)) for stage in facts.stages]}
    more: Any = {OUR_KEY: _without_none(ours)} if any(ours.values()) else {}
    measured = [
        name for name in ("loss", "accuracy") if any(getattr(stage, name) is not None for stage in facts.stages)
    ]
    return ModelCardData(
        license=facts.license,
        library_name="transformers",
        pipeline_tag=pipeline,
        base_model=base_model[0] if base_model else None,
        datasets=datasets or None,
        tags=["tokenformer"],
        metrics=measured or None,
        **more,
    ).to_yaml()


def _pipeline(model: PreTrainedModel) -> str | None:
    """The Hub's name for what the model does."""
    if model.can_generate():
        return "text-generation"
    return next((task for head, task in PIPELINES.items() if type(model).__name__.endswith(head)), None)


def _describe(model: PreTrainedModel) -> dict[str, str]:
    config: Any = model.config
    kind = MODEL_KINDS[config.model_type]
    taus = sorted({round(layer.tau.item(), 2) for _, layer in pattention_layers(model) if not layer.tau.is_meta})
    rows = {
        "parameters": f"{model.num_parameters():,}",
        "width, layers, heads": f"{config.hidden_size}, {config.num_hidden_layers}, {config.num_attention_heads}",
        "parameter tokens (each of query, key, value / output / feed-forward)": " / ".join(
            str(count) for count in config.num_tokens.values()
        ),
        "Pattention": f"{config.pattention_kind}, tau {_listed_taus(taus)}",
    }
    return {
        "title": kind.title,
        "loader": kind.auto(model),
        # What is best to train on with, if it is exact.
        "method": config.growth_method,
        "summary": "Every linear projection in the blocks of this model is an attention over learnable parameter "
        "tokens (Pattention), so the model can be grown by appending tokens without changing what it computes.",
        "size": f"{_table(['', ''], rows.items())}\n{kind.inputs.format(config=config)}",
    }


def _describe_adopted(model: PreTrainedModel, record: Adopted) -> dict[str, str]:
    tokens: dict[str, set[int]] = {}
    for name, layer in record.layers.items():
        tokens.setdefault(re.sub(r"\.\d+\.", ".*.", name), set()).add(layer["num_tokens"])
    rows = {
        "parameters": f"{model.num_parameters():,}",
        **{
            f"parameter tokens in each `{name}`": " to ".join(
                f"{count:,}" for count in sorted({min(found), max(found)})
            )
            for name, found in tokens.items()
        },
    }
    return {
        "title": f"An adopted {model.config.model_type}",
        "loader": _auto_class(model),
        "method": record.growth_method,
        "summary": "Some layers of this model are attentions over learnable parameter tokens (Pattention). When they "
        "replaced the original's layers they computed the same, and the model can be grown by appending tokens without "
        "changing what it computes.",
        "size": _table(["", ""], rows.items()),
    }


def _listed_taus(taus: list[float]) -> str:
    """Those of a model are few, unless it was shrunk."""
    if len(taus) > MOST_TAUS:
        return f"{taus[0]:g} to {taus[-1]:g}"
    return ", ".join(f"{tau:g}" for tau in taus) or "as saved"


def _auto_class(model: PreTrainedModel) -> str:
    """The Auto class that finds the model by its configuration; its own class if there is none."""
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None) if isinstance(auto, type) else None
        if mapping is not None and name != "AutoModelForPreTraining" and type(model.config) in mapping:
            found = mapping[type(model.config)]
            if type(model) in (found if isinstance(found, tuple) else (found,)):
                return name
    return type(model).__name__


def _growth(config: Any, record: Adopted | None) -> str:
    steps = growth_steps(config) if record is None else [_growth_step(step) for step in record.growth]
    return "\n".join(f"{i}. {step}" for i, step in enumerate(steps, start=1)) or "It has not been grown."


def _data(facts: CardFacts) -> str:
    lines = [f"- {name}" for name in facts.datasets]
    lines += [f"- tokenizer: {facts.tokenizer}"] if facts.tokenizer else []
    return "\n".join(lines) or "Not recorded."


def _training(facts: CardFacts) -> str:
    parts = [f"Started from {facts.base_model}."] if facts.base_model else []
    if facts.recipe:
        parts.append(f"Trained with the recipe `{facts.recipe}`. Losses are measured on held-out data.")
    if facts.stages:
        columns = {
            "parameters": [f"{stage.parameters:,}" for stage in facts.stages],
            "steps so far": [f"{stage.steps:,}" for stage in facts.stages],
            f"{facts.unit} so far": [f"{stage.seen:,}" for stage in facts.stages],
            "growth": [stage.method or "" for stage in facts.stages],
            "loss before growth": [_number(stage.loss_before_growth) for stage in facts.stages],
            "loss after growth": [_number(stage.loss_after_growth) for stage in facts.stages],
            "loss at the end": [_number(stage.loss) for stage in facts.stages],
            "accuracy": [_number(stage.accuracy) for stage in facts.stages],
        }
        filled = {name: cells for name, cells in columns.items() if any(cells)}
        rows = zip(*filled.values(), strict=True)
        parts.append(_table(["stage", *filled], ([str(i), *row] for i, row in enumerate(rows, start=1))))
    return "\n\n".join(parts) or "Not recorded."


def _table(header: list[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("".join(f"| {cell} " if cell else "| " for cell in line) + "|" for line in lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _on_the_hub(names: Iterable[str]) -> list[str]:
    """Those of the names that can be names on the Hub."""
    return [name for name in names if HUB_NAME.fullmatch(name)]


def _listed(value: Any) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def _without_none(entries: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if value is not None}


def _is_ours(text: str) -> bool:
    """Whether the card is as we wrote it."""
    body, _, signature = text.rpartition("<!--")
    return f"<!--{signature}" == SIGNED.format(digest=_digest(body))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
