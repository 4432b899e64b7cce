"""What the commands share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from outofcore import zoo
from outofcore.errors import InputError


def find_workload(model: str, options: Mapping[str, Any]) -> zoo.Workload:
    """A workload by its name on the command line, where a resnet may carry its depth: "resnet50".

    Raises:
        InputError: there is no such workload, or an option does not fit it.
    """
    named = re.fullmatch(r"resnet(\d+)", model)
    if named is None:
        return zoo.workload(model, **options)
    depth = int(named.group(1))
    if options.get("depth") not in (None, depth):
        raise InputError(f"{model} has {depth} layers, and --depth says {options['depth']}; give one of the two")
    return zoo.workload("resnet", **{**options, "depth": depth})
