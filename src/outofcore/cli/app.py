"""The commands with their flags. What they do lies in a module each, which may import PyTorch; this one does not."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

import outofcore
from outofcore.cli.flags import ZOO_FLAGS, command
from outofcore.planning import POLICIES
from outofcore.units import parse_bytes

app = typer.Typer(
    help="Train PyTorch models that do not fit in memory, within a byte budget, bit for bit the same.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str, typer.Argument(help="resnet50 (or any depth), vgg16, densenet121, unet3d or gpt.", show_default=False)
]
Budget = Annotated[str | None, typer.Option(help="Bytes for all tensors of a step, such as 512MiB.")]
Batch = Annotated[int, typer.Option(help="Samples in a batch.")]
Home = Annotated[str, typer.Option(help="Where bytes live that do not fit: disk, host, or a folder on a disk.")]
Policy = Annotated[str, typer.Option(help=f"How to plan: {', '.join(POLICIES)}.")]
Picture = Annotated[Path | None, typer.Option(help="Write the memory of a step over time to this HTML file.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(outofcore.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Flags of the program itself."""


@command(app, ZOO_FLAGS)
def train(
    model: Model,
    *,
    budget: Budget = None,
    batch: Batch = 8,
    steps: Annotated[int, typer.Option(min=1, help="How many steps to train.")] = 20,
    home: Home = "disk",
    policy: Policy = "auto",
    eager: Annotated[bool, typer.Option("--eager", help="Plain PyTorch, without outofcore, to compare.")] = False,
    picture: Picture = None,
    **zoo: Any,
) -> None:
    """Train a model of the zoo within a byte budget."""
    if budget is None and not eager:
        raise typer.BadParameter(
            "give one, such as --budget 512MiB, or --eager for plain PyTorch", param_hint="--budget"
        )
    if eager and (budget is not None or picture is not None):
        raise typer.BadParameter("plain PyTorch knows no budget and gives no picture", param_hint="--eager")
    limit = None if budget is None else parse_bytes(budget)
    import_module("outofcore.cli.train").train(
        model, {**zoo, "batch": batch}, budget=limit, steps=steps, home=home, policy=policy, picture=picture
    )


@command(app, ZOO_FLAGS)
def plan(
    model: Model,
    *,
    budget: Budget = None,
    batch: Batch = 8,
    home: Home = "disk",
    policy: Policy = "auto",
    picture: Picture = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **zoo: Any,
) -> None:
    """Tell whether a model fits a budget, what would move, and how long a step would take.

    Exit status 1: it does not fit.
    """
    if budget is None and picture is not None:
        raise typer.BadParameter("a picture needs a budget to plan for", param_hint="--picture")
    limit = None if budget is None else parse_bytes(budget)
    fits = import_module("outofcore.cli.plan").plan(
        model, {**zoo, "batch": batch}, budget=limit, home=home, policy=policy, picture=picture, as_json=as_json
    )
    if not fits:
        raise typer.Exit(1)


@command(app)
def pack(
    file: Annotated[Path, typer.Argument(help="Rectangles as CSV: id,lower,upper,size.", show_default=False)],
    *,
    capacity: Annotated[str, typer.Option(help="Bytes that they must fit, such as 1048576 or 1MiB.")],
    output: Annotated[
        Path | None, typer.Option(help="Write the file with offsets here, and not to the screen.")
    ] = None,
    effort: Annotated[float, typer.Option(min=0, help="How hard to search; 1 takes a second or two.")] = 1.0,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Stop the search after so many, whatever is left.")
    ] = None,
) -> None:
    """Give rectangles (bytes by lifetime) addresses within a capacity.

    Reads and writes the CSV format of MiniMalloc. The same file gives the same addresses, unless --seconds runs out.
    Exit status 1: no placement was found.
    """
    limit = parse_bytes(capacity)
    placed = import_module("outofcore.cli.pack").run(
        file, capacity=limit, output=output, effort=effort, seconds=seconds
    )
    if not placed:
        raise typer.Exit(1)


@command(app)
def doctor(home: Home = "disk") -> None:
    """Print what the library sees of this machine, and what is amiss."""
    import_module("outofcore.cli.doctor").doctor(home)


def main() -> None:
    """The program ``outofcore``."""
    app()
