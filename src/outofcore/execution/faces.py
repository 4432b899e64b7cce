"""Which of the user's tensors shows which slot of which home, and whose the slot is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from outofcore._torch_internals import storage_bytes, storage_key
from outofcore.analysis import is_large
from outofcore.execution.slots import Slots
from outofcore.execution.store import HomeStore


@dataclass
class Face:
    """A slot that a storage shows from its first byte on.

    Attributes:
        home: which of the homes, nearest first.
        offset: of the slot.
        bytes: of the storage.
        owned: whether a step gives the slot back when it needs it no more; else it is given back once
            nothing shows it.
    """

    home: int
    offset: int
    bytes: int
    owned: bool
    reference: StorageWeakRef


class Faces:
    """Makes the faces of slots, and recognises them.

    A parameter that is born at home, and all that a step leaves there for others, have slots that live as long
    as their faces. A step that takes such a tensor over claims its slot.

    Args:
        slots: of the homes, nearest first.
    """

    def __init__(self, slots: Sequence[Slots]) -> None:
        self.slots = tuple(slots)
        # By the key of the storage. The weak reference keeps the key from being given to another storage.
        self._faces: dict[int, Face] = {}
        self._keys: dict[tuple[int, int], int] = {}  # of the last face of each slot

    def show(self, home: int, offset: int, count: int, *, owned: bool = True) -> torch.Tensor:
        """A new face of a slot (see ``HomeStore.face``); an older one is not known any more."""
        tensor = self.slots[home].home.face(offset, count)
        if count:
            self.drop(home, offset)
            reference = StorageWeakRef(tensor.untyped_storage())
            self._faces[storage_key(tensor)] = Face(home, offset, count, owned, reference)
            self._keys[home, offset] = storage_key(tensor)
        return tensor

    def drop(self, home: int, offset: int) -> None:
        """Know the face of a slot no more, because the slot is to be something else's."""
        key = self._keys.pop((home, offset), None)
        if key is not None:
            del self._faces[key]

    def find(self, tensor: torch.Tensor) -> Face | None:
        """What the storage of a tensor shows; None: no slot."""
        found = self._faces.get(storage_key(tensor))
        return None if found is None or found.reference.expired() else found

    def store_of(self, face: Face) -> HomeStore:
        """The home that has a face's slot."""
        return self.slots[face.home].home

    def drop_cache(self, tensor: torch.Tensor) -> None:
        """Give back physical memory that a tensor occupies for caching a slot alone."""
        face = self.find(tensor)
        if face is not None:
            self.store_of(face).drop_cache(tensor)

    def birth(self, count: int) -> torch.Tensor:
        """A face of ``count`` bytes at the last home, contents unknown, for a tensor that begins its life there.

        Raises:
            SpillError: the home has no room for it.
        """
        self.sweep()
        last = len(self.slots) - 1
        return self.show(last, self.slots[last].take(count), count, owned=False)

    def part(self, tensor: torch.Tensor | None) -> None:
        """Give a tensor its bytes in a place of their own, because those where it is are to be something else's.

        Args:
            tensor: that the user has put aside; None: nobody has it any more, and there is nothing to do.

        Raises:
            SpillError: the home has no room for it.
        """
        if tensor is None:
            return
        count = tensor.untyped_storage().nbytes()
        base = self.birth(count) if is_large(count) else torch.empty(count, dtype=torch.uint8)
        base.copy_(storage_bytes(tensor))
        self.drop_cache(base)
        apart = torch.empty(0, dtype=tensor.dtype)
        tensor.data = apart.set_(base.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def disown(self, home: int, offset: int, count: int) -> None:
        """Let a slot live as long as its face does."""
        key = self._keys.get((home, offset))
        if key is None:
            self.slots[home].give(offset, count)
        else:
            self._faces[key].owned = False

    def sweep(self) -> None:
        """Forget faces that are gone, and give back the slots that nobody else does."""
        for key, face in [(k, f) for k, f in self._faces.items() if f.reference.expired()]:
            del self._faces[key]
            if self._keys.get((face.home, face.offset)) == key:
                del self._keys[face.home, face.offset]
            if not face.owned:
                self.slots[face.home].give(face.offset, face.bytes)
