"""The policies by name, and the parser for texts such as ``"window:reach=2"``."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, cast, get_args, get_type_hints

from outofcore.errors import InputError
from outofcore.planning.baselines import (
    DTR,
    TFLMS,
    PoocH,
    ProfileGuided,
    SqrtCheckpoint,
    SuperNeurons,
    Window,
)
from outofcore.planning.parameters import SearchParams
from outofcore.planning.policy import Auto, FunctionPolicy, KeepAll, OffloadAll, Policy, PolicyLike

_BY_NAME = {
    kind.name: kind
    for kind in (Auto, KeepAll, OffloadAll, DTR, PoocH, ProfileGuided, SqrtCheckpoint, SuperNeurons, TFLMS, Window)
}

# The names of all policies.
POLICIES = tuple(_BY_NAME)

_WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "none": None}


def policy_of(given: PolicyLike) -> Policy:
    """Return the policy that a user has named or given.

    Args:
        given: a policy; a function from graph, costs and bytes of room to a plan; or a text. A text is a name of
            ``POLICIES``, with values for its fields after a colon. Values are numbers, words, ``true``, ``false``,
            ``none`` and lists of numbers; ``auto`` takes the fields of ``SearchParams``.

    Raises:
        InputError: there is no such policy or field, or a value has the wrong type.

    >>> policy_of("window:reach=2") == Window(reach=2)
    True
    >>> policy_of("auto:polish_ops=0,shares=[0.5]").params.shares
    (0.5,)
    """
    if isinstance(given, str):
        return _parse_policy(given)
    if isinstance(given, type):
        raise InputError(f"policy is the class {given.__name__}; give an instance: {given.__name__}()")
    if isinstance(given, Policy):
        return given
    if callable(given):
        return FunctionPolicy(getattr(given, "__name__", type(given).__name__), given)
    raise InputError(
        f"policy must be a name, a policy of outofcore.policies or a function that makes a plan, not {given!r}"
    )


def _parse_policy(text: str) -> Policy:
    """Return the policy of a text such as ``window:reach=2``; raise ``InputError`` if it is invalid."""
    name, _, arguments = text.partition(":")
    name = name.strip()
    if "(" in name:
        raise _unreadable_policy_error(text)
    kind = _BY_NAME.get(name)
    if kind is None:
        near = get_close_matches(name, POLICIES, 1)
        hint = f"did you mean {near[0]!r}? There are" if near else "choose one of"
        raise InputError(f"there is no policy {name!r}; {hint} {', '.join(POLICIES)}")
    values = _parse_arguments(text, arguments)
    if kind is Auto:
        return Auto(SearchParams(**_check_fields("auto", SearchParams, values)))
    return kind(**_check_fields(name, kind, values))


def _unreadable_policy_error(text: str) -> InputError:
    return InputError(f"cannot read the policy {text!r}; write it like window:reach=1.5,persist=false")


def _parse_arguments(text: str, arguments: str) -> dict[str, Any]:
    """Parse ``arguments`` as keyword arguments without running code; raise ``InputError`` if that fails."""
    try:
        call = ast.parse(f"f({arguments})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _unreadable_policy_error(text) from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise _unreadable_policy_error(text)
    values: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in values:
            raise _unreadable_policy_error(text)
        if isinstance(keyword.value, ast.Name):
            values[keyword.arg] = _WORDS.get(keyword.value.id.lower(), keyword.value.id)
            continue
        try:
            value = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            raise _unreadable_policy_error(text) from None
        values[keyword.arg] = tuple(cast("list[object]", value)) if isinstance(value, list) else value
    return values


def _check_fields(name: str, kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values``; raise ``InputError`` if ``kind`` has no such fields, or a search parameter is invalid."""
    names = [field.name for field in fields(kind)]
    for key in values:
        if key not in names:
            have = f"has {', '.join(names)}" if names else "has no fields"
            raise InputError(f"the policy {name!r} has no field {key!r}; it {have}")
    if kind is not SearchParams:
        return values
    hints = get_type_hints(kind)
    for key, value in values.items():
        many = bool(get_args(hints[key]))
        kinds = (int, float) if float in (hints[key], *get_args(hints[key])) else (int,)
        parts = cast("tuple[object, ...]", value if isinstance(value, tuple) else (value,))
        is_valid = many == isinstance(value, tuple) and all(type(part) in kinds for part in parts)
        if not is_valid or any(isinstance(part, (int, float)) and part < 0 for part in parts):
            expected = "a list of numbers" if many else "a number" if float in kinds else "a whole number"
            raise InputError(f"the policy {name!r}: {key} must be {expected}, 0 or more, not {value!r}")
    return values
