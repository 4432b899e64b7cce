"""The options of the commands, and the decorator that makes a function a command. Without PyTorch."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from outofcore.cli import completion
from outofcore.cli.commands import Command
from outofcore.errors import InputError, OutOfCoreError, is_out_of_memory
from outofcore.policies import POLICIES, policy_of
from outofcore.presets import Number, devices
from outofcore.report import columns
from outofcore.units import KIB, format_bytes, parse_bytes

Function = Callable[..., None]

_shape = partial(typer.Option, rich_help_panel="Size of the model (models of the zoo)")
_training = partial(typer.Option, rich_help_panel="Training (models of the zoo)")
_configured = partial(typer.Option, rich_help_panel="Model configuration (config.json)")

_ZOO = "Model of the zoo: resnet50 (or another depth), vgg16, densenet121, unet3d or gpt"
_SCRIPT = "my_script.py:build, your function that returns (step, model, optimizer, inputs)"
Model = Annotated[
    str, typer.Argument(help=f"{_ZOO}.", show_default=False, metavar="MODEL", autocompletion=completion.models)
]
Target = Annotated[
    str | None,
    typer.Argument(
        help=f"{_ZOO}; or {_SCRIPT}.", show_default=False, metavar="MODEL", autocompletion=completion.models
    ),
]
PlannedTarget = Annotated[
    str | None,
    typer.Argument(
        help=f"{_ZOO}; {_SCRIPT}; model.onnx, to plan its forward pass; or config.json of a model of transformers, "
        "built without weights.",
        show_default=False,
        metavar="MODEL",
        autocompletion=completion.models,
    ),
]
BATCH = 8  # samples, by default
Batch = Annotated[int, typer.Option(help="Samples per batch.")]
_HOME = "Backing store for evicted tensors: disk, host (memory), or a folder on a disk"
Home = Annotated[str, typer.Option(help=f"{_HOME}.", autocompletion=completion.homes)]
HostBudget = Annotated[
    str | None, typer.Option(help="Host memory for evicted tensors, used before the disk, e.g. 4GiB.")
]
CacheFolder = Annotated[
    Path | None,
    typer.Option("--cache", help="Folder for stored measurements and plans; the user cache folder by default."),
]
Arrays = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        help="Input of an ONNX file: x.npz with arrays by name, x.npy for a single input, or name=x.npy. Repeatable.",
    ),
]

# A smaller budget without a unit is probably a mistake.
_MIN_BARE_BUDGET = 64 * KIB


def parse_optional_bytes(text: str | None) -> int | None:
    return None if text is None else parse_bytes(text)


def check_budget(budgets: str | None) -> None:
    """Raise ``InputError`` if one of the comma-separated budgets is a small number without a unit, such as 6."""
    for text in () if budgets is None else budgets.split(","):
        number = text.strip()
        if number.isdigit() and 0 < int(number) < _MIN_BARE_BUDGET:
            unit = "GiB" if int(number) < 100 else "MiB"
            raise InputError(
                f"the budget {number} has no unit, and would be {number} bytes; did you mean {number}{unit}? "
                f"(For bytes write {number}B.)"
            )


def _check_policy(text: str) -> str:
    try:
        policy_of(text)
    except InputError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    return text


def refuse(*rules: tuple[bool, str, str]) -> None:
    """Raise ``typer.BadParameter`` for the first rule that applies; a rule is (applies, option, reason)."""
    for is_wrong, option, reason in rules:
        if is_wrong:
            raise typer.BadParameter(reason, param_hint=option)


@dataclass(frozen=True)
class PlaceOptions:
    """Where a step runs, where its evicted tensors and measurements are stored, and how it is planned."""

    device: Annotated[
        str, typer.Option(help="Device of the step: cpu, cuda or cuda:0.", autocompletion=completion.local_devices)
    ] = "cpu"
    home: Annotated[
        str | None,
        typer.Option(
            help=f"{_HOME}.",
            show_default="disk; for a GPU pinned host memory, then disk",
            autocompletion=completion.homes,
        ),
    ] = None
    host_budget: HostBudget = None
    policy: Annotated[
        str,
        typer.Option(
            callback=_check_policy,
            help=f"Planning policy: {', '.join(POLICIES)}; optionally with settings, e.g. window:reach=2.",
            autocompletion=completion.policies,
        ),
    ] = "auto"
    cache: CacheFolder = None
    no_cache: Annotated[
        bool,
        typer.Option("--no-cache", help="Ignore stored measurements and plans, and store no new ones."),
    ] = False

    @property
    def host_bytes(self) -> int | None:
        return parse_optional_bytes(self.host_budget)

    @property
    def cache_argument(self) -> bool | Path:
        return False if self.no_cache else self.cache or True

    def check(self) -> None:
        both = self.no_cache and self.cache is not None
        refuse((both, "--no-cache", "give one of --cache and --no-cache"))


def _print_devices(value: str) -> str:
    """Return the value; if it is "list", print the devices that can be simulated, and exit."""
    if value != "list":
        return value
    rows: list[tuple[str, ...]] = [("device", "memory", "to the host", "16 bits", "tf32", "fp32", "name")]
    for preset in devices():
        rates = (preset.flops.get(number) for number in (Number.HALF, Number.TF32, Number.FP32))
        rows.append(
            (
                preset.key,
                format_bytes(preset.memory_bytes),
                f"{preset.in_bytes_per_s / 1e9:g} GB/s",
                *("-" if rate is None else f"{rate / 1e12:g} TFLOPS" for rate in rates),
                preset.name,
            )
        )
    typer.echo(columns(rows))
    raise typer.Exit


@dataclass(frozen=True)
class PlannedPlaceOptions(PlaceOptions):
    device: Annotated[
        str,
        typer.Option(
            "--device",
            "--gpu",  # the older name
            callback=_print_devices,
            help="Device to plan for: cpu, cuda or cuda:0 (measured), or a simulated one, e.g. rtx4090 (list prints "
            "all) or '24GiB, 80 TFLOPS, 25 GB/s'.",
            autocompletion=completion.all_devices,
        ),
    ] = "cpu"


@dataclass(frozen=True)
class TrainOptions:
    steps: Annotated[int, typer.Option(min=1, help="Number of steps to train.")] = 20
    eager: Annotated[bool, typer.Option("--eager", help="Plain PyTorch without a budget, for comparison.")] = False
    picture: Annotated[Path | None, typer.Option(help="HTML file for a chart of memory over a step.")] = None
    save: Annotated[Path | None, typer.Option(help="Folder for a checkpoint at the end of training.")] = None
    resume: Annotated[Path | None, typer.Option(help="Folder of a checkpoint to continue from.")] = None
    bits: Annotated[bool, typer.Option("--bits", help="Losses with all bits, in hexadecimal.")] = False
    elastic: Annotated[
        int | None,
        typer.Option(min=1, help="Number of logical workers, divided among the processes of torchrun."),
    ] = None
    shard: Annotated[bool, typer.Option("--shard", help="Model sharded over the processes of torchrun.")] = False

    def check(self, budget: str | None) -> None:
        """Refuse options that contradict each other; also a missing budget, except with ``--eager``."""
        is_elastic, draws = self.elastic is not None, self.picture is not None
        refuse(
            (
                budget is None and not self.eager,
                "--budget",
                "train needs --budget, such as --budget 512MiB, or --eager for plain PyTorch",
            ),
            (
                self.eager and (budget is not None or draws),
                "--eager",
                "--eager trains without a budget and draws no picture; leave --budget and --picture out",
            ),
            (
                is_elastic and (self.eager or draws),
                "--elastic",
                "logical workers train within a budget and draw no picture; leave --eager and --picture out",
            ),
            (
                self.shard and (self.eager or is_elastic),
                "--shard",
                "only a compiled step shards a model; leave --eager and --elastic out",
            ),
        )


@dataclass(frozen=True)
class ReportOptions:
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file of the report.")] = Path("report.html")
    trace: Annotated[Path | None, typer.Option(help="File for a trace that Perfetto and chrome://tracing open.")] = None
    steps: Annotated[
        int, typer.Option(min=0, help="Number of steps to train before reporting the last; 0 reports the plan alone.")
    ] = 5
    curve: Annotated[
        bool, typer.Option("--curve/--no-curve", help="Step time over other budgets, with a plan for each.")
    ] = True


@dataclass(frozen=True)
class AnswerOptions:
    compare: Annotated[bool, typer.Option("--compare", help="Table of all policies at several budgets.")] = False
    sweep: Annotated[bool, typer.Option("--sweep", help="Table of step times by budget and policy.")] = False
    picture: Annotated[
        Path | None, typer.Option(help="HTML file for a chart of memory over a step; with --sweep of step times.")
    ] = None
    save_graph: Annotated[Path | None, typer.Option(help="Graph file of the step to write (.json or .json.gz).")] = None
    save_plan: Annotated[Path | None, typer.Option(help="File to write the plan to, for validate.")] = None
    curve: Annotated[
        bool | None,
        typer.Option(
            "--curve/--no-curve",
            help="Step time over budgets, and the budget from which a step is at most 1 % slower.",
            show_default="for your own script",
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="JSON for programs, in bytes and seconds.")] = False

    @property
    def compares_plans(self) -> bool:
        return self.compare or self.sweep

    def refuse_for_config(self, places: PlaceOptions, sharers: SharingOptions) -> None:
        """Refuse each given option that does not work with a model's ``config.json``."""
        reason = "this option does not work with a model's config.json; leave it out"
        options = {
            "--compare": self.compare,
            "--sweep": self.sweep,
            "--picture": self.picture is not None,
            "--save-graph": self.save_graph is not None,
            "--save-plan": self.save_plan is not None,
            "--curve": self.curve is not None,
            "--shard": sharers.shard,
            "--home": places.home is not None,
            "--host-budget": places.host_budget is not None,
        }
        refuse(*((is_given, option, reason) for option, is_given in options.items()))

    def check(self, budgets: tuple[int, ...]) -> None:
        """Refuse options that contradict each other, or that do not fit the number of budgets."""
        draws, saves = self.picture is not None, self.save_plan is not None
        refuse(
            (self.compare and self.sweep, "--sweep", "give one of --compare and --sweep"),
            (
                len(budgets) > 1 and not self.compares_plans,
                "--budget",
                "more than one budget needs --compare or --sweep",
            ),
            (not budgets and saves, "--save-plan", "this option needs a budget to plan for; give --budget"),
            (
                not budgets and draws and not self.sweep,
                "--picture",
                "this option needs a budget to plan for; give --budget",
            ),
            (
                self.compares_plans and saves,
                "--save-plan",
                "this option saves a single plan; leave --compare and --sweep out",
            ),
            (self.compare and draws, "--picture", "--compare draws no picture; use --sweep"),
        )


