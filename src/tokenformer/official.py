"""The authors' checkpoints into model folders, and back: `import_official` and `export_official`.

Enters: CHECKPOINT.bin, which torch.save wrote from a dictionary of tensors, and CONFIG.yml, or a model folder. Leaves:
the other, with every bit of the weights, if their code and ours compute the same model from it. Every key, shape and
setting is checked; settings that only concern training are ignored. docs/official.md is the page for users.

    tokenformer import-official pytorch_model.bin 150M.yml models/150m --tokenizer tokenizer.json
    tokenformer export-official models/150m pytorch_model.bin 150M.yml
"""

import math
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from .errors import BadFileError, BadRequestError, one_line
from .io import check_new, check_outside, existing_file, write_new
from .models import TokenFormerConfig, TokenFormerForCausalLM
from .models.loading import read_config, read_model, wrong_keys
from .models.side_files import LOAD_IT_YOURSELF
from .models.text import END_OF_TEXT
from .pattention import default_tau, pattention_layers

# tau is kept in fp32 and growth by split multiplies it: a few roundings do not make it a different tau. One appended
# token changes √n by 1 / 2n of it, which is more than this in any layer of less than half a million tokens.
TAU_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Conversion:
    """What was converted. `vocabulary` counts the tokenizer's entries; further embedding rows are padding."""

    written: tuple[Path, ...]
    parameters: int
    dtype: torch.dtype
    num_tokens: dict[str, int]
    embedding_rows: int
    vocabulary: int | None


def import_official(
    checkpoint: str | os.PathLike,
    settings: str | os.PathLike,
    folder: str | os.PathLike,
    tokenizer: str | os.PathLike | None = None,
) -> Conversion:
    """Turn the authors' checkpoint and settings into a model folder that transformers' Auto classes load.

    `folder` must be new or empty. The weights keep their dtype, the embedding all its rows. `tokenizer` is a
    tokenizer.json, which goes into the folder too.
    """
    checkpoint, folder = Path(checkpoint), Path(folder)
    check_new(folder)
    values = read_settings(existing_file(settings))
    tensors = read_checkpoint(existing_file(checkpoint))
    names = official_names(values["num_layers"], tied=not values["no_weight_tying"])
    check_keys(tensors, names, checkpoint)
    rows = tensors[EMBEDDING].shape[:1].numel()
    # The tokenizer of the authors' models has its end of text at 0.
    end_of_text, vocabulary, fast = 0, None, None
    if tokenizer is not None:
        fast, vocabulary = _read_tokenizer(existing_file(tokenizer), rows, values["max_position_embeddings"])
        end_of_text = fast.eos_token_id
    config = to_config(values, rows, end_of_text)
    model = _model(config, tensors, names, checkpoint)
    with write_new(folder) as (partial,):
        model.save_pretrained(partial)
        if fast is not None:
            fast.save_pretrained(partial)
    return _conversion(model, (folder,), vocabulary)


def export_official(
    folder: str | os.PathLike, checkpoint: str | os.PathLike, settings: str | os.PathLike
) -> Conversion:
    """Write a model folder as the authors' checkpoint and settings, two new files.

    A model that their code cannot compute is refused.
    """
    folder, checkpoint, settings = Path(folder), Path(checkpoint), Path(settings)
    if checkpoint.resolve() == settings.resolve():
        raise BadRequestError(f"{checkpoint} was given for both files; name two")
    for path in (checkpoint, settings):
        if path.is_dir():
            raise BadRequestError(f"{path} is a folder; name the file to write")
        check_outside(path, folder)
    check_new(checkpoint, settings)
    config = read_config(folder, TokenFormerConfig, foreign_code=LOAD_IT_YOURSELF)
    official_settings = from_config(config, folder)
    model = read_model(folder)
    for name, layer in pattention_layers(model):
        tau, official_tau = layer.tau.item(), default_tau(layer.num_tokens, layer.kind)
        if not math.isclose(tau, official_tau, rel_tol=TAU_TOLERANCE):
            raise BadRequestError(
                f"{folder}: {name} has {layer.num_tokens} tokens and tau {tau:.7g}, as a grown model may; "
                f"the authors' code would take tau {official_tau:.7g} and compute something else"
            )
    state = model.state_dict()
    names = official_names(config.num_hidden_layers, tied=config.tie_word_embeddings)
    with write_new(checkpoint, settings) as (partial_checkpoint, partial_settings):
        torch.save({theirs: state[ours] for theirs, ours in names.items()}, partial_checkpoint)
        write_settings(official_settings, partial_settings)
    return _conversion(model, (checkpoint, settings), None)


