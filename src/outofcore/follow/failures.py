"""Convert errors of the native code to the library's exceptions, with the op, its module and the user's line."""

from __future__ import annotations

from types import TracebackType

from outofcore.errors import BudgetError
from outofcore.follow.native import REFUSAL_FIELDS, error_of, refusal_of
from outofcore.follow.observed import KnownStorages
from outofcore.follow.running import sources
from outofcore.follow.sources import IN_BACKWARD, places_of
from outofcore.units import format_bytes


def explain_error(error: BaseException, names: KnownStorages | None = None) -> Exception | None:
    """Return the library exception for an error of the native code; None for other errors."""
    text = str(error)
    if not isinstance(error, RuntimeError):
        return None
    refusal = refusal_of(text)
    if refusal is None:
        return error_of(text)
    op, refused = refusal
    counts = {name: format_bytes(getattr(refused, name)) for name in REFUSAL_FIELDS}
    details = f", and {counts['kept']} cannot be moved" if refused.kept else ""
    if refused.small:
        details += f"; tensors below {counts['smallest']} take {counts['small']}"
    if refused.reserved:
        details += f"; {counts['reserved']} are kept for libraries, tensors below {counts['smallest']} and holes"
    parameter = (names or {}).get(refused.parameter, ("a parameter",))[0] if refused.sums else None
    op_name = _describe_op(op, parameter, error.__traceback__)
    return BudgetError(
        f"the budget of {counts['budget']} is too small: {op_name} needs {counts['asked']} on top of the "
        f"{counts['used']} of its operands{details}. Use a budget of at least {counts['least']}, or smaller batches. "
        "measure=True (outofcore run --measure) finds the budget that holds every op; grow=True (--grow) lets such ops "
        "exceed it",
        refused.least,
    )


def _describe_op(op: str, parameter: str | None, trace: TracebackType | None) -> str:
    """Describe an op for an error message: its name, its module or parameter, and the user's line."""
    if IN_BACKWARD in op:
        return op
    module, line = sources.find(places_of(trace))
    location = f" at {line}" if line else ""
    if parameter is not None:
        return op + IN_BACKWARD + parameter + location
    return op + (f" in {module}" if module else "") + location