@dataclass(frozen=True)
class SharingOptions:
    """Options to plan for processes that share a model; the processes need not exist."""

    shard: Annotated[bool, typer.Option("--shard", help="Plan for one of --ranks processes that share the model.")] = (
        False
    )
    ranks: Annotated[
        int | None,
        typer.Option(min=2, help="Number of processes that share the model, with --shard. They need not exist."),
    ] = None
    between: Annotated[
        str | None,
        typer.Option(
            help="Bytes per second that each process sends to the others, with --shard, e.g. 10GiB.",
            show_default="1GiB; for a simulated device the rate of its link to the host",
        ),
    ] = None

    def check(self, graph: Path | None) -> None:
        """Refuse options that are incomplete, or given for a graph file."""
        is_wrong = self.shard != (self.ranks is not None) or (self.shard and graph is not None)
        refuse(
            (
                is_wrong or (self.between is not None and not self.shard),
                "--shard",
                "to plan for processes that share a model, give both --shard and --ranks, such as --shard --ranks 8, "
                "without --graph; --between needs them too",
            )
        )


@dataclass(frozen=True)
class OnnxOptions:
    dims: Annotated[
        list[str] | None,
        typer.Option("--dim", help="Value of a dynamic dimension of an ONNX file, e.g. batch=4. Repeatable."),
    ] = None
    arrays: Arrays = None


