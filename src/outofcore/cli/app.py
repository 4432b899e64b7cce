"""The commands of the command line. A command imports PyTorch only when it runs and needs it."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

import outofcore
from outofcore.cli import answer, completion
from outofcore.cli import run as scripts
from outofcore.cli.commands import Command, Group
from outofcore.cli.options import (
    BATCH,
    AnswerOptions,
    Arrays,
    Batch,
    CacheFolder,
    ConfigOptions,
    Home,
    HostBudget,
    Model,
    OnnxOptions,
    PlaceOptions,
    PlannedPlaceOptions,
    PlannedTarget,
    ReportOptions,
    SharingOptions,
    Target,
    TrainOptions,
    ZooOptions,
    command,
    parse_optional_bytes,
    refuse,
)
from outofcore.cli.targets import TargetKind, classify_target
from outofcore.errors import ValidationError
from outofcore.graphfile import write_graph
from outofcore.presets import simulated
from outofcore.profiling.cache import Cache, default_cache_folder
from outofcore.units import format_bytes, parse_bytes, share_of

app = typer.Typer(
    cls=Group,
    help="Train PyTorch models within a memory budget, with bit-identical results.",
    epilog="Example: outofcore plan resnet50 --batch 16 --budget 1GiB",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(is_set: bool) -> None:
    if is_set:
        typer.echo(outofcore.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself."""


@command(app, "outofcore train gpt --params 10M --budget 256MiB --steps 5")
def train(
    model: Model,
    *,
    budget: Annotated[str | None, typer.Option(help="Memory budget for all tensors of a step, e.g. 512MiB.")] = None,
    batch: Batch = BATCH,
    options: TrainOptions,
    places: PlaceOptions,
    zoo: ZooOptions,
) -> None:
    """Train a model of the zoo within a memory budget.

    To train your own script, use: outofcore run --budget 6GiB my_script.py
    """
    options.check(budget)
    places.check()
    limit = parse_optional_bytes(budget)
    import_module("outofcore.cli.train").train(model, zoo.with_batch(batch), limit, options, places)


@command(app, "outofcore plan resnet50 --batch 16 --budget 1GiB")
def plan(
    model: PlannedTarget = None,
    *,
    budget: Annotated[
        str | None,
        typer.Option(help="Memory budget, e.g. 6GiB; a list with --compare or --sweep, e.g. 1GiB,2GiB."),
    ] = None,
    batch: Batch = BATCH,
    onnx: OnnxOptions,
    places: PlannedPlaceOptions,
    graph: Annotated[
        Path | None, typer.Option(help="Graph file of the step, in place of a model; works without PyTorch.")
    ] = None,
    answers: AnswerOptions,
    sharers: SharingOptions,
    zoo: ZooOptions,
    configured: ConfigOptions,
) -> None:
    """Estimate memory and step time for a model without running it.

    Exit status: 0 if the step fits the budget, 1 if it does not, 2 after an error.
    """
    _check_source(model, graph, places)
    has_sizes = bool(onnx.dims or onnx.arrays)
    refuse((graph is not None and has_sizes, "--dim", "a graph file contains its sizes; leave --dim and --input out"))
    sharers.check(graph)
    budgets = () if budget is None else tuple(map(parse_bytes, budget.split(",")))
    kind = None if model is None else classify_target(model)
    with answer.answer_printer(answers_only=answers.as_json) as printer:
        if model is not None and kind is TargetKind.CONFIG:
            answers.refuse_for_config(places, sharers)
            zoo.refuse("a model's config.json", but=frozenset({"optimizer", "amp", "clip", "seed"}))
            fits = _answer_config(model, configured.training(zoo, batch), places, budgets, answers.as_json, printer)
        else:
            _check_zoo(kind, zoo, batch)
            configured.refuse()
            preset = simulated(places.device)
            if not budgets and preset is not None and not answers.compares_plans:
                budgets = (preset.memory_bytes,)
            answers.check(budgets)
            subject = _find_subject(model, zoo.with_batch(batch), graph, places, answers.as_json, sharers, onnx)
            if answers.compares_plans:
                if answers.save_graph is not None:
                    write_graph(answers.save_graph, subject.file)
                fits = answer.print_comparison(subject, budgets, answers, printer)
            else:
                shown = replace(answers, curve=kind is TargetKind.SCRIPT if answers.curve is None else answers.curve)
                fits = answer.print_plan(subject, budgets[0] if budgets else None, places.policy, shown, printer)
    if not fits:
        raise typer.Exit(1)


def _answer_config(
    model: str,
    training: dict[str, Any],
    places: PlaceOptions,
    budgets: tuple[int, ...],
    as_json: bool,
    printer: answer.Printer,
) -> bool:
    """Print memory needs and plans of the model in a ``config.json``; return whether every budget has a plan."""
    preset = simulated(places.device)
    reason = (
        "a config.json is planned for a simulated device; name one, such as --device h100 (--device list prints all)"
    )
    refuse((preset is None and places.device != "cpu", "--device", reason))
    # Nearly all objects stay alive until the answer, and collecting garbage would take a fifth of the time.
    gc.disable()
    try:
        configs, fitting = import_module("outofcore.cli.configs"), import_module("outofcore.cli.fit")
        model_config, training_options = configs.read_config(model), configs.Training(**training)
        return fitting.answer(
            model_config,
            training_options,
            target_device=preset,
            budgets=budgets,
            policy=places.policy,
            as_json=as_json,
            printer=printer,
        )
    finally:
        gc.freeze()  # the process collects no garbage when it ends, either
        gc.enable()


