"""Steps of a model that is known only by its ``config.json`` of transformers, without weights.

The class of transformers that the configuration names builds the model on the device "meta". Its inputs follow from the
configuration and the kind of model. Only code of transformers is run, and nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn, optim

from outofcore._torch_internals import tree_flatten
from outofcore.cli.config_fields import QUANTISED, check_dtype, check_sizes, quantisation_of
from outofcore.errors import InputError, is_out_of_memory
from outofcore.estimation.repeating import KEPT, Stack
from outofcore.options import UserStep
from outofcore.units import format_bytes

_INSTALL = "pip install transformers"
# What is not computed in: gradients, moments and losses need a sign and many digits.
_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], optim.Optimizer]] = {
    "adamw": optim.AdamW,
    "adam": optim.Adam,
    "adafactor": optim.Adafactor,
    "adagrad": optim.Adagrad,
    "rmsprop": optim.RMSprop,
    "momentum": lambda parameters: optim.SGD(parameters, momentum=0.9),
    "sgd": optim.SGD,
}
INFERENCE = "none"
# Without --sequence: as long as this, or as the model allows.
_SEQUENCE = 1024
# Fields of which a configuration that leaves them out is of another model than people think.
_SHAPES = ("hidden_size", "d_model", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_sequence_length")
# Layers that take turns do so after this many at most.
_PERIOD = 8
# Of speech models, of which a frame is 10 ms; transformers keeps that beside the configuration.
_SAMPLES_PER_S = 16_000


# By a field of theirs, JSON files that are taken for configurations.
_OTHER_FILES = {
    "storages": "it is a graph file, give it as --graph {path}",
    "peft_type": "it is of an adapter; give the config.json of the model, with --lora and the adapter's rank",
    "weight_map": "it says which file has which weights; give the config.json beside it",
    "added_tokens": "it is of a tokenizer; give the config.json beside it",
    "image_processor_type": "it is of a processor of images; give the config.json beside it",
}


class Unit(Enum):
    """What a step processes."""

    TOKENS = "tokens"
    IMAGES = "images"
    AUDIO = "seconds of audio"


class Labels(Enum):
    """What a model of transformers takes to compute its own loss."""

    TOKENS = "one for each token"
    CLASSES = "one for each sample"
    SPANS = "a start and an end for each sample"
    PAIRS = "none: pairs of texts and images are told apart"
    NONE = "none: it has no loss"


# By the names of tasks in transformers' own tables of classes.
_TASKS = {
    "CAUSAL_LM": Labels.TOKENS,
    "MASKED_LM": Labels.TOKENS,
    "SEQ_TO_SEQ_CAUSAL_LM": Labels.TOKENS,
    "SPEECH_SEQ_2_SEQ": Labels.TOKENS,
    "TOKEN_CLASSIFICATION": Labels.TOKENS,
    "MULTIMODAL_LM": Labels.TOKENS,
    "IMAGE_TEXT_TO_TEXT": Labels.TOKENS,
    "CTC": Labels.TOKENS,
    "SEQUENCE_CLASSIFICATION": Labels.CLASSES,
    "IMAGE_CLASSIFICATION": Labels.CLASSES,
    "AUDIO_CLASSIFICATION": Labels.CLASSES,
    "VIDEO_CLASSIFICATION": Labels.CLASSES,
    "QUESTION_ANSWERING": Labels.SPANS,
    "ZERO_SHOT_IMAGE_CLASSIFICATION": Labels.PAIRS,
}


@dataclass(frozen=True)
class Training:
    """How to train a model.

    Attributes:
        sequence: tokens of each sample; None: what suits the model.
        dtype: of parameters, such as "bf16"; None: what the configuration says.
        optimizer: by name; "none": a forward pass alone, without gradients.
        lora: rank of the adapters on all linear layers; None: all parameters are trained.
        checkpointing: whether layers are recomputed in the backward pass.
        amp: whether the forward pass runs under autocast to bfloat16.
        clip: the maximal norm of all gradients; None: no clipping.
        blocks: keep only this many of each stack of layers that are alike.
    """

    batch: int = 8
    sequence: int | None = None
    dtype: str | None = None
    optimizer: str = "adamw"
    lora: int | None = None
    checkpointing: bool = False
    amp: bool = False
    clip: float | None = None
    blocks: int | None = None

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return self.optimizer != INFERENCE


@dataclass(frozen=True)
class ModelConfig:
    """A configuration of transformers, and what follows from it.

    ``config`` is the object of transformers, ``kind`` the class of the model. ``notes`` are for the reader of the
    answer. ``quantised`` names the field that says that weights are stored quantised, and how.
    """

    path: Path
    config: Any
    kind: type[nn.Module]
    labels: Labels
    notes: tuple[str, ...] = ()
    quantised: str = ""

    @property
    def text(self) -> Any:
        """The part of the configuration that describes the language model."""
        return self.config.get_text_config()

    @property
    def sequence_limit(self) -> int | None:
        """The number of positions of the model; None: no limit, or it reads no tokens."""
        found = (getattr(self.text, name, None) for name in _POSITIONS)
        return next((limit for limit in found if isinstance(limit, int) and limit > 0), None)

    @property
    def reads_tokens(self) -> bool:
        """Whether there is a sequence of tokens whose length one may choose."""
        return (
            isinstance(getattr(self.text, "vocab_size", None), int)
            and self.labels is not Labels.PAIRS
            and (
                "input_ids" in signature(self.kind.forward).parameters
                or "decoder_input_ids" in signature(self.kind.forward).parameters
            )
        )


@dataclass(frozen=True)
class ConfiguredStep:
    """The step of a model that is known by its configuration.

    It processes ``items`` of ``unit``. ``sequence`` is the tokens of a sample, None if it reads none; ``trained`` the
    number of trained parameters. Other fields are as for ``PlainStep``; ``notes`` are for the reader of the answer, and
    ``warning``, if not empty, is to be read first. ``stacks`` are the layers that are alike, as in the whole model.
    """

    user: UserStep[..., Any]
    inputs: tuple[Any, ...]
    title: str
    unit: Unit
    items: float
    sequence: int | None
    parameters: int
    trained: int
    notes: tuple[str, ...]
    warning: str = ""
    stacks: tuple[Stack, ...] = ()


@contextmanager
def _quiet() -> Generator[None]:
    """Silence transformers' and peft's advice, which a user of this command cannot follow."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def read_config(target: str) -> ModelConfig:
    """Read a ``config.json``, given its path or folder.

    Raises ``InputError`` if it cannot be read, is unknown to the installed transformers, needs code of its own, or
    transformers is not installed.
    """
    path = _path_of(target)
    content = _content(path)
    try:
        with _quiet():
            import transformers  # noqa: PLC0415
            from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise InputError(
            f"{path} is a model's configuration, which transformers builds, and it is not installed; install it with: "
            f"{_INSTALL}"
        ) from error
    name = _type_of(path, content, CONFIG_MAPPING, transformers.__version__)

    def known(kind: object) -> Any:
        return CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in CONFIG_MAPPING else None

    check_dtype(path, content, lambda dtype: isinstance(getattr(torch, dtype, None), torch.dtype))
    with _quiet():
        check_sizes(path, content, CONFIG_MAPPING[name], known)
    try:
        with _quiet():
            # It is spoken of in ``configured_step``; some methods cannot even be read without packages of their own.
            config = CONFIG_MAPPING[name].from_dict(_without_quantisation(content))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"{path}: transformers cannot use this configuration of a {name}: {_one_line(error)}"
        ) from error
    kind = _model_class(path, content, config, transformers)
    return ModelConfig(path, config, kind, _labels_of(kind), _notes(config, content), quantisation_of(content))


