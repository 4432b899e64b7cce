"""Every error that outofcore raises on purpose.

    OutOfCoreError
    ├── InputError (also a ValueError)      something handed to outofcore is not usable as it is
    │   ├── UnitError                       a byte count or a rate could not be read
    │   ├── BudgetError                     the budget cannot hold the step
    │   ├── SpillError                      the spill directory is missing, read-only or too small
    │   └── GraphError                      a step graph, plan or cost file contradicts itself
    ├── CaptureError                        the step cannot become one graph; names the user's line
    ├── ValidationError                     a program broke one of the promises of the design
    ├── ArenaError (also a MemoryError)     a request did not fit the planned arena
    ├── TransferError (also an OSError)     a copy to or from a home failed
    │   └── DeviceError                     the device itself failed, and does nothing more in this process
    ├── StateError (also a RuntimeError)    a step, model or tensor is used in a state that forbids it
    ├── CommunicationError (RuntimeError)   a collective failed: another process has ended or did not come to it
    └── VersionError (also an ImportError)  the installed PyTorch lacks what a feature relies on

Each message says what happened, why, and what to do; where the user's own code is the
place to act, the message carries its file and line or the module path.
"""

import errno


class OutOfCoreError(Exception):
    """The root of all errors raised by this library."""


class InputError(OutOfCoreError, ValueError):
    """An argument cannot be used as it is; nothing has been changed."""


class UnitError(InputError):
    """A byte count or a rate could not be read."""


class BudgetError(InputError):
    """The budget cannot hold the step.

    Attributes:
        smallest_budget: the smallest budget in bytes that would do, where it is known.
    """

    def __init__(self, message: str, smallest_budget: int | None = None) -> None:
        super().__init__(message)
        self.smallest_budget = smallest_budget


class SpillError(InputError):
    """The spill directory is missing, read-only or too small."""


class GraphError(InputError):
    """A step graph, its costs or a plan contradicts itself."""


class CaptureError(OutOfCoreError):
    """The training step cannot become one graph.

    Attributes:
        location: the user's ``file:line``, or an empty string where there is none.
        is_loop: on the CPU, the step runs as it is within ``outofcore.budget``.
    """

    def __init__(self, message: str, location: str = "", *, is_loop: bool = True) -> None:
        super().__init__(message)
        self.location = location
        self.is_loop = is_loop


class ValidationError(OutOfCoreError):
    """A program broke one of the promises: a fault of the planner, never of the user."""


class ArenaError(OutOfCoreError, MemoryError):
    """A request for device memory did not fit the arena."""


class TransferError(OutOfCoreError, OSError):
    """A copy to or from a home failed."""


class DeviceError(TransferError):
    """The device itself failed, and does nothing more in this process."""


class StateError(OutOfCoreError, RuntimeError):
    """A step, a model or a tensor is used in a state that forbids it."""


class CommunicationError(OutOfCoreError, RuntimeError):
    """A collective failed: another process has ended, or did not come to it in time."""


class VersionError(OutOfCoreError, ImportError):
    """The installed PyTorch lacks a name that a feature relies on; the other features work."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python, the system or PyTorch means that memory ran out or was too small."""
    if isinstance(error, MemoryError):
        return not isinstance(error, OutOfCoreError)
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # PyTorch's allocator on the CPU, and what computes sizes, raise errors that say so in words alone.
    said = str(error).lower()
    return isinstance(error, OverflowError) or (
        isinstance(error, RuntimeError | TypeError)
        and any(words in said for words in ("can't allocate memory", "not enough memory", "overflow"))
    )