@dataclass(frozen=True)
class ZooOptions:
    """The options of ``outofcore.zoo.workload``, which documents and checks them."""

    depth: Annotated[int | None, _shape(help="Depth of a resnet, as in its paper.")] = None
    size: Annotated[
        int | None, _shape(help="Height and width of the images in pixels; for unet3d voxels per edge.")
    ] = None
    base: Annotated[int | None, _shape(help="Channels of the first convolution of unet3d.")] = None
    classes: Annotated[int | None, _shape(help="Number of classes.")] = None
    params: Annotated[
        str | None,
        _shape(help="Approximate number of parameters of gpt, e.g. 125M, instead of layers and width."),
    ] = None
    layers: Annotated[int | None, _shape(help="Number of transformer blocks of gpt.")] = None
    width: Annotated[int | None, _shape(help="Hidden size of gpt.")] = None
    heads: Annotated[int | None, _shape(help="Number of attention heads of gpt.")] = None
    context: Annotated[int | None, _shape(help="Tokens per sequence of gpt.")] = None
    vocab: Annotated[int | None, _shape(help="Vocabulary size of gpt, at least 256.")] = None
    dropout: Annotated[float | None, _shape(help="Dropout probability, for gpt and vgg16.")] = None
    images: Annotated[
        str | None,
        _training(
            help="Source of images: photos, digits or generated.",
            autocompletion=completion.words("photos", "digits", "generated"),
        ),
    ] = None
    optimizer: Annotated[
        str,
        _training(
            help="Optimizer: sgd, momentum, adamw, adagrad or rmsprop.",
            autocompletion=completion.words("sgd", "momentum", "adamw", "adagrad", "rmsprop"),
        ),
    ] = "adamw"
    optimizer_impl: Annotated[
        str | None,
        _training(
            help="Implementation of the optimizer: plain, foreach or fused.",
            show_default="as PyTorch chooses",
            autocompletion=completion.words("plain", "foreach", "fused"),
        ),
    ] = None
    lr: Annotated[float | None, _training(help="Learning rate.", show_default="a common one for the optimizer")] = None
    amp: Annotated[bool, _training("--amp", help="Forward pass under autocast to bfloat16.")] = False
    clip: Annotated[float | None, _training(help="Maximum norm to which all gradients are clipped.")] = None
    seed: Annotated[int, _training(help="Seed of weights, data and dropout.")] = 0

    def refuse(self, source: str, but: frozenset[str] = frozenset()) -> None:
        """Refuse each option that the user has set, except ``but``, since ``source`` does not take it."""
        reason = f"only models of the zoo take this option; {source} sets it itself"
        for field in fields(self):
            is_given = field.name not in but and getattr(self, field.name) != field.default
            refuse((is_given, f"--{field.name.replace('_', '-')}", reason))

    def with_batch(self, batch: int) -> dict[str, Any]:
        return {**asdict(self), "batch": batch}


