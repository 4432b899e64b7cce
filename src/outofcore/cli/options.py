"""The options of the commands, and how a function becomes a command. Without PyTorch.

A parameter of a command that is annotated with one of the classes here stands for all of its fields, each an option.
"""

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

from outofcore.errors import InputError, OutOfCoreError, is_out_of_memory
from outofcore.policies import POLICIES, policy_of
from outofcore.presets import Number, devices
from outofcore.report import columns
from outofcore.units import format_bytes, parse_bytes

Command = Callable[..., None]

_shape = partial(typer.Option, rich_help_panel="The model")
_training = partial(typer.Option, rich_help_panel="The training")
_configured = partial(typer.Option, rich_help_panel="A model's configuration")

Model = Annotated[
    str, typer.Argument(help="resnet50 (or any depth), vgg16, densenet121, unet3d or gpt.", show_default=False)
]
_TARGET = (
    "As for train, or a function of your own as my_script.py:build, which returns (step, model, optimizer, inputs); "
    "plan also takes an ONNX file, whose forward pass is planned."
)
Target = Annotated[str | None, typer.Argument(help=_TARGET, show_default=False)]
PlannedTarget = Annotated[
    str | None,
    typer.Argument(
        help=f"{_TARGET[:-1]}, or a model's config.json, of which transformers builds the model without weights.",
        show_default=False,
    ),
]
BATCH = 8  # samples, where none are asked for
Batch = Annotated[int, typer.Option(help="Samples in a batch.")]
Home = Annotated[str, typer.Option(help="Where bytes live that do not fit: disk, host, or a folder on a disk.")]
HostBudget = Annotated[
    str | None, typer.Option(help="Bytes of host memory for what does not fit, used before the disk; such as 4GiB.")
]
CacheFolder = Annotated[
    Path | None, typer.Option("--cache", help="A folder for measurements; by default one in the user's own cache.")
]
Arrays = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        help="Inputs of an ONNX file: an .npz file by their names, a .npy file for one, or name=x.npy; repeatable.",
    ),
]


def bytes_in(given: str | None) -> int | None:
    """Read a byte count that may have been left out."""
    return None if given is None else parse_bytes(given)


def _known_policy(text: str) -> str:
    """Return the option, or refuse an unknown policy before anything else is done."""
    try:
        policy_of(text)
    except InputError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    return text


def refuse(*rules: tuple[bool, str, str]) -> None:
    """Refuse the first option that is wrong; each rule says whether it is, how it is called, and why."""
    for is_wrong, option, why in rules:
        if is_wrong:
            raise typer.BadParameter(why, param_hint=option)


@dataclass(frozen=True)
class Places:
    """Where a step runs and where its bytes live, how it is planned, and where measurements are kept."""

    device: Annotated[str, typer.Option(help="Where the step runs: cpu, cuda or cuda:0.")] = "cpu"
    home: Annotated[
        str | None,
        typer.Option(
            help="Where bytes live that do not fit: disk, host, or a folder on a disk; by default disk, and for a GPU "
            "pinned host memory, which comes before a disk.",
            show_default=False,
        ),
    ] = None
    host_budget: HostBudget = None
    policy: Annotated[
        str,
        typer.Option(
            callback=_known_policy,
            help=f"How to plan: {', '.join(POLICIES)}; with values for fields as in window:reach=2.",
        ),
    ] = "auto"
    cache: CacheFolder = None
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Measure anew, and keep nothing for the next time.")] = (
        False
    )

    @property
    def host_bytes(self) -> int | None:
        """The host budget in bytes."""
        return bytes_in(self.host_budget)

    @property
    def kept(self) -> bool | Path:
        """The value of ``compile``'s argument ``cache``."""
        return False if self.no_cache else self.cache or True

    def check(self) -> None:
        """Refuse what contradicts itself."""
        both = self.no_cache and self.cache is not None
        refuse((both, "--no-cache", "give one of --cache and --no-cache"))


