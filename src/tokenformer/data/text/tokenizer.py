"""Tokenizers: bytes, a tokenizer.json, a folder, a Hub name; or one trained on the corpus.

Enters: a name, or a configuration and a size. Leaves: a transformers tokenizer with an end-of-document token, in the
form that AutoTokenizer loads when it is saved beside a model.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ...errors import BadFileError, BadRequestError, did_you_mean, one_line
from ...models.side_files import refuse_foreign_code, tokenizer_files
from ...models.text import END_OF_TEXT as EOS
from ...models.text import byte_tokenizer, has_entries, holds_no_tokenizer, no_backend
from .settings import TextSettings
from .split import training_pieces

# Names that a bare tokenizer.json may have for the end of a document: the file itself does not say which token it is.
EOS_NAMES = (EOS, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>")
NEEDED = "give bytes, or a folder with a tokenizer.json"
# The trainer makes room for all entries before it begins: several times what any model has, and no memory is too small.
MOST_ENTRIES = 2**20


def load_tokenizer(
    name_or_path: str | Path, eos_token: str | None = None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerFast:
    """The tokenizer of that name. `eos_token` names its end-of-document token, if it does not say or says otherwise.

    Python code that comes with it is run only with `trust_remote_code`.
    """
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if path.exists() and not path.is_file() and not path.is_dir():  # a pipe may never end
        raise BadRequestError(f"tokenizer {name!r} is neither a file nor a folder")
    if name == "bytes":
        tokenizer = byte_tokenizer()
    elif path.is_file() and not (path.parent / "tokenizer_config.json").exists():
        tokenizer = _from_file(path)
    else:
        tokenizer = _from_pretrained(name, path.parent if path.is_file() else path, trust_remote_code)
    _set_eos(tokenizer, name, eos_token)
    return tokenizer


def train_tokenizer(settings: TextSettings, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab_size` entries, trained on the training documents and no others."""
    if vocab_size < 257:
        raise BadRequestError(f"a vocabulary of {vocab_size} was asked for; 256 bytes and {EOS} need at least 257")
    if vocab_size > MOST_ENTRIES:
        raise BadRequestError(f"a vocabulary of {vocab_size} was asked for; at most {MOST_ENTRIES:,} are possible")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (piece.data.decode("utf-8", "replace") for piece in training_pieces(settings))
    tokenizer.train_from_iterator(texts, trainer)
    return _wrapped(tokenizer, eos_token=EOS)


def _wrapped(tokenizer: Tokenizer, **settings: object) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **settings)


def _from_file(path: Path) -> PreTrainedTokenizerFast:
    try:
        return _wrapped(Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises nothing more precise
        raise BadFileError(f"{path} is not a tokenizer.json: {one_line(error)}") from error


def _from_pretrained(name: str, folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerFast:
    local = folder.is_dir()
    if local and not tokenizer_files(folder):  # of a model's folder transformers would make an empty one
        raise holds_no_tokenizer(folder, NEEDED)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder) if local else name, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers and the Hub raise many kinds, most for a wrong name
        refuse_foreign_code(f"the tokenizer {name!r}", error)
        if local and no_backend(error):
            raise holds_no_tokenizer(folder, NEEDED) from error
        reason = f"{type(error).__name__}: {one_line(error)}"
        if local:
            raise BadFileError(f"transformers cannot load a tokenizer from the folder {folder}: {reason}") from error
        raise BadRequestError(
            f"tokenizer {name!r} is neither bytes nor a local path, and could not be loaded from the Hub: {reason}"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise BadRequestError(f"tokenizer {name!r} has no tokenizer.json, which preparing needs")
    if not has_entries(tokenizer):
        raise holds_no_tokenizer(name, NEEDED)
    return tokenizer


def _set_eos(tokenizer: PreTrainedTokenizerFast, name: str, eos_token: str | None) -> None:
    vocabulary = tokenizer.get_vocab()
    if eos_token is not None and eos_token not in vocabulary:
        special = [token.content for token in tokenizer.added_tokens_decoder.values()]
        hint = f"; {did_you_mean(eos_token, special)}" if special else ""
        raise BadRequestError(f"tokenizer {name!r} has no token {eos_token!r}{hint}")
    if eos_token is None and tokenizer.eos_token_id is None:
        eos_token = next((known for known in EOS_NAMES if known in vocabulary), None)
        if eos_token is None:
            raise BadRequestError(
                f"tokenizer {name!r} has no end-of-document token; name one of its tokens with eos_token: "
                "data.eos_token=TOKEN in a recipe or behind train and adapt, --eos-token TOKEN behind prepare"
            )
    if eos_token is not None:
        tokenizer.eos_token = eos_token
    if tokenizer.pad_token is None:  # blocks need none; those who use the model in batches do
        tokenizer.pad_token = tokenizer.eos_token
