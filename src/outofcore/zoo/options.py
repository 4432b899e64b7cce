"""What a workload of the zoo can be asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from enum import StrEnum

from outofcore.errors import InputError

_COUNT_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


class OptimizerName(StrEnum):
    """The update rule."""

    SGD = "sgd"  # plain gradient descent: no state
    MOMENTUM = "momentum"  # gradient descent with momentum 0.9: one state tensor per parameter
    ADAMW = "adamw"  # two state tensors per parameter
    ADAGRAD = "adagrad"  # one state tensor per parameter
    RMSPROP = "rmsprop"  # one state tensor per parameter


class OptimizerImpl(StrEnum):
    """Which of PyTorch's implementations of the update rule runs."""

    PLAIN = "plain"  # a loop over the parameters
    FOREACH = "foreach"  # one call for a list of parameters
    FUSED = "fused"  # one kernel for the whole update; PyTorch has none for rmsprop


class ImageSource(StrEnum):
    """Where the images for the vision models come from."""

    PHOTOS = "photos"  # crops of scikit-learn's two sample photographs; needs scikit-learn and Pillow
    DIGITS = "digits"  # scikit-learn's 1,797 handwritten digits, enlarged; needs scikit-learn
    GENERATED = "generated"  # gratings made from the seed; needs nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooOptions:
    """All that can be chosen about a workload. None: the usual value of the model.

    Attributes:
        batch: samples in a batch.
        depth: layers of ``resnet``, counted as in its paper.
        size: edge of the input in pixels (vision models) or voxels (``unet3d``).
        base: channels of the first convolution of ``unet3d``.
        classes: how many classes are told apart.
        params: how many parameters ``gpt`` should have, about; picks layers and width.
        layers, width, heads, context, vocab: the shape of ``gpt``.
        dropout: probability of dropping a value; ``gpt`` and ``vgg16``.
        images: source of the images; None: the first of photos (edge of 64 pixels or more), digits and
            generated for which the packages are installed.
        optimizer: the update rule.
        optimizer_impl: None: whatever PyTorch takes by itself on the device at hand.
        lr: learning rate; None: a usual one for the update rule.
        amp: forward pass under autocast to bfloat16.
        clip: largest norm of all gradients together; None: no clipping.
        seed: decides weights and data.
    """

    batch: int
    depth: int | None = None
    size: int | None = None
    base: int | None = None
    classes: int | None = None
    params: int | None = None
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    context: int | None = None
    vocab: int | None = None
    dropout: float | None = None
    images: ImageSource | None = None
    optimizer: OptimizerName = OptimizerName.ADAMW
    optimizer_impl: OptimizerImpl | None = None
    lr: float | None = None
    amp: bool = False
    clip: float | None = None
    seed: int = 0

    def check(self, name: str, takes: frozenset[str]) -> None:
        """Refuse options that make no sense, or none for the model ``name``.

        Args:
            takes: which of the options that shape a model this model knows.

        Raises:
            InputError: an option is not above zero, or is one of another model.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _SHAPING and value is not None and field.name not in takes:
                known = ", ".join(sorted(takes))
                raise InputError(f"{name} has no option {field.name!r}; the options that shape it are: {known}")
            if field.name in _POSITIVE and value is not None and not value > 0:
                raise InputError(f"{field.name} must be above zero, and {value} is not")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise InputError(f"dropout must be at least 0 and below 1, and {self.dropout} is not")
        if self.seed < 0:
            raise InputError(f"the seed must not be negative, and {self.seed} is; take 0 or any larger whole number")


_SHAPING = frozenset(
    {"depth", "size", "base", "classes", "params", "layers", "width", "heads", "context", "vocab", "dropout", "images"}
)
_POSITIVE = (_SHAPING - {"dropout", "images"}) | {"batch", "lr", "clip"}


def parse_count(text: str | int) -> int:
    """Read a number of parameters such as ``350M``, ``"1.3B"`` or ``125000000``.

    ``K``, ``M`` and ``B`` are powers of 1000.

    Raises:
        InputError: the text is not a count, or is not above zero.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMBkmb]?)\s*", str(text))
    count = round(float(match.group(1)) * _COUNT_UNITS[match.group(2).upper()]) if match else 0
    if isinstance(text, bool) or count <= 0:
        raise InputError(f"cannot read {text!r} as a number of parameters; write for example '350M' or '1.3B'")
    return count
