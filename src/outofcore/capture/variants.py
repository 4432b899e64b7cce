"""Which capture of a step fits the current Python values.

A capture is valid while the Python values that it has read are unchanged (``capture.snapshot``). Otherwise the step is
captured again, so one input signature may have several variants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from outofcore.capture.signature import Signature
from outofcore.capture.snapshot import Snapshot

# So many captures for one kind of inputs are kept.
_MOST = 4
# So many of the last calls with one kind of inputs are looked at; where values have changed in so many of them, it is
# no use to capture the step again.
_LAST_CALLS, _TOO_OFTEN = 8, 3


class Variants:
    def __init__(self) -> None:
        self._known: dict[Signature, dict[int, Snapshot]] = {}
        self._changes: dict[Signature, deque[bool]] = {}
        self._count = 0

    def find(self, signature: Signature) -> tuple[Signature, str]:
        """Return the signature of the variant that fits now, and what has changed since the latest capture.

        If no variant fits, the signature has the number of a new one. The change is empty if there is none.
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
                return signature._replace(variant=number), ""
            told = told or change
        self._changes[signature].append(True)
        self._count += 1
        return signature._replace(variant=self._count), told

    def add(self, signature: Signature, snapshot: Snapshot) -> Iterator[Signature]:
        """Add a capture by the values that it has read; yields the signatures of captures to be forgotten."""
        kind = signature._replace(variant=0)
        known = self._known.setdefault(kind, {})
        self._changes.setdefault(kind, deque(maxlen=_LAST_CALLS))
        known[signature.variant] = snapshot
        while len(known) > _MOST:
            number = next(iter(known))
            del known[number]
            yield kind._replace(variant=number)

    def others(self, signature: Signature) -> Iterable[Signature]:
        """Return the signatures of the other variants, the one used last first."""
        kind = signature._replace(variant=0)
        return [kind._replace(variant=n) for n in reversed(self._known.get(kind, {})) if n != signature.variant]

    def changes_too_often(self, signature: Signature) -> bool:
        """Return whether the values that calls with this signature read have changed in most recent calls."""
        return sum(self._changes.get(signature._replace(variant=0), ())) >= _TOO_OFTEN

    def forget(self, signature: Signature | None = None) -> None:
        if signature is None:
            self._known.clear()
        else:
            self._known.get(signature._replace(variant=0), {}).pop(signature.variant, None)
