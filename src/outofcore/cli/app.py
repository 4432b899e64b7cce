"""The commands and their flags. A command imports PyTorch when it runs and needs it."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import outofcore
from outofcore.cli import answer
from outofcore.cli import run as scripts
from outofcore.cli.targets import Kind, kind_of
from outofcore.errors import InputError, OutOfCoreError, ValidationError, is_out_of_memory
from outofcore.graphfile import write_graph
from outofcore.policies import POLICIES, policy_of
from outofcore.presets import devices, simulated
from outofcore.profiling.cache import Cache, default_cache_folder
from outofcore.units import format_bytes, parse_bytes

Command = Callable[..., None]
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_CONFIGURED = "A model's configuration"


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
# What goes with a model's configuration alone; see ``outofcore.cli.configs``.
CONFIG_FLAGS = (
    _flag("sequence", int | None, None, "Tokens in a sequence.", _CONFIGURED),
    _flag("dtype", str | None, None, "Of the parameters: fp32, bf16 or fp16; by default as configured.", _CONFIGURED),
    _flag("lora", int | None, None, "Rank of LoRA adapters on all linear layers; they alone are trained.", _CONFIGURED),
    _flag("checkpointing", bool, False, "Gradient checkpointing, as transformers does it.", _CONFIGURED),
)
DEBUG_FLAG = _flag("debug", bool, False, "Log what the library does, and show the traceback of an error.", "Help")


def command(app: typer.Typer, flags: Iterable[inspect.Parameter] = (), **settings: Any) -> Callable[[Command], Command]:
    """Register a function as a command with further flags, which it takes as keyword arguments, and with ``--debug``.

    An error of outofcore's own ends the command with its message and exit status 2. ``settings`` are those of typer.
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
            except Exception as error:
                if debug or not is_out_of_memory(error):
                    raise
                said = str(error).partition("\n")[0][:200] or type(error).__name__
                typer.echo(
                    f"error: there is not enough memory for this command ({said}). Give it smaller sizes. Planning "
                    "makes no tensors, but for one op at a time where it measures: name a device that is simulated, "
                    "such as --device h100, and have a script make its model and inputs under torch.device('meta').",
                    err=True,
                )
                raise typer.Exit(2) from error

        # typer reads a command's flags from these.
        run.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(**settings)(run)
        return run

    return register


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
_BATCH = 8
Batch = Annotated[int, typer.Option(help="Samples in a batch.")]
Home = Annotated[str, typer.Option(help="Where bytes live that do not fit: disk, host, or a folder on a disk.")]
HomeOf = Annotated[
    str | None,
    typer.Option(
        help="Where bytes live that do not fit: disk, host, or a folder on a disk; by default disk, and for a GPU "
        "pinned host memory, which comes before a disk.",
        show_default=False,
    ),
]
HostBudget = Annotated[
    str | None, typer.Option(help="Bytes of host memory for what does not fit, used before the disk; such as 4GiB.")
]
OnDevice = Annotated[str, typer.Option("--device", help="Where the step runs: cpu, cuda or cuda:0.")]
ForDevice = Annotated[
    str,
    typer.Option(
        "--device",
        "--gpu",  # as it was called first
        help="Where the step runs: cpu, cuda or cuda:0, where it is measured; or a device that need not be here and is "
        f"simulated: {', '.join(d.key for d in devices())}.",
    ),
]


def _known_policy(text: str) -> str:
    """Return the option, or refuse an unknown policy before anything else is done."""
    try:
        policy_of(text)
    except InputError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    return text


