"""Named groups of tokens beside the layers of any model: added, switched, saved, loaded, merged and removed."""

from . import methods as methods  # which models with groups get
from .change import (
    GroupFacts,
    add_tokens,
    merge_tokens,
    remove_tokens,
    token_groups,
    tokens_by_row,
    use_tokens,
)
from .files import load_tokens, save_tokens

__all__ = [
    "GroupFacts",
    "add_tokens",
    "load_tokens",
    "merge_tokens",
    "remove_tokens",
    "save_tokens",
    "token_groups",
    "tokens_by_row",
    "use_tokens",
]
