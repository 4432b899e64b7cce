"""Steps of a model described only by its ``config.json``: transformers builds it on "meta", without downloads."""

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
from outofcore.estimation.repeating import KEPT_BLOCKS, Stack
from outofcore.options import UserStep
from outofcore.units import format_bytes

_INSTALL = "pip install transformers"
# Only dtypes to train in: gradients, moments and losses need a sign and enough digits.
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
# Default sequence length in tokens; less if the model has fewer positions.
_DEFAULT_SEQUENCE = 1024
# If a configuration lacks one of these fields, it may describe another model than its author thinks.
_SHAPE_FIELDS = (
    "hidden_size",
    "d_model",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)
_POSITION_FIELDS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_sequence_length")
# The longest period of alternating layers.
_MAX_PERIOD = 8
# Sample rate of speech models, with frames of 10 ms; transformers does not store it in the configuration.
_SAMPLES_PER_S = 16_000
# Advice for JSON files that are mistaken for configurations, by a field that identifies them.
_OTHER_FILES = {
    "storages": "it is a graph file; give it as --graph {path}",
    "peft_type": "it describes an adapter; give the config.json of the model, and --lora with the rank of the adapter",
    "weight_map": "it is an index of weight files; give the config.json in the same folder",
    "added_tokens": "it describes a tokenizer; give the config.json in the same folder",
    "image_processor_type": "it describes an image processor; give the config.json in the same folder",
}


class Unit(Enum):
    TOKENS = "tokens"
    IMAGES = "images"
    AUDIO = "seconds of audio"


class Labels(Enum):
    """Labels from which a model of transformers computes its own loss."""

    TOKENS = "one for each token"
    CLASSES = "one for each sample"
    SPANS = "a start and an end for each sample"
    PAIRS = "none: the loss matches texts with images"
    NONE = "none: it has no loss"


# Labels by the names of tasks in transformers' tables of classes.
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
    """The user's options for a step, which trains a model or runs its forward pass alone."""

    batch: int = 8
    sequence: int | None = None  # tokens per sample; None: a default for the model
    dtype: str | None = None  # of parameters, such as "bf16"; None: as configured
    optimizer: str = "adamw"  # "none": a forward pass without gradients
    lora: int | None = None  # rank of adapters on all linear layers; None: all parameters are trained
    checkpointing: bool = False
    amp: bool = False
    clip: float | None = None  # maximum norm of all gradients
    blocks: int | None = None  # keep only this many blocks of each stack of equal layers

    @property
    def trains(self) -> bool:
        return self.optimizer != INFERENCE


@dataclass(frozen=True)
class ModelConfig:
    """A model configuration of transformers, read from a ``config.json``, and the class of its model."""

    path: Path
    config: Any
    model_class: type[nn.Module]
    labels: Labels
    notes: tuple[str, ...] = ()  # for the reader of the answer
    quantised: str = ""  # the field and method of quantisation, if any

    @property
    def text_config(self) -> Any:
        return self.config.get_text_config()

    @property
    def sequence_limit(self) -> int | None:
        limits = (getattr(self.text_config, name, None) for name in _POSITION_FIELDS)
        return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)

    @property
    def reads_tokens(self) -> bool:
        """Whether the model takes sequences of tokens, of a length that the user may choose."""
        return (
            isinstance(getattr(self.text_config, "vocab_size", None), int)
            and self.labels is not Labels.PAIRS
            and (
                "input_ids" in signature(self.model_class.forward).parameters
                or "decoder_input_ids" in signature(self.model_class.forward).parameters
            )
        )


@dataclass(frozen=True)
class ConfiguredStep:
    """The step of a model built from its configuration; it processes ``items`` of ``unit``, such as 4096 tokens."""

    user: UserStep[..., Any]
    inputs: tuple[Any, ...]
    title: str
    unit: Unit
    items: float
    sequence: int | None  # tokens of a sample; None for other inputs
    parameters: int  # their number
    trained: int  # the number of trained parameters
    notes: tuple[str, ...]  # printed after the answer
    warning: str = ""  # printed before the answer
    stacks: tuple[Stack, ...] = ()  # the stacks of equal layers of the whole model


