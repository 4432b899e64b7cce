"""Workloads: a model with its data, loss, optimizer and training step, by name and options."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from outofcore.errors import InputError
from outofcore.zoo.data import Batches, ImageSource, image_batches, image_source, text_batches, volume_batches
from outofcore.zoo.gpt import GPT, GPTShape, choose_shape
from outofcore.zoo.vision import VGG16, DenseNet121, ResNet, UNet3d, choose_resnet_shape

Loss = Callable[..., Tensor]
TrainStep = Callable[..., Tensor]

_COUNT_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
_MIN_VOCAB = 256  # gpt's smallest vocabulary: the values of a byte
_SOURCE_DESCRIPTIONS = {
    ImageSource.PHOTOS: "crops of scikit-learn's sample photographs",
    ImageSource.DIGITS: "scikit-learn's handwritten digits, enlarged",
    ImageSource.GENERATED: "generated gratings",
}


class OptimizerName(StrEnum):
    SGD = "sgd"  # plain gradient descent: no state
    MOMENTUM = "momentum"  # gradient descent with momentum 0.9: one state tensor per parameter
    ADAMW = "adamw"  # two state tensors per parameter
    ADAGRAD = "adagrad"  # one state tensor per parameter
    RMSPROP = "rmsprop"  # one state tensor per parameter


class OptimizerImpl(StrEnum):
    """PyTorch's implementations of an update rule."""

    PLAIN = "plain"  # a loop over the parameters
    FOREACH = "foreach"  # one call for a list of parameters
    FUSED = "fused"  # one kernel for the whole update; not available for rmsprop


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooOptions:
    """The options of a workload; None: the model's default.

    Options may be text: ``params="350M"``, ``optimizer="sgd"``. Raises ``InputError`` for unknown text.

    Attributes:
        batch: samples in a batch.
        depth: layers of ``resnet``, counted as in its paper.
        size: edge of the input in pixels (vision models) or voxels (``unet3d``).
        base: channels of the first convolution of ``unet3d``.
        classes: number of classes.
        params: approximate number of parameters of ``gpt``; chooses layers and width.
        layers, width, heads, context, vocab: the shape of ``gpt``.
        dropout: dropout probability of ``gpt`` and ``vgg16``.
        images: source of images; None: the first of photos (from 64 pixels), digits and generated that is installed.
        optimizer_impl: None: PyTorch's choice on the device.
        lr: learning rate; None: a default for the optimizer.
        amp: forward pass under autocast to bfloat16.
        clip: maximum norm of all gradients together; None: no clipping.
        seed: of weights and data.
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

    def __post_init__(self) -> None:
        for name, read in _PARSERS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, read(value))

    def check(self, name: str, takes: frozenset[str]) -> None:
        """Raise ``InputError`` for options that the workload ``name`` does not take, or that are out of range."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _SHAPE_OPTIONS and value is not None and field.name not in takes:
                valid = ", ".join(sorted(takes))
                raise InputError(f"{name} has no option {field.name!r}; the options that shape it are: {valid}")
            if field.name in _POSITIVE and value is not None and not value > 0:
                raise InputError(f"{field.name} must be above zero, and {value} is not")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise InputError(f"dropout must be at least 0 and below 1, and {self.dropout} is not")
        if self.optimizer is OptimizerName.RMSPROP and self.optimizer_impl is OptimizerImpl.FUSED:
            raise InputError("PyTorch has no fused rmsprop; use optimizer_impl 'foreach' or 'plain'")
        if self.seed < 0:
            raise InputError(f"the seed must not be negative, and {self.seed} is; use 0 or any larger whole number")


_SHAPE_OPTIONS = frozenset(
    {"depth", "size", "base", "classes", "params", "layers", "width", "heads", "context", "vocab", "dropout", "images"}
)
_POSITIVE = (_SHAPE_OPTIONS - {"dropout", "images"}) | {"batch", "lr", "clip"}


