"""ImageSettings: which images to read, how to split and how to augment them; the `data:` section of a recipe for
images.

A recipe for images has the key `images` where one for text has `train`.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import Self

from ...schema import Count, CountFromZero, NotNegative, Positive, Probability, ProcessesFromZero, Section, Seed, Share
from ..base import ONLY_FOR_TEXT, check_split

# Mean and standard deviation of the pixels in [0, 1], as they are usually taken.
CONSTANTS: dict[str, tuple[list[float], list[float]]] = {
    "half": ([0.5], [0.5]),
    "imagenet": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    "cifar10": ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    "cifar100": ([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
    "mnist": ([0.1307], [0.3081]),
    "fashion_mnist": ([0.2860], [0.3530]),
}


def _least_and_largest(bounds: list[float]) -> list[float]:
    if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
        raise ValueError(f"{bounds} was given; a least and a largest value are needed, as [0.08, 1.0]")
    return bounds


def _shares(bounds: list[float]) -> list[float]:
    if max(bounds) > 1:
        raise ValueError(f"{bounds} was given; a share of the area is at most 1, as in [0.08, 1.0]")
    return bounds


Range = Annotated[list[float], AfterValidator(_least_and_largest)]
Shares = Annotated[Range, AfterValidator(_shares)]


class AugmentSettings(Section):
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

    crop_scale: Shares | None = None
    crop_ratio: Range = [3 / 4, 4 / 3]
    crop_padding: CountFromZero = 0
    flip: Probability = 0.0
    rand_augment: CountFromZero = 0
    rand_probability: Probability = 1.0
    magnitude: Annotated[float, Field(ge=0, le=10)] = 9.0
    magnitude_std: NotNegative = 0.0
    erasing: Probability = 0.0
    erasing_area: Shares = [0.02, 1 / 3]
    mixup: NotNegative = 0.0
    cutmix: NotNegative = 0.0
    mix_probability: Probability = 1.0
    label_smoothing: Share = 0.0

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs; batches must be even then."""
        return (self.mixup > 0 or self.cutmix > 0) and self.mix_probability > 0


class ImageSettings(Section):
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
    size: Count = 32
    channels: Literal[1, 3] = 3
    crop_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    normalise: Literal["half", "imagenet", "cifar10", "cifar100", "mnist", "fashion_mnist"] = "half"
    mean: list[float] | None = None
    std: list[Positive] | None = None
    validation_fraction: Share = 0.01
    split: list[float] | None = None
    split_seed: Seed = 0
    seed: Seed = 0
    strict: bool = False
    workers: ProcessesFromZero | None = None
    cache: str | None = None
    hub_config: str | None = None
    hub_split: str = "train"
    hub_validation_split: str = "validation"
    augment: AugmentSettings = AugmentSettings()

    @classmethod
    def keys_of_other_recipes(cls) -> dict[str, str]:
        from ..text.settings import TextSettings  # not before there is an error to explain

        return dict.fromkeys(TextSettings.model_fields, ONLY_FOR_TEXT)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_split(self.split, self.validation)
        if (self.mean is None) != (self.std is None):
            raise ValueError("one of mean and std was given; set both, or choose known ones with normalise")
        for name, values in (("mean", self.pixel_mean), ("std", self.pixel_std)):
            if len(values) != self.channels:
                raise ValueError(
                    f"{name} has {len(values)} values, and images have channels={self.channels}; give one for each"
                )
        return self

    @property
    def pixel_mean(self) -> list[float]:
        """What is subtracted from the pixels of each channel."""
        return _each_channel(self.mean or CONSTANTS[self.normalise][0], self.channels)

    @property
    def pixel_std(self) -> list[float]:
        """What the pixels of each channel are divided by after that."""
        return _each_channel(self.std or CONSTANTS[self.normalise][1], self.channels)

    @property
    def shorter_side(self) -> int:
        """To how many pixels the shorter side is resized before the centre is cropped."""
        return round(self.size / self.crop_fraction)


def _each_channel(values: Sequence[float], channels: int) -> list[float]:
    return list(values) * channels if len(values) == 1 else list(values)
