"""The commands. A command imports PyTorch when it runs and needs it."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import outofcore
from outofcore.cli import answer
from outofcore.cli import run as scripts
from outofcore.cli.options import (
    BATCH,
    Answers,
    Arrays,
    Batch,
    CacheFolder,
    ConfigOptions,
    Home,
    HostBudget,
    Model,
    OnnxOptions,
    Places,
    PlannedPlaces,
    PlannedTarget,
    ReportOptions,
    Sharers,
    Target,
    TrainOptions,
    ZooOptions,
    bytes_in,
    command,
    refuse,
)
from outofcore.cli.targets import Kind, kind_of
from outofcore.errors import ValidationError
from outofcore.graphfile import write_graph
from outofcore.presets import simulated
from outofcore.profiling.cache import Cache, default_cache_folder
from outofcore.units import format_bytes, parse_bytes

app = typer.Typer(
    help="Train PyTorch models that do not fit in memory, within a byte budget, bit for bit the same.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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


@command(app)
def train(
    model: Model,
    *,
    budget: Annotated[str | None, typer.Option(help="Bytes for all tensors of a step, such as 512MiB.")] = None,
    batch: Batch = BATCH,
    options: TrainOptions,
    places: Places,
    zoo: ZooOptions,
) -> None:
    """Train a model of the zoo within a byte budget."""
    options.check(budget)
    places.check()
    limit = bytes_in(budget)
    import_module("outofcore.cli.train").train(model, zoo.with_batch(batch), limit, options, places)


@command(app)
def plan(
    model: PlannedTarget = None,
    *,
    budget: Annotated[
        str | None,
        typer.Option(help="Bytes for all tensors of a step; with --compare or --sweep several, with commas between."),
    ] = None,
    batch: Batch = BATCH,
    onnx: OnnxOptions,
    places: PlannedPlaces,
    graph: Annotated[Path | None, typer.Option(help="Plan for the step in this graph file; needs no PyTorch.")] = None,
    answers: Answers,
    sharers: Sharers,
    zoo: ZooOptions,
    configured: ConfigOptions,
) -> None:
    """Tell whether a step fits a budget, what would move, and how long it would take.

    Exit status 1: it does not fit.
    """
    _check_source(model, graph, places)
    has_sizes = bool(onnx.dims or onnx.arrays)
    refuse((graph is not None and has_sizes, "--dim", "the sizes of a graph file are in the file"))
    sharers.check(graph)
    budgets = () if budget is None else tuple(map(parse_bytes, budget.split(",")))
    kind = None if model is None else kind_of(model)
    with answer.saying(alone=answers.as_json) as say:
        if model is not None and kind is Kind.CONFIG:
            answers.refuse_for_config(places, sharers)
            zoo.refuse("a model's config.json", but=frozenset({"optimizer", "amp", "clip", "seed"}))
            fits = _fit(model, configured.training(zoo, batch), places, budgets, answers.as_json, say)
        else:
            _check_zoo(kind, zoo, batch)
            configured.refuse()
            preset = simulated(places.device)
            if not budgets and preset is not None and not answers.several:
                budgets = (preset.memory_bytes,)
            answers.check(budgets)
            subject = _subject(model, zoo.with_batch(batch), graph, places, answers.as_json, sharers, onnx)
            if answers.several:
                if answers.save_graph is not None:
                    write_graph(answers.save_graph, subject.file)
                fits = answer.side_by_side(subject, budgets, answers, say)
            else:
                drawn = replace(answers, curve=kind is Kind.SCRIPT if answers.curve is None else answers.curve)
                fits = answer.present(subject, budgets[0] if budgets else None, places.policy, drawn, say)
    if not fits:
        raise typer.Exit(1)


def _fit(
    model: str, training: dict[str, Any], places: Places, budgets: tuple[int, ...], as_json: bool, say: answer.Say
) -> bool:
    """Answer for a model's configuration; False if it does not fit."""
    card = simulated(places.device)
    why = "a configuration is planned for a device by its data sheet; name one that is simulated"
    refuse((card is None and places.device != "cpu", "--device", why))
    # Nearly all that is made is held until the answer: to look for garbage would take a fifth of the time.
    gc.disable()
    try:
        configs, fitting = import_module("outofcore.cli.configs"), import_module("outofcore.cli.fit")
        found, asked = configs.read_config(model), configs.Training(**training)
        return fitting.answer(found, asked, card=card, budgets=budgets, policy=places.policy, as_json=as_json, say=say)
    finally:
        gc.freeze()  # nor is any looked for when the process ends
        gc.enable()


def _check_zoo(kind: Kind | None, zoo: ZooOptions, batch: int) -> None:
    """Refuse options of zoo models for anything else, where they would be ignored."""
    if kind is Kind.ZOO:
        return
    what = "a graph file" if kind is None else kind.value
    refuse((batch != BATCH, "--batch", f"it goes with models of the zoo; {what} says this itself"))
    zoo.refuse(what)


def _check_source(model: str | None, graph: Path | None, places: Places) -> None:
    """Refuse two sources of a step or none, and places that do not go with it."""
    is_file = graph is not None
    refuse(
        ((model is None) != is_file, "MODEL", "give either a model of the zoo or --graph with a graph file"),
        (is_file and places.device != "cpu", "--device", "the costs of a graph file are in the file"),
    )
    places.check()


def _subject(
    model: str | None,
    options: dict[str, Any],
    graph: Path | None,
    places: Places,
    quiet: bool,
    sharers: Sharers,
    onnx: OnnxOptions,
) -> answer.Subject:
    """Find the step to plan. Only a step that is not from a file needs PyTorch."""
    if graph is not None:
        return answer.subject_from(graph)
    subjects = import_module("outofcore.cli.subjects")
    return subjects.subject_of(
        subjects.find_step(model, options, tuple(onnx.dims or ()), tuple(onnx.arrays or ())),
        device=places.device,
        home=places.home,
        quiet=quiet,
        cache=places.kept,
        host_budget=places.host_bytes,
        ranks=sharers.ranks,
        between=bytes_in(sharers.between),
    )


