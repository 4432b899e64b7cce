"""Find the capture of a step that fits the current Python values.

A capture is valid while the Python values that it has read are unchanged (``capture.snapshot``). Otherwise the step is
captured again, so one input signature may have several captures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from outofcore.capture.signature import Signature
from outofcore.capture.snapshot import Snapshot

# Captures that are kept for one input signature.
_MOST_CAPTURES = 4
# Calls of one input signature that are remembered. Where values have changed in so many of them, it is no use to
# capture the step again.
_LAST_CALLS, _TOO_OFTEN = 8, 3


class CapturesByReads:
    """The captures of each input signature, told apart by the values that they have read."""

    def __init__(self) -> None:
        self._known: dict[Signature, dict[int, Snapshot]] = {}
        self._changes: dict[Signature, deque[bool]] = {}
        self._count = 0

    def find(self, signature: Signature) -> tuple[Signature, str]:
        """Return the signature of the capture that fits now, and what has changed since the latest one.

        If none fits, the signature has the number of a new one. The change is empty if there is none.
        """
        known = self._known.get(signature)
        if not known:
            return signature, ""
        told = ""
        for number in reversed(known):  # the one used last comes first
            change = known[number].change()
            if change is None:
                known[number] = known.pop(number)
                self._changes[signature].append(False)
                return signature._replace(capture=number), ""
            told = told or change
        self._changes[signature].append(True)
        self._count += 1
        return signature._replace(capture=self._count), told

    def add(self, signature: Signature, snapshot: Snapshot) -> Iterator[Signature]:
        """Add a capture by the values that it has read; yields the signatures of captures to be forgotten."""
        of_inputs = signature._replace(capture=0)
        known = self._known.setdefault(of_inputs, {})
        self._changes.setdefault(of_inputs, deque(maxlen=_LAST_CALLS))
        known[signature.capture] = snapshot
        while len(known) > _MOST_CAPTURES:
            number = next(iter(known))
            del known[number]
            yield of_inputs._replace(capture=number)

    def others(self, signature: Signature) -> Iterable[Signature]:
        """Return the signatures of the other captures for the same inputs, the one used last first."""
        of_inputs = signature._replace(capture=0)
        numbers = reversed(self._known.get(of_inputs, {}))
        return [of_inputs._replace(capture=number) for number in numbers if number != signature.capture]

    def changes_too_often(self, signature: Signature) -> bool:
        """Return whether the values that calls with this signature read have changed in most recent calls."""
        return sum(self._changes.get(signature._replace(capture=0), ())) >= _TOO_OFTEN

    def forget(self, signature: Signature | None = None) -> None:
        """Forget one capture, or all."""
        if signature is None:
            self._known.clear()
        else:
            self._known.get(signature._replace(capture=0), {}).pop(signature.capture, None)