def _listing(value: str) -> str:
    """Print the devices that may be simulated, where they are asked for."""
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
class PlannedPlaces(Places):
    """The same for a step that may be planned for a device that is not here."""

    device: Annotated[
        str,
        typer.Option(
            "--device",
            "--gpu",  # as it was called first
            callback=_listing,
            help="Where the step runs: cpu, cuda or cuda:0, where it is measured; or a device that need not be here "
            "and is simulated: such as rtx4090 (list prints all), or by numbers '24GiB, 80 TFLOPS, 25 GB/s'.",
        ),
    ] = "cpu"


@dataclass(frozen=True)
class TrainOptions:
    """What ``train`` does besides training within a budget."""

    steps: Annotated[int, typer.Option(min=1, help="How many steps to train.")] = 20
    eager: Annotated[bool, typer.Option("--eager", help="Plain PyTorch, without outofcore, to compare.")] = False
    picture: Annotated[Path | None, typer.Option(help="Write the memory of a step over time to this HTML file.")] = None
    save: Annotated[Path | None, typer.Option(help="Save a checkpoint into this folder at the end.")] = None
    resume: Annotated[Path | None, typer.Option(help="Go on from the checkpoint in this folder.")] = None
    bits: Annotated[bool, typer.Option("--bits", help="Print all bits of the losses, to compare runs.")] = False
    elastic: Annotated[
        int | None,
        typer.Option(min=1, help="So many logical workers, shared by all processes that torchrun has started."),
    ] = None
    shard: Annotated[
        bool, typer.Option("--shard", help="Spread the model over the processes that torchrun has started.")
    ] = False

    def check(self, budget: str | None) -> None:
        """Refuse what does not go together."""
        is_elastic, draws = self.elastic is not None, self.picture is not None
        refuse(
            (
                budget is None and not self.eager,
                "--budget",
                "give one, such as --budget 512MiB, or --eager for plain PyTorch",
            ),
            (
                self.eager and (budget is not None or draws),
                "--eager",
                "plain PyTorch knows no budget and gives no picture",
            ),
            (
                is_elastic and (self.eager or draws),
                "--elastic",
                "logical workers train within a budget, and give no picture",
            ),
            (
                self.shard and (self.eager or is_elastic),
                "--shard",
                "a model is spread by a compiled step, and not for logical workers",
            ),
        )


@dataclass(frozen=True)
class ReportOptions:
    """What ``report`` writes."""

    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file.")] = Path("report.html")
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace for Perfetto or chrome://tracing to this file as well.")
    ] = None
    steps: Annotated[
        int, typer.Option(min=0, help="Train so many steps and report the last; 0: report the plan alone.")
    ] = 5
    curve: Annotated[
        bool, typer.Option("--curve/--no-curve", help="Plan for other budgets as well; takes as long as so many plans.")
    ] = True


