"""What this machine can hold, so that what cannot fit is refused in a line before it is begun, not by the kernel."""

import os

from .errors import BadRequestError

GIB = 2**30


def machine_memory() -> int | None:
    """Bytes of main memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


def check_fits(what: str, needed: float, available: int | None, way_out: str) -> None:
    """Refuse what needs more bytes than there are."""
    if available is not None and needed > available:
        raise BadRequestError(
            f"{what} needs about {needed / GIB:,.1f} GiB of memory, and only {available / GIB:,.1f} GiB is available; "
            f"{way_out}"
        )