@dataclass(frozen=True)
class ConfigOptions:
    """Options for a model's configuration only; see ``outofcore.cli.configs.Training``."""

    sequence: Annotated[int | None, _configured(help="Tokens per sequence.")] = None
    dtype: Annotated[
        str | None,
        _configured(
            help="Type of the parameters: fp32, bf16 or fp16.",
            show_default="as configured",
            autocompletion=completion.words("fp32", "bf16", "fp16"),
        ),
    ] = None
    lora: Annotated[
        int | None, _configured(help="Rank of LoRA adapters on all linear layers; only they are trained.")
    ] = None
    checkpointing: Annotated[
        bool, _configured("--checkpointing", help="Gradient checkpointing as in transformers.")
    ] = False

    def training(self, zoo: ZooOptions, batch: int) -> dict[str, Any]:
        return {**asdict(self), "batch": batch, "optimizer": zoo.optimizer, "amp": zoo.amp, "clip": zoo.clip}

    def refuse(self) -> None:
        """Refuse each of these options that the user has set, since the target is no model configuration."""
        reason = "only a model's config.json takes this option; leave it out"
        refuse(*((bool(value), f"--{name}", reason) for name, value in asdict(self).items()))


Debug = Annotated[
    bool,
    typer.Option("--debug", help="Log of the library, and the traceback of an error.", rich_help_panel="Help"),
]


def command(
    app: typer.Typer, example: str, *, cls: type[Command] = Command, **settings: Any
) -> Callable[[Function], Function]:
    """Return a decorator that makes a function a command; fields of its dataclass parameters become options."""

    def register(function: Function) -> Function:
        option_classes: dict[str, type] = {}
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            if is_dataclass(parameter.annotation) and isinstance(parameter.annotation, type):
                option_classes[parameter.name] = parameter.annotation
                parameters += _options_of(parameter.annotation)
            else:
                parameters.append(parameter)
        parameters.append(inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug))

        @functools.wraps(function)
        def run(*args: Any, debug: bool, **kwargs: Any) -> None:
            for name, option_class in option_classes.items():
                kwargs[name] = option_class(**{field.name: kwargs.pop(field.name) for field in fields(option_class)})
            is_own_step = kwargs.get("graph") is None  # a graph file may contain a tiny step
            checks = [partial(check_budget, kwargs.get("budget"))] if is_own_step else []
            _run_reporting_errors(*checks, partial(function, *args, **kwargs), debug=debug)

        # typer reads the options of a command from these attributes.
        run.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(cls=cls, epilog=f"Example: {example}", **settings)(run)
        return run

    return register


def _options_of(option_class: type) -> list[inspect.Parameter]:
    hints = get_type_hints(option_class, include_extras=True)
    only = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(f.name, only, default=f.default, annotation=hints[f.name]) for f in fields(option_class)]


def _run_reporting_errors(*functions: Callable[[], None], debug: bool) -> None:
    """Call functions; print an expected error and exit with status 2, or raise the error if ``debug``."""
    if debug:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    try:
        for function in functions:
            function()
    except Exception as error:
        message = _error_message(error)
        if debug or not message:
            raise
        typer.echo(f"error: {message}", err=True)
        raise typer.Exit(2) from error


def _error_message(error: Exception) -> str:
    """Return a message for an expected error; "" for any other, which needs a traceback."""
    if isinstance(error, OutOfCoreError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return (
            "this command needs PyTorch, which is not installed; install it with: pip install torch. "
            "These commands work without it: plan --graph, validate and pack."
        )
    if is_out_of_memory(error):
        text = str(error).partition("\n")[0][:200] or type(error).__name__
        return (
            f"there is not enough memory for this command ({text}). Use smaller sizes. Planning allocates tensors only "
            "to measure one op at a time: name a simulated device, such as --device h100, to measure no ops, and build "
            "the model and inputs of a script under torch.device('meta')."
        )
    return ""
