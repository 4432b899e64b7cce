"""Defer Ctrl-C and SIGTERM to the end of a step, so that no interrupt leaves a model half updated."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

_log = logging.getLogger("outofcore")

# Waiting threads wake at this interval: a signal that arrives as a thread falls asleep is handled at the next wake-up.
SIGNAL_POLL_SECONDS = 0.05

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class DeferredSignals:
    """Defers Ctrl-C and SIGTERM to the end of a block: ``with DeferredSignals(activity):``.

    The second signal (the third with ``stops=3``), or a later one, is handled at once if ``may_stop`` allows it;
    signals after it are dropped. A capture needs ``stops=3``: PyTorch calls Python from places where an exception would
    end the process. Outside of the main thread the context has no effect.
    """

    def __init__(self, activity: str, *, stops: int = 2, may_stop: Callable[[], bool] = lambda: True) -> None:
        self._activity = activity
        self._stops = stops
        self._may_stop = may_stop
        self._is_handled = False
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._pending: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._defer_or_handle)
        return self

    def _defer_or_handle(self, number: int, frame: FrameType | None) -> None:
        """Defer a signal to the end of the block, or handle a repeated one now if the step may stop."""
        self._pending.append((number, frame))
        if len(self._pending) == 1:
            _log.warning(
                "%s: waiting for %s to finish; %s stops it half way",
                signal.Signals(number).name,
                self._activity,
                "a second signal" if self._stops == 2 else "a third signal",
            )
        elif len(self._pending) >= self._stops and not self._is_handled:
            if self._may_stop():
                self._is_handled = True
                self._handlers[number](number, frame)
            elif len(self._pending) == self._stops:
                _log.warning(
                    "parameters are being updated, and stopping now would leave only some of them updated: waiting for "
                    "%s to finish; SIGQUIT (Ctrl-\\) or SIGKILL ends the process",
                    self._activity,
                )

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._pending and not self._is_handled:
            number, frame = self._pending[0]
            self._handlers[number](number, frame)