@contextmanager
def _quiet() -> Generator[None]:
    """Silence Python warnings, log messages up to level WARNING, and stderr in the block."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def read_config(target: str) -> ModelConfig:
    """Read a model's ``config.json``, given its path or its folder; raise ``InputError`` if it is unusable."""
    path = _config_path(target)
    content = _read_json(path)
    try:
        with _quiet():
            import transformers  # noqa: PLC0415
            from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise InputError(
            f"{path} is a model's configuration, and planning it needs transformers, which is not installed; install "
            f"it with: {_INSTALL}"
        ) from error
    name = _model_type(path, content, CONFIG_MAPPING, transformers.__version__)

    def class_of(model_type: object) -> Any:
        return CONFIG_MAPPING[model_type] if isinstance(model_type, str) and model_type in CONFIG_MAPPING else None

    check_dtype(path, content, lambda dtype: isinstance(getattr(torch, dtype, None), torch.dtype))
    with _quiet():
        check_sizes(path, content, CONFIG_MAPPING[name], class_of)
    try:
        with _quiet():
            # ``_quantisation_warning`` reports quantisation. Reading some methods needs packages that may be missing.
            config = CONFIG_MAPPING[name].from_dict(_without_quantisation(content))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"{path}: transformers cannot use this configuration of a {name}: {_one_line(error)}; correct the file"
        ) from error
    model_class = _model_class(path, content, config, transformers)
    return ModelConfig(
        path, config, model_class, _model_labels(model_class), _config_notes(config, content), quantisation_of(content)
    )


def _config_path(target: str) -> Path:
    path = Path(target)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"the folder {path} has no config.json; give a model's configuration, or its folder")
        path = path / "config.json"
    return path


def _model_type(path: Path, content: Mapping[str, Any], known_types: Any, version: str) -> str:
    """Return the type of the model; raise ``InputError`` with advice if it is missing or unknown to transformers."""
    name = content.get("model_type")
    if not isinstance(name, str):
        advice = next((said for key, said in _OTHER_FILES.items() if key in content), "")
        advice = advice or "give the config.json from the folder of a model's weights"
        raise InputError(
            f"{path} has no 'model_type', the kind of the model (such as \"llama\"): {advice.format(path=path)}"
        )
    if name not in known_types:
        if content.get("auto_map"):
            raise InputError(
                f"{path}: a model of type {name!r} needs code from its own repository, which outofcore never runs; "
                "write a function that builds your step, and give it as my_script.py:build"
            )
        raise InputError(
            f"{path}: transformers {version} has no model of type {name!r}; check its spelling, or install a newer "
            f"release: {_INSTALL} --upgrade"
        )
    return name


