"""Images into a saved vision model: the settings of transformers' ViTImageProcessor, written beside the weights.

Enters: a configuration, or a folder that has them. Leaves: preprocessor_config.json, which AutoImageProcessor and
pipeline read, or the processor. Plain JSON, so that saving a model needs no Pillow.
"""

import json
import os
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import AutoImageProcessor

from ..errors import BadFileError, BadRequestError, one_line
from .vision_config import TokenFormerVisionConfig

IMAGE_PROCESSOR_FILE = "preprocessor_config.json"
# transformers takes the one whose library is installed: Pillow is all we ask for.
IMAGE_PROCESSORS = {"pil": "ViTImageProcessorPil", "torchvision": "ViTImageProcessor"}


def write_image_processor(config: TokenFormerVisionConfig, folder: str | os.PathLike) -> None:
    """Write how images become pixel values, unless the folder says how already.

    That is as the folder or the Hub says that the model was loaded from, if need be at another size; for a new one, in
    [-1, 1] and of its size.
    """
    path = Path(folder) / IMAGE_PROCESSOR_FILE
    if path.exists():
        return
    before = _loaded_with(config)
    if before is not None:
        path.write_text(_at_size(before.read_text(), config.image_size))
        return
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": config.num_channels == 3,
        "do_resize": True,
        "size": {"height": config.image_size, "width": config.image_size},
        "resample": 3,  # bicubic
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * config.num_channels,
        "image_std": [0.5] * config.num_channels,
    }
    path.write_text(json.dumps(settings, indent=2) + "\n")


def _at_size(text: str, image_size: int) -> str:
    """The same processor for images of another size: what it resizes to and crops keep their proportions."""
    try:
        settings = json.loads(text)
    except json.JSONDecodeError:  # whoever reads it will say so
        return text
    given = settings.get("crop_size") or settings.get("size") or {}
    before = next(iter(given.values()), image_size) if isinstance(given, dict) else given
    if before == image_size:
        return text

    def scaled(size: Any) -> Any:
        if isinstance(size, dict):
            return {side: scaled(pixels) for side, pixels in size.items()}
        return round(size * image_size / before)

    settings |= {key: scaled(settings[key]) for key in ("size", "crop_size") if settings.get(key)}
    return json.dumps(settings, indent=2) + "\n"


def _loaded_with(config: TokenFormerVisionConfig) -> Path | None:
    """The file beside the weights that a model was loaded from, if it is still there; nothing is downloaded."""
    name = config.name_or_path
    if not name:
        return None
    here = Path(name) / IMAGE_PROCESSOR_FILE
    if here.is_file():
        return here
    try:
        cached = try_to_load_from_cache(name, IMAGE_PROCESSOR_FILE)
    except HFValidationError:  # a folder that is gone
        return None
    return Path(cached) if isinstance(cached, str) else None


def read_image_processor(folder: str | os.PathLike) -> Any:
    """The image processor of a model folder, or of a name on the Hub."""
    if Path(folder).exists() and not (Path(folder) / IMAGE_PROCESSOR_FILE).is_file():
        raise BadRequestError(f"{folder} has no {IMAGE_PROCESSOR_FILE}, which says how images become pixels; add it")
    try:
        return AutoImageProcessor.from_pretrained(folder, local_files_only=Path(folder).exists())
    except Exception as error:  # a broken file, an unknown class, a missing library: each raises its own
        raise BadFileError(f"the image processor of {folder} cannot be read: {one_line(error)}") from error