def parse_count(text: str | int) -> int:
    """Parse a count such as ``350M`` or ``"1.3B"``, with powers of 1000; raises ``InputError``."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMBkmb]?)\s*", str(text))
    count = round(float(match.group(1)) * _COUNT_UNITS[match.group(2).upper()]) if match else 0
    if isinstance(text, bool) or count <= 0:
        raise InputError(f"cannot read {text!r} as a number of parameters; write for example '350M' or '1.3B'")
    return count


def _enum_parser(option: str, kind: type[StrEnum]) -> Callable[[Any], Any]:

    def read(text: Any) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise InputError(f"{option} {text!r} is unknown; use one of: {', '.join(kind)}") from None

    return read


# Parsers of options that may be text.
_PARSERS: dict[str, Callable[[Any], Any]] = {
    "params": parse_count,
    "images": _enum_parser("images", ImageSource),
    "optimizer": _enum_parser("optimizer", OptimizerName),
    "optimizer_impl": _enum_parser("optimizer_impl", OptimizerImpl),
}

_DEFAULT_RATES = {
    OptimizerName.SGD: 0.05,
    OptimizerName.MOMENTUM: 0.01,
    OptimizerName.ADAMW: 3e-4,
    OptimizerName.ADAGRAD: 0.01,
    OptimizerName.RMSPROP: 1e-4,
}


@dataclass(frozen=True)
class Workload:
    """A model of the zoo with its data, loss and optimizer.

    Attributes:
        shape: description of the model, such as "50 layers, 224 × 224 pixels".
        data: description of the data.
        network: makes the model, with weights from PyTorch's default generator.
        loss: called as ``loss(model, *batch)``; returns a scalar tensor.
        stream: called as ``stream(batch, seed)``; returns endless batches.
        sample: shape and dtype of each tensor of a sample.
    """

    name: str
    options: ZooOptions
    shape: str
    data: str
    network: Callable[[], nn.Module]
    loss: Loss
    stream: Callable[[int, int], Batches]
    sample: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    def build(self, seed: int | None = None) -> nn.Module:
        """Make the model in training mode on the CPU, with weights from the seed."""
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would also seed the generators of accelerators.
            torch.default_generator.manual_seed(self.options.seed if seed is None else seed)
            return self.network().train()

    def skeleton(self) -> nn.Module:
        """Make the model in training mode on the meta device, without memory, for ``outofcore.load``."""
        with torch.device("meta"):
            return self.network().train()

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        """Make the optimizer that the options name, for all parameters of the model."""
        options, settings = self.options, dict[str, Any](lr=self.learning_rate)
        if options.optimizer_impl is not None:
            # PyTorch refuses foreach and fused together.
            settings["foreach"] = options.optimizer_impl is OptimizerImpl.FOREACH
            if options.optimizer is not OptimizerName.RMSPROP:
                settings["fused"] = options.optimizer_impl is OptimizerImpl.FUSED
        match options.optimizer:
            case OptimizerName.SGD:
                return optim.SGD(model.parameters(), **settings)
            case OptimizerName.MOMENTUM:
                return optim.SGD(model.parameters(), momentum=0.9, weight_decay=1e-4, **settings)
            case OptimizerName.ADAMW:
                return optim.AdamW(model.parameters(), **settings)
            case OptimizerName.ADAGRAD:
                return optim.Adagrad(model.parameters(), **settings)
            case OptimizerName.RMSPROP:
                return optim.RMSprop(model.parameters(), **settings)

    @property
    def learning_rate(self) -> float:
        return _DEFAULT_RATES[self.options.optimizer] if self.options.lr is None else self.options.lr

    def make_step(self, model: nn.Module, optimizer: optim.Optimizer) -> TrainStep:
        """Make a training step in plain PyTorch; it takes the tensors of a batch and returns the loss."""
        turn, update = self.make_turn(model), self.make_update(model, optimizer)

        def train_step(*batch: Tensor) -> Tensor:
            loss = turn(*batch)
            update()
            optimizer.zero_grad()
            return loss

        return train_step

    def make_turn(self, model: nn.Module) -> TrainStep:
        """Make a function that runs the forward and backward pass and returns the loss, for ``outofcore.elastic``."""
        loss_of, amp = self.loss, self.options.amp

        def precision(device: torch.device) -> AbstractContextManager[object]:
            return torch.autocast(device.type, dtype=torch.bfloat16) if amp else nullcontext()

        def turn(*batch: Tensor) -> Tensor:
            with precision(batch[0].device):
                loss = loss_of(model, *batch)
            loss.backward()
            return loss

        return turn

    def make_update(self, model: nn.Module, optimizer: optim.Optimizer) -> Callable[[], None]:
        """Make a function that clips gradients, if the options ask for it, and takes an optimizer step."""
        clip = self.options.clip

        def update() -> None:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()

        return update

    def batches(self, batch: int | None = None, seed: int | None = None) -> Batches:
        """Yield endless batches on the CPU, as arguments of the step; defaults come from the options."""
        return self.stream(self.options.batch if batch is None else batch, self.options.seed if seed is None else seed)

    def empty_batch(self) -> tuple[Tensor, ...]:
        """Return a batch on the meta device, without memory."""
        return tuple(
            torch.empty((self.options.batch, *shape), dtype=dtype, device="meta") for shape, dtype in self.sample
        )

    def parameter_count(self) -> int:
        """Return the number of parameters, without allocating them; shared parameters count once."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.network().parameters())

    def describe(self) -> str:
        """Describe the workload in one line."""
        options = self.options
        parts = [
            f"{self.name}: {self.shape}",
            f"{self.parameter_count():,} parameters",
            f"batch {options.batch}",
            f"{options.optimizer.value} at {self.learning_rate:g}"
            + (f" ({options.optimizer_impl.value})" if options.optimizer_impl else ""),
        ]
        if options.amp:
            parts.append("autocast to bfloat16")
        if options.clip is not None:
            parts.append(f"gradients clipped to {options.clip:g}")
        return "; ".join([*parts, self.data])


def names() -> tuple[str, ...]:
    """Return the names of the workloads."""
    return ("resnet", "vgg16", "densenet121", "unet3d", "gpt")