Policy = Annotated[
    str,
    typer.Option(
        callback=_known_policy,
        help=f"How to plan: {', '.join(POLICIES)}; with values for fields as in window:reach=2.",
    ),
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Measure anew, and keep nothing for the next time.")]
CacheFolder = Annotated[
    Path | None, typer.Option("--cache", help="A folder for measurements; by default one in the user's own cache.")
]
_TARGET = (
    "As for train, or a function of your own as my_script.py:build, which returns (step, model, optimizer, inputs); "
    "plan also takes an ONNX file, whose forward pass is planned."
)
Dims = Annotated[
    list[str] | None, typer.Option("--dim", help="A size that an ONNX file leaves open, such as batch=4; repeatable.")
]
Arrays = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        help="Inputs of an ONNX file: an .npz file by their names, a .npy file for one, or name=x.npy; repeatable.",
    ),
]
_PLANNED = f"{_TARGET[:-1]}, or a model's config.json, of which transformers builds the model without weights."
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
    batch: Batch = _BATCH,
    steps: Annotated[int, typer.Option(min=1, help="How many steps to train.")] = 20,
    device: OnDevice = "cpu",
    home: HomeOf = None,
    host_budget: HostBudget = None,
    policy: Policy = "auto",
    eager: Annotated[bool, typer.Option("--eager", help="Plain PyTorch, without outofcore, to compare.")] = False,
    picture: Picture = None,
    save: Annotated[Path | None, typer.Option(help="Save a checkpoint into this folder at the end.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on from the checkpoint in this folder.")] = None,
    bits: Annotated[bool, typer.Option("--bits", help="Print all bits of the losses, to compare runs.")] = False,
    elastic: Annotated[
        int | None,
        typer.Option(min=1, help="So many logical workers, shared by all processes that torchrun has started."),
    ] = None,
    shard: Annotated[
        bool, typer.Option("--shard", help="Spread the model over the processes that torchrun has started.")
    ] = False,
    cache: CacheFolder = None,
    no_cache: NoCache = False,
    **zoo: Any,
) -> None:
    """Train a model of the zoo within a byte budget."""
    if budget is None and not eager:
        raise typer.BadParameter(
            "give one, such as --budget 512MiB, or --eager for plain PyTorch", param_hint="--budget"
        )
    if eager and (budget is not None or picture is not None):
        raise typer.BadParameter("plain PyTorch knows no budget and gives no picture", param_hint="--eager")
    if elastic is not None and (eager or picture is not None):
        raise typer.BadParameter("logical workers train within a budget, and give no picture", param_hint="--elastic")
    if shard and (eager or elastic is not None):
        raise typer.BadParameter(
            "a model is spread by a compiled step, and not for logical workers", param_hint="--shard"
        )
    limit = None if budget is None else parse_bytes(budget)
    import_module("outofcore.cli.train").train(
        model,
        {**zoo, "batch": batch},
        budget=limit,
        steps=steps,
        device=device,
        home=home,
        policy=policy,
        picture=picture,
        save=save,
        resume=resume,
        bits=bits,
        cache=_cache(cache, no_cache),
        host_budget=_bytes(host_budget),
        elastic=elastic,
        shard=shard,
    )


