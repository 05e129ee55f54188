"""Files and folders that appear whole or not at all, a list of what a folder holds, and a lock: all in one place.

write_new      new files or folders, all of them or none; what exists is never overwritten
read_json      what a JSON file holds, or one line that says why it holds none
replace_files  files, replaced in one step each, once all of them are on the disk
naming         what goes wrong while something is written, in one line that names it
new_folder     a folder with a manifest, written to disk before it takes its name
check_folder   such a folder read again: every file is as it was written, or the first that is not is named
lock           one process at a time, for as long as it lives
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from .errors import BadFileError, BadRequestError, BadResultError, one_line

# What the system says when a disk or a quota is full, and where one may not write.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
TORCH_SAYS = "the disk is full or the file too large"  # it does not say which
# What some network file systems say of locks.
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}

MANIFEST = "MANIFEST.json"


def existing_file(path: str | os.PathLike) -> Path:
    """The path, if there is a file to read."""
    path = Path(path)
    if not path.is_file():
        raise BadRequestError(f"{path} {'is not a file' if path.exists() else 'does not exist'}; check the path")
    return path


def parse_json(text: str | bytes, where: object) -> Any:
    """What JSON says. Errors begin with `where`: the file, and the line if it is one of many."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise BadFileError(f"{where} nests its brackets too deeply") from error
    except ValueError as error:  # no JSON, or no UTF-8
        raise BadFileError(f"{where} is not JSON: {one_line(error)}") from error


def read_json(path: Path) -> Any:
    """What a JSON file holds; a BadFileError if it cannot be read, or is a pipe, which may never end."""
    try:
        if not path.is_file():
            raise BadFileError(f"{path} {'is not a file' if path.exists() else 'is missing'}")
        content = path.read_bytes()
    except OSError as error:
        raise BadFileError(f"{path} cannot be read: {error.strerror or error}") from error
    return parse_json(content, path)


def check_new_file(target: Path) -> None:
    """As `check_new`, for a file: it does not replace a folder, not even an empty one."""
    if target.is_dir():
        raise BadRequestError(f"{target} is a folder; name a file, such as {target / 'scores.json'}")
    check_new(target)


def check_new(*targets: Path) -> None:
    """Refuse a target that exists, unless it is an empty folder, and one that cannot be written."""
    for target in targets:
        if os.path.lexists(target):
            if not target.is_dir() or any(target.iterdir()):
                raise BadRequestError(f"{target} exists already and would be overwritten; choose a new name")
            if target.is_mount() or target.resolve() == Path.cwd():
                raise BadRequestError(
                    f"{target} is the working directory or a mount point and cannot be replaced; choose a new "
                    "folder inside it"
                )
        parent = next(parent for parent in target.absolute().parents if os.path.lexists(parent))
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise BadRequestError(f"{target} cannot be written: {parent} is not a writable folder; choose another")


def check_outside(target: Path, source: Path) -> None:
    """Refuse to write inside the folder that is read."""
    if source.resolve() in target.resolve().parents:
        raise BadRequestError(f"{target} is inside {source}, which is read; choose a folder outside it")


@contextmanager
def write_new(*targets: Path) -> Iterator[tuple[Path, ...]]:
    """Yield a path beside each target, to write a file or folder to. At the end all take their names.

    After an error or an interruption none of them is left. What a process that was killed left is removed when the same
    target is written again.
    """
    check_new(*targets)
    targets = tuple(target.resolve() for target in targets)
    renaming = False
    with naming(*targets), ExitStack() as claims:
        partials = tuple(claims.enter_context(_claimed(target)) / target.name for target in targets)
        try:
            yield partials
            check_new(*targets)
            renaming = True
            for partial, target in zip(partials, targets, strict=True):
                partial.rename(target)
        except BaseException:
            for partial, target in zip(partials, targets, strict=True):
                if renaming and not os.path.lexists(partial):
                    _remove(target)
            raise


@contextmanager
def _claimed(target: Path) -> Iterator[Path]:
    """An empty folder beside the target, which no other process writes in as long as this one lives."""
    folder = partial_path(target)
    if not folder.is_dir():
        _remove(folder)
    folder.mkdir(parents=True, exist_ok=True)
    guard = folder / _guard(folder)
    with ExitStack() as stack:
        try:
            held = stack.enter_context(lock(guard, wait=False))
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            held = True  # no one can tell, and most often no one else is there
        # One that is done removes its guard before it lets go of it.
        if not held or not guard.exists():
            raise BadRequestError(f"another process is writing {target}; wait for it, or choose a new name")
        try:
            for left in folder.iterdir():
                if left != guard:
                    _remove(left)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    if os.name == "nt":  # where a file that is open cannot be removed
        shutil.rmtree(folder, ignore_errors=True)