def _read_tokenizer(path: Path, rows: int, length: int) -> tuple[PreTrainedTokenizerFast, int]:
    """The tokenizer and the number of ids it uses."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself
        raise BadFileError(f"{path} is not a tokenizer.json: {one_line(error)}") from error
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    used = max(vocabulary.values(), default=-1) + 1
    if used > rows:
        raise BadRequestError(
            f"{path} has {used} entries, the checkpoint's embedding {rows} rows; give this model's tokenizer"
        )
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT} if END_OF_TEXT in vocabulary else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, **special), used


def _model(
    config: TokenFormerConfig, tensors: dict[str, Tensor], names: dict[str, str], checkpoint: Path
) -> TokenFormerForCausalLM:
    """A model for saving, whose weights are the tensors themselves, not copies."""
    with torch.device("meta"):
        model = TokenFormerForCausalLM(config)
    shapes = {ours: tensor.shape for ours, tensor in model.state_dict().items()}
    check_tensors(tensors, {theirs: shapes[ours] for theirs, ours in names.items()}, checkpoint)
    state: dict[str, Tensor] = {}
    held: set[int] = set()
    for theirs, ours in names.items():
        tensor = tensors[theirs]
        # Saving would leave out the second of two names for one tensor.
        state[ours] = tensor.clone() if tensor.data_ptr() in held else tensor
        held.add(tensor.data_ptr())
    for name, layer in pattention_layers(model):
        tau_dtype = torch.promote_types(tensors[EMBEDDING].dtype, layer.tau.dtype)
        state[f"{name}.tau"] = torch.tensor(default_tau(layer.num_tokens, layer.kind), dtype=tau_dtype)
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model


def _conversion(model: TokenFormerForCausalLM, written: tuple[Path, ...], vocabulary: int | None) -> Conversion:
    return Conversion(
        written=written,
        parameters=model.num_parameters(),
        dtype=model.dtype,
        num_tokens=model.config.num_tokens,
        embedding_rows=model.config.vocab_size,
        vocabulary=vocabulary,
    )


EMBEDDING = "sequential.0.word_embeddings.weight"
PATTENTIONS = {
    "attention.query": "attention.query",
    "attention.key": "attention.key",
    "attention.value": "attention.value",
    "attention.proj": "attention.out",
    "mlp": "ffn",
}


def official_names(num_layers: int, tied: bool) -> dict[str, str]:
    """Our name for each of theirs. They number a pipeline's stages, of which 1 and L + 2 hold no weights."""
    names = {EMBEDDING: "model.embed_tokens.weight"}
    for i in range(num_layers):
        for theirs, ours in PATTENTIONS.items():
            for part in ("key", "value"):
                name = f"sequential.{i + 2}.{theirs}.{part}_param_tokens"
                names[name] = f"model.layers.{i}.{ours}.{part}_tokens"
    for part in ("weight", "bias"):
        names[f"sequential.{num_layers + 3}.norm.{part}"] = f"model.norm.{part}"
    if not tied:
        names[f"sequential.{num_layers + 4}.final_linear.weight"] = "lm_head.weight"
    return names


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by the authors' names. No code in the file is run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Files from before torch 1.6 are bare pickles, which cannot be mapped.
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # on bytes that are not a checkpoint the unpickler can raise anything
        raise BadFileError(f"{path} cannot be read as a checkpoint: {_reason(error)}") from error
    if not isinstance(loaded, dict):
        raise BadFileError(f"{path} holds a {type(loaded).__name__}, not a dictionary of tensors")
    for key, value in loaded.items():
        if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided:
            raise BadFileError(f"{path}: {key!r} is a {type(value).__name__}, not a dense tensor with values")
    return loaded


