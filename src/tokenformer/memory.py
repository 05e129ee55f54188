"""What this machine can hold, so that what cannot fit is refused in a line before it is begun, not by the kernel."""

import os
from pathlib import Path

from .errors import BadRequestError

GIB = 2**30
# What a container may use: a number of bytes, or "max". Only with the second version of cgroups.
CONTAINER = Path("/sys/fs/cgroup/memory.max")


def machine_memory() -> int | None:
    """Bytes of main memory, or of the part of it that a container may use; None where the system does not say."""
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None
    try:
        return min(whole, int(CONTAINER.read_text()))
    except (OSError, ValueError):
        return whole


def check_fits(what: str, needed: float, available: int | None, way_out: str) -> None:
    """Refuse what needs more bytes than there are, however much of them is in use."""
    if available is not None and needed > available:
        raise BadRequestError(
            f"{what} needs about {needed / GIB:,.1f} GiB of memory, and this machine has {available / GIB:,.1f} GiB; "
            f"{way_out}"
        )
