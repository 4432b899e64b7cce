"""Decide what Ctrl-C and SIGTERM do during a step: the step ends first, so the model is never part old and part new.

``session.Outcome`` says what an exception did to the model.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

_log = logging.getLogger("outofcore")

# A thread that waits wakes as often: a signal that comes as it falls asleep is handled when it next wakes.
SIGNALS_SECONDS = 0.05

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Deferred:
    """In ``with Deferred(what):`` signals that have a handler in Python are kept for its end.

    The second one (or the third, see ``stops``) is handled at once if ``may_stop`` allows it; if its handler raises, as
    Ctrl-C's does, the block is left. Further ones are dropped until the block has cleaned up. Signals without such a
    handler, as SIGTERM by default, do what they always do. Outside of the main thread, where handlers never run, this
    does nothing.

    Args:
        what: what goes on to its end, for the log.
        stops: which signal is handled at once. During a capture PyTorch calls Python from places where an exception
            would end the process: there it is the third, so that two in a row do no harm.
        may_stop: whether the block may be left half way now.
    """

    def __init__(self, what: str, *, stops: int = 2, may_stop: Callable[[], bool] = lambda: True) -> None:
        self._what = what
        self._stops = stops
        self._may_stop = may_stop
        self._is_told = False  # whether a handler was called
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._pending: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending.append((number, frame))
        if len(self._pending) == 1:
            _log.warning(
                "%s: %s is brought to its end first; %s stops it half way",
                signal.Signals(number).name,
                self._what,
                "another one" if self._stops == 2 else "a third one",
            )
        elif len(self._pending) >= self._stops and not self._is_told:
            if self._may_stop():
                self._is_told = True
                self._handlers[number](number, frame)
            elif len(self._pending) == self._stops:
                _log.warning(
                    "parameters are being updated, and would be part old and part new: %s is brought to its end all "
                    "the same; SIGQUIT (Ctrl-\\) or SIGKILL ends the process",
                    self._what,
                )

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._pending and not self._is_told:
            number, frame = self._pending[0]
            self._handlers[number](number, frame)
