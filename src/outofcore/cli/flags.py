"""Flags that several commands share, and what becomes of an error in a command."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from outofcore.errors import OutOfCoreError

Command = Callable[..., None]
_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _flag(name: str, kind: Any, default: object, text: str, panel: str) -> inspect.Parameter:
    # A switch by its one name: typer would add a "--no-…" beside it.
    names = (f"--{name}",) if kind is bool else ()
    annotation = Annotated[kind, typer.Option(*names, help=text, rich_help_panel=panel)]
    return inspect.Parameter(name, _KEYWORD, default=default, annotation=annotation)


def _shape(name: str, kind: Any, text: str) -> inspect.Parameter:
    return _flag(name, kind | None, None, text, "The model")


def _training(name: str, kind: Any, default: object, text: str) -> inspect.Parameter:
    return _flag(name, kind, default, text, "The training")


# The options of ``outofcore.zoo.workload``, where they are explained and checked.
ZOO_FLAGS = (
    _shape("depth", int, "Layers of a resnet, counted as in its paper."),
    _shape("size", int, "Edge of the input, in pixels or (unet3d) voxels."),
    _shape("base", int, "Channels of the first convolution of unet3d."),
    _shape("classes", int, "How many classes are told apart."),
    _shape("params", str, "How many parameters gpt should have, about, such as 125M; picks layers and width."),
    _shape("layers", int, "Blocks of gpt."),
    _shape("width", int, "Channels of gpt."),
    _shape("heads", int, "Attention heads of gpt."),
    _shape("context", int, "Tokens in a sequence of gpt."),
    _shape("vocab", int, "Tokens that gpt knows; it reads bytes, so 256 at least."),
    _shape("dropout", float, "Probability of dropping a value; gpt and vgg16."),
    _training("images", str | None, None, "Source of images: photos, digits or generated."),
    _training("optimizer", str, "adamw", "sgd, momentum, adamw, adagrad or rmsprop."),
    _training("optimizer_impl", str | None, None, "plain, foreach or fused; by default PyTorch's own choice."),
    _training("lr", float | None, None, "Learning rate; by default a usual one for the optimizer."),
    _training("amp", bool, False, "Run the forward pass under autocast to bfloat16."),
    _training("clip", float | None, None, "Clip the norm of all gradients to this."),
    _training("seed", int, 0, "Decides weights, data and dropout."),
)
DEBUG_FLAG = _flag("debug", bool, False, "Log what the library does, and show the traceback of an error.", "Help")


def command(app: typer.Typer, flags: Iterable[inspect.Parameter] = ()) -> Callable[[Command], Command]:
    """Register a function as a command with further flags, which it takes as keyword arguments, and with ``--debug``.

    An error of outofcore's own ends the command with its message and exit status 2.
    """

    def register(function: Command) -> Command:
        own = inspect.signature(function, eval_str=True)
        named = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters = [*named, *flags, DEBUG_FLAG]

        @functools.wraps(function)
        def run(*args: Any, debug: bool, **kwargs: Any) -> None:
            if debug:
                logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
            try:
                function(*args, **kwargs)
            except OutOfCoreError as error:
                if debug:
                    raise
                typer.echo(f"error: {error}", err=True)
                raise typer.Exit(2) from error
            except ModuleNotFoundError as error:
                if debug or error.name != "torch":
                    raise
                typer.echo(
                    "error: this command needs PyTorch, which is not installed; install it with: pip install torch. "
                    "Without it work: plan --graph, validate and pack.",
                    err=True,
                )
                raise typer.Exit(2) from error

        # typer reads a command's flags from these.
        run.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command()(run)
        return run

    return register
