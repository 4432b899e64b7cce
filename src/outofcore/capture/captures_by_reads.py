"""Find the capture of a step that fits the current Python values.

A capture is valid while the Python values that it has read are unchanged (``capture.snapshot``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from outofcore.capture.signature import Signature
from outofcore.capture.snapshot import Snapshot

# Captures per input signature.
_MAX_CAPTURES = 4
# If values changed in 3 of the last 8 calls of an input signature, another capture is pointless.
_RECENT_CALLS, _MAX_CHANGES = 8, 3


class CapturesByReads:
    """The captures of one step, several per input signature if the Python values that they read differ."""

    def __init__(self) -> None:
        self._snapshots: dict[Signature, dict[int, Snapshot]] = {}
        self._changes: dict[Signature, deque[bool]] = {}
        self._count = 0

    def find(self, signature: Signature) -> tuple[Signature, str]:
        """Return the signature of the capture to run, and the change that requires a new capture, if any."""
        snapshots = self._snapshots.get(signature)
        if not snapshots:
            return signature, ""
        first_change = ""
        for number in reversed(snapshots):  # most recently used first
            change = snapshots[number].change()
            if change is None:
                snapshots[number] = snapshots.pop(number)
                self._changes[signature].append(False)
                return signature._replace(capture=number), ""
            first_change = first_change or change
        self._changes[signature].append(True)
        self._count += 1
        return signature._replace(capture=self._count), first_change

    def add(self, signature: Signature, snapshot: Snapshot) -> Iterator[Signature]:
        """Add a capture, and yield the signature of each capture dropped for it. Callers must exhaust the iterator."""
        of_inputs = signature._replace(capture=0)
        snapshots = self._snapshots.setdefault(of_inputs, {})
        self._changes.setdefault(of_inputs, deque(maxlen=_RECENT_CALLS))
        snapshots[signature.capture] = snapshot
        while len(snapshots) > _MAX_CAPTURES:
            number = next(iter(snapshots))
            del snapshots[number]
            yield of_inputs._replace(capture=number)

    def alternatives(self, signature: Signature) -> Iterable[Signature]:
        """Return the signatures of other captures for the same input signature, most recently used first."""
        of_inputs = signature._replace(capture=0)
        numbers = reversed(self._snapshots.get(of_inputs, {}))
        return [of_inputs._replace(capture=number) for number in numbers if number != signature.capture]

    def changes_too_often(self, signature: Signature) -> bool:
        return sum(self._changes.get(signature._replace(capture=0), ())) >= _MAX_CHANGES

    def forget(self, signature: Signature | None = None) -> None:
        if signature is None:
            self._snapshots.clear()
        else:
            self._snapshots.get(signature._replace(capture=0), {}).pop(signature.capture, None)