def _path_of(target: str) -> Path:
    path = Path(target)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"the folder {path} has no config.json; give a model's configuration, or its folder")
        path = path / "config.json"
    return path


def _type_of(path: Path, content: Mapping[str, Any], known: Any, version: str) -> str:
    """Return the type of a model that is among those known to this version of transformers."""
    name = content.get("model_type")
    if not isinstance(name, str):
        what = next((said for key, said in _OTHER_FILES.items() if key in content), "")
        what = what or "give the config.json that lies beside a model's weights"
        raise InputError(
            f"{path} has no 'model_type', which says what kind of model it is (such as \"llama\"): "
            f"{what.format(path=path)}"
        )
    if name not in known:
        if content.get("auto_map"):
            raise InputError(
                f"{path}: a model of type {name!r} needs code from its own repository, which outofcore never runs; "
                "write a function that builds your step, and give it as my_script.py:build"
            )
        raise InputError(
            f"{path}: transformers {version} knows no model of type {name!r}; look whether it is "
            f"written rightly, or install a newer release: {_INSTALL} --upgrade"
        )
    return name


def _notes(config: Any, content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what the reader of an answer should know of a configuration."""
    notes: list[str] = []
    if content.get("auto_map"):
        notes.append("the configuration names code of its own, which is not run: this is the model of transformers")
    absent = [
        f"{key}={getattr(config, key)}" for key in _SHAPES if hasattr(config, key) and not _said(config, content, key)
    ]
    if absent:
        notes.append(f"not in the file, so as {type(config).__name__} has it by default: {', '.join(absent)}")
    return tuple(notes)


def _without_quantisation(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_quantisation(cast("dict[str, Any]", value))
        if isinstance(value, dict) and name.endswith("_config")
        else value
        for name, value in content.items()
        if name not in QUANTISED
    }


def _said(config: Any, content: Mapping[str, Any], key: str) -> bool:
    """Return whether a file gives a field, by any name that its class knows."""
    names = {key, getattr(type(config), "attribute_map", {}).get(key, key)}
    return bool(names & content.keys()) or not isinstance(getattr(config, key), int)


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}; give a config.json, or its folder") from error
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}; give the config.json of a model of transformers") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds no JSON object; give the config.json of a model of transformers")
    return cast("dict[str, Any]", content)


def _model_class(path: Path, content: Mapping[str, Any], config: Any, transformers: Any) -> type[nn.Module]:
    """Return the class that a configuration names; without a name that of its language model."""
    named = content.get("architectures")
    if isinstance(named, list) and named:
        name = str(named[0])
        kind = getattr(transformers, name, None)
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            raise InputError(
                f"{path}: transformers {transformers.__version__} has no model {name!r}, which 'architectures' names; "
                f"look whether it is written rightly, or install a newer release: {_INSTALL} --upgrade"
            )
        wanted = getattr(kind, "config_class", None)
        if isinstance(wanted, type) and not isinstance(config, wanted):
            raise InputError(
                f"{path}: 'architectures' names {name}, which takes a {wanted.__name__}, and 'model_type' is "
                f"{config.model_type!r}: the two have to be of one model"
            )
        return kind
    from transformers.models.auto import modeling_auto  # noqa: PLC0415

    for task in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_CLASSIFICATION", "MASKED_LM"):
        name = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").get(config.model_type)
        if isinstance(name, str):
            return getattr(transformers, name)
    raise InputError(
        f'{path} names no class: add "architectures", such as ["{type(config).__name__.replace("Config", "Model")}"]'
    )


def _labels_of(kind: type[nn.Module]) -> Labels:
    from transformers.models.auto import modeling_auto  # noqa: PLC0415

    for task, labels in _TASKS.items():
        for name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values():
            if kind.__name__ in ((name,) if isinstance(name, str) else name):
                taken = "return_loss" if labels is Labels.PAIRS else "labels"
                taken = "start_positions" if labels is Labels.SPANS else taken
                return labels if taken in signature(kind.forward).parameters else Labels.NONE
    # What stands in no table, such as classes for one model alone, is told by its name.
    if "labels" in signature(kind.forward).parameters:
        return Labels.CLASSES if "Classification" in kind.__name__ and "Token" not in kind.__name__ else Labels.TOKENS
    return Labels.NONE


# Tensors as large as a parameter that optimizers keep for it.
_KEPT = {"adamw": 2, "adam": 2, "adagrad": 1, "rmsprop": 1, "momentum": 1}


def at_once(step: ConfiguredStep, training: Training) -> str:
    """Return what is known of a step's bytes before it is captured, as a line."""
    parameters = [(p.numel() * p.element_size(), p.requires_grad) for p in step.user.models[0].parameters()]
    parts = [f"{format_bytes(sum(count for count, _ in parameters))} of parameters"]
    if training.trains:
        trained = sum(count for count, learns in parameters if learns)
        parts.append(f"{format_bytes(trained)} of gradients")
        parts.append(f"{format_bytes(trained * _KEPT.get(training.optimizer, 0))} of optimizer state")
    return f"at once: {', '.join(parts)}; with activations, times and what fits in a few seconds ..."


def dtype_of(found: ModelConfig, training: Training) -> torch.dtype:
    """Return the dtype of parameters, requested or configured; refuse one that cannot be trained.

    Weights that are stored quantised are planned for as plain ones, in bfloat16 if no dtype to compute in is given.
    """
    if training.dtype is not None:
        if training.dtype not in _DTYPES:
            raise InputError(f"there is no dtype {training.dtype!r}; choose one of fp32, bf16 and fp16")
        return _DTYPES[training.dtype]
    given = getattr(found.config, "dtype", None) or getattr(found.text, "dtype", None) or torch.float32
    named = getattr(torch, given, None) if isinstance(given, str) else given
    if found.quantised and named not in _DTYPES.values():
        return torch.bfloat16
    if named not in _DTYPES.values():
        raise InputError(f"{found.path}: the dtype {given} is none that models are trained in; give --dtype bf16")
    return cast("torch.dtype", named)


def configured_step(found: ModelConfig, training: Training) -> ConfiguredStep:
    """Build a model on the device "meta", and a step of it.

    Raises ``InputError`` if an option does not suit the model, or transformers cannot build it.
    """
    _check(found, training)
    dtype = dtype_of(found, training)
    model = _built(found, training, dtype)
    stacks = stacks_of(model, found.config)
    if training.blocks is not None:
        for stack in stacks:
            del cast("nn.ModuleList", model.get_submodule(stack.path))[stack.first + stack.period * training.blocks :]
    length = length_of(found, training)
    batch, unit, items = _inputs(found, model, training, dtype, length)
    if training.lora is not None:
        model = _adapted(model, training.lora)
        stacks = [replace(stack, path=f"base_model.model.{stack.path}") for stack in stacks]
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    optimizers: list[optim.Optimizer] = []
    if training.trains:
        optimizers.append(_OPTIMIZERS[training.optimizer](trained))
        model.train()
    else:
        model.eval()
    notes = list(found.notes)
    if found.labels is Labels.NONE and training.trains:
        notes.append(f"{found.kind.__name__} has no loss of its own: the mean of its first result stands in for one")
    step = _training_step(model, optimizers, training) if training.trains else _forward_step(model)
    counted, learnt = sum(p.numel() for p in parameters), sum(p.numel() for p in trained)
    if training.lora is not None:
        experts = [m for m in model.modules() if "Experts" in type(m).__name__]
        missed = sum(p.numel() for m in experts for p in m.parameters(recurse=False))
        if missed:
            notes.append(
                f"the adapters are on linear layers; {missed / counted:.0%} of the parameters are experts, which are "
                "no linear layers, and have none"
            )
    shapes = ", ".join(f"{name} {'×'.join(map(str, tensor.shape))}" for name, tensor in batch.items())
    how = _how(training, dtype, counted, learnt if training.trains else 0)
    return ConfiguredStep(
        UserStep(step, [model], optimizers),
        (batch,),
        f"{found.kind.__name__} of {found.path}: {how}; {shapes}",
        unit,
        items,
        length,
        counted,
        learnt if training.trains else 0,
        tuple(notes),
        _warning(found, training, dtype),
        tuple(stacks),
    )


def _warning(found: ModelConfig, training: Training, dtype: torch.dtype) -> str:
    """Return what is to be said of a model whose weights are stored quantised."""
    if not found.quantised:
        return ""
    name = str(dtype).removeprefix("torch.")
    rest = "the quantised model needs less memory, and its link moves less"
    if training.trains and training.lora is None:
        rest = "weights that stay quantised cannot be trained, only adapters on them: see --lora"
    return (
        f"NOT AS QUANTISED: the file says {found.quantised}, and all that follows is of plain weights in {name}; {rest}"
    )


def _how(training: Training, dtype: torch.dtype, parameters: int, trained: int) -> str:
    parts = [f"{parameters:,} parameters in {str(dtype).removeprefix('torch.')}"]
    if not training.trains:
        return ", ".join([*parts, "a forward pass alone"])
    if training.lora is not None:
        parts.append(f"of which LoRA of rank {training.lora} trains {trained:,}")
    parts.append(training.optimizer)
    if training.checkpointing:
        parts.append("gradient checkpointing")
    if training.amp:
        parts.append("autocast to bfloat16")
    return ", ".join(parts)


def _check(found: ModelConfig, training: Training) -> None:
    if training.batch < 1 or (training.sequence is not None and training.sequence < 2):
        raise InputError("a batch has one sample at least, and a sequence two tokens")
    if training.optimizer != INFERENCE and training.optimizer not in _OPTIMIZERS:
        raise InputError(
            f"there is no optimizer {training.optimizer!r} for a configuration; choose one of "
            f"{', '.join(_OPTIMIZERS)}, or {INFERENCE} for a forward pass alone"
        )
    if training.sequence is not None and not found.reads_tokens:
        raise InputError(f"{found.kind.__name__} takes no sequence whose length could be chosen: leave --sequence out")
    limit = found.sequence_limit
    if training.sequence is not None and limit is not None and training.sequence > limit:
        raise InputError(
            f"{found.path}: the model has positions for {limit} tokens, and --sequence is {training.sequence}"
        )
    if not training.trains and (training.lora is not None or training.checkpointing or training.clip is not None):
        raise InputError("a forward pass alone has no gradients: leave --lora, --checkpointing and --clip out")
    if training.clip is not None and not training.clip > 0:
        raise InputError(f"clip must be above zero, and {training.clip} is not")
    if training.lora is not None and training.lora < 1:
        raise InputError(f"the rank of adapters is one at least, not {training.lora}")


def length_of(found: ModelConfig, training: Training) -> int | None:
    """Return the tokens of a sequence, requested or suiting the model; None if it reads none."""
    if not found.reads_tokens:
        return None
    return training.sequence or min(_SEQUENCE, found.sequence_limit or _SEQUENCE)


def _built(found: ModelConfig, training: Training, dtype: torch.dtype) -> nn.Module:
    # transformers writes into it, such as the dtype.
    config = copy.deepcopy(found.config)
    try:
        with _quiet(), torch.device("meta"):
            model = cast("Any", found.kind)._from_config(config, dtype=dtype)
            if training.checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except Exception as error:
        if is_out_of_memory(error):
            raise
        what = "does not support gradient checkpointing" if "checkpointing" in str(error) else "cannot be built"
        raise InputError(f"{found.path}: {found.kind.__name__} {what}: {_one_line(error)}") from error
    return model


def stacks_of(model: nn.Module, config: Any) -> list[Stack]:
    """Return the stacks of a model: lists of layers, of which those from some layer on are alike, or take turns.

    Lists within the layers of a stack, such as experts, are left out, and stacks no deeper than a shallow model.
    """
    found: list[Stack] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{stack.path}.") for stack in found):
            kinds = _kinds_of(list(module), config)
            found += [stack for stack in [_stack_of(path, kinds)] if stack is not None]
    return found


def _stack_of(path: str, kinds: Sequence[int]) -> Stack | None:
    """Return the stack of layers of these kinds that takes the fewest layers to show."""
    count, best = len(kinds), None
    fewest = count
    for first in range(count):
        for period in range(1, _PERIOD + 1):
            blocks = (count - first) // period
            start = count - blocks * period
            if start + KEPT * period < fewest and all(
                kinds[at] == kinds[at + period] for at in range(first, count - period)
            ):
                best, fewest = Stack(path, start, period, blocks), start + KEPT * period
    return best


def _kinds_of(layers: Sequence[nn.Module], config: Any) -> list[int]:
    """Return a number for each layer, the same for those that are alike in all but their own number."""
    parts = [config, *(part for part in vars(config).values() if hasattr(part, "to_dict"))]
    listed = [
        values
        for part in parts
        for values in vars(part).values()
        if isinstance(values, list | tuple) and len(cast("Sequence[Any]", values)) == len(layers)
    ]
    described = [
        _described(layer) | {("", str(number)): repr(values[at]) for number, values in enumerate(listed)}
        for at, layer in enumerate(layers)
    ]
    first = described[0] if described else {}
    numbered = {
        key
        for key, value in first.items()
        if isinstance(value, int) and all(each.get(key) == value + at for at, each in enumerate(described))
    }
    kinds: dict[tuple[object, ...], int] = {}
    told = (tuple((key, value) for key, value in each.items() if key not in numbered) for each in described)
    return [kinds.setdefault(each, len(kinds)) for each in told]


def _described(layer: nn.Module) -> dict[tuple[str, str], object]:
    """Return what tells a layer from others: its modules with their settings, and the shapes of its tensors."""
    found: dict[tuple[str, str], object] = {}
    for path, module in layer.named_modules():
        found[path, ""] = type(module)
        for name, value in vars(module).items():
            if value is None or isinstance(value, bool | int | float | str):
                found[path, name] = value
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            found[path, name] = tuple(tensor.shape), tensor.dtype
    return found


def _adapted(model: nn.Module, rank: int) -> nn.Module:
    try:
        with _quiet():
            from peft import LoraConfig, get_peft_model  # noqa: PLC0415
            from transformers.pytorch_utils import Conv1D  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise InputError("--lora takes peft, which is not installed; install it with: pip install peft") from error
    # Not peft's own "all-linear", which takes parameters of experts as well and replaces them in every step.
    head = cast("Any", model).get_output_embeddings()
    linear = [path for path, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    try:
        with _quiet(), torch.device("meta"):
            return get_peft_model(cast("Any", model), LoraConfig(r=rank, target_modules=linear))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise InputError(f"peft cannot put adapters on {type(model).__name__}: {_one_line(error)}") from error


def _inputs(
    found: ModelConfig, model: nn.Module, training: Training, dtype: torch.dtype, length: int | None
) -> tuple[dict[str, torch.Tensor], Unit, float]:
    """Return the model's inputs by name, without contents; what it processes, and how much of that."""
    config, taken = found.config, signature(found.kind.forward).parameters
    main = cast("str", getattr(model, "main_input_name", "input_ids"))
    count = training.batch
    batch: dict[str, torch.Tensor] = {}
    unit, items = Unit.TOKENS, float(count * (length or 0))

    def ids(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.long, device="meta")

    if main == "pixel_values" or ("pixel_values" in taken and found.labels is Labels.PAIRS):
        vision = getattr(config, "vision_config", None) or config
        size = getattr(vision, "image_size", 224)  # convolutional models leave it open
        edges = (size, size) if isinstance(size, int) else tuple(size)
        frames = (vision.num_frames,) if hasattr(vision, "num_frames") else ()
        shape = (count, *frames, getattr(vision, "num_channels", 3), *edges)
        batch["pixel_values"] = torch.empty(shape, dtype=dtype, device="meta")
        unit, items = Unit.IMAGES, float(count)
    if main == "input_features":
        frames = 2 * _needed(found, config, "max_source_positions")
        batch[main] = torch.empty((count, _needed(found, config, "num_mel_bins"), frames), dtype=dtype, device="meta")
        unit, items = Unit.AUDIO, count * frames / 100
    if main == "input_values":
        seconds = 10
        batch[main] = torch.empty((count, seconds * _SAMPLES_PER_S), dtype=dtype, device="meta")
        unit, items = Unit.AUDIO, float(count * seconds)
    if found.labels is Labels.PAIRS:
        batch["input_ids"] = ids(count, found.sequence_limit or _SEQUENCE)
    elif main == "input_ids" and length is not None:
        batch["input_ids"] = ids(count, length)
    if not batch:
        raise InputError(
            f"{found.path}: {found.kind.__name__} is called with {main!r}, for which it is not known what to give; "
            "write a function that builds your step, and give it as my_script.py:build"
        )
    if training.trains:
        batch |= _labels(found, count, length)
    elif length is not None and "decoder_input_ids" in taken:
        batch["decoder_input_ids"] = ids(count, length)
    return batch, unit, items


def _labels(found: ModelConfig, count: int, length: int | None) -> dict[str, torch.Tensor]:
    each = torch.empty(count, dtype=torch.long, device="meta")
    match found.labels:
        case Labels.TOKENS:
            shape = (count, length if length is not None else 32)
            return {"labels": torch.empty(shape, dtype=torch.long, device="meta")}
        case Labels.CLASSES:
            regression = found.config.num_labels == 1 and found.config.problem_type is None
            return {"labels": each.float() if regression else each}
        case Labels.SPANS:
            return {"start_positions": each, "end_positions": each.clone()}
        case Labels.PAIRS | Labels.NONE:
            return {}


def _needed(found: ModelConfig, config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    if value is None:
        raise InputError(f"{found.path} has no {name!r}, which says how large the inputs of {found.kind.__name__} are")
    return value


def _call(model: nn.Module) -> Callable[[dict[str, torch.Tensor]], Any]:
    """Call the model without the caches of text generation, and return its loss."""
    inner = cast("Any", model).get_base_model() if hasattr(model, "peft_config") else model
    taken = signature(inner.forward).parameters
    more: dict[str, Any] = {}
    if "use_cache" in taken:
        more["use_cache"] = False
    if "return_loss" in taken and model.training:
        more["return_loss"] = True
    return lambda batch: model(**batch, **more)


def _training_step(
    model: nn.Module, optimizers: Sequence[optim.Optimizer], training: Training
) -> Callable[[dict[str, torch.Tensor]], Any]:
    call = _call(model)

    def train_step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16) if training.amp else nullcontext():
            found = call(batch)
            loss = getattr(found, "loss", None)
            if loss is None:
                loss = _first(found).float().mean()
        loss.backward()
        if training.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return train_step


def _forward_step(model: nn.Module) -> Callable[[dict[str, torch.Tensor]], Any]:
    call = _call(model)

    def forward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return _first(call(batch))

    return forward


def _first(found: Any) -> torch.Tensor:
    """Return the first result of a model that is a tensor of numbers."""
    leaves = tree_flatten(tuple(found.to_tuple()) if hasattr(found, "to_tuple") else found)[0]
    return next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