def _guard(partial: Path) -> str:
    """The name of the file in a partial folder that `write_new` locks. What is written there has another name."""
    return f"{partial.name}.lock"


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file, or replace it, so that a reader finds the old one or the new one, whole."""
    replace_files({path: content})


def replace_files(contents: Mapping[Path, str | bytes]) -> None:
    """Write or replace several files. If there is no room for all of them, none is touched."""
    partials = {path: partial_path(path) for path in contents}
    with naming(*contents):
        try:
            for path, content in contents.items():
                partials[path].write_bytes(content.encode() if isinstance(content, str) else content)
                _sync(partials[path])
            for path, partial in partials.items():
                os.replace(partial, path)
        except OSError:
            for partial in partials.values():
                partial.unlink(missing_ok=True)
            raise


@contextmanager
def naming(*targets: Path) -> Iterator[None]:
    """Where there is no room, or nothing may be written: one line that names what was to be written."""
    try:
        yield
    except (BadFileError, BadResultError, BadRequestError):
        raise
    except Exception as error:
        code = _system_code(error) if _is_about(error, targets) else None
        said = TORCH_SAYS if _is_torchs(error) else os.strerror(code or 0)
        names = ", ".join(map(str, targets))
        if code in NO_ROOM:
            raise BadResultError(
                f"{names} could not be written: {said}; free some space and run the same command again"
            ) from error
        if code in NOT_ALLOWED:
            raise BadRequestError(
                f"{names} cannot be written: {said}; choose another path, or change its permissions"
            ) from error
        raise


def _is_about(error: Exception, targets: Iterable[Path]) -> bool:
    """Whether an error names no file, or a target, its partial form, what is in them, or a folder that they are in."""
    file = getattr(error, "filename", None)
    if file is None:
        return True
    named = str(file)
    places = [str(place) for target in targets for place in (target, partial_path(target))]
    return any(named.startswith(place) or place.startswith(named) for place in places)


def _is_torchs(error: Exception) -> bool:
    """Whether this is how torch.save says that a file came out short."""
    return "inline_container" in str(error)


def _system_code(error: Exception) -> int | None:
    """The number of the system's own error behind one of ours or of a library's, if it is known."""
    if in_rust := re.search(r"\(os error (\d+)\)", str(error)):
        return int(in_rust[1])
    if _is_torchs(error):
        return errno.ENOSPC
    return getattr(error, "errno", None)


def partial_path(target: Path) -> Path:
    """Where something is written before it takes its name."""
    return target.with_name(f".{target.name}.partial")


def remove_partials(folder: Path) -> None:
    """Remove what processes that died left half-written. For the holder of the lock of all that is written here.

    Of `write_new`, which locks what it writes itself, only what no living process writes.
    """
    for path in folder.glob(".*.partial"):
        guard = path / _guard(path)
        if not guard.exists():
            _remove(path)
            continue
        with lock(guard, wait=False) as held:
            if held:
                _remove(path)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder to fill. At the end it is sealed; after an error or an interruption it is removed."""
    partial = partial_path(target)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with naming(target):
            partial.mkdir(parents=True)
            yield partial
            seal_folder(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def seal_folder(partial: Path, target: Path) -> None:
    """Write the manifest, bring everything to disk, and rename. An older folder of that name is replaced."""
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    manifest = {str(p.relative_to(partial)): {"size": p.stat().st_size, "hash": _hash(p)} for p in files}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in [*files, partial / MANIFEST, partial]:
        _sync(path)
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
    _sync(target.parent)


def check_folder(folder: Path) -> None:
    """Raise a BadFileError that names the first file of a sealed folder that is not as it was written."""
    try:
        manifest = read_json(folder / MANIFEST)
        entries = [(name, entry["size"], entry["hash"]) for name, entry in manifest.items()]
    except (BadFileError, TypeError, KeyError, AttributeError) as error:
        raise BadFileError(f"{folder / MANIFEST} is missing or broken") from error
    for name, size, digest in entries:
        path = folder / name
        if not path.is_file():
            raise BadFileError(f"{path} is missing")
        if path.stat().st_size != size:
            raise BadFileError(f"{path} has {path.stat().st_size} bytes; {size} were written")
        if _hash(path) != digest:
            raise BadFileError(f"{path} is corrupted: its content is not what was written")


@contextmanager
def lock(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of a file, which is made if need be. Yields False, at once, if it is taken and we do not `wait`.

    The kernel lets go of it however the process ends. Not the locks of the filelock library, which worker processes
    inherit when they are forked, and keep for seconds after their parent was killed.
    """
    with path.open("a") as file:
        yield _take(file, wait)


def _take(file: IO[str], wait: bool) -> bool:
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # Windows cannot open a folder, and needs no sync of it
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
