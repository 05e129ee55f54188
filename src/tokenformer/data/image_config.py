"""ImageConfig: which images to read, how to split them and how to augment them; the `data:` section of an image recipe.

Enters: what a user wrote; an image recipe has the key `images` where one for text has `train`. Leaves: the same,
checked; every wrong setting is refused here, before a file is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from ..errors import BadRequestError, did_you_mean
from .config import check_seeds

# Mean and standard deviation of the pixels in [0, 1], as they are usually taken.
CONSTANTS: dict[str, tuple[list[float], list[float]]] = {
    "half": ([0.5], [0.5]),
    "imagenet": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    "cifar10": ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    "cifar100": ([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
    "mnist": ([0.1307], [0.3081]),
    "fashion_mnist": ([0.2860], [0.3530]),
}


@dataclass
class AugmentConfig:
    """What is done to training images; nothing unless asked for. In this order:

    crop_scale: random resized crop: the share of the area it keeps, as [0.08, 1.0]. None: resize and centre crop.
    crop_ratio: the least and the largest width / height of that crop.
    crop_padding: pixels of black put around the resized image before a crop of its size is taken at random.
    flip: probability of a mirror image.
    rand_augment: operations of RandAugment, chosen anew for each image; rand_probability: how often one that is chosen
        is carried out.
    magnitude: their strength, 0 to 10; magnitude_std: the standard deviation of a strength drawn around it.
    erasing: probability that a rectangle becomes noise.
    erasing_area: its least and largest share of the area.
    mixup, cutmix: the alpha of Beta(alpha, alpha) from which two images' shares are drawn; of both, either is taken.
    mix_probability: how often a pair is mixed.
    label_smoothing: the share of a label that is spread over all classes.
    """

    crop_scale: list[float] | None = None
    crop_ratio: list[float] = field(default_factory=lambda: [3 / 4, 4 / 3])
    crop_padding: int = 0
    flip: float = 0.0
    rand_augment: int = 0
    rand_probability: float = 1.0
    magnitude: float = 9.0
    magnitude_std: float = 0.0
    erasing: float = 0.0
    erasing_area: list[float] = field(default_factory=lambda: [0.02, 1 / 3])
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0
    label_smoothing: float = 0.0

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs; batches must be even then."""
        return (self.mixup > 0 or self.cutmix > 0) and self.mix_probability > 0


@dataclass
class ImageConfig:
    """Images in, pixel values and labels out.

    images, validation: one source or a list: folders with a sub-folder for each class, Parquet files, IDX files, Hub
        names, `digits`. See docs/data.md.
    image_column, label_column: the columns of Parquet and Hub datasets; found by themselves if there is one of each.
    class_names: names for labels that are numbers.
    size: pixels of a side of what comes out.
    channels: 3, or 1 for grey.
    crop_fraction: the share of the shorter side that the centre crop keeps, 0.875 for ImageNet's usual 224 of 256.
    normalise: whose mean and standard deviation the pixels are scaled by: half (to [-1, 1]), imagenet, cifar10, …
    mean, std: other ones, for each channel.
    validation_fraction: this share of the images is held out, unless `validation` or `split` is given.
    split: shares for training, validation and, if there are three, test.
    split_seed: decides what is held out.
    seed: decides the order, and every augmentation.
    strict: an image that cannot be read is an error, instead of being replaced by another and counted.
    workers: processes that decode and augment; all cores if None.
    cache: the folder where `datasets` keeps what it reads; its own if None.
    hub_config, hub_split, hub_validation_split: for Hub names: the configuration, and the splits that `images` and
        `validation` are read from.
    augment: what is done to training images.
    """

    images: str | list[str] = "digits"
    validation: str | list[str] | None = None
    image_column: str | None = None
    label_column: str | None = None
    class_names: list[str] | None = None
    size: int = 32
    channels: int = 3
    crop_fraction: float = 1.0
    normalise: str = "half"
    mean: list[float] | None = None
    std: list[float] | None = None
    validation_fraction: float = 0.01
    split: list[float] | None = None
    split_seed: int = 0
    seed: int = 0
    strict: bool = False
    workers: int | None = None
    cache: str | None = None
    hub_config: str | None = None
    hub_split: str = "train"
    hub_validation_split: str = "validation"
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        """A section of a recipe arrives as a mapping."""
        if self.augment is None:
            self.augment = AugmentConfig()
        elif not isinstance(self.augment, AugmentConfig):
            self.augment = _augment_from(self.augment)

    @property
    def pixel_mean(self) -> list[float]:
        """What is taken from the pixels of each channel."""
        return _each_channel(self.mean or CONSTANTS[self.normalise][0], self.channels)

    @property
    def pixel_std(self) -> list[float]:
        """What the pixels of each channel are divided by after that."""
        return _each_channel(self.std or CONSTANTS[self.normalise][1], self.channels)


