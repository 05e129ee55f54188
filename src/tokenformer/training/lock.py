"""One process, or one group of processes, at a time in a run's folder."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import PartialState

from ..errors import BadRequestError


@contextmanager
def run_lock(folder: Path, processes: PartialState) -> Iterator[None]:
    """Make the folder and hold its lock. The kernel lets go of it however the process ends."""
    file = None
    try:
        if processes.is_main_process:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file = (folder / "lock").open("w")
            except OSError as error:
                raise BadRequestError(
                    f"{folder} cannot be written ({error.strerror}); give another training.output_dir"
                ) from error
            try:
                # Not flock, which the data loader's workers would inherit, and keep for seconds after a kill.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise BadRequestError(
                    f"another process is training in {folder}; wait for it, or give another training.output_dir"
                ) from None
        yield
    finally:
        if file is not None:
            file.close()