def _check_zoo(kind: TargetKind | None, zoo: ZooOptions, batch: int) -> None:
    """Refuse options of zoo models if the target is not a zoo model."""
    if kind is TargetKind.ZOO:
        return
    source = "a graph file" if kind is None else kind.value
    refuse((batch != BATCH, "--batch", f"only models of the zoo take this option; {source} sets it itself"))
    zoo.refuse(source)


def _check_source(model: str | None, graph: Path | None, places: PlaceOptions) -> None:
    """Refuse a command that does not name exactly one source: a model or a graph file."""
    is_file = graph is not None
    refuse(
        (
            model is None and not is_file,
            "MODEL",
            "name a model, e.g. resnet50 or my_script.py:build, or give a graph file with --graph",
        ),
        (model is not None and is_file, "MODEL", "give either a model or --graph, not both"),
        (
            is_file and places.device != "cpu",
            "--device",
            "a graph file contains the costs of its device; leave --device out",
        ),
    )
    places.check()


def _find_subject(
    model: str | None,
    options: dict[str, Any],
    graph: Path | None,
    places: PlaceOptions,
    quiet: bool,
    sharing: SharingOptions,
    onnx: OnnxOptions,
) -> answer.Subject:
    """Return the step to plan, with its costs: read from a graph file, or built from a model."""
    if graph is not None:
        return answer.read_subject(graph)
    subjects = import_module("outofcore.cli.subjects")
    return subjects.subject_of(
        subjects.find_step(model, options, tuple(onnx.dims or ()), tuple(onnx.arrays or ())),
        device=places.device,
        home=places.home,
        quiet=quiet,
        cache=places.cache_argument,
        host_budget=places.host_bytes,
        ranks=sharing.ranks,
        between=parse_optional_bytes(sharing.between),
    )


@command(app, "outofcore report resnet50 --batch 16 --budget 1GiB")
def report(
    model: Target = None,
    *,
    budget: Annotated[str | None, typer.Option(help="Memory budget, e.g. 6GiB. Required.")] = None,
    options: ReportOptions,
    batch: Batch = BATCH,
    places: PlannedPlaceOptions,
    graph: Annotated[Path | None, typer.Option(help="Graph file of the step, in place of a model.")] = None,
    zoo: ZooOptions,
) -> None:
    """Write an HTML page that shows where the time and the memory of a step go."""
    _check_source(model, graph, places)
    if budget is None:
        raise typer.BadParameter("report needs a budget, such as --budget 512MiB", param_hint="--budget")
    limit = parse_bytes(budget)
    _check_zoo(None if model is None else classify_target(model), zoo, batch)
    if graph is None and simulated(places.device) is None and options.steps:
        import_module("outofcore.cli.train").report(model, zoo.with_batch(batch), limit, options, places)
        return
    subject = _find_subject(model, zoo.with_batch(batch), graph, places, False, SharingOptions(), OnnxOptions())
    answer.write_plan_report(subject, limit, places.policy, options)