def _augment_from(section: Any) -> AugmentConfig:
    if not isinstance(section, Mapping):
        raise BadRequestError(f"augment is {section!r}; a list of keys and values is needed, as flip: 0.5")
    known = [item.name for item in fields(AugmentConfig)]
    for key in section:
        if key not in known:
            raise BadRequestError(f"augment: {key!r} is not known; {did_you_mean(str(key), known)}")
    return AugmentConfig(**section)


def _each_channel(values: list[float], channels: int) -> list[float]:
    return list(values) * channels if len(values) == 1 else list(values)


def check_image_config(config: ImageConfig) -> None:
    """Refuse settings that cannot be met."""
    _check_numbers(config, "")
    _check_numbers(config.augment, "augment.")
    if config.size < 1:
        raise BadRequestError(f"size={config.size} was given; an image needs at least 1 pixel a side")
    if config.channels not in (1, 3):
        raise BadRequestError(f"channels={config.channels} was given; choose 3, or 1 for grey")
    if not 0 < config.crop_fraction <= 1:
        raise BadRequestError(f"crop_fraction={config.crop_fraction} was given; it must be above 0 and at most 1")
    if not 0 <= config.validation_fraction < 1:
        raise BadRequestError(
            f"validation_fraction={config.validation_fraction} was given; it must be at least 0 and less than 1"
        )
    check_seeds(config)
    if config.workers is not None and config.workers < 0:
        raise BadRequestError(f"workers={config.workers} was given; at least 0 is needed (0: the training process)")
    _check_constants(config)
    _check_split(config)
    _check_augment(config.augment)


def _check_numbers(section: Any, prefix: str) -> None:
    for name, hint in get_type_hints(type(section)).items():
        value = getattr(section, name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if hint is int and not whole:
            raise BadRequestError(f"{prefix}{name}={value!r} was given; it must be a whole number")
        if hint is float and not (whole or isinstance(value, float)):
            raise BadRequestError(f"{prefix}{name}={value!r} was given; it must be a number")


def _check_constants(config: ImageConfig) -> None:
    if config.normalise not in CONSTANTS:
        raise BadRequestError(
            f"normalise={config.normalise!r} is not known; {did_you_mean(str(config.normalise), CONSTANTS)}"
        )
    if (config.mean is None) != (config.std is None):
        raise BadRequestError("one of mean and std was given; give both, or name known ones with normalise")
    for name, values in (("mean", config.pixel_mean), ("std", config.pixel_std)):
        if len(values) != config.channels:
            raise BadRequestError(
                f"{name} has {len(values)} values, and images have channels={config.channels}; give one for each"
            )
    if min(config.pixel_std) <= 0:
        raise BadRequestError(f"std={config.std} was given; it must be above 0")


def _check_split(config: ImageConfig) -> None:
    if config.split is None:
        return
    if len(config.split) not in (2, 3) or min(config.split) <= 0 or abs(sum(config.split) - 1) > 1e-6:
        raise BadRequestError(
            f"split={config.split} was given; it must be two or three positive shares that add up to 1, "
            "as [0.9, 0.05, 0.05]"
        )
    if config.validation is not None:
        raise BadRequestError("both split and validation were given; one of them decides what is held out")


def _check_augment(augment: AugmentConfig) -> None:
    for name in ("flip", "rand_probability", "erasing", "mix_probability"):
        value = getattr(augment, name)
        if not 0 <= value <= 1:
            raise BadRequestError(f"augment.{name}={value} was given; a probability is between 0 and 1")
    for name in ("crop_padding", "rand_augment", "magnitude_std", "mixup", "cutmix"):
        value = getattr(augment, name)
        if value < 0:
            raise BadRequestError(f"augment.{name}={value} was given; it must be at least 0 (0 is off)")
    if not 0 <= augment.magnitude <= 10:
        raise BadRequestError(f"augment.magnitude={augment.magnitude} was given; it must be between 0 and 10")
    if not 0 <= augment.label_smoothing < 1:
        raise BadRequestError(
            f"augment.label_smoothing={augment.label_smoothing} was given; it must be at least 0 and less than 1"
        )
    for name, most in (("crop_scale", 1.0), ("erasing_area", 1.0), ("crop_ratio", float("inf"))):
        bounds = getattr(augment, name)
        if bounds is None and name == "crop_scale":
            continue
        numbers = isinstance(bounds, list | tuple) and [value for value in bounds if isinstance(value, int | float)]
        if not numbers or len(numbers) != 2 or len(bounds) != 2 or not 0 < bounds[0] <= bounds[1] <= most:
            raise BadRequestError(
                f"augment.{name}={bounds!r} was given; it must be a least and a largest value, as "
                + {"crop_scale": "[0.08, 1.0]", "erasing_area": "[0.02, 0.33]", "crop_ratio": "[0.75, 1.33]"}[name]
            )