def check_keys(tensors: Mapping[str, Tensor], names: Iterable[str], path: Path) -> None:
    """Every expected key is there, and no other."""
    names = set(names)
    wrong = wrong_keys(names - tensors.keys(), tensors.keys() - names)
    if wrong:
        raise BadFileError(f"{path} {wrong}; do the settings belong to this checkpoint?")


def check_tensors(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], path: Path) -> None:
    """Every tensor has the shape that the settings say, and all have one floating dtype."""
    for key, shape in shapes.items():
        given = tensors[key].shape
        if given != shape:
            raise BadFileError(f"{path}: {key} is {list(given)}; by the settings it must be {list(shape)}")
    dtype = tensors[EMBEDDING].dtype
    for key, tensor in tensors.items():
        if tensor.dtype != dtype or not dtype.is_floating_point:
            raise BadFileError(
                f"{path}: {key} is {_dtype(tensor.dtype)} and {EMBEDDING} is {_dtype(dtype)}; "
                "one floating dtype for all is needed"
            )


def _reason(error: Exception) -> str:
    unsafe = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
    if unsafe:
        return f"it holds {unsafe[1]}, and only tensors are loaded"
    if isinstance(error, PermissionError):
        return "permission denied"
    return "it is truncated, or not a file that torch.save wrote"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


COUNTS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "qkv_slot_num": "qkv_tokens",
    "proj_slot_num": "out_tokens",
    "ffn_slot_num": "ffn_tokens",
    "max_position_embeddings": "max_position_embeddings",
}
OUR_KINDS = {"l2_norm_gelu": "l2_gelu", "gelu_l2_norm": "gelu_l2", "softmax": "softmax"}

# Settings of which our model computes one value. The norms must be given, for the authors' defaults differ;
# the rest have this value if they are not given (pos_emb because rotary_pct must be).
NORMS = {"norm": "layernorm_nonparam", "final_norm": "layernorm"}
FIXED = {
    **NORMS,
    "pos_emb": "rotary",
    "gpt_j_residual": False,
    "model_parallel_size": 1,
    "use_mup": False,
    "sliding_window_width": None,
}
NEEDED = (*COUNTS, *NORMS, "norm_activation_type", "rotary_pct", "no_weight_tying")

