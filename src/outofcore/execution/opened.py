"""A home that is open: its slots, and the steps that share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from outofcore.errors import StateError
from outofcore.execution.aliases import Faces
from outofcore.execution.slots import Slots
from outofcore.execution.store import HomeStore


class OpenHome:
    """Where bytes live that are not on the device: made by ``outofcore.open_home``; a context manager.

    Models are born in it (``outofcore.build``, ``outofcore.materialize``), and steps are compiled over it
    (``outofcore.compile(…, home=…)``). Of several steps that share a home one at a time has tensors in its arena: when
    another one is called, it brings them home and releases its arena, so that a step for training and one for
    evaluation of the same model take the larger of their budgets and not the sum.

    Args:
        stores: where the bytes are, nearest first.
        kept: whether whoever opened the home closes it. Then what lives there stays there when a step is closed;
            else it moves to ordinary memory with the last step that shares the home.

    >>> import torch
    >>> import outofcore
    >>> with outofcore.open_home("host") as home:
    ...     model = outofcore.build(lambda: torch.nn.Linear(256, 256), home=home)
    ...     home.bytes >= 256 * 256 * 4
    True
    """

    def __init__(self, stores: Sequence[HomeStore], *, kept: bool) -> None:
        self.stores = tuple(stores)
        self.faces = Faces([Slots(store) for store in stores])
        self.kept = kept
        self._holders = 1 if kept else 0
        self._closed = False
        self._tenant: tuple[object, Callable[[], None]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def bytes(self) -> int:
        """Bytes that are taken up so far."""
        return sum(store.bytes for store in self.stores)

    def close(self) -> None:
        """Let go of the home; it is given back to the system once no step has it. May be called again.

        Tensors that live there stay valid.
        """
        if self.kept and not self._closed:
            self._closed = True
            self.release()

    def check_open(self) -> None:
        """Refuse a home that was closed.

        Raises:
            StateError: it was.
        """
        if self._closed:
            raise StateError("this home is closed; open another one with outofcore.open_home()")

    def hold(self) -> None:
        """Take note of one more step that needs the home.

        Raises:
            StateError: the home is closed.
        """
        self.check_open()
        self._holders += 1

    def release(self) -> None:
        """Take note that one of those who needed the home does no more; the last one closes it."""
        self._holders -= 1
        if self._holders == 0:
            for store in self.stores:
                store.close()

    @property
    def shared(self) -> bool:
        """Whether somebody else needs what is there, or may do so, than the one step that asks."""
        return self.kept or self._holders > 1

    def start(self) -> None:
        """Take note that anything at home may be another than what was written there last."""
        for store in self.stores:
            store.start()

    def occupy(self, step: object, vacate: Callable[[], None]) -> bool:
        """Let a step bring tensors into its arena, after another one has taken its own out.

        Args:
            step: whose arena.
            vacate: called when another step is to have the tensors; they are at home when it returns.

        Returns:
            whether it was not this step that had them last.

        Raises:
            StateError: the step that has them cannot give them up.
        """
        if self._tenant is not None and self._tenant[0] is step:
            return False
        if self._tenant is not None:
            self._tenant[1]()
        self._tenant = (step, vacate)
        return True

    def leave(self, step: object) -> None:
        """Take note that a step has nothing in its arena any more."""
        if self._tenant is not None and self._tenant[0] is step:
            self._tenant = None
