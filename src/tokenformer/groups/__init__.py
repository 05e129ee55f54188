"""Named groups of tokens beside the layers of any model: added, switched, saved, loaded, merged and removed."""

from . import methods as methods  # which models with groups get
from .change import (
    GroupFacts,
    add_tokens,
    merge_tokens,
    remove_tokens,
    token_groups,
    train_tokens,
    use_tokens,
)
from .files import load_tokens, save_tokens
from .rows import choose_tokens, tokens_by_row

__all__ = [
    "GroupFacts",
    "add_tokens",
    "choose_tokens",
    "load_tokens",
    "merge_tokens",
    "remove_tokens",
    "save_tokens",
    "token_groups",
    "tokens_by_row",
    "train_tokens",
    "use_tokens",
]
