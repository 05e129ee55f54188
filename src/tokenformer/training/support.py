"""Whether training can work here, asked once, before the rest of this folder is imported: the extra `train` is
installed, and transformers' Trainer has the private methods that trainer.py overrides.

The model, growth, adoption and evaluation use no private methods and do not come here.
"""

from ..errors import BadRequestError, require

# The oldest and the newest minor that `make test-versions` has run; `tokenformer train --help` names them too.
TRIED = "5.16", "5.23"
FIRST_WITH_FSDP = (5, 19)  # by tests/test_training_parallel.py; with 5.18 products of cut-up tensors fail
PRIVATE_METHODS = (
    "_clip_grad_norm",
    "_get_grad_norm",
    "_get_output_dir",
    "_init_training_state",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
)


def check_trainer(trainer: type, version: str) -> None:
    """Refuse a Trainer that lacks what ours overrides or calls."""
    gone = [name for name in PRIVATE_METHODS if not hasattr(trainer, name)]
    if gone:
        raise BadRequestError(
            f"training needs transformers {' to '.join(TRIED)}; {version} is installed, whose Trainer has no "
            f"{', '.join(gone)}"
        )


def version_warning(version: str) -> str | None:
    """What to say of a transformers that is newer than what was tried."""
    major, newest = _minor(TRIED[1])
    if _minor(version) <= (major, newest):
        return None
    return (
        f"training was tried with transformers {' to '.join(TRIED)}, and {version} is installed; if it fails: "
        f'pip install "transformers<{major}.{newest + 1}"'
    )


def has_fsdp(version: str) -> bool:
    """Whether this transformers' own FSDP2 can train our models."""
    return _minor(version) >= FIRST_WITH_FSDP


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def check_fsdp(version: str) -> None:
    """Refuse to cut a model up where that cannot work."""
    if not has_fsdp(version):
        raise BadRequestError(
            f"training.parallel is fsdp, which needs transformers 5.19 or newer; {version} is installed: use ddp"
        )


def _check() -> None:
    require("training", "train")
    import transformers

    check_trainer(transformers.Trainer, transformers.__version__)


_check()