@dataclass(frozen=True)
class Answers:
    """What ``plan`` prints and writes."""

    compare: Annotated[bool, typer.Option("--compare", help="All policies side by side, at several budgets.")] = False
    sweep: Annotated[bool, typer.Option("--sweep", help="Step time against budget for all policies.")] = False
    picture: Annotated[
        Path | None, typer.Option(help="Draw the memory of a step, or with --sweep the times, in this HTML file.")
    ] = None
    save_graph: Annotated[Path | None, typer.Option(help="Write the step as a graph file (.json or .json.gz).")] = None
    save_plan: Annotated[Path | None, typer.Option(help="Write the plan as a file that validate reads.")] = None
    curve: Annotated[
        bool | None,
        typer.Option(
            "--curve/--no-curve",
            help="Step time over budgets, and the budget from which nothing is lost; by default for your own code.",
            show_default=False,
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False

    @property
    def several(self) -> bool:
        """Whether more than one plan is asked for."""
        return self.compare or self.sweep

    def refuse_for_config(self, places: Places, sharers: Sharers) -> None:
        """Refuse what does not go with a model's configuration."""
        why = "it does not go with a model's config.json"
        given = {
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
        refuse(*((is_given, option, why) for option, is_given in given.items()))

    def check(self, budgets: tuple[int, ...]) -> None:
        """Refuse what does not go together."""
        draws, saves = self.picture is not None, self.save_plan is not None
        refuse(
            (self.compare and self.sweep, "--sweep", "give one of --compare and --sweep"),
            (len(budgets) > 1 and not self.several, "--budget", "several budgets need --compare or --sweep"),
            (not budgets and saves, "--save-plan", "it needs a budget to plan for"),
            (not budgets and draws and not self.sweep, "--picture", "it needs a budget to plan for"),
            (self.several and saves, "--save-plan", "it takes a single plan: leave --compare and --sweep away"),
            (self.compare and draws, "--picture", "--compare draws nothing; --sweep does"),
        )


@dataclass(frozen=True)
class Sharers:
    """Processes that share a model, of which none has to be here."""

    shard: Annotated[
        bool, typer.Option("--shard", help="Plan for one of --ranks processes over which the model is spread.")
    ] = False
    ranks: Annotated[
        int | None, typer.Option(min=2, help="With --shard: how many processes; none of them has to be here.")
    ] = None
    between: Annotated[
        str | None,
        typer.Option(
            help="With --shard: bytes a second that each process sends to others, such as 10GiB; by default 1GiB, and "
            "on a simulated device as many as reach it from its host."
        ),
    ] = None

    def check(self, graph: Path | None) -> None:
        """Refuse what does not go together."""
        is_wrong = self.shard != (self.ranks is not None) or (self.shard and graph is not None)
        refuse(
            (
                is_wrong or (self.between is not None and not self.shard),
                "--shard",
                "a step of your own or of the zoo is planned for processes that share a model by --shard --ranks 8; "
                "--between goes with these",
            )
        )


@dataclass(frozen=True)
class OnnxOptions:
    """The sizes and arrays of an ONNX file."""

    dims: Annotated[
        list[str] | None,
        typer.Option("--dim", help="A size that an ONNX file leaves open, such as batch=4; repeatable."),
    ] = None
    arrays: Arrays = None


@dataclass(frozen=True)
class ZooOptions:
    """The options of ``outofcore.zoo.workload``, where they are explained and checked."""

    depth: Annotated[int | None, _shape(help="Layers of a resnet, counted as in its paper.")] = None
    size: Annotated[int | None, _shape(help="Edge of the input, in pixels or (unet3d) voxels.")] = None
    base: Annotated[int | None, _shape(help="Channels of the first convolution of unet3d.")] = None
    classes: Annotated[int | None, _shape(help="How many classes are told apart.")] = None
    params: Annotated[
        str | None,
        _shape(help="How many parameters gpt should have, about, such as 125M; picks layers and width."),
    ] = None
    layers: Annotated[int | None, _shape(help="Blocks of gpt.")] = None
    width: Annotated[int | None, _shape(help="Channels of gpt.")] = None
    heads: Annotated[int | None, _shape(help="Attention heads of gpt.")] = None
    context: Annotated[int | None, _shape(help="Tokens in a sequence of gpt.")] = None
    vocab: Annotated[int | None, _shape(help="Tokens that gpt knows; it reads bytes, so 256 at least.")] = None
    dropout: Annotated[float | None, _shape(help="Probability of dropping a value; gpt and vgg16.")] = None
    images: Annotated[str | None, _training(help="Source of images: photos, digits or generated.")] = None
    optimizer: Annotated[str, _training(help="sgd, momentum, adamw, adagrad or rmsprop.")] = "adamw"
    optimizer_impl: Annotated[
        str | None, _training(help="plain, foreach or fused; by default PyTorch's own choice.")
    ] = None
    lr: Annotated[float | None, _training(help="Learning rate; by default a usual one for the optimizer.")] = None
    amp: Annotated[bool, _training("--amp", help="Run the forward pass under autocast to bfloat16.")] = False
    clip: Annotated[float | None, _training(help="Clip the norm of all gradients to this.")] = None
    seed: Annotated[int, _training(help="Decides weights, data and dropout.")] = 0

    def refuse(self, what: str, but: frozenset[str] = frozenset()) -> None:
        """Refuse options that were given, except those named, for something that would ignore them."""
        why = f"it goes with models of the zoo; {what} says this itself"
        for field in fields(self):
            is_given = field.name not in but and getattr(self, field.name) != field.default
            refuse((is_given, f"--{field.name.replace('_', '-')}", why))

    def with_batch(self, batch: int) -> dict[str, Any]:
        """The options by name, as ``zoo.workload`` takes them."""
        return {**asdict(self), "batch": batch}


@dataclass(frozen=True)
class ConfigOptions:
    """What goes with a model's configuration alone; see ``outofcore.cli.configs``."""

    sequence: Annotated[int | None, _configured(help="Tokens in a sequence.")] = None
    dtype: Annotated[
        str | None, _configured(help="Of the parameters: fp32, bf16 or fp16; by default as configured.")
    ] = None
    lora: Annotated[
        int | None, _configured(help="Rank of LoRA adapters on all linear layers; they alone are trained.")
    ] = None
    checkpointing: Annotated[
        bool, _configured("--checkpointing", help="Gradient checkpointing, as transformers does it.")
    ] = False

    def training(self, zoo: ZooOptions, batch: int) -> dict[str, Any]:
        """The fields of ``configs.Training``."""
        return {**asdict(self), "batch": batch, "optimizer": zoo.optimizer, "amp": zoo.amp, "clip": zoo.clip}

    def refuse(self) -> None:
        """Refuse what was given."""
        why = "it goes with a model's config.json alone"
        refuse(*((bool(value), f"--{name}", why) for name, value in asdict(self).items()))


Debug = Annotated[
    bool,
    typer.Option(
        "--debug", help="Log what the library does, and show the traceback of an error.", rich_help_panel="Help"
    ),
]


def command(app: typer.Typer, **settings: Any) -> Callable[[Command], Command]:
    """Register a function as a command whose parameters are its options, with those of classes in place and --debug.

    An error of outofcore's own ends the command with its message and exit status 2. ``settings`` are those of typer.
    """

    def register(function: Command) -> Command:
        groups: dict[str, type] = {}
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            if is_dataclass(parameter.annotation) and isinstance(parameter.annotation, type):
                groups[parameter.name] = parameter.annotation
                parameters += _options_of(parameter.annotation)
            else:
                parameters.append(parameter)
        parameters.append(inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug))

        @functools.wraps(function)
        def run(*args: Any, debug: bool, **kwargs: Any) -> None:
            for name, kind in groups.items():
                kwargs[name] = kind(**{field.name: kwargs.pop(field.name) for field in fields(kind)})
            _called(partial(function, *args, **kwargs), debug=debug)

        # typer reads a command's options from these.
        run.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(**settings)(run)
        return run

    return register


def _options_of(kind: type) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    only = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(f.name, only, default=f.default, annotation=hints[f.name]) for f in fields(kind)]


def _called(function: Callable[[], None], *, debug: bool) -> None:
    """Run a command, and put its errors in a sentence; with ``debug`` they are shown as they are."""
    if debug:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    try:
        function()
    except Exception as error:
        said = _said(error)
        if debug or not said:
            raise
        typer.echo(f"error: {said}", err=True)
        raise typer.Exit(2) from error


def _said(error: Exception) -> str:
    """Return what an error tells a user; empty where only its traceback helps."""
    if isinstance(error, OutOfCoreError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return (
            "this command needs PyTorch, which is not installed; install it with: pip install torch. "
            "Without it work: plan --graph, validate and pack."
        )
    if is_out_of_memory(error):
        text = str(error).partition("\n")[0][:200] or type(error).__name__
        return (
            f"there is not enough memory for this command ({text}). Give it smaller sizes. Planning makes no tensors, "
            "but for one op at a time where it measures: name a device that is simulated, such as --device h100, and "
            "have a script make its model and inputs under torch.device('meta')."
        )
    return ""
