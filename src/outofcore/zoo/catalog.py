"""Which workloads there are, and how the options shape them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from outofcore.errors import InputError
from outofcore.zoo.data import image_batches, image_source, text_batches, volume_batches
from outofcore.zoo.densenet import DenseNet121
from outofcore.zoo.gpt import GPT, GPTShape, shape_for
from outofcore.zoo.optimizers import check_optimizer
from outofcore.zoo.options import ImageSource, OptimizerImpl, OptimizerName, ZooOptions, parse_count
from outofcore.zoo.resnet import ResNet, resnet_shape
from outofcore.zoo.unet3d import UNet3d
from outofcore.zoo.vgg import VGG16
from outofcore.zoo.workload import Workload

_BYTES = 256
_SOURCES = {
    ImageSource.PHOTOS: "crops of scikit-learn's sample photographs",
    ImageSource.DIGITS: "scikit-learn's handwritten digits, enlarged",
    ImageSource.GENERATED: "generated gratings",
}


def names() -> tuple[str, ...]:
    """The workloads of the zoo."""
    return ("resnet", "vgg16", "densenet121", "unet3d", "gpt")


def workload(
    name: str,
    *,
    batch: int,
    depth: int | None = None,
    size: int | None = None,
    base: int | None = None,
    classes: int | None = None,
    params: int | str | None = None,
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    context: int | None = None,
    vocab: int | None = None,
    dropout: float | None = None,
    images: str | None = None,
    optimizer: str = "adamw",
    optimizer_impl: str | None = None,
    lr: float | None = None,
    amp: bool = False,
    clip: float | None = None,
    seed: int = 0,
) -> Workload:
    """A workload by name. The options are those of `ZooOptions`, as text where that reads better.

    Args:
        params: a count, or text such as "350M".

    Raises:
        InputError: there is no such workload, or an option does not fit it.
    """
    return from_options(
        name,
        ZooOptions(
            batch=batch,
            depth=depth,
            size=size,
            base=base,
            classes=classes,
            params=None if params is None else parse_count(params),
            layers=layers,
            width=width,
            heads=heads,
            context=context,
            vocab=vocab,
            dropout=dropout,
            images=None if images is None else _one_of(ImageSource, images, "images"),
            optimizer=_one_of(OptimizerName, optimizer, "optimizer"),
            optimizer_impl=None if optimizer_impl is None else _one_of(OptimizerImpl, optimizer_impl, "optimizer_impl"),
            lr=lr,
            amp=amp,
            clip=clip,
            seed=seed,
        ),
    )


def from_options(name: str, options: ZooOptions) -> Workload:
    """A workload by name.

    Raises:
        InputError: there is no such workload, or an option does not fit it.
    """
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
            raise InputError(f"the zoo has no {name!r}; take one of: {', '.join(names())}")
    options.check(name, frozenset(takes))
    check_optimizer(options)
    return make(options)


def _resnet(options: ZooOptions) -> Workload:
    depth, classes = options.depth or 50, options.classes or 1000
    resnet_shape(depth)  # refuses a depth that cannot be, before anything is built
    return _vision("resnet", options, f"{depth} layers", partial(ResNet, depth, classes))


def _vgg16(options: ZooOptions) -> Workload:
    size, classes = options.size or 224, options.classes or 1000
    dropout = 0.5 if options.dropout is None else options.dropout
    return _vision("vgg16", options, f"dropout {dropout:g}", partial(VGG16, size, classes, dropout))


def _densenet121(options: ZooOptions) -> Workload:
    return _vision("densenet121", options, "growth 32", partial(DenseNet121, options.classes or 1000))


def _vision(name: str, options: ZooOptions, shape: str, network: Callable[[], nn.Module]) -> Workload:
    size = options.size or 224
    if size < 32:
        raise InputError(f"{name} halves its input five times, so the size must be at least 32, and {size} is not")
    source = image_source(size, options.images)
    classes = options.classes or 1000
    return Workload(
        name=name,
        options=options,
        shape=f"{shape}, {size} × {size} pixels",
        data=_SOURCES[source],
        network=network,
        loss=_classification_loss,
        stream=lambda batch, seed: image_batches(batch, size, classes, seed, source),
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
    )


def _gpt_shape(options: ZooOptions) -> GPTShape:
    context, vocab = options.context or 1024, options.vocab or _BYTES
    dropout = 0.1 if options.dropout is None else options.dropout
    if vocab < _BYTES:
        raise InputError(f"gpt reads bytes, so its vocabulary must be at least {_BYTES}, and {vocab} is not")
    if options.params is not None:
        if options.layers or options.width or options.heads:
            raise InputError("gpt: params picks layers, width and heads; give either params or these, not both")
        return shape_for(options.params, context, vocab, dropout)
    width = options.width or 768
    return GPTShape(options.layers or 12, width, options.heads or max(1, width // 64), context, vocab, dropout)


# The spatial and time axes are flattened into the batch: PyTorch's cross-entropy over two axes is deterministic on
# CUDA, the one over more is not.


def _classification_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def _segmentation_loss(model: nn.Module, volumes: Tensor, masks: Tensor) -> Tensor:
    return F.cross_entropy(model(volumes).movedim(1, -1).flatten(0, -2), masks.flatten())


def _language_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, -2), targets.flatten())


def _one_of(kind: Any, text: str, option: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise InputError(f"{option} {text!r} is not known; take one of: {', '.join(kind)}") from None