HEADER = "# The model's settings for the authors' code. Add those of training, data and hardware.\n"


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a file, checked: none that we need is missing, and our model can compute them all."""
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise BadFileError(f"{path} is not YAML: {one_line(error)}") from error
    if not isinstance(loaded, dict):
        raise BadFileError(f"{path} holds a {type(loaded).__name__}, not a mapping of settings to values")
    settings = {str(key).replace("-", "_"): value for key, value in loaded.items()}
    missing = [key for key in NEEDED if key not in settings]
    if missing:
        raise BadFileError(f"{path} lacks {', '.join(missing)}; without them the model is not determined")
    _check_numbers(settings, path)
    _check_supported(settings, path)
    return settings


def to_config(settings: dict[str, Any], vocab_size: int, eos_token_id: int | None) -> TokenFormerConfig:
    """Our configuration for checked settings."""
    rope = {
        "rope_type": "default",
        "rope_theta": settings["rotary_emb_base"],
        "partial_rotary_factor": settings["rotary_pct"],
    }
    return TokenFormerConfig(
        **{ours: settings[theirs] for theirs, ours in COUNTS.items()},
        vocab_size=vocab_size,
        pattention_kind=OUR_KINDS[settings["norm_activation_type"]],
        rope_parameters=rope,
        layer_norm_eps=settings["layernorm_epsilon"],
        tie_word_embeddings=not settings["no_weight_tying"],
        bos_token_id=eos_token_id,
        eos_token_id=eos_token_id,
    )


def from_config(config: TokenFormerConfig, source: Path) -> dict[str, Any]:
    """The authors' settings for our configuration; `source` is named in the error if there are none."""
    rope: Any = config.rope_parameters
    if rope["rope_type"] != "default":
        raise BadRequestError(f"{source}: rope_type is {rope['rope_type']!r}; the authors' code only has 'default'")
    if config.parametric_norm:
        raise BadRequestError(
            f"{source}: the blocks' norms have weights and biases (parametric_norm); the authors' have none"
        )
    theta, kinds = rope["rope_theta"], {ours: theirs for theirs, ours in OUR_KINDS.items()}
    settings = {theirs: getattr(config, ours) for theirs, ours in COUNTS.items()}
    settings |= {
        "seq_length": config.max_position_embeddings,
        "pos_emb": FIXED["pos_emb"],
        "rotary_pct": float(rope["partial_rotary_factor"]),
        # Their code needs a whole number here.
        "rotary_emb_base": int(theta) if theta == int(theta) else theta,
        "no_weight_tying": not config.tie_word_embeddings,
        **NORMS,
        "layernorm_epsilon": config.layer_norm_eps,
        "gpt_j_residual": FIXED["gpt_j_residual"],
        "attention_config": [[["tokenformer"], config.num_hidden_layers]],
        "norm_activation_type": kinds.get(config.pattention_kind, config.pattention_kind),
    }
    _check_supported(settings, source)
    return settings


def write_settings(settings: dict[str, Any], path: Path) -> None:
    """Write settings as the authors' code reads them."""
    path.write_text(HEADER + yaml.safe_dump(settings, sort_keys=False, default_flow_style=None), encoding="utf-8")


def _check_numbers(settings: dict[str, Any], path: Path) -> None:
    """Every number is one; the two that may be left out are filled in with the authors' defaults."""
    for key in COUNTS:
        if type(settings[key]) is not int or settings[key] < 1:
            raise BadFileError(f"{path}: {key} is {settings[key]!r}; a whole number of at least 1 is needed")
    for key, default in (("rotary_pct", None), ("rotary_emb_base", 10000), ("layernorm_epsilon", 1e-5)):
        given: Any = settings.get(key, default)
        try:
            # YAML reads 1e-5, which has no decimal point, as a string.
            settings[key] = float(given)
        except (TypeError, ValueError):
            settings[key] = 0.0
        if isinstance(given, bool) or not 0 < settings[key] < math.inf:
            raise BadFileError(f"{path}: {key} is {given!r}; a number above 0 is needed")
    if not isinstance(settings["no_weight_tying"], bool):
        given = settings["no_weight_tying"]
        raise BadFileError(f"{path}: no_weight_tying is {given!r}; true or false is needed")


def _check_supported(settings: dict[str, Any], source: Path) -> None:
    for key, supported in FIXED.items():
        given = settings.get(key, supported)
        if given != supported:
            raise BadRequestError(f"{source}: {key} is {given!r}; only {supported!r} is supported")
    kind = settings["norm_activation_type"]
    if str(kind) not in OUR_KINDS:
        raise BadRequestError(
            f"{source}: norm_activation_type is {kind!r}; the supported ones are {', '.join(OUR_KINDS)}"
        )
    width, heads = settings["hidden_size"], settings["num_attention_heads"]
    if width % heads:
        raise BadRequestError(f"{source}: hidden_size is {width}; it must divide by {heads} attention heads")
    head, rotary_pct = width // heads, settings["rotary_pct"]
    rotated = int(head * rotary_pct)
    if rotary_pct > 1 or rotated < 2 or rotated % 2:
        raise BadRequestError(
            f"{source}: rotary_pct is {rotary_pct:g}, which rotates {rotated} of a head's {head} entries; "
            f"they rotate in pairs, so an even number from 2 to {head} is supported"
        )