def workload(name: str, **options: Any) -> Workload:
    """Return the workload ``name`` with these ``ZooOptions``; raises ``InputError`` for an unknown name or value."""
    parsed = ZooOptions(**options)
    match name:
        case "resnet":
            make, takes = _resnet, {"depth", "size", "classes", "images"}
        case "vgg16":
            make, takes = _vgg16, {"size", "classes", "dropout", "images"}
        case "densenet121":
            make, takes = _densenet121, {"size", "classes", "images"}
        case "unet3d":
            make, takes = _unet3d, {"size", "base", "classes"}
        case "gpt":
            make, takes = _gpt, {"params", "layers", "width", "heads", "context", "vocab", "dropout"}
        case _:
            near = difflib.get_close_matches(name.lower(), names(), n=1)
            meant = f"did you mean {near[0]}? It has" if near else "use one of:"
            raise InputError(f"the zoo has no {name!r}; {meant} {', '.join(names())}")
    parsed.check(name, frozenset(takes))
    return make(parsed)


def _resnet(options: ZooOptions) -> Workload:
    depth, classes = options.depth or 50, options.classes or 1000
    choose_resnet_shape(depth)  # raises for an invalid depth before the model is built
    return _vision("resnet", options, f"{depth} layers", partial(ResNet, depth, classes))


def _vgg16(options: ZooOptions) -> Workload:
    size, classes = options.size or 224, options.classes or 1000
    dropout = 0.5 if options.dropout is None else options.dropout
    return _vision("vgg16", options, f"dropout {dropout:g}", partial(VGG16, size, classes, dropout))


def _densenet121(options: ZooOptions) -> Workload:
    return _vision("densenet121", options, "growth 32", partial(DenseNet121, options.classes or 1000))


def _vision(name: str, options: ZooOptions, shape: str, network: Callable[[], nn.Module]) -> Workload:
    """Make the workload of an image classifier; ``shape`` describes its layers, ``network`` makes the model."""
    size = options.size or 224
    if size < 32:
        raise InputError(f"{name} halves its input five times, so the size must be at least 32, and {size} is not")
    source = image_source(size, options.images)
    classes = options.classes or 1000
    return Workload(
        name=name,
        options=options,
        shape=f"{shape}, {size} × {size} pixels",
        data=_SOURCE_DESCRIPTIONS[source],
        network=network,
        loss=_classification_loss,
        stream=lambda batch, seed: image_batches(batch, size, classes, seed, source),
        sample=(((3, size, size), torch.float32), ((), torch.int64)),
    )


def _unet3d(options: ZooOptions) -> Workload:
    size, base, classes = options.size or 64, options.base or 32, options.classes or 3
    if size % 8:
        raise InputError(
            f"unet3d halves its volume three times, so the size must be a multiple of 8, and {size} is not"
        )
    return Workload(
        name="unet3d",
        options=options,
        shape=f"{base} base channels, {size}³ voxels",
        data="generated ellipsoids",
        network=partial(UNet3d, base, 3, classes),
        loss=_segmentation_loss,
        stream=lambda batch, seed: volume_batches(batch, size, classes, seed),
        sample=(((3, size, size, size), torch.float32), ((size, size, size), torch.int64)),
    )


def _gpt(options: ZooOptions) -> Workload:
    shape = _gpt_shape(options)
    return Workload(
        name="gpt",
        options=options,
        shape=(
            f"{shape.layers} layers of width {shape.width}, {shape.heads} heads, context {shape.context}, "
            f"vocabulary {shape.vocab}, dropout {shape.dropout:g}"
        ),
        data="source text of Python's standard library, one byte a token",
        network=partial(GPT, shape),
        loss=_language_loss,
        stream=lambda batch, seed: text_batches(batch, shape.context, seed),
        sample=(((shape.context,), torch.int64), ((shape.context,), torch.int64)),
    )


def _gpt_shape(options: ZooOptions) -> GPTShape:
    """Return a GPT's layers, width and other sizes from options; raises ``InputError`` for invalid options."""
    context, vocab = options.context or 1024, options.vocab or _MIN_VOCAB
    dropout = 0.1 if options.dropout is None else options.dropout
    if vocab < _MIN_VOCAB:
        raise InputError(f"gpt reads bytes, so its vocabulary must be at least {_MIN_VOCAB}, and {vocab} is not")
    if options.params is not None:
        if options.layers or options.width or options.heads:
            raise InputError("gpt: params picks layers, width and heads; give either params or these, not both")
        return choose_shape(options.params, context, vocab, dropout)
    width = options.width or 768
    return GPTShape(options.layers or 12, width, options.heads or max(1, width // 64), context, vocab, dropout)


# Spatial and time axes are flattened into the batch: on CUDA, PyTorch's cross-entropy is deterministic only for inputs
# of two dimensions.


def _classification_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def _segmentation_loss(model: nn.Module, volumes: Tensor, masks: Tensor) -> Tensor:
    return F.cross_entropy(model(volumes).movedim(1, -1).flatten(0, -2), masks.flatten())


def _language_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, -2), targets.flatten())
