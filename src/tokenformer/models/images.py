"""Images into a saved vision model: the settings of transformers' ViTImageProcessor, written beside the weights.

Enters: a configuration, or a folder that has them. Leaves: preprocessor_config.json, which AutoImageProcessor and
pipeline read, or the processor. Plain JSON, so that saving a model needs no Pillow.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

# Not from transformers itself, which up to 5.17 hides it where torchvision is not installed, though Pillow is enough.
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.utils import cached_file

from ..errors import BadFileError, BadRequestError, one_line
from .config import TokenFormerVisionConfig
from .side_files import refuse_foreign_code

logger = logging.getLogger(__name__)

IMAGE_PROCESSOR_FILE = "preprocessor_config.json"
# transformers takes the one whose library is installed; we only require Pillow.
IMAGE_PROCESSORS = {"pil": "ViTImageProcessorPil", "torchvision": "ViTImageProcessor"}
# Options of from_pretrained that say where and how to look up a name on the Hub.
LOOKUP_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def image_processor_beside(name: str | os.PathLike, options: dict[str, Any]) -> str | None:
    """The text of the file beside the weights of a folder or of a name on the Hub; None if there is none.

    `options` are those of from_pretrained: its revision, cache and token apply here too.
    """
    hub = {key: options[key] for key in LOOKUP_OPTIONS if options.get(key) is not None}
    found = cached_file(
        name,
        IMAGE_PROCESSOR_FILE,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **hub,
    )
    return None if found is None else Path(found).read_text()


def write_image_processor(config: TokenFormerVisionConfig, loaded_with: str | None, folder: str | os.PathLike) -> None:
    """Write how images become pixel values: as the model was `loaded_with`, if need be at another size; for a new one,
    in [-1, 1] and of its size.

    A file that is not ours is kept, with a warning if it cannot be right for this model.
    """
    path = Path(folder) / IMAGE_PROCESSOR_FILE
    if loaded_with is None:
        text = _text(_new_settings(config.image_size, config.num_channels))
    else:
        text = _at_size(loaded_with, config.image_size)
    there = path.read_text() if path.exists() else None
    if there is None or there == loaded_with or _is_new(there):
        path.write_text(text)
    elif there != text and (loaded_with is not None or _at_size(there, config.image_size) != there):
        logger.warning(
            "%s is kept, and is not what this model of %d pixels %s; delete it and save again to have the model's",
            path,
            config.image_size,
            "takes" if loaded_with is None else "was loaded with",
        )


def _new_settings(image_size: int, channels: int) -> dict[str, Any]:
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": channels == 3,
        "do_resize": True,
        "size": {"height": image_size, "width": image_size},
        "resample": 3,  # bicubic
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * channels,
        "image_std": [0.5] * channels,
    }


def _is_new(text: str) -> bool:
    """Whether it is what a new model of some size is saved with, which nobody chose."""
    try:
        settings = json.loads(text)
        return settings == _new_settings(settings["size"]["height"], len(settings["image_mean"]))
    except (json.JSONDecodeError, RecursionError, KeyError, TypeError):
        return False


def _text(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"


def _at_size(text: str, image_size: int) -> str:
    """The same processor for images of another size: what it resizes to and crops keep their proportions."""
    try:
        settings = json.loads(text)
    except (json.JSONDecodeError, RecursionError):  # reading it will report that
        return text
    given = settings.get("crop_size") or settings.get("size") or {}
    before = next(iter(given.values()), image_size) if isinstance(given, dict) else given
    if before == image_size:
        return text

    def scaled(size: Any) -> Any:
        if isinstance(size, dict):
            return {side: scaled(pixels) for side, pixels in size.items()}
        return round(size * image_size / before)

    return _text({**settings, **{key: scaled(settings[key]) for key in ("size", "crop_size") if settings.get(key)}})


def read_image_processor(folder: str | os.PathLike, *, trust_remote_code: bool = False) -> Any:
    """The image processor of a model folder, or of a name on the Hub."""
    if Path(folder).exists() and not (Path(folder) / IMAGE_PROCESSOR_FILE).is_file():
        raise BadRequestError(f"{folder} has no {IMAGE_PROCESSOR_FILE}, which says how images become pixels; add it")
    try:
        return AutoImageProcessor.from_pretrained(
            folder, local_files_only=Path(folder).exists(), trust_remote_code=trust_remote_code
        )
    except Exception as error:  # a broken file, an unknown class, a missing library: each raises its own
        refuse_foreign_code(f"the image processor of {folder}", error)
        raise BadFileError(f"the image processor of {folder} cannot be read: {one_line(error)}") from error
