"""Convert errors of the native code to the library's: what did not fit, and which op asked for it, where."""

from __future__ import annotations

import re
from types import TracebackType

from outofcore.errors import BudgetError
from outofcore.follow.native import error_of
from outofcore.follow.observed import Known
from outofcore.follow.running import sources
from outofcore.follow.sources import IN_BACKWARD, places_of
from outofcore.units import format_bytes

# An op that adds to a gradient, as ``source_of_running`` in room.h names it.
_SUMMED = re.compile(IN_BACKWARD + r"parameter (-?\d+)$")
_REFUSAL = re.compile(
    r"outofcore: the budget of (?P<budget>\d+) bytes cannot hold (?P<op>.+), which asks for (?P<asked>\d+) bytes "
    r"beside (?P<used>\d+) bytes that it uses and (?P<kept>\d+) bytes that cannot be moved; at least (?P<least>\d+) "
    r"bytes are needed, of which tensors of less than (?P<smallest>\d+) bytes each take (?P<small>\d+), and "
    r"(?P<beside>\d+) lie beside the arena"
)


def explained(error: BaseException, names: Known | None = None) -> Exception | None:
    """Convert an error of the native code to one of the library's; None for any other error."""
    text = str(error)
    if not isinstance(error, RuntimeError):
        return None
    refused = _REFUSAL.search(text)
    if refused is None:
        return error_of(text)
    counts = {name: format_bytes(int(count)) for name, count in refused.groupdict().items() if name != "op"}
    held = f", and {counts['kept']} cannot be moved" if int(refused["kept"]) else ""
    if int(refused["small"]):
        held += f", beside {counts['small']} of tensors below {counts['smallest']}"
    if int(refused["beside"]):
        held += f"; {counts['beside']} are kept for libraries, tensors below {counts['smallest']} and holes"
    named = _named(refused["op"], error.__traceback__, names or {})
    return BudgetError(
        f"the budget of {counts['budget']} cannot hold {named}: beside {counts['used']} that it uses it asks for "
        f"{counts['asked']}{held}. Give a budget of at least {counts['least']}, or smaller batches",
        int(refused["least"]),
    )


def _named(op: str, trace: TracebackType | None, names: Known) -> str:
    """Name an op with its module and the user's line."""
    summed = _SUMMED.search(op)
    if summed is None and IN_BACKWARD in op:
        return op
    module, line = sources.find(places_of(trace))
    at = f" at {line}" if line else ""
    if summed is not None:
        return op[: summed.start()] + IN_BACKWARD + names.get(int(summed[1]), ("a parameter",))[0] + at
    return op + (f" in {module}" if module else "") + at
