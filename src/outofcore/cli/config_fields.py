"""Check the fields of a model's configuration that decide its size, before anything is built."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from outofcore.errors import InputError

# Names of sizes. Of other fields, and of those whose default is no whole number, nothing is known.
_SIZE = re.compile(
    r"(num|n|d|max)_\w+|(\w+_)?(size|dim|layers|heads|channels|length|positions|embeddings|experts|bins|groups|depth)"
)
# Without these there is no model: none may be null or zero. Some models call them otherwise: see ``attribute_map``.
_CORE = frozenset(
    {
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"),
        *("max_position_embeddings", "image_size", "patch_size", "num_channels", "num_mel_bins", "num_layers"),
        *("num_heads", "d_model", "d_ff", "d_kv", "n_embd", "n_layer", "n_head", "n_positions", "embed_dim"),
        *("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"),
        *("encoder_ffn_dim", "decoder_ffn_dim", "max_source_positions", "max_target_positions"),
    }
)
# Zero of any other says that there are none, such as shared experts.
_NEVER_ZERO = _CORE | {"num_key_value_heads", "head_dim", "num_local_experts", "num_experts_per_tok"}
# Names of lists of sizes, one for each stage of a model.
_SIZES = re.compile(r"depths|(\w+_)?(sizes|dims?|kernels?|strides?|channels|heads)")
# The heads of a model with one of these need not divide its width.
_HEAD_WIDTHS = ("head_dim", "d_kv", "d_head", "attention_head_size", "kv_channels", "v_head_dim", "qk_nope_head_dim")
# No model has more, and a number that does not fit 31 bits overflows as soon as two of them meet.
_MOST, _MOST_MODULES = 2**31 - 1, 10_000
_STACKED = re.compile(r"\w*(layers|layer|blocks|depth)")
# What says that weights are stored otherwise than they are computed with, and where the method is named.
QUANTISED = ("quantization_config", "compression_config", "quantization", "load_in_8bit", "load_in_4bit")
_METHODS = ("quant_method", "quantization_method", "format", "quant_algo")


def check_sizes(path: Path, content: Mapping[str, Any], kind: Any, known: Callable[[object], Any]) -> None:
    """Refuse sizes that no model has, and name them.

    They are no whole number, too small or large, or heads that do not divide the width. ``kind`` is the class of
    transformers for the file; ``known`` returns the class for a ``model_type``, or None.
    """
    _check(path, content, "", kind, known)


def _check(path: Path, content: Mapping[str, Any], prefix: str, kind: Any, known: Callable[[object], Any]) -> None:
    usual = _default(kind)
    renamed: Mapping[str, str] = getattr(kind, "attribute_map", {})
    core = _CORE | {renamed.get(name, name) for name in _CORE}
    for name, value in content.items():
        default = _field(usual, name)
        if isinstance(value, dict) and name.endswith("_config"):
            inner = cast("dict[str, Any]", value)
            _check(path, inner, f"{prefix}{name}.", known(inner.get("model_type")) or type(default), known)
        elif value != default and (name in core or _is_size(name, value, default)):
            _check_size(path, prefix + name, name, value, default, is_core=name in core)
    _check_heads(path, content, prefix, usual, renamed)


def _default(kind: Any) -> Any:
    """Return the default configuration of a class; None where it has none."""
    try:
        return None if kind is None else kind()
    except Exception:  # it is that of transformers, and some want fields
        return None


def _field(usual: Any, name: str) -> Any:
    try:
        return getattr(usual, name, None)
    except Exception:  # fields that differ from layer to layer
        return None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(name: str, value: object, default: object) -> bool:
    """Return whether a field is a size, by its name and by its class's default."""
    if isinstance(default, list | tuple):
        return isinstance(value, list) and all(map(_is_whole, _leaves(default))) and _SIZES.fullmatch(name) is not None
    if _SIZE.fullmatch(name) is None:
        return False
    # Without a usual value it may be anything but a number that is no size.
    return _is_whole(default) or (default is None and isinstance(value, int | float) and not isinstance(value, bool))