def _config_notes(config: Any, content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return notes for the user about sizes that the file lacks, and custom code that is not run."""
    notes: list[str] = []
    if content.get("auto_map"):
        notes.append("the configuration names its own code, which is not run; this is the model of transformers")
    absent = [
        f"{key}={getattr(config, key)}"
        for key in _SHAPE_FIELDS
        if hasattr(config, key) and not _is_in_file(config, content, key)
    ]
    if absent:
        notes.append(f"not in the file, so defaults of {type(config).__name__}: {', '.join(absent)}")
    return tuple(notes)


def _without_quantisation(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_quantisation(cast("dict[str, Any]", value))
        if isinstance(value, dict) and name.endswith("_config")
        else value
        for name, value in content.items()
        if name not in QUANTISED
    }


def _is_in_file(config: Any, content: Mapping[str, Any], key: str) -> bool:
    """Return whether the configuration file, rather than a default, sets a size of the model."""
    names = {key, getattr(type(config), "attribute_map", {}).get(key, key)}
    return bool(names & content.keys()) or not isinstance(getattr(config, key), int)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}; give a config.json, or its folder") from error
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}; give the config.json of a model of transformers") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} contains no JSON object; give the config.json of a model of transformers")
    return cast("dict[str, Any]", content)


def _model_class(path: Path, content: Mapping[str, Any], config: Any, transformers: Any) -> type[nn.Module]:
    """Return the model's class in transformers; raise ``InputError`` if there is no such class."""
    architectures = content.get("architectures")
    if isinstance(architectures, list) and architectures:
        name = str(architectures[0])
        model_class = getattr(transformers, name, None)
        if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
            raise InputError(
                f"{path}: transformers {transformers.__version__} has no model {name!r}, which 'architectures' names; "
                f"check its spelling, or install a newer release: {_INSTALL} --upgrade"
            )
        config_class = getattr(model_class, "config_class", None)
        if isinstance(config_class, type) and not isinstance(config, config_class):
            raise InputError(
                f"{path}: 'architectures' names {name}, which takes a {config_class.__name__}, but 'model_type' is "
                f"{config.model_type!r}; both must name the same model"
            )
        return model_class
    from transformers.models.auto import modeling_auto  # noqa: PLC0415

    for task in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_CLASSIFICATION", "MASKED_LM"):
        name = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").get(config.model_type)
        if isinstance(name, str):
            return getattr(transformers, name)
    raise InputError(
        f'{path} does not name the class of the model: add "architectures", such as '
        f'["{type(config).__name__.replace("Config", "Model")}"]'
    )


def _model_labels(model_class: type[nn.Module]) -> Labels:
    """Return the kind of labels from which a model computes its loss; ``Labels.NONE`` if it takes no labels."""
    from transformers.models.auto import modeling_auto  # noqa: PLC0415

    for task, labels in _TASKS.items():
        for name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values():
            if model_class.__name__ in ((name,) if isinstance(name, str) else name):
                argument = "return_loss" if labels is Labels.PAIRS else "labels"
                argument = "start_positions" if labels is Labels.SPANS else argument
                return labels if argument in signature(model_class.forward).parameters else Labels.NONE
    # The name decides for classes that are in no table, such as classes for a single model.
    if "labels" in signature(model_class.forward).parameters:
        return (
            Labels.CLASSES
            if "Classification" in model_class.__name__ and "Token" not in model_class.__name__
            else Labels.TOKENS
        )
    return Labels.NONE


# The number of tensors in optimizer state for each parameter, of the same size.
_STATE_TENSORS = {"adamw": 2, "adam": 2, "adagrad": 1, "rmsprop": 1, "momentum": 1}


def size_text(step: ConfiguredStep, training: Training) -> str:
    """Return a line of text with the bytes of parameters, gradients and optimizer state."""
    parameters = [(p.numel() * p.element_size(), p.requires_grad) for p in step.user.models[0].parameters()]
    parts = [f"{format_bytes(sum(count for count, _ in parameters))} of parameters"]
    if training.trains:
        trained = sum(count for count, learns in parameters if learns)
        parts.append(f"{format_bytes(trained)} of gradients")
        parts.append(f"{format_bytes(trained * _STATE_TENSORS.get(training.optimizer, 0))} of optimizer state")
    return f"model: {', '.join(parts)}; activations, times and the largest sizes follow in a few seconds ..."


def parameter_dtype(model_config: ModelConfig, training: Training) -> torch.dtype:
    """Return the dtype of the parameters; raise ``InputError`` if this dtype is not supported."""
    if training.dtype is not None:
        if training.dtype not in _DTYPES:
            raise InputError(f"--dtype {training.dtype!r} is unknown; choose one of fp32, bf16 and fp16")
        return _DTYPES[training.dtype]
    configured = (
        getattr(model_config.config, "dtype", None) or getattr(model_config.text_config, "dtype", None) or torch.float32
    )
    dtype = getattr(torch, configured, None) if isinstance(configured, str) else configured
    if model_config.quantised and dtype not in _DTYPES.values():
        return torch.bfloat16
    if dtype not in _DTYPES.values():
        raise InputError(f"{model_config.path}: models cannot be trained in the dtype {configured}; give --dtype bf16")
    return cast("torch.dtype", dtype)


def configured_step(model_config: ModelConfig, training: Training) -> ConfiguredStep:
    """Build the step of a model configuration, without memory for weights; raise ``InputError`` on failure."""
    _check_options(model_config, training)
    dtype = parameter_dtype(model_config, training)
    model = _build_model(model_config, training, dtype)
    stacks = find_stacks(model, model_config.config)
    if training.blocks is not None:
        for stack in stacks:
            del cast("nn.ModuleList", model.get_submodule(stack.path))[stack.first + stack.period * training.blocks :]
    length = sequence_length(model_config, training)
    batch, unit, items = _inputs(model_config, model, training, dtype, length)
    if training.lora is not None:
        model = _add_adapters(model, training.lora)
        stacks = [replace(stack, path=f"base_model.model.{stack.path}") for stack in stacks]
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    optimizers: list[optim.Optimizer] = []
    if training.trains:
        optimizers.append(_OPTIMIZERS[training.optimizer](trained))
        model.train()
    else:
        model.eval()
    notes = list(model_config.notes)
    if model_config.labels is Labels.NONE and training.trains:
        notes.append(
            f"{model_config.model_class.__name__} has no loss of its own; the mean of its first result replaces it"
        )
    step = _training_step(model, optimizers, training) if training.trains else _forward_step(model)
    parameter_count, trained_count = sum(p.numel() for p in parameters), sum(p.numel() for p in trained)
    if training.lora is not None:
        experts = [m for m in model.modules() if "Experts" in type(m).__name__]
        expert_count = sum(p.numel() for m in experts for p in m.parameters(recurse=False))
        if expert_count:
            notes.append(
                f"only linear layers have adapters; {expert_count / parameter_count:.0%} of the parameters are "
                "experts, which have none"
            )
    shapes = ", ".join(f"{name} {'×'.join(map(str, tensor.shape))}" for name, tensor in batch.items())
    description = _training_text(training, dtype, parameter_count, trained_count if training.trains else 0)
    return ConfiguredStep(
        UserStep(step, [model], optimizers),
        (batch,),
        f"{model_config.model_class.__name__} of {model_config.path}: {description}; {shapes}",
        unit,
        items,
        length,
        parameter_count,
        trained_count if training.trains else 0,
        tuple(notes),
        _quantisation_warning(model_config, training, dtype),
        tuple(stacks),
    )


def _quantisation_warning(model_config: ModelConfig, training: Training, dtype: torch.dtype) -> str:
    if not model_config.quantised:
        return ""
    name = str(dtype).removeprefix("torch.")
    consequence = "the quantised model needs less memory and smaller copies"
    if training.trains and training.lora is None:
        consequence = "quantised weights cannot be trained, only adapters on them: see --lora"
    return (
        f"NOT AS QUANTISED: the file has {model_config.quantised}, but this answer is for plain weights in {name}; "
        f"{consequence}"
    )


def _training_text(training: Training, dtype: torch.dtype, parameters: int, trained: int) -> str:
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


def _check_options(model_config: ModelConfig, training: Training) -> None:
    if training.batch < 1 or (training.sequence is not None and training.sequence < 2):
        raise InputError("--batch must be at least 1, and --sequence at least 2")
    if training.optimizer != INFERENCE and training.optimizer not in _OPTIMIZERS:
        raise InputError(
            f"there is no optimizer {training.optimizer!r} for a configuration; choose one of "
            f"{', '.join(_OPTIMIZERS)}, or {INFERENCE} for a forward pass alone"
        )
    if training.sequence is not None and not model_config.reads_tokens:
        raise InputError(
            f"{model_config.model_class.__name__} takes no sequence of variable length: leave --sequence out"
        )
    limit = model_config.sequence_limit
    if training.sequence is not None and limit is not None and training.sequence > limit:
        raise InputError(
            f"{model_config.path}: the model has positions for {limit} tokens, but --sequence is {training.sequence}; "
            f"use at most {limit}"
        )
    if not training.trains and (training.lora is not None or training.checkpointing or training.clip is not None):
        raise InputError("a forward pass alone has no gradients: leave --lora, --checkpointing and --clip out")
    if training.clip is not None and not training.clip > 0:
        raise InputError(f"--clip must be above zero, not {training.clip}")
    if training.lora is not None and training.lora < 1:
        raise InputError(f"--lora, the rank of adapters, must be at least 1, not {training.lora}")


def sequence_length(model_config: ModelConfig, training: Training) -> int | None:
    """Return the tokens per sequence, the user's or a default; None if the model has no variable length."""
    if not model_config.reads_tokens:
        return None
    return training.sequence or min(_DEFAULT_SEQUENCE, model_config.sequence_limit or _DEFAULT_SEQUENCE)


def _build_model(model_config: ModelConfig, training: Training, dtype: torch.dtype) -> nn.Module:
    config = copy.deepcopy(model_config.config)  # since transformers writes the dtype into it
    try:
        with _quiet(), torch.device("meta"):
            model = cast("Any", model_config.model_class)._from_config(config, dtype=dtype)
            if training.checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except Exception as error:
        if is_out_of_memory(error):
            raise
        problem = "does not support gradient checkpointing" if "checkpointing" in str(error) else "cannot be built"
        raise InputError(
            f"{model_config.path}: {model_config.model_class.__name__} {problem}: {_one_line(error)}; "
            "correct the file, or leave --checkpointing out if it is given"
        ) from error
    return model


def find_stacks(model: nn.Module, config: Any) -> list[Stack]:
    """Return the layer lists of a model that end in repeated layers, or in repeated groups of layers."""
    stacks: list[Stack] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{stack.path}.") for stack in stacks):
            kinds = _layer_kinds(list(module), config)
            stacks += [stack for stack in [_best_stack(path, kinds)] if stack is not None]
    return stacks


def _best_stack(path: str, layer_kinds: Sequence[int]) -> Stack | None:
    """Find the repetition in a layer list that lets a model omit the most layers; None if it needs all layers."""
    count, best = len(layer_kinds), None
    fewest = count
    for first in range(count):
        for period in range(1, _MAX_PERIOD + 1):
            blocks = (count - first) // period
            start = count - blocks * period
            if start + KEPT_BLOCKS * period < fewest and all(
                layer_kinds[index] == layer_kinds[index + period] for index in range(first, count - period)
            ):
                best, fewest = Stack(path, start, period, blocks), start + KEPT_BLOCKS * period
    return best


def _layer_kinds(layers: Sequence[nn.Module], config: Any) -> list[int]:
    """Return the kind of each layer as a number; layers of one kind are equal, except for their own index."""
    parts = [config, *(part for part in vars(config).values() if hasattr(part, "to_dict"))]
    per_layer = [
        values
        for part in parts
        for values in vars(part).values()
        if isinstance(values, list | tuple) and len(cast("Sequence[Any]", values)) == len(layers)
    ]
    descriptions = [
        _layer_facts(layer) | {("", str(number)): repr(values[index]) for number, values in enumerate(per_layer)}
        for index, layer in enumerate(layers)
    ]
    first = descriptions[0] if descriptions else {}
    numbered = {
        key
        for key, value in first.items()
        if isinstance(value, int)
        and all(description.get(key) == value + index for index, description in enumerate(descriptions))
    }
    kinds: dict[tuple[object, ...], int] = {}
    signatures = (
        tuple((key, value) for key, value in description.items() if key not in numbered) for description in descriptions
    )
    return [kinds.setdefault(description, len(kinds)) for description in signatures]


def _layer_facts(layer: nn.Module) -> dict[tuple[str, str], object]:
    """Return the types, plain attributes and tensor shapes of a layer's modules, by (path, attribute)."""
    description: dict[tuple[str, str], object] = {}
    for path, module in layer.named_modules():
        description[path, ""] = type(module)
        for name, value in vars(module).items():
            if value is None or isinstance(value, bool | int | float | str):
                description[path, name] = value
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            description[path, name] = tuple(tensor.shape), tensor.dtype
    return description


def _add_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Add LoRA adapters of a given rank to all linear layers except the output head; return the model."""
    try:
        with _quiet():
            from peft import LoraConfig, get_peft_model  # noqa: PLC0415
            from transformers.pytorch_utils import Conv1D  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise InputError("--lora needs peft, which is not installed; install it with: pip install peft") from error
    # Not peft's "all-linear", which includes parameters of experts and replaces them in every step.
    head = cast("Any", model).get_output_embeddings()
    linear = [path for path, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    try:
        with _quiet(), torch.device("meta"):
            return get_peft_model(cast("Any", model), LoraConfig(r=rank, target_modules=linear))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"peft cannot put adapters on {type(model).__name__}: {_one_line(error)}; leave --lora out"
        ) from error


def _inputs(
    model_config: ModelConfig, model: nn.Module, training: Training, dtype: torch.dtype, length: int | None
) -> tuple[dict[str, torch.Tensor], Unit, float]:
    """Return a step's inputs as meta tensors, and the unit and amount of its work, such as 4096 tokens."""
    config, accepted = model_config.config, signature(model_config.model_class.forward).parameters
    main_input = cast("str", getattr(model, "main_input_name", "input_ids"))
    count = training.batch
    batch: dict[str, torch.Tensor] = {}
    unit, items = Unit.TOKENS, float(count * (length or 0))

    def ids(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.long, device="meta")

    if main_input == "pixel_values" or ("pixel_values" in accepted and model_config.labels is Labels.PAIRS):
        vision = getattr(config, "vision_config", None) or config
        size = getattr(vision, "image_size", 224)  # convolutional models do not fix it
        edges = (size, size) if isinstance(size, int) else tuple(size)
        frames = (vision.num_frames,) if hasattr(vision, "num_frames") else ()
        shape = (count, *frames, getattr(vision, "num_channels", 3), *edges)
        batch["pixel_values"] = torch.empty(shape, dtype=dtype, device="meta")
        unit, items = Unit.IMAGES, float(count)
    if main_input == "input_features":
        frames = 2 * _required_field(model_config, config, "max_source_positions")
        batch[main_input] = torch.empty(
            (count, _required_field(model_config, config, "num_mel_bins"), frames), dtype=dtype, device="meta"
        )
        unit, items = Unit.AUDIO, count * frames / 100
    if main_input == "input_values":
        seconds = 10
        batch[main_input] = torch.empty((count, seconds * _SAMPLES_PER_S), dtype=dtype, device="meta")
        unit, items = Unit.AUDIO, float(count * seconds)
    if model_config.labels is Labels.PAIRS:
        batch["input_ids"] = ids(count, model_config.sequence_limit or _DEFAULT_SEQUENCE)
    elif main_input == "input_ids" and length is not None:
        batch["input_ids"] = ids(count, length)
    if not batch:
        raise InputError(
            f"{model_config.path}: {model_config.model_class.__name__} takes {main_input!r}, an input that outofcore "
            "cannot generate; write a function that builds your step, and give it as my_script.py:build"
        )
    if training.trains:
        batch |= _label_inputs(model_config, count, length)
    elif length is not None and "decoder_input_ids" in accepted:
        batch["decoder_input_ids"] = ids(count, length)
    return batch, unit, items


def _label_inputs(model_config: ModelConfig, count: int, length: int | None) -> dict[str, torch.Tensor]:
    labels = torch.empty(count, dtype=torch.long, device="meta")
    match model_config.labels:
        case Labels.TOKENS:
            shape = (count, length if length is not None else 32)
            return {"labels": torch.empty(shape, dtype=torch.long, device="meta")}
        case Labels.CLASSES:
            regression = model_config.config.num_labels == 1 and model_config.config.problem_type is None
            return {"labels": labels.float() if regression else labels}
        case Labels.SPANS:
            return {"start_positions": labels, "end_positions": labels.clone()}
        case Labels.PAIRS | Labels.NONE:
            return {}


def _required_field(model_config: ModelConfig, config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    if value is None:
        raise InputError(
            f"{model_config.path} has no {name!r}, which sets the size of the inputs of "
            f"{model_config.model_class.__name__}; add it"
        )
    return value


def _make_call(model: nn.Module) -> Callable[[dict[str, torch.Tensor]], Any]:
    """Return a function that calls the model on a batch, without a key-value cache."""
    inner = cast("Any", model).get_base_model() if hasattr(model, "peft_config") else model
    accepted = signature(inner.forward).parameters
    extra: dict[str, Any] = {}
    if "use_cache" in accepted:
        extra["use_cache"] = False
    if "return_loss" in accepted and model.training:
        extra["return_loss"] = True
    return lambda batch: model(**batch, **extra)


def _training_step(
    model: nn.Module, optimizers: Sequence[optim.Optimizer], training: Training
) -> Callable[[dict[str, torch.Tensor]], Any]:
    call = _make_call(model)

    def train_step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16) if training.amp else nullcontext():
            output = call(batch)
            loss = getattr(output, "loss", None)
            if loss is None:
                loss = _first_tensor(output).float().mean()
        loss.backward()
        if training.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return train_step


def _forward_step(model: nn.Module) -> Callable[[dict[str, torch.Tensor]], Any]:
    call = _make_call(model)

    def forward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return _first_tensor(call(batch))

    return forward


def _first_tensor(output: Any) -> torch.Tensor:
    leaves = tree_flatten(tuple(output.to_tuple()) if hasattr(output, "to_tuple") else output)[0]
    return next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