class _RunCommand(Command):
    """The ``run`` command: arguments after a script belong to the script; options may also follow an ONNX file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            values, _, _ = self.make_parser(ctx).parse_args(list(args))
        except Exception:  # super().parse_args raises it again and typer prints it
            values = {}
        if str(values.get("target")).endswith(".onnx") and not values.get("is_module"):
            ctx.allow_interspersed_args = True
        return super().parse_args(ctx, args)


@command(
    app,
    "outofcore run --budget 6GiB train.py --epochs 3",
    cls=_RunCommand,
    context_settings={"allow_interspersed_args": False},
)
def run(
    target: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="Python script, module with -m, or ONNX file.", show_default=False)
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Arguments of the script.", show_default=False)
    ] = None,
    *,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Memory budget for all tensors, e.g. 6GiB; for a script also a share of available memory, e.g. 70%. "
            "An ONNX file needs a budget in bytes.",
            show_default="70%; on a GPU 95% of its free memory",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Device that the budget applies to: cpu, cuda or cuda:0.",
            show_default="a GPU if there is one",
            autocompletion=completion.local_devices,
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Report of the script's memory use: peak without a budget, smallest budget, and predicted step times. "
            "The run may exceed the budget.",
        ),
    ] = False,
    grow: Annotated[
        bool,
        typer.Option("--grow", help="Permission to exceed the budget for ops that need more; the summary lists them."),
    ] = False,
    is_module: Annotated[
        bool, typer.Option("-m", help="Name of a module in place of a script, as for python -m.")
    ] = False,
    home: Home = "disk",
    host_budget: HostBudget = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Compare checksums of tensors evicted without a copy, to detect unnoticed writes.",
        ),
    ] = True,
    arrays: Arrays = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="File for the outputs of an ONNX file, by their names (.npz)."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary at the end.")] = False,
) -> None:
    """Run an unedited Python script, or an ONNX file on arrays, within a memory budget.

    Options come before the script; arguments after it are passed to the script. The exit status is that of the script.
    """
    if target.endswith(".onnx") and not is_module:
        reason = "an ONNX file runs on the CPU within a budget in bytes; outofcore plan prints the smallest one"
        refuse((budget is None, "--budget", reason), (measure, "--measure", reason), (grow, "--grow", reason))
        refuse((device not in (None, "cpu"), "--device", reason))
        if arguments:
            raise typer.BadParameter(
                f"an ONNX file takes no arguments; leave {arguments[0]!r} out", param_hint="ARGUMENTS"
            )
        import_module("outofcore.cli.onnx_models").run_model(
            target,
            parse_bytes(budget),
            arrays or (),
            output,
            home=home,
            host_budget=parse_optional_bytes(host_budget),
            checked=check,
            quiet=quiet,
        )
        return
    is_onnx = bool(arrays) or output is not None
    refuse((is_onnx, "--input", "only ONNX files take arrays; arguments of a script follow its name"))
    limit = budget if budget is None or share_of(budget) is not None else parse_bytes(budget)
    launch = scripts.Launch(
        target,
        tuple(arguments or ()),
        is_module,
        budget=limit,
        device=device,
        home=home,
        host_budget=parse_optional_bytes(host_budget),
        checked=check,
        quiet=quiet,
        measure=measure,
        grow=grow,
    )
    raise scripts.LaunchRequest(scripts.check_launch(launch))


@command(app, "outofcore validate --graph step.json --plan plan.json")
def validate(
    *,
    graph: Annotated[Path, typer.Option(help="Graph file of the step, from plan --save-graph.")],
    plan: Annotated[Path, typer.Option(help="Plan file, from plan --save-plan.")],
    budget: Annotated[str | None, typer.Option(help="Memory budget, e.g. 6GiB.", show_default="the plan's")] = None,
) -> None:
    """Prove that a saved plan computes its step within the budget.

    The checker shares no code with the planner. Exit status: 0 if the plan is valid, 1 if it is not, 2 after an error.
    """
    limit = None if budget is None else parse_bytes(budget)
    try:
        answer.check_plan_file(graph, plan, limit)
    except ValidationError as error:
        typer.echo(f"not valid: {error}", err=True)
        raise typer.Exit(1) from error


@command(app, "outofcore pack buffers.csv --capacity 1MiB --output placed.csv")
def pack(
    file: Annotated[
        Path,
        typer.Argument(
            help="CSV file of buffers (rectangles) in the format of MiniMalloc: id,lower,upper,size.",
            show_default=False,
            metavar="FILE",
        ),
    ],
    *,
    capacity: Annotated[str, typer.Option(help="Memory for all buffers, e.g. 1MiB or 1048576.")],
    output: Annotated[Path | None, typer.Option(help="CSV file to write.", show_default="standard output")] = None,
    effort: Annotated[float, typer.Option(min=0, help="Search effort; 1 takes up to a minute for hard files.")] = 1.0,
    seconds: Annotated[float | None, typer.Option(min=0, help="Time limit of the search in seconds.")] = None,
) -> None:
    """Assign memory offsets to buffers with known lifetimes.

    The output is the file with a column of offsets. The same file gets the same offsets, unless --seconds ends the
    search. Exit status: 0 if the buffers fit the capacity, 1 if no placement was found, 2 after an error.
    """
    limit = parse_bytes(capacity)
    placed = import_module("outofcore.cli.pack").run(
        file, capacity=limit, output=output, effort=effort, seconds=seconds
    )
    if not placed:
        raise typer.Exit(1)


@command(app, "outofcore doctor")
def doctor(
    home: Home = "disk",
    *,
    cache: CacheFolder = None,
    clear_cache: Annotated[
        bool, typer.Option("--clear-cache", help="Delete stored measurements and plans instead of checking.")
    ] = False,
) -> None:
    """Check the installation: versions, compiler, disk speed, and training with compile() and budget().

    Exit status: 0 if everything works, 1 if there are problems, 2 after an error.
    """
    if clear_cache:
        store = Cache(default_cache_folder() if cache is None else cache)
        stored_bytes = store.bytes()
        typer.echo(f"{store.folder}: {store.clear()} files deleted, {format_bytes(stored_bytes)}")
    elif not import_module("outofcore.cli.doctor").doctor(home, cache):
        raise typer.Exit(1)


def main() -> None:
    """Run the command line, and then the script of ``outofcore run``, if there is one."""
    hook, launch = sys.excepthook, None
    try:
        app(prog_name="outofcore")
    except scripts.LaunchRequest as launching:
        launch = launching.launch
    if launch is not None:
        sys.excepthook = hook  # typer has replaced it
        scripts.run(launch)