def _check_size(path: Path, label: str, name: str, value: Any, default: Any, *, is_core: bool) -> None:
    if isinstance(value, dict) or (value is None and not (is_core and _is_whole(default))):
        return
    most = _MOST_MODULES if _STACKED.fullmatch(name) else _MOST
    least = 1 if is_core or name in _NEVER_ZERO or isinstance(value, list) else 0
    least = min([least, *filter(_is_whole, _leaves(default))])
    for one in _leaves(value):
        if not _is_whole(one):
            raise InputError(f"{path}: {label} must be a whole number, and is {_shown(one)}")
        if not least <= one <= most:
            what = f"at least {least}" if one < least else f"at most {most}"
            raise InputError(f"{path}: {label} must be {what}, and is {_shown(one)}")


def _leaves(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value]
    return [leaf for item in cast("list[Any]", value) for leaf in _leaves(item)]


def _shown(value: object) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _check_heads(path: Path, content: Mapping[str, Any], prefix: str, usual: Any, renamed: Mapping[str, str]) -> None:
    def said(name: str) -> tuple[str, int] | None:
        """Return the name of a field in the file, and its value there or by default."""
        own = next((key for key in (name, renamed.get(name, name)) if key in content), renamed.get(name, name))
        value = content.get(own, _field(usual, own))
        return (prefix + own, value) if _is_whole(value) and value > 0 else None

    heads, groups, width = said("num_attention_heads"), said("num_key_value_heads"), said("hidden_size")
    if heads and groups and heads[1] % groups[1] and "num_key_value_heads" in content:
        raise InputError(f"{path}: {heads[0]} is {heads[1]}, not a multiple of {groups[0]}, {groups[1]}")
    if any(content.get(name) for name in _HEAD_WIDTHS) or not _divides(usual):
        return
    for found in (heads, said("encoder_attention_heads"), said("decoder_attention_heads")):
        if width and found and width[1] % found[1]:
            raise InputError(f"{path}: {width[0]} is {width[1]}, not a multiple of {found[0]}, {found[1]}")


def _divides(usual: Any) -> bool:
    """Return whether the heads of a class share its width between them."""
    width, heads = _field(usual, "hidden_size"), _field(usual, "num_attention_heads")
    if not (_is_whole(width) and _is_whole(heads) and heads) or cast("int", width) % cast("int", heads):
        return False
    each = cast("int", width) // cast("int", heads)
    return all(_field(usual, name) in (None, each) for name in _HEAD_WIDTHS)


def check_dtype(path: Path, content: Mapping[str, Any], known: Callable[[str], bool]) -> None:
    """Refuse an unknown dtype, or two that contradict each other; ``known`` recognises names."""
    given = {name: content[name] for name in ("dtype", "torch_dtype") if content.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, dict) and not (isinstance(value, str) and known(value.removeprefix("torch."))):
            raise InputError(
                f'{path}: {name} is {_shown(value)}, which is no dtype of PyTorch; write such as "bfloat16"'
            )
    if len({str(value).removeprefix("torch.") for value in given.values()}) > 1:
        said = " and ".join(f"{name} is {_shown(value)}" for name, value in given.items())
        raise InputError(f"{path}: {said}; leave one of the two out")


def quantisation_of(content: Mapping[str, Any]) -> str:
    """Return the field that says that weights are quantised, and how; empty where they are not."""
    for name, value in content.items():
        if name in QUANTISED and value:
            return f"{name} ({_method(value)})"
        if isinstance(value, dict) and name.endswith("_config"):
            inner = quantisation_of(cast("dict[str, Any]", value))
            if inner:
                return f"{name}.{inner}"
    return ""


def _method(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    given = cast("dict[str, Any]", value)
    method = next((str(given[name]) for name in _METHODS if given.get(name)), None)
    bits = given.get("bits") or ("4" if given.get("load_in_4bit") else "8" if given.get("load_in_8bit") else None)
    method = method or ("bitsandbytes" if "load_in_4bit" in given or "load_in_8bit" in given else "unnamed method")
    return f"{method}, {bits} bits" if bits else method
