"""Steps with the schedules that Checkmate and MONeT found for them, from the repository ``utsaslab/monet-schedules``.

MONeT's authors (Shah et al., ICLR 2021) ran Checkmate's integer program (Jain et al., MLSys 2020) on five networks for
up to 24 hours each, on costs measured on a P100 with 16 GB. Checkmate's model of a step is simple enough that our
planner can solve the very same problem, so that step times can be compared:

* A node is an op that makes one storage; an edge says which storages an op reads. There are no workspaces. Sizes are
  whole KiB and times whole multiples of 10 µs, as the solver rounded them.
* Parameters, their gradients and the input are counted beforehand, and taken from the budget.
* Nothing can be offloaded.

One thing differs: Checkmate adds up bytes, and we find addresses too.

For GoogleNet the schedules themselves are large, so the objectives are read from the solver's logs: it solved four of
six budgets. MONeT's own solutions for the same network, which may run ReLU in place but use no other implementations
of operators, stand beside them. The overheads in MONeT's README choose among implementations of convolutions as well,
which is another problem.

The files are pickles. They are read without running anything that they name: see ``load_pickle``.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from instances.sources import Clone, Instance

from outofcore.costs import Costs, OpCost
from outofcore.graph import Op, StepGraph, Storage, StorageKind
from outofcore.graphfile import GraphFile

REPOSITORY = "monet-schedules"
# Folders and files of the networks, and the budgets in GiB for which the solver found a schedule.
_NETWORKS = {
    "MobileNetV2": ("mobilenet_272", "mobilenet_v2_272", range(5, 11)),
    "ResNet-50": ("r50_184", "resnet50_184", range(5, 11)),
    "U-Net": ("unet_11", "un_11", range(5, 11)),
    "VGG-16": ("vgg16_176", "vgg16_176", range(8, 11)),
}
_TICKS = 100_000  # in a second: the unit of time of the solver
_OBJECTIVE = re.compile(r"^Best objective ([0-9.e+]+), best bound ([0-9.e+]+)", re.MULTILINE)

CASES = {f"{network} {gib} GB": (network, gib) for network, (_, _, budgets) in _NETWORKS.items() for gib in budgets}
GOOGLENET_CASES = {f"GoogleNet {gib} GB": gib for gib in range(5, 11)}


class Inert:
    """What stands in for an object of any foreign class: its state, and nothing that runs."""

    def __new__(cls, *_: object) -> Inert:
        """Take whatever the class would be called with."""
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _Dtype(Inert):
    """A type of numbers, such as "f8"."""

    def __new__(cls, code: str, *_: object) -> _Dtype:
        made = object.__new__(cls)
        made.__dict__["code"] = code
        return made


def _decode_scalar(dtype: _Dtype, data: bytes) -> float:
    return struct.unpack({"f8": "<d", "f4": "<f", "i8": "<q", "i4": "<i"}[dtype.__dict__["code"]], data)[0]


def _make_array(*_: object) -> Inert:
    return Inert()


def _make_nested(_: type, name: str) -> type[Inert]:
    """Stand in for ``getattr``, by which pickles name classes within classes."""
    return type(name, (Inert,), {})


_HARMLESS: dict[tuple[str, str], Any] = {
    ("builtins", "set"): set,
    ("builtins", "list"): list,
    ("builtins", "getattr"): _make_nested,
    ("collections", "defaultdict"): defaultdict,
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): Inert,
    ("numpy.core.multiarray", "scalar"): _decode_scalar,
    ("numpy.core.multiarray", "_reconstruct"): _make_array,
}
_FOREIGN = re.compile(r"(monet|checkmate)\.[\w.]+|__main__")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        known = _HARMLESS.get((module_name, global_name))
        if known is not None:
            return known
        if _FOREIGN.fullmatch(module_name) and global_name.isidentifier():
            return type(global_name, (Inert,), {})
        raise pickle.UnpicklingError(f"the pickle names {module_name}.{global_name}, which is not read")


def load_pickle(data: bytes) -> Any:
    """Read a pickle of MONeT's without running code of it, its classes or numpy: foreign objects become ``Inert``.

    Raises:
        pickle.UnpicklingError: it names something other than MONeT's own classes, arrays and plain containers.
    """
    return _Unpickler(io.BytesIO(data)).load()


def make_graph(nodes: Mapping[int, Any], edges: Sequence[Sequence[int]], milliseconds: Sequence[float]) -> GraphFile:
    """Make a graph file of Checkmate's model of a step: what each node takes, and which it reads."""
    reads: dict[int, dict[int, None]] = {node: {} for node in nodes}
    for source, node, *_ in edges:
        reads[node][source] = None
    storages = tuple(Storage(k, round(nodes[k].mem / 1024) * 1024, StorageKind.ACTIVATION) for k in sorted(nodes))
    ops = tuple(Op(k, str(nodes[k].op), tuple(reads[k]), (), (k,)) for k in sorted(nodes))
    graph = StepGraph(storages, ops)
    graph.check()
    return GraphFile.of(graph, Costs(tuple(OpCost(round(each * 100) / _TICKS) for each in milliseconds)))


def _compute_budget(gib: int, nodes: Mapping[int, Any]) -> int:
    """Return the bytes that the solver leaves for what the ops make."""
    return (gib << 30) - round(nodes[max(nodes)].fixed_mem / 1024) * 1024


def read_instance(clone: Clone, case: str) -> Instance:
    """Read one of ``CASES``, with the step that Checkmate's schedule takes."""
    network, gib = CASES[case]
    folder, file, _ = _NETWORKS[network]
    name = f"checkmate_{folder}_24hr/checkmate_solution_{file}_normal_{gib}.00.pkl"
    problem, solution = load_pickle(clone.read(name))
    nodes = problem.nodes
    made = make_graph(nodes, problem.edge_list, [nodes[k].workspace_compute[0] for k in sorted(nodes)])
    return Instance(case, _compute_budget(gib, nodes), made, {"Checkmate": solution.runtime_expected / _TICKS})


def read_googlenet(clone: Clone, case: str) -> Instance:
    """Read one of ``GOOGLENET_CASES``: Checkmate's step where its solver found a schedule, and MONeT's."""
    gib = GOOGLENET_CASES[case]
    problem, solution = load_pickle(
        clone.read(f"monet_googlenet_320_24hr/solution_googlenet_320_inplace_normal_{gib}.00.pkl")
    )
    _, milliseconds, *_ = load_pickle(clone.read("cost_googlenet_320_normal.pkl"))
    nodes = problem.nodes
    made = make_graph(nodes, problem.edge_list, [milliseconds[k][0] for k in sorted(nodes)])
    log = clone.read(f"checkmate_googlenet_320_24hr/checkmate_googlenet_normal_320_{gib:02}").decode()
    solved = _OBJECTIVE.search(log)
    published = {"Checkmate": float(solved[1]) / _TICKS} if solved else {}
    published["MONeT, ReLU in place"] = float(solution.runtime_expected) / _TICKS
    return replace(Instance(case, _compute_budget(gib, nodes), made), published=published)