@command(app, (*ZOO_FLAGS, *CONFIG_FLAGS))
def plan(
    model: Annotated[str | None, typer.Argument(help=_PLANNED, show_default=False)] = None,
    *,
    budget: Annotated[
        str | None,
        typer.Option(help="Bytes for all tensors of a step; with --compare or --sweep several, with commas between."),
    ] = None,
    batch: Batch = _BATCH,
    dims: Dims = None,
    arrays: Arrays = None,
    device: ForDevice = "cpu",
    home: HomeOf = None,
    host_budget: HostBudget = None,
    policy: Policy = "auto",
    graph: Annotated[Path | None, typer.Option(help="Plan for the step in this graph file; needs no PyTorch.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="All policies side by side, at several budgets.")] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Step time against budget for all policies.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the memory of a step, or with --sweep the times, in this HTML file.")
    ] = None,
    save_graph: Annotated[Path | None, typer.Option(help="Write the step as a graph file (.json or .json.gz).")] = None,
    save_plan: Annotated[Path | None, typer.Option(help="Write the plan as a file that validate reads.")] = None,
    curve: Annotated[
        bool | None,
        typer.Option(
            "--curve/--no-curve",
            help="Step time over budgets, and the budget from which nothing is lost; by default for your own code.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    shard: Annotated[
        bool, typer.Option("--shard", help="Plan for one of --ranks processes over which the model is spread.")
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(min=2, help="With --shard: how many processes; none of them has to be here.")
    ] = None,
    between: Annotated[
        str | None,
        typer.Option(
            help="With --shard: bytes a second that each process sends to others, such as 10GiB; by default 1GiB, and "
            "on a simulated device as many as reach it from its host."
        ),
    ] = None,
    cache: CacheFolder = None,
    no_cache: NoCache = False,
    **zoo: Any,
) -> None:
    """Tell whether a step fits a budget, what would move, and how long it would take.

    Exit status 1: it does not fit.
    """
    _check_plan(model, graph, device)
    if graph is not None and (dims or arrays):
        raise typer.BadParameter("the sizes of a graph file are in the file", param_hint="--dim")
    if shard != (ranks is not None) or (shard and graph is not None) or (between is not None and not shard):
        raise typer.BadParameter(
            "a step of your own or of the zoo is planned for processes that share a model by --shard --ranks 8; "
            "--between goes with these",
            param_hint="--shard",
        )
    if compare and sweep:
        raise typer.BadParameter("give one of --compare and --sweep", param_hint="--sweep")
    preset = simulated(device)
    budgets = () if budget is None else tuple(map(parse_bytes, budget.split(",")))
    several = compare or sweep
    configured = {flag.name: zoo.pop(flag.name) for flag in CONFIG_FLAGS}
    kind = None if model is None else kind_of(model)
    if kind is Kind.CONFIG:
        asked = {
            "--compare": compare,
            "--sweep": sweep,
            "--picture": picture is not None,
            "--save-graph": save_graph is not None,
            "--save-plan": save_plan is not None,
            "--curve": curve is not None,
            "--shard": shard,
            "--home": home is not None,
            "--host-budget": host_budget is not None,
        }
        with answer.saying(alone=as_json) as say:
            fits = _fit(str(model), {**zoo, **configured, "batch": batch}, asked, device, budgets, policy, as_json, say)
        if not fits:
            raise typer.Exit(1)
        return
    _check_zoo_options(kind, {**zoo, "batch": batch})
    for name, value in configured.items():
        if value:
            raise typer.BadParameter("it goes with a model's config.json alone", param_hint=f"--{name}")
    if len(budgets) > 1 and not several:
        raise typer.BadParameter("several budgets need --compare or --sweep", param_hint="--budget")
    if not budgets and preset is not None and not several:
        budgets = (preset.memory_bytes,)
    if not budgets and (save_plan is not None or (picture is not None and not sweep)):
        raise typer.BadParameter(
            "it needs a budget to plan for", param_hint="--save-plan" if save_plan else "--picture"
        )
    if several and save_plan is not None:
        raise typer.BadParameter("it takes a single plan: leave --compare and --sweep away", param_hint="--save-plan")
    if compare and picture is not None:
        raise typer.BadParameter("--compare draws nothing; --sweep does", param_hint="--picture")
    with answer.saying(alone=as_json) as say:
        subject = _subject(
            model,
            {**zoo, "batch": batch},
            graph,
            device,
            home,
            host_budget,
            _cache(cache, no_cache),
            as_json,
            ranks,
            _bytes(between),
            dims=dims or (),
            arrays=arrays or (),
        )
        if several:
            if save_graph is not None:
                write_graph(save_graph, subject.file)
            fits = answer.side_by_side(subject, budgets, swept=sweep, as_json=as_json, picture=picture, say=say)
        else:
            drawn = kind is Kind.SCRIPT if curve is None else curve
            wish = answer.Wish(policy, as_json, picture, save_graph, save_plan, drawn)
            fits = answer.present(subject, budgets[0] if budgets else None, wish, say)
    if not fits:
        raise typer.Exit(1)


def _fit(
    model: str,
    options: dict[str, Any],
    asked: dict[str, bool],
    device: str,
    budgets: tuple[int, ...],
    policy: str,
    as_json: bool,
    say: answer.Say,
) -> bool:
    """Answer for a model's configuration; False if it does not fit."""
    for flag, given in asked.items():
        if given:
            raise typer.BadParameter("it does not go with a model's config.json", param_hint=flag)
    unset = {flag.name: flag.default for flag in ZOO_FLAGS}
    taken = {"optimizer", "amp", "clip", "seed"}
    for name, default in unset.items():
        if name not in taken and options[name] != default:
            raise typer.BadParameter(
                "it goes with models of the zoo; a model's config.json says this itself",
                param_hint=f"--{name.replace('_', '-')}",
            )
    card = simulated(device)
    if card is None and device != "cpu":
        raise typer.BadParameter(
            "a configuration is planned for a device by its data sheet; name one that is simulated",
            param_hint="--device",
        )
    configs, fitting = import_module("outofcore.cli.configs"), import_module("outofcore.cli.fit")
    chosen = {name: value for name, value in options.items() if name not in unset or name in taken - {"seed"}}
    training = configs.Training(**chosen)
    return fitting.answer(
        configs.read_config(model), training, card=card, budgets=budgets, policy=policy, as_json=as_json, say=say
    )


def _check_zoo_options(kind: Kind | None, options: dict[str, Any]) -> None:
    """Refuse options of zoo models for anything else, where they would be ignored."""
    if kind is Kind.ZOO:
        return
    unset = {"batch": _BATCH, **{flag.name: flag.default for flag in ZOO_FLAGS}}
    for name, default in unset.items():
        if options[name] != default:
            raise typer.BadParameter(
                f"it goes with models of the zoo; {'a graph file' if kind is None else kind.value} says this itself",
                param_hint=f"--{name.replace('_', '-')}",
            )


def _bytes(given: str | None) -> int | None:
    return None if given is None else parse_bytes(given)


def _cache(folder: Path | None, off: bool) -> bool | Path:
    """Return the value of ``compile``'s argument ``cache``."""
    if off and folder is not None:
        raise typer.BadParameter("give one of --cache and --no-cache", param_hint="--no-cache")
    return False if off else folder or True


def _check_plan(model: str | None, graph: Path | None, device: str) -> None:
    if (model is None) == (graph is None):
        raise typer.BadParameter("give either a model of the zoo or --graph with a graph file", param_hint="MODEL")
    if graph is not None and device != "cpu":
        raise typer.BadParameter("the costs of a graph file are in the file", param_hint="--device")


def _subject(
    model: str | None,
    options: dict[str, Any],
    graph: Path | None,
    device: str,
    home: str | None,
    host_budget: str | None,
    cache: bool | Path,
    quiet: bool,
    ranks: int | None = None,
    between: int | None = None,
    dims: Iterable[str] = (),
    arrays: Iterable[str] = (),
) -> answer.Subject:
    """Find the step to plan. Only a step that is not from a file needs PyTorch."""
    if graph is not None:
        return answer.subject_from(graph)
    subjects = import_module("outofcore.cli.subjects")
    return subjects.subject_of(
        subjects.find_step(model, options, tuple(dims), tuple(arrays)),
        device=device,
        home=home,
        quiet=quiet,
        cache=cache,
        host_budget=_bytes(host_budget),
        ranks=ranks,
        between=between,
    )


@command(app, ZOO_FLAGS)
def report(
    model: Annotated[str | None, typer.Argument(help=_TARGET, show_default=False)] = None,
    *,
    budget: Annotated[str | None, typer.Option(help="Bytes for all tensors of a step; it must be given.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file.")] = Path("report.html"),
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace for Perfetto or chrome://tracing to this file as well.")
    ] = None,
    steps: Annotated[
        int, typer.Option(min=0, help="Train so many steps and report the last; 0: report the plan alone.")
    ] = 5,
    batch: Batch = _BATCH,
    device: ForDevice = "cpu",
    home: HomeOf = None,
    host_budget: HostBudget = None,
    policy: Policy = "auto",
    graph: Annotated[Path | None, typer.Option(help="Report a plan for the step in this graph file.")] = None,
    curve: Annotated[
        bool, typer.Option("--curve/--no-curve", help="Plan for other budgets as well; takes as long as so many plans.")
    ] = True,
    cache: CacheFolder = None,
    no_cache: NoCache = False,
    **zoo: Any,
) -> None:
    """Show where the time and the bytes of a step go, as one HTML page."""
    _check_plan(model, graph, device)
    if budget is None:
        raise typer.BadParameter("give one, such as --budget 512MiB", param_hint="--budget")
    limit, kept = parse_bytes(budget), _cache(cache, no_cache)
    options = {**zoo, "batch": batch}
    _check_zoo_options(None if model is None else kind_of(model), options)
    if graph is None and simulated(device) is None and steps:
        import_module("outofcore.cli.train").report(
            model,
            options,
            budget=limit,
            steps=steps,
            device=device,
            home=home,
            host_budget=_bytes(host_budget),
            policy=policy,
            output=output,
            trace=trace,
            curve=curve,
            cache=kept,
        )
        return
    subject = _subject(model, options, graph, device, home, host_budget, kept, False)
    answer.report_plan(subject, budget=limit, policy=policy, output=output, trace=trace, curve=curve)


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
            host_budget=_bytes(host_budget),
            checked=check,
            quiet=quiet,
        )
        return
    if arrays or output is not None:
        raise typer.BadParameter(
            "arrays are for ONNX files; a script has arguments after its name", param_hint="--input"
        )
    launch = scripts.Launch(target, tuple(arguments or ()), is_module, limit, home, _bytes(host_budget), check, quiet)
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
        bool, typer.Option("--clear-cache", help="Delete the measurements that are kept, and do nothing else.")
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
