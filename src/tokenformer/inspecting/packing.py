"""Arrays as text for a page: all of them in one compressed string, and a table of where each begins.

Enters: numpy arrays by name. Leaves: what sheet.js of the page reads again: type, place and length of each, and
the bytes by zlib and base64.
"""

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

# numpy's types, and what the page calls them.
TYPES = {"uint8": "Uint8", "int8": "Int8", "uint16": "Uint16", "uint32": "Uint32", "float32": "Float32"}
LEVEL = 9
WORD = 8  # bytes that every array begins at a multiple of


def pack(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The arrays, flattened, as one entry of a JSON."""
    table, parts, at = {}, [], 0
    for name, array in arrays.items():
        content = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()
        table[name] = [TYPES[array.dtype.name], at, array.size]
        parts.append(content + bytes(-len(content) % WORD))
        at += len(parts[-1])
    return {"table": table, "bytes": base64.b64encode(zlib.compress(b"".join(parts), LEVEL)).decode()}


def unpack(packed: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The inverse."""
    content = zlib.decompress(base64.b64decode(packed["bytes"]))
    names = {ours: numpy for numpy, ours in TYPES.items()}
    return {
        name: np.frombuffer(content, np.dtype(names[kind]).newbyteorder("<"), count, at)
        for name, (kind, at, count) in packed["table"].items()
    }


def smallest(numbers: np.ndarray, most: int) -> np.ndarray:
    """Whole numbers up to `most`, in two bytes each where that is enough."""
    return numbers.astype(np.uint16 if most < 2**16 else np.uint32)


def as_bytes(numbers: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    """Numbers as shares of `scale` in 255 steps, from -1 to 1."""
    share = np.divide(numbers, scale, out=np.zeros(numbers.shape, np.float32), where=np.asarray(scale) > 0)
    return np.clip(np.rint(share * 127), -127, 127).astype(np.int8)


def as_roots(numbers: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    """The same of the signed square roots of the shares, so that small numbers keep their order."""
    share = np.divide(numbers, scale, out=np.zeros(numbers.shape, np.float32), where=np.asarray(scale) > 0)
    return np.clip(np.rint(np.sign(share) * np.sqrt(np.abs(share)) * 127), -127, 127).astype(np.int8)
