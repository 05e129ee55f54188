"""The files beside the weights and the card: a loader for programs that do not import tokenformer, and those of the
tokenizer or image processor.

The loader is a file of imports that transformers runs for `from_pretrained(folder, trust_remote_code=True)`, so that
any program finds our classes where they are installed.
"""

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from transformers import PreTrainedModel

from ..errors import BadRequestError

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "*.model",
)

LOADER = "load_tokenformer"
LOADER_TEXT = """\
# Lets transformers find the classes of this model in the installed package tokenformer.
from {} import {}
"""


@dataclass(frozen=True)
class ModelKind:
    """What the card and the loader say about one kind of model."""

    title: str
    classes: dict[str, str]  # by Auto class
    inputs: str

    def auto(self, model: PreTrainedModel) -> str:
        """The Auto class that loads a model with its head."""
        found = {name: auto for auto, name in self.classes.items()}
        return found.get(type(model).__name__, "AutoModel")


MODEL_KINDS = {
    "tokenformer": ModelKind(
        "A TokenFormer language model",
        {
            "AutoConfig": "TokenFormerConfig",
            "AutoModel": "TokenFormerModel",
            "AutoModelForCausalLM": "TokenFormerForCausalLM",
            "AutoModelForSequenceClassification": "TokenFormerForSequenceClassification",
            "AutoModelForTokenClassification": "TokenFormerForTokenClassification",
            "AutoModelForQuestionAnswering": "TokenFormerForQuestionAnswering",
        },
        "| vocabulary, context | {config.vocab_size}, {config.max_position_embeddings} |",
    ),
    "tokenformer_vision": ModelKind(
        "A TokenFormer vision model",
        {
            "AutoConfig": "TokenFormerVisionConfig",
            "AutoModel": "TokenFormerVisionModel",
            "AutoModelForImageClassification": "TokenFormerForImageClassification",
        },
        "| image, patch, classes | {config.image_size} pixels, {config.patch_size} pixels, {config.num_labels} |",
    ),
}


def auto_map(classes: Mapping[str, str]) -> dict[str, str]:
    """For config.json: the loader's class for each Auto class."""
    return {auto: f"{LOADER}.{name}" for auto, name in classes.items()}


def write_loader(folder: str | os.PathLike, module: str, names: Iterable[str]) -> None:
    """Write the loader, which imports the classes of these names from a module of ours."""
    (Path(folder) / f"{LOADER}.py").write_text(LOADER_TEXT.format(module, ", ".join(sorted(names))))


# What to do about Python code that came with a model: for what has an option to run it, and for what has none.
GIVE_THE_OPTION = "if you have read it and trust it, give --trust-remote-code (in Python, trust_remote_code=True)"
LOAD_IT_YOURSELF = "load it in Python with trust_remote_code=True and save it as a model of this library"


def refuse_foreign_code(what: str, error: Exception, way_out: str = GIVE_THE_OPTION) -> None:
    """Raise an error that says so if transformers failed because it may not run the Python code of a folder.

    transformers runs such code only where it has no class of its own, and asks on standard input unless it is told.
    """
    if "trust_remote_code=True" in str(error):
        raise BadRequestError(f"{what} needs Python code that came with it, which was not run; {way_out}") from error


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a folder that belong to its tokenizer."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and any(fnmatchcase(path.name, name) for name in TOKENIZER_FILES)
    )


def copy_beside_weights(source: Path, target: Path) -> None:
    """Copy the files of a model's tokenizer or image processor, unchanged."""
    for path in (*tokenizer_files(source), *source.glob("*processor_config.json")):
        shutil.copyfile(path, target / path.name)