@command(app)
def report(
    model: Target = None,
    *,
    budget: Annotated[str | None, typer.Option(help="Bytes for all tensors of a step; it must be given.")] = None,
    options: ReportOptions,
    batch: Batch = BATCH,
    places: PlannedPlaces,
    graph: Annotated[Path | None, typer.Option(help="Report a plan for the step in this graph file.")] = None,
    zoo: ZooOptions,
) -> None:
    """Show where the time and the bytes of a step go, as one HTML page."""
    _check_source(model, graph, places)
    if budget is None:
        raise typer.BadParameter("give one, such as --budget 512MiB", param_hint="--budget")
    limit = parse_bytes(budget)
    _check_zoo(None if model is None else kind_of(model), zoo, batch)
    if graph is None and simulated(places.device) is None and options.steps:
        import_module("outofcore.cli.train").report(model, zoo.with_batch(batch), limit, options, places)
        return
    subject = _subject(model, zoo.with_batch(batch), graph, places, False, Sharers(), OnnxOptions())
    answer.report_plan(subject, limit, places.policy, options)


class _RunCommand(TyperCommand):
    """Leaves what follows a script to the script, whatever it looks like; options may follow an ONNX file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            found, _, _ = self.make_parser(ctx).parse_args(list(args))
        except Exception:  # it is raised again where it is told
            found = {}
        if str(found.get("target")).endswith(".onnx") and not found.get("is_module"):
            ctx.allow_interspersed_args = True
        return super().parse_args(ctx, args)


@command(app, cls=_RunCommand, context_settings={"allow_interspersed_args": False})
def run(
    target: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A script, with -m a module, or an ONNX file.", show_default=False)
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="Those of the script.", show_default=False)
    ] = None,
    *,
    budget: Annotated[str, typer.Option(help="Bytes for all tensors of the script, such as 6GiB.", show_default=False)],
    is_module: Annotated[
        bool, typer.Option("-m", help="The script is a module by its name, as for python -m.")
    ] = False,
    home: Home = "disk",
    host_budget: HostBudget = None,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Compare by checksum what leaves memory without having been written."),
    ] = True,
    arrays: Arrays = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Write the outputs of an ONNX file to this .npz file, by their names."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing at the end.")] = False,
) -> None:
    """Run a Python script that nobody edits within a byte budget, as python runs it; or an ONNX file on arrays.

    Options come before a script; what comes after it is the script's. The exit status is that of the script.
    """
    limit = parse_bytes(budget)
    if target.endswith(".onnx") and not is_module:
        if arguments:
            raise typer.BadParameter(
                f"an ONNX file takes no arguments, and {arguments[0]!r} is one", param_hint="ARGUMENTS"
            )
        import_module("outofcore.cli.onnx_models").run_model(
            target,
            limit,
            arrays or (),
            output,
            home=home,
            host_budget=bytes_in(host_budget),
            checked=check,
            quiet=quiet,
        )
        return
    is_onnx = bool(arrays) or output is not None
    refuse((is_onnx, "--input", "arrays are for ONNX files; a script has arguments after its name"))
    launch = scripts.Launch(target, tuple(arguments or ()), is_module, limit, home, bytes_in(host_budget), check, quiet)
    raise scripts.Launching(scripts.checked(launch))


@command(app)
def validate(
    *,
    graph: Annotated[Path, typer.Option(help="The graph file that the plan is for.")],
    plan: Annotated[Path, typer.Option(help="The plan, as plan --save-plan wrote it.")],
    budget: Annotated[str | None, typer.Option(help="Bytes; by default what the plan was made for.")] = None,
) -> None:
    """Prove that a saved plan computes its step within the budget, by a checker that shares nothing with the planner.

    Exit status 1: it does not, and why.
    """
    limit = None if budget is None else parse_bytes(budget)
    try:
        answer.check(graph, plan, limit)
    except ValidationError as error:
        typer.echo(f"not valid: {error}", err=True)
        raise typer.Exit(1) from error


@command(app)
def pack(
    file: Annotated[Path, typer.Argument(help="Rectangles as CSV: id,lower,upper,size.", show_default=False)],
    *,
    capacity: Annotated[str, typer.Option(help="Bytes that they must fit, such as 1048576 or 1MiB.")],
    output: Annotated[
        Path | None, typer.Option(help="Write the file with offsets here, and not to the screen.")
    ] = None,
    effort: Annotated[
        float, typer.Option(min=0, help="How hard to search; 1 takes up to a minute where there may be a placement.")
    ] = 1.0,
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
def doctor(
    home: Home = "disk",
    *,
    cache: CacheFolder = None,
    clear_cache: Annotated[
        bool, typer.Option("--clear-cache", help="Delete the stored measurements and plans, and do nothing else.")
    ] = False,
) -> None:
    """Check this machine and the installed versions, and train a small model through both doors."""
    if clear_cache:
        measured = Cache(default_cache_folder() if cache is None else cache)
        taken = measured.bytes()
        typer.echo(f"{measured.folder}: {measured.clear()} files deleted, {format_bytes(taken)}")
    elif not import_module("outofcore.cli.doctor").doctor(home, cache):
        raise typer.Exit(1)


def main() -> None:
    hook, launch = sys.excepthook, None
    try:
        app()
    except scripts.Launching as launching:
        launch = launching.launch
    if launch is not None:
        sys.excepthook = hook  # typer has one of its own
        scripts.run(launch)
