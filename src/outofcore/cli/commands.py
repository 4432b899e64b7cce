"""Command classes of typer that name values in help texts and reject byte counts of two words."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

_BYTES = "BYTES"
# Names of option values in help texts.
_METAVARS = {
    **dict.fromkeys(("budget", "host_budget", "capacity", "between"), _BYTES),
    **dict.fromkeys(("picture", "save_graph", "save_plan", "graph", "plan", "output", "trace", "arrays"), "FILE"),
    **dict.fromkeys(("cache", "save", "resume"), "FOLDER"),
    **dict.fromkeys(("batch", "steps", "elastic", "ranks", "depth", "size", "base", "classes", "layers", "width"), "N"),
    **dict.fromkeys(("params", "heads", "context", "vocab", "seed", "sequence", "lora", "effort", "seconds"), "N"),
    **dict.fromkeys(("dropout", "lr", "clip"), "X"),
    **dict.fromkeys(("images", "optimizer", "optimizer_impl", "dtype"), "NAME"),
    "device": "DEVICE",
    "home": "HOME",
    "policy": "POLICY",
    "dims": "NAME=N",
}
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?")
_UNIT = re.compile(r"[KMGT]i?B?|%", re.IGNORECASE)


class Command(TyperCommand):
    """A typer command. Its help names values, such as FILE, and it refuses byte counts in two words, such as 6 GiB."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _set_metavars(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self._refuse_separate_units(ctx, args)
        return super().parse_args(ctx, args)

    def _refuse_separate_units(self, ctx: Any, args: list[str]) -> None:
        try:
            values, _, _ = self.make_parser(ctx).parse_args(list(args))
        except Exception:  # super().parse_args raises it again
            return
        for param in self.get_params(ctx):
            count = values.get(param.name)
            if param.metavar != _BYTES or not isinstance(count, str) or not _NUMBER.fullmatch(count):
                continue
            option = param.opts[0]
            unit = next((unit for before, unit in pairwise(args) if before in (count, f"{option}={count}")), "")
            if _UNIT.fullmatch(unit):
                reason = f"write the number and its unit as one word: {option} {count}{unit}"
                raise typer.BadParameter(reason, ctx=ctx, param_hint=option)


class Group(TyperGroup):
    """The typer program with all commands; its help names values, such as FILE, instead of Python types."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _set_metavars(super().get_params(ctx))


def _set_metavars(params: list[Any]) -> list[Any]:
    """Set the placeholder that help prints for each option's value, such as FILE; return the same list."""
    for param in params:
        if isinstance(param, TyperArgument):
            # Some releases of typer print the type of an argument even if it has a metavar.
            param.display_type_rich = lambda ctx: ""  # pyright: ignore[reportAttributeAccessIssue]
        if getattr(param, "is_flag", False):
            param.metavar = ""
        elif param.metavar is None:
            param.metavar = _METAVARS.get(param.name)
    return params
