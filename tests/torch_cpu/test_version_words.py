"""Tests of words in memory that change whenever the values they stand for do."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from outofcore.capture.words import EntryKind, word_address, word_at

VALUE = 0


class Plain:
    """A class with few attributes, which may be stored in the object itself."""

    def __init__(self) -> None:
        self.x = 1


def _make_specialized() -> Plain:
    """Return an object with an attribute set so often that the interpreter specializes the store."""
    plain = Plain()
    for number in range(1000):
        plain.x = number
    return plain


def _set_attribute(owner: Any) -> None:
    for _ in range(100):
        owner.x = object()


def _set_global(_: Any) -> None:
    global VALUE  # noqa: PLW0603 - the tested case
    VALUE += 1


# Make an object, get its dict, and change an item of it.
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], dict[Any, Any]], Callable[[Any], Any]]] = {
    "attribute": (Plain, vars, lambda owner: setattr(owner, "x", object())),
    "attribute often": (_make_specialized, vars, _set_attribute),
    "attribute past its class": (Plain, vars, lambda owner: object.__setattr__(owner, "x", object())),
    "attribute gone": (Plain, vars, lambda owner: delattr(owner, "x")),
    "attribute of a module": (lambda: nn.Dropout(0.5), vars, lambda owner: setattr(owner, "p", owner.p / 2)),
    "flag of a module": (nn.Identity, vars, lambda owner: owner.eval()),
    "attribute of a class": (
        lambda: type("Made", (), {"x": 1}),
        lambda owner: next(d for d in gc.get_referents(vars(owner)) if isinstance(d, dict)),
        lambda owner: setattr(owner, "x", object()),
    ),
    "global": (lambda: None, lambda _: globals(), _set_global),
    "item": (lambda: {"x": 1}, lambda owner: owner, lambda owner: owner.__setitem__("x", object())),
    "update": (lambda: {"x": 1}, lambda owner: owner, lambda owner: owner.update(x=object())),
    "union": (lambda: {"x": 1}, lambda owner: owner, lambda owner: owner.__ior__({"x": object()})),
    "pop": (lambda: {"x": 1}, lambda owner: owner, lambda owner: owner.pop("x")),
    "popitem": (lambda: {"x": 1}, lambda owner: owner, lambda owner: owner.popitem()),
    "clear": (lambda: {"x": 1}, lambda owner: owner, lambda owner: owner.clear()),
    "default": (lambda: defaultdict(object), lambda owner: owner, lambda owner: owner["x"]),
    "ordered": (lambda: OrderedDict(x=1), lambda owner: owner, lambda owner: owner.__setitem__("x", object())),
    "ordered pop": (lambda: OrderedDict(x=1), lambda owner: owner, lambda owner: owner.popitem()),
    "other keys": (lambda: {"x": 1}, lambda owner: owner, lambda owner: owner.__setitem__("y", owner.pop("x"))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_word_changes_with_a_dict_item(name: str) -> None:
    make, dict_of, change = CHANGES[name]
    owner = make()
    address = word_address(EntryKind.ITEM, dict_of(owner), "x")
    if sys.version_info >= (3, 13):
        assert address is None
        return
    assert address is not None
    for _ in range(2 if name not in ("attribute gone", "pop", "popitem", "clear", "ordered pop", "other keys") else 1):
        before = word_at(address)
        if name == "default":
            owner.clear()
        change(owner)
        assert word_at(address) != before
        if name == "flag of a module":
            owner.train()


def test_words_follow_sizes_types_and_cells() -> None:
    owner = {"x": 1}
    size = word_address(EntryKind.SIZE, owner, None)
    assert size is not None and word_at(size) == 1
    owner["y"] = 2
    assert word_at(size) == 2

    plain = Plain()
    kind = word_address(EntryKind.TYPE, plain, None)
    assert kind is not None and word_at(kind) == id(Plain)
    plain.__class__ = type("Other", (Plain,), {})
    assert word_at(kind) == id(type(plain))

    number = object()

    def closure() -> object:
        return number

    assert closure.__closure__ is not None
    cell = word_address(EntryKind.CELL, closure.__closure__[0], None)
    assert cell is not None and word_at(cell) == id(number)
    number = object()
    assert word_at(cell) == id(number)


def test_word_follows_the_size_of_an_empty_set() -> None:
    for item in (1, "name", None):
        owner: set[Any] = set()
        address = word_address(EntryKind.CALL, owner, None)
        assert address is not None and word_at(address) == 0
        owner.add(item)
        assert word_at(address) == 1
        owner.discard(item)
        owner |= {item, 2}
        assert word_at(address) == len(owner) != 0


class Failure(Exception):  # noqa: N818 - exceptions store attributes elsewhere
    pass


@pytest.mark.parametrize("make", [Plain, Failure, type("Items", (dict,), {}), nn.Identity])
def test_word_changes_when_the_attribute_dict_is_replaced(make: Callable[[], Any]) -> None:
    owner = make()
    before = vars(owner)
    address = word_address(EntryKind.ATTRIBUTE, owner, "__dict__")
    assert address is not None and word_at(address) == id(before)
    object.__setattr__(owner, "__dict__", {**before})
    assert word_at(address) != id(before)


@pytest.mark.parametrize(
    "of", [torch.zeros(3, requires_grad=True), nn.Parameter(torch.zeros(3))], ids=["tensor", "parameter"]
)
def test_words_follow_hooks_of_tensors(of: torch.Tensor) -> None:
    names = "_backward_hooks", "_post_accumulate_grad_hooks"
    before = [word_address(EntryKind.ATTRIBUTE, of, name) for name in names]
    assert None not in before and before[0] != before[1]
    for name, address, register in zip(
        names, before, (of.register_hook, of.register_post_accumulate_grad_hook), strict=True
    ):
        assert address is not None
        register(lambda _: None)
        assert word_at(address) == id(getattr(of, name))


def test_unsupported_objects_have_no_word() -> None:
    class Own(torch.Tensor):
        pass

    assert word_address(EntryKind.ATTRIBUTE, torch.zeros(2).as_subclass(Own), "_backward_hooks") is None
    assert word_address(EntryKind.ATTRIBUTE, torch.zeros(2), "shape") is None
    assert word_address(EntryKind.LIST, [], None) is None
    assert word_address(EntryKind.CALL, [], None) is None
    assert word_address(EntryKind.CALL, {1}, None) is None
