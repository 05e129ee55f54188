"""Text as a page shows it: one visible piece for every id that a model reads, and a label for every id of a vocabulary.

Enters: a tokenizer and text, as hostile as it likes. Leaves: pieces that hold no control character but line breaks and
tabs, each behind a sign of its own. A character of several bytes, or several tokens, is shown at the first of them; the
others are empty pieces.
"""

import unicodedata
from typing import Any, NamedTuple

from ..errors import BadRequestError
from ..models.text import BYTES, as_text, encode, reads_bytes

# By the first byte of a character in UTF-8, how many it has.
LENGTHS = (((0x80, 0xC2), 0), ((0xC2, 0xE0), 2), ((0xE0, 0xF0), 3), ((0xF0, 0xF5), 4), ((0xF5, 0x100), 0))
SIGNS = {"\n": "⏎\n", "\t": "⇥\t", "\u2028": "⟨U+2028⟩\n", "\u2029": "⟨U+2029⟩\n"}
# Invisible, not assigned, half a character, or a command to whoever draws text.
HIDDEN = ("Cc", "Cf", "Cn", "Co", "Cs")


class Pieces(NamedTuple):
    """What a model reads, and what is shown of it."""

    ids: list[int]
    shown: list[str]
    left_out: int  # characters or bytes behind the last id


def visible(text: str) -> str:
    """Text in which every control character has become a sign or its number."""
    found = []
    for sign in text:
        kind = unicodedata.category(sign)
        if sign in SIGNS:
            found.append(SIGNS[sign])
        elif kind in HIDDEN:
            found.append(f"⟨{ord(sign):02X}⟩" if sign < "\x80" else f"⟨U+{ord(sign):04X}⟩")
        else:
            found.append(sign)
    if found and unicodedata.combining(text[0]):
        found.insert(0, "◌")  # or it would change the piece before
    return "".join(found)


def cut_into_pieces(tokenizer: Any, text: bytes, vocab_size: int, most: int) -> Pieces:
    """The first `most` ids of a text, and what is shown of each."""
    if reads_bytes(tokenizer):
        ids = encode(tokenizer, text[:most], vocab_size)
        return Pieces(ids, byte_pieces(bytes(ids)), len(text) - len(ids))
    whole = as_text(text)
    some = whole[: most * 8]  # more characters than so many ids have
    ids = encode(tokenizer, some, vocab_size)[:most]
    if not tokenizer.is_fast:
        return Pieces(ids, [visible(tokenizer.decode([one])) for one in ids], 0 if len(ids) < most else len(whole))
    offsets = tokenizer(some, return_offsets_mapping=True, verbose=False)["offset_mapping"][:most]
    shown, end = [], 0
    for token, (first, last) in zip(ids, offsets, strict=True):
        special = first == last == 0 and token in tokenizer.all_special_ids
        shown.append(visible(tokenizer.convert_ids_to_tokens(token) if special else some[end : max(end, last)]))
        end = max(end, last)
    return Pieces(ids, shown, len(whole) - end)


def byte_pieces(text: bytes) -> list[str]:
    """For every byte what is shown there: a character at its first byte, nothing at the others, else its number."""
    shown: list[str] = []
    while len(shown) < len(text):
        at = len(shown)
        length = 1 if text[at] < 0x80 else next(n for (low, high), n in LENGTHS if low <= text[at] < high)
        try:
            if not length:
                raise ValueError
            shown += [visible(text[at : at + length].decode()), *[""] * (length - 1)]
        except ValueError:  # not UTF-8: bytes are text, too
            shown.append(f"⟨{text[at]:02X}⟩")
    return shown


def label(tokenizer: Any, token: int) -> str:
    """An entry of the vocabulary in short: spaces at its ends can be seen, and a byte that is no character, too."""
    if token >= len(tokenizer):
        return f"id {token}"
    if reads_bytes(tokenizer) and 0x80 <= token < 0x100:
        return f"⟨{token:02X}⟩"
    text = tokenizer.decode([token])
    raw = tokenizer.convert_ids_to_tokens(token) or ""
    if "\ufffd" in text and set(raw) <= BYTES.keys():  # part of a character
        return "".join(f"⟨{BYTES[sign]:02X}⟩" for sign in raw)
    inner = text.strip(" ")
    if not inner:
        return "␣" * len(text) or visible(raw) or f"id {token}"
    before = len(text) - len(text.lstrip(" "))
    return "␣" * before + visible(inner).replace("\n", "").replace("\t", "") + "␣" * (len(text) - before - len(inner))


def check_not_empty(pieces: Pieces, where: str) -> None:
    """Refuse a text of which nothing is read."""
    if not pieces.ids:
        raise BadRequestError(f"{where} is empty; give at least one character")
