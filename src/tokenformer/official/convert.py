"""import_official and export_official: the authors' checkpoints to model folders, and back.

Enters: CHECKPOINT.bin and CONFIG.yml, or a model folder. Leaves: the other, with every bit of the weights.

    tokenformer import-official pytorch_model.bin 150M.yml models/150m --tokenizer tokenizer.json
    tokenformer export-official models/150m pytorch_model.bin 150M.yml
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ..errors import BadFileError, BadRequestError, one_line
from ..files import check_new, existing_file, write_new
from ..models import TokenFormerConfig, TokenFormerForCausalLM
from ..models.loading import read_config, read_model
from ..pattention import default_tau, pattention_layers
from .checkpoint import EMBEDDING, check_keys, check_tensors, official_names, read_checkpoint
from .settings import from_config, read_settings, to_config, write_settings

END_OF_TEXT = "<|endoftext|>"

# tau is kept in fp32 and growth by split multiplies it: a few roundings do not make another tau. One appended
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
    check_new(checkpoint, settings)
    config = read_config(folder)
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
    except Exception as error:  # tokenizers raises no narrower class
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
        # Of a tensor under two names, saving would leave out the second.
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
