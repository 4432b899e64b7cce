"""Check the fields of a model's configuration that decide its size, before the model is built."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from outofcore.errors import InputError

# Names of sizes. Other fields are not checked, and sizes only if their default is a whole number.
_SIZE = re.compile(
    r"(num|n|d|max)_\w+|(\w+_)?(size|dim|layers|heads|channels|length|positions|embeddings|experts|bins|groups|depth)"
)
# Sizes that every model needs: not null, not zero. ``attribute_map`` has other names for them.
_CORE = frozenset(
    {
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"),
        *("max_position_embeddings", "image_size", "patch_size", "num_channels", "num_mel_bins", "num_layers"),
        *("num_heads", "d_model", "d_ff", "d_kv", "n_embd", "n_layer", "n_head", "n_positions", "embed_dim"),
        *("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"),
        *("encoder_ffn_dim", "decoder_ffn_dim", "max_source_positions", "max_target_positions"),
    }
)
# Any other size may be zero, such as the number of shared experts.
_NEVER_ZERO = _CORE | {"num_key_value_heads", "head_dim", "num_local_experts", "num_experts_per_tok"}
# Names of lists of sizes, one for each stage of a model.
_SIZES = re.compile(r"depths|(\w+_)?(sizes|dims?|kernels?|strides?|channels|heads)")
# The heads of a model with one of these need not divide its width.
_HEAD_WIDTHS = ("head_dim", "d_kv", "d_head", "attention_head_size", "kv_channels", "v_head_dim", "qk_nope_head_dim")
# No model has more, and products of two larger numbers overflow.
_MAX_SIZE, _MAX_LAYERS = 2**31 - 1, 10_000
_STACKED = re.compile(r"\w*(layers|layer|blocks|depth)")
# Fields that mark weights as stored quantised, and fields in them that name the method.
QUANTISED = ("quantization_config", "compression_config", "quantization", "load_in_8bit", "load_in_4bit")
_METHODS = ("quant_method", "quantization_method", "format", "quant_algo")


def check_sizes(path: Path, content: Mapping[str, Any], config_class: Any, class_of: Callable[[object], Any]) -> None:
    _check_fields(path, content, "", config_class, class_of)


def _check_fields(
    path: Path, content: Mapping[str, Any], prefix: str, config_class: Any, find_class: Callable[[object], Any]
) -> None:
    """Raise ``InputError`` if a model configuration, or one nested in it, has an invalid size."""
    defaults = _default_config(config_class)
    aliases: Mapping[str, str] = getattr(config_class, "attribute_map", {})
    core = _CORE | {aliases.get(name, name) for name in _CORE}
    for name, value in content.items():
        default = _default_value(defaults, name)
        if isinstance(value, dict) and name.endswith("_config"):
            inner = cast("dict[str, Any]", value)
            _check_fields(
                path, inner, f"{prefix}{name}.", find_class(inner.get("model_type")) or type(default), find_class
            )
        elif value != default and (name in core or _is_size(name, value, default)):
            _check_size(path, prefix + name, name, value, default, is_core=name in core)
    _check_heads(path, content, prefix, defaults, aliases)


def _default_config(config_class: Any) -> Any:
    try:
        return None if config_class is None else config_class()
    except Exception:  # some classes of transformers require fields
        return None


def _default_value(defaults: Any, name: str) -> Any:
    try:
        return getattr(defaults, name, None)
    except Exception:  # fields that differ from layer to layer
        return None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(name: str, value: object, default: object) -> bool:
    """Return whether a field of a configuration is a size, such as ``hidden_size``, or a list of sizes."""
    if isinstance(default, list | tuple):
        return isinstance(value, list) and all(map(_is_whole, _leaves(default))) and _SIZES.fullmatch(name) is not None
    if _SIZE.fullmatch(name) is None:
        return False
    # Without a default, any value may be valid, except numbers that are not sizes.
    return _is_whole(default) or (default is None and isinstance(value, int | float) and not isinstance(value, bool))


def _check_size(path: Path, shown_name: str, name: str, value: Any, default: Any, *, is_core: bool) -> None:
    """Raise ``InputError`` if a size, or one in a list of sizes, is not a whole number or is out of range."""
    if isinstance(value, dict) or (value is None and not (is_core and _is_whole(default))):
        return
    max_size = _MAX_LAYERS if _STACKED.fullmatch(name) else _MAX_SIZE
    min_size = 1 if is_core or name in _NEVER_ZERO or isinstance(value, list) else 0
    min_size = min([min_size, *filter(_is_whole, _leaves(default))])
    for leaf in _leaves(value):
        if not _is_whole(leaf):
            raise InputError(f"{path}: {shown_name} must be a whole number, not {_short_text(leaf)}")
        if not min_size <= leaf <= max_size:
            bound = f"at least {min_size}" if leaf < min_size else f"at most {max_size}"
            raise InputError(f"{path}: {shown_name} must be {bound}, not {_short_text(leaf)}")


def _leaves(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value]
    return [leaf for item in cast("list[Any]", value) for leaf in _leaves(item)]


def _short_text(value: object) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _check_heads(
    path: Path, content: Mapping[str, Any], prefix: str, defaults: Any, aliases: Mapping[str, str]
) -> None:
    """Raise ``InputError`` if a number of attention heads does not fit the key-value heads or the hidden size."""

    def field_of(name: str) -> tuple[str, int] | None:
        key_name = next((key for key in (name, aliases.get(name, name)) if key in content), aliases.get(name, name))
        value = content.get(key_name, _default_value(defaults, key_name))
        return (prefix + key_name, value) if _is_whole(value) and value > 0 else None

    heads, groups, width = field_of("num_attention_heads"), field_of("num_key_value_heads"), field_of("hidden_size")
    if heads and groups and heads[1] % groups[1] and "num_key_value_heads" in content:
        raise InputError(
            f"{path}: {heads[0]} is {heads[1]}, not a multiple of {groups[0]}, {groups[1]}; correct one of them"
        )
    if any(content.get(name) for name in _HEAD_WIDTHS) or not _heads_divide_width(defaults):
        return
    for head_field in (heads, field_of("encoder_attention_heads"), field_of("decoder_attention_heads")):
        if width and head_field and width[1] % head_field[1]:
            raise InputError(
                f"{path}: {width[0]} is {width[1]}, not a multiple of {head_field[0]}, {head_field[1]}; correct one "
                "of them"
            )


def _heads_divide_width(defaults: Any) -> bool:
    width, heads = _default_value(defaults, "hidden_size"), _default_value(defaults, "num_attention_heads")
    if not (_is_whole(width) and _is_whole(heads) and heads) or cast("int", width) % cast("int", heads):
        return False
    head_width = cast("int", width) // cast("int", heads)
    return all(_default_value(defaults, name) in (None, head_width) for name in _HEAD_WIDTHS)


def check_dtype(path: Path, content: Mapping[str, Any], is_dtype: Callable[[str], bool]) -> None:
    """Raise ``InputError`` if a configuration names an unknown dtype, or two different ones."""
    dtypes = {name: content[name] for name in ("dtype", "torch_dtype") if content.get(name) is not None}
    for name, value in dtypes.items():
        if not isinstance(value, dict) and not (isinstance(value, str) and is_dtype(value.removeprefix("torch."))):
            raise InputError(
                f'{path}: {name} is {_short_text(value)}, which is not a dtype of PyTorch; write e.g. "bfloat16"'
            )
    if len({str(value).removeprefix("torch.") for value in dtypes.values()}) > 1:
        conflict = " and ".join(f"{name} is {_short_text(value)}" for name, value in dtypes.items())
        raise InputError(f"{path}: {conflict}; remove one of the two")


def quantisation_of(content: Mapping[str, Any]) -> str:
    """Describe how weights are quantised, e.g. "quantization_config (gptq, 4 bits)"; "" if they are not."""
    for name, value in content.items():
        if name in QUANTISED and value:
            return f"{name} ({_quantisation_text(value)})"
        if isinstance(value, dict) and name.endswith("_config"):
            inner = quantisation_of(cast("dict[str, Any]", value))
            if inner:
                return f"{name}.{inner}"
    return ""


def _quantisation_text(config_value: Any) -> str:
    if not isinstance(config_value, dict):
        return str(config_value)
    settings = cast("dict[str, Any]", config_value)
    method = next((str(settings[name]) for name in _METHODS if settings.get(name)), None)
    bits = settings.get("bits") or (
        "4" if settings.get("load_in_4bit") else "8" if settings.get("load_in_8bit") else None
    )
    method = method or (
        "bitsandbytes" if "load_in_4bit" in settings or "load_in_8bit" in settings else "unnamed method"
    )
    return f"{method}, {bits} bits" if bits else method
