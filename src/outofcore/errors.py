"""The errors that outofcore raises.

    OutOfCoreError
    ├── InputError (also a ValueError)      an argument or a file cannot be used
    │   ├── UnitError                       a byte count or a rate cannot be parsed
    │   ├── BudgetError                     the budget is too small for the step
    │   ├── SpillError                      a home is missing, read-only or too small
    │   └── GraphError                      a step graph, plan or cost file is inconsistent
    ├── CaptureError                        the step cannot be captured as one graph; names the user's line
    ├── ValidationError                     a program failed validation: a bug in outofcore
    ├── ArenaError (also a MemoryError)     a request did not fit the planned arena
    ├── TransferError (also an OSError)     a copy to or from a home failed
    │   └── DeviceError                     the device failed and is unusable in this process
    ├── StateError (also a RuntimeError)    a step, model or tensor is in a state that forbids the call
    ├── CommunicationError (RuntimeError)   a collective failed: another process has ended or did not arrive in time
    └── VersionError (also an ImportError)  the installed PyTorch lacks a name that a feature needs

A message has the file and line, or the module path, of user code that needs a change.
"""

import errno


class OutOfCoreError(Exception):
    """The base class of all errors that outofcore raises."""


class InputError(OutOfCoreError, ValueError):
    """An argument or a file cannot be used; no state has changed."""


class UnitError(InputError):
    """A byte count or a rate cannot be parsed."""


class BudgetError(InputError):
    """The budget is too small for the step; ``smallest_budget`` in bytes suffices (None: unknown)."""

    def __init__(self, message: str, smallest_budget: int | None = None) -> None:
        super().__init__(message)
        self.smallest_budget = smallest_budget


class SpillError(InputError):
    """A home is missing, read-only or too small."""


class GraphError(InputError):
    """A step graph, its costs or a plan is inconsistent."""


class CaptureError(OutOfCoreError):
    """The training step cannot be captured as one graph.

    ``location`` is the user's ``file:line``, or empty. ``is_loop``: ``outofcore.budget`` can run the step (CPU only).
    """

    def __init__(self, message: str, location: str = "", *, is_loop: bool = True) -> None:
        super().__init__(message)
        self.location = location
        self.is_loop = is_loop


class ValidationError(OutOfCoreError):
    """A program failed validation: a bug in the planner, never the user's fault."""


class ArenaError(OutOfCoreError, MemoryError):
    """A request for device memory did not fit the arena."""


class TransferError(OutOfCoreError, OSError):
    """A copy to or from a home failed."""


class DeviceError(TransferError):
    """The device failed and is unusable in this process."""


class StateError(OutOfCoreError, RuntimeError):
    """A step, model or tensor is in a state that forbids the call."""


class CommunicationError(OutOfCoreError, RuntimeError):
    """A collective failed: another process has ended, or did not arrive in time."""


class VersionError(OutOfCoreError, ImportError):
    """The installed PyTorch lacks a name that a feature needs; other features work."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python, the system or PyTorch means that memory ran out."""
    if isinstance(error, MemoryError):
        return not isinstance(error, OutOfCoreError)
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # PyTorch's CPU allocator and its size computations raise generic errors; only the message identifies them.
    message = str(error).lower()
    return isinstance(error, OverflowError) or (
        isinstance(error, RuntimeError | TypeError)
        and any(words in message for words in ("can't allocate memory", "not enough memory", "overflow"))
    )
