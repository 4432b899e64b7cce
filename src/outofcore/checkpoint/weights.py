"""Weights from safetensors files of any origin: one file, or several with an index."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch

from outofcore.checkpoint.copying import fill
from outofcore.checkpoint.format import Entry, TensorFile, read_header
from outofcore.checkpoint.stream import InFile, new_buffer
from outofcore.errors import InputError
from outofcore.execution.aliases import Faces
from outofcore.jsonfile import Node, load_json

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Weights:
    """Named tensors in safetensors files, of which the headers alone have been read.

    Args:
        path: a safetensors file; an index (``*.safetensors.index.json``) beside the files that it names; or a folder
            with ``model.safetensors`` or ``model.safetensors.index.json``.

    Raises:
        InputError: there are no such files, or they cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, tuple[TensorFile, Entry]] = {}
        if path.is_dir():
            path = next((path / name for name in (_INDEX, _ONE) if (path / name).is_file()), path)
            if path.is_dir():
                raise InputError(f"{path} has neither {_ONE} nor {_INDEX}; name the file itself")
        if path.name.endswith(".json"):
            self._read_index(path)
        else:
            file = read_header(path)
            self._entries = {name: (file, entry) for name, entry in file.entries.items()}

    def _read_index(self, path: Path) -> None:
        places = load_json(path).at("weight_map")
        files: dict[str, TensorFile] = {}
        for name in places.mapping():
            where: Node = places.at(name)
            file = files.get(where.text()) or read_header(path.parent / where.text())
            files[where.text()] = file
            if name not in file.entries:
                where.refuse(f"has no tensor {name!r}, which the index looks for there")
            self._entries[name] = (file, file.entries[name])

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._entries)

    def load(self, targets: Mapping[str, torch.Tensor], faces: Faces | None) -> None:
        """Fill tensors on the CPU, each by its name, converted where the dtypes differ; others in the files are left.

        Raises:
            InputError: a tensor has another shape in the files; nothing has been changed.
            TransferError: a file cannot be read.
        """
        wanted: defaultdict[Path, list[tuple[Entry, torch.Tensor]]] = defaultdict(list)
        for name, tensor in targets.items():
            file, entry = self._entries[name]
            if entry.shape != tuple(tensor.shape):
                raise InputError(f"{name} has the shape {tuple(tensor.shape)}, and {entry.shape} in {file.path}")
            wanted[file.path].append((entry, tensor))
        buffer = new_buffer()
        for path, items in wanted.items():
            with InFile(path) as source:
                for entry, tensor in sorted(items, key=lambda item: item[0].begin):
                    fill(tensor, entry, source, faces, buffer)
