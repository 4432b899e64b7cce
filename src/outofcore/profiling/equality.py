"""Decide whether a split op gives the bits of the whole op, by trying it on this machine: ``refuted``.

``transforms.split.rules`` proposes the splits; ``step_variants`` drops those that fail here.

A library may use another kernel for fewer rows, which adds up in another order. So each way to split is tried on random
numbers, whole against parts, once for a family of ops, and verdicts are kept with the measurements.

An op that the budget does not hold as a whole is tried in a process of its own, if the machine has twice as much memory
left. Otherwise two stretches are tried in its place, one at each end and as long as the budget allows. That proves
less, as libraries choose kernels by sizes: of the parts that held for half of an op, 8 of 234 did not for all of it
(convolutions of a ResNet-50). An op of which not even a quarter fits is not split so.

Elementwise kernels are vectorised and may round differently what is left over at the end of a stretch, or what has gaps
in memory. Random numbers rarely show it, so all elements are computed in scraps; an affected operator is split only
where nothing is left over, and there are no gaps. An op that makes few elements is tried several times.

Limits: a kernel that rounds differently for rare numbers alone would not be noticed. On a GPU trials in processes of
their own have not run yet.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import pickle
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch

from outofcore import _torch_internals as internals
from outofcore.analysis import SMALL_ALIGNMENT
from outofcore.analysis.chunks import extent, is_dense
from outofcore.capture.captured import Call, Ref, Value
from outofcore.capture.helpers import packed, received
from outofcore.capture.operators import by_name, placed, written_arguments
from outofcore.capture.patching import TURN
from outofcore.child_processes import start_process
from outofcore.execution.backend import Backend
from outofcore.profiling.cache import Cache
from outofcore.profiling.ops import op_shelf
from outofcore.profiling.scratch import fit
from outofcore.report.machine import available_memory_bytes
from outofcore.transforms.split.exactness import Claim
from outofcore.transforms.split.rules import is_elementwise
from outofcore.transforms.split.tensors import dense_like, named_refs, with_tensors
from outofcore.transforms.split.ways import Cut, Name
from outofcore.units import MIB

_log = logging.getLogger("outofcore.profiling")

_SEED = 20_406
# A stretch of an elementwise operator that a thread takes is at least so long (GRAIN_SIZE of ATen/TensorIterator.h).
_THREAD_ELEMENTS = 32_768
# More elements than a kernel takes at a time.
_LANES = 64
_SCRAP = 7  # elements, of which no kernel takes so few at a time
_SCRAPS = 1024 * _SCRAP  # of all scraps


@dataclass(frozen=True)
class _Effort:
    """How much is tried before a split is believed.

    Attributes:
        elements: parts are tried on new numbers until so many were compared,
        bytes: or so many were given and made,
        draws: or so often.
        placings: in so many ways are arguments placed, in place or in memory of their own.
        share: a stretch of an op stands for it if it is at least so large a part.
    """

    elements: int = 4096
    bytes: int = 64 * MIB
    draws: int = 64
    placings: int = 8
    share: float = 0.25


_EFFORT = _Effort()
# What PyTorch says where the system gives it no memory.
_NO_MEMORY = "DefaultCPUAllocator"
# Whole numbers of as many bytes as others.
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Stretch:
    """The range ``low:high`` of the axis that is computed at once in a trial, and the parts to compare with it."""

    low: int
    high: int
    parts: tuple[tuple[int, int], ...]


def refuted(
    claims: Sequence[Claim], values: Sequence[Value], backend: Backend, most: int, cache: Cache | None = None
) -> frozenset[str]:
    """Return the keys of the claims that do not hold on this machine.

    ``values`` are what the refs of the claims' calls name. A trial may take ``most`` bytes in this process.
    """
    shelf = None if cache is None else op_shelf(cache, backend.facts(), kind="parts")
    verdicts = _Verdicts(values, backend.device, {} if shelf is None else shelf.read())
    for claim in claims:
        if verdicts.is_known(claim) or _fits(claim, values, _whole(claim), most):
            verdicts.find(claim, (_whole(claim),))
    large = [claim for claim in claims if claim.key not in verdicts.holds]
    if large:
        # The processes of a machine would all take the memory at once.
        with contextlib.nullcontext() if shelf is None else shelf.turn():
            verdicts.known |= {} if shelf is None else shelf.read()
            verdicts.find_elsewhere(large)
            if shelf is not None:
                shelf.write(verdicts.new)
        for claim in large:
            if claim.key not in verdicts.holds:
                verdicts.find(claim, stretches_of(claim, values, most))
    if shelf is not None:
        shelf.write(verdicts.new)
    wrong = frozenset(key for key, holds in verdicts.holds.items() if not holds)
    for key in sorted(wrong):
        _log.info("parts are not the whole, to the bit: %s", key)
    return wrong


@dataclass
class _Verdicts:
    """Verdicts on claims: ``known`` and ``new`` ones by ``_key``, and ``holds`` by the keys of checked claims."""

    values: Sequence[Value]
    device: torch.device
    known: dict[str, object]
    new: dict[str, object] = field(default_factory=dict[str, object])
    holds: dict[str, bool] = field(default_factory=dict[str, bool])

    def is_known(self, claim: Claim) -> bool:
        """Return whether there is a verdict on the whole op."""
        return isinstance(self.known.get(_key(claim, (_whole(claim),))), bool)

    def find(self, claim: Claim, stretches: Sequence[Stretch]) -> None:
        """Try a claim here, if there is no verdict on these stretches."""
        key = _key(claim, stretches)
        found = self.known.get(key)
        if not isinstance(found, bool):
            found = _holds(claim, self.values, self.device, stretches)
            if found is not None:
                self.new[key] = found
        self.holds[claim.key] = bool(found)

    def find_elsewhere(self, claims: Sequence[Claim]) -> None:
        """Try the whole ops in a process of its own, as far as there is memory."""
        # A trial takes scratch memory as well, of which little is known.
        most = _left_on(self.device) // 2
        unknown = [c for c in claims if not self.is_known(c) and _fits(c, self.values, _whole(c), most)]
        found = _tried_elsewhere(unknown, self.values, self.device)
        self.new |= {_key(claim, (_whole(claim),)): found[claim.key] for claim in unknown if claim.key in found}
        for claim in claims:
            key = _key(claim, (_whole(claim),))
            holds = self.new.get(key, self.known.get(key))
            if isinstance(holds, bool):
                self.holds[claim.key] = holds


def _key(claim: Claim, stretches: Sequence[Stretch]) -> str:
    """Return the key of a verdict: it includes the stretches, as a trial on less memory proves less."""
    tried = [(stretch.low, stretch.high, stretch.parts) for stretch in stretches]
    return hashlib.sha256(f"stretches, several draws: {claim.key} {tried}".encode()).hexdigest()[:24]


def _left_on(device: torch.device) -> int:
    """Return the bytes of memory that are free where trials run."""
    return (available_memory_bytes() or 0) if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def _tried_elsewhere(claims: Sequence[Claim], values: Sequence[Value], device: torch.device) -> dict[str, bool]:
    """Return verdicts on whole ops from a process of its own, without those that it died of."""
    verdicts = {b"True": True, b"False": False}
    found: dict[str, bool] = {}
    while claims:
        try:
            said, status = _said(packed((claims, values, device)))
        except (OSError, pickle.PicklingError, AttributeError, TypeError) as error:
            _log.info("no process can try parts: %s", error)
            break
        found |= {c.key: verdicts[each] for c, each in zip(claims, said, strict=False) if each in verdicts}
        if len(said) == len(claims):
            break
        _log.info("a process that tried parts ended with status %d: %s", status, claims[len(said)].key)
        # One that was ended from outside may have taken too much memory; others may do as they would here.
        claims = claims[len(said) + 1 :] if status < 0 else []
    return found


def _said(work: bytes) -> tuple[list[bytes], int]:
    """Return a process's verdicts on the claims that it is given, as far as it came, and its exit status."""
    with tempfile.TemporaryFile() as answer:
        helper = start_process(f"{__name__}:serve", work, answer)
        try:
            status = helper.wait()
        finally:
            helper.kill()
            helper.wait()
        answer.seek(0)
        return answer.read().split(), status


def serve() -> None:
    """Try the claims that come in by standard input: the main function of a trial process."""
    # Where memory runs out all the same, this process shall go, not another one.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    claims, values, device = received()
    # A device that this process cannot have says nothing of parts: it ends here.
    torch.zeros(1, device=device)
    for claim in claims:
        sys.stdout.write(f"{_holds(claim, values, device, (_whole(claim),))}\n")
        sys.stdout.flush()


def _whole(claim: Claim) -> Stretch:
    return Stretch(claim.ends[0], claim.ends[-1], tuple(_one_of_each(claim.ends)))


def _fits(claim: Claim, values: Sequence[Value], stretch: Stretch, most: int) -> bool:
    part = max(high - low for low, high in stretch.parts)
    return _needed(claim, values, stretch.low, stretch.high, part) <= most


def stretches_of(claim: Claim, values: Sequence[Value], most: int) -> tuple[Stretch, ...]:
    """Choose what to try of an op within ``most`` bytes: all of it, a stretch at either end, or nothing."""
    parts, end = list(itertools.pairwise(claim.ends)), claim.ends[-1]
    # What is one part needs no more than the budget holds.
    if len(parts) == 1 or _fits(claim, values, _whole(claim), most):
        return (_whole(claim),)

    def fits(low: int, high: int, compared: Sequence[tuple[int, int]]) -> bool:
        return _fits(claim, values, Stretch(low, high, tuple(compared)), most)

    grain, found = claim.way.grain, list[Stretch]()
    for ordered in (parts, parts[::-1]):
        # Several parts; else one, and as much beside it as there is room for; else one, and its halves.
        counts = range(len(parts) - 1, 1, -1)
        place = bisect_left(counts, True, key=lambda n, of=ordered: fits(*_span(of[:n]), of[:n]))
        if place < len(counts):
            some = ordered[: counts[place]]
            ends = sorted({edge for part in some for edge in part})
            found.append(Stretch(*_span(some), tuple(_one_of_each(ends))))
            continue
        low, high = first = ordered[0]
        beside = ordered[1]
        edges = range(beside[0], low, grain) if high == end else range(beside[1], high, -grain)
        wider = [(min(edge, low), max(edge, high)) for edge in edges]
        place = bisect_left(wider, True, key=lambda span, part=first: fits(*span, [part]))
        if place < len(wider):
            found.append(Stretch(*wider[place], (first,)))
            continue
        middle = (low + high) // 2
        middle = middle // grain * grain if middle // grain * grain > low else middle
        if low < middle:
            found.append(Stretch(low, high, ((low, middle), (middle, high))))
    least = (end - claim.ends[0]) * _EFFORT.share
    return () if any(stretch.high - stretch.low < least for stretch in found) else tuple(dict.fromkeys(found))


def _span(parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return min(low for low, _ in parts), max(high for _, high in parts)


def _needed(claim: Claim, values: Sequence[Value], low: int, high: int, part: int) -> int:
    """Return the bytes of a stretch, of what it changes in place, and of a part of length ``part``."""
    func, names = _operator(claim.call), _tensors(claim.call, values)
    written = written_arguments(func, by_name(func, claim.call.args, claim.call.kwargs))
    changed = {name for name in names if name[0] in written}
    copied = changed | {name for name in names if name in claim.way.given or name in claim.laid}
    whole = _given(claim, values, low, high) + _made(claim, values, low, high, claim.of or claim.call)
    own = _given(claim, values, low, low + part, copied) + _made(claim, values, low, low + part, claim.call)
    return whole + _given(claim, values, low, high, changed) + own


def _given(claim: Claim, values: Sequence[Value], low: int, high: int, names: Set[Name] | None = None) -> int:
    """Return the bytes of a part's arguments, of all or of the named ones."""
    tensors = _tensors(claim.call, values)
    cuts = claim.way.given
    return sum(
        _size(v, name in cuts, claim, low, high) for name, v in tensors.items() if names is None or name in names
    )


def _made(claim: Claim, values: Sequence[Value], low: int, high: int, call: Call) -> int:
    """Return the bytes of what a part of a call makes."""
    cuts = claim.way.made
    made = ((place, values[v]) for place, v in enumerate(call.results) if v is not None)
    return sum(_size(value, place in cuts, claim, low, high) for place, value in made)


def _size(value: Value, is_cut: bool, claim: Claim, low: int, high: int) -> int:
    share = (high - low) / claim.way.extent if is_cut else 1.0
    return int(prod(value.shape) * value.dtype.itemsize * share)


def _tensors(call: Call, values: Sequence[Value]) -> dict[Name, Value]:
    return {name: values[index] for name, index in named_refs(call)}


def _operator(call: Call) -> Any:
    return call.func


def _holds(claim: Claim, values: Sequence[Value], device: torch.device, stretches: Sequence[Stretch]) -> bool | None:
    """Return whether a claim holds on stretches of its op; None if memory ran out."""
    if not stretches:
        return False
    with TURN, internals.below_autograd():
        try:
            if is_elementwise(_operator(claim.call)) and not _rounds_alike(claim, values, device):
                return False
            return all(
                Trial(claim, values, device, stretch, draw).holds()
                for stretch in stretches
                for draw in range(_draws(claim, values, stretch))
            )
        except (RuntimeError, ValueError, IndexError) as error:
            # What does not run in parts is not cut.
            _log.info("parts could not be tried: %s: %s", claim.key, error)
            return None if isinstance(error, torch.OutOfMemoryError) or _NO_MEMORY in str(error) else False


def _draws(claim: Claim, values: Sequence[Value], stretch: Stretch) -> int:
    """Return how often to try parts: ops that make few elements more often."""
    func = _operator(claim.call)
    written = written_arguments(func, by_name(func, claim.call.args, claim.call.kwargs))
    made = [prod(values[v].shape) for v in claim.call.results if v is not None]
    made += [prod(value.shape) for (name, _), value in _tensors(claim.call, values).items() if name in written]
    share = (stretch.high - stretch.low) / claim.way.extent
    wanted = ceil(_EFFORT.elements / max(min(made, default=1) * share, 1))
    low, high = stretch.low, stretch.high
    tried = _given(claim, values, low, high) + _made(claim, values, low, high, claim.call)
    affordable = _EFFORT.bytes // max(tried, 1)
    return max(min(wanted, affordable, _EFFORT.draws), 1)


def _rounds_alike(claim: Claim, values: Sequence[Value], device: torch.device) -> bool:
    """Return whether an elementwise operator rounds all elements alike, or the parts make no difference."""
    tensors = _tensors(claim.call, values)
    # Parts are put side by side where the whole was not.
    apart = any(prod(v.shape) > 1 and not is_dense(v.shape, v.stride) for v in tensors.values())
    if (apart or claim.laid) and _is_uneven(claim, tensors, device, _rounds_gaps):
        return False
    return _leaves_nothing(claim, tensors) or not _is_uneven(claim, tensors, device, _rounds_scraps)


def _leaves_nothing(claim: Claim, tensors: Mapping[Name, Value]) -> bool:
    """Return whether parts of an elementwise operator end where no element is left over."""
    sizes = {prod(value.shape) for value in tensors.values()}
    elements = max(sizes, default=0)
    threads = torch.get_num_threads()

    def is_even(count: int) -> bool:
        stretches = min(threads, -(-count // _THREAD_ELEMENTS))
        return stretches < 2 or not -(-count // stretches) % _LANES

    inner = elements // claim.way.extent
    alike = all(value.shape == next(iter(tensors.values())).shape for value in tensors.values() if value.shape)
    counts = [(high - low) * inner for low, high in zip(claim.ends, claim.ends[1:], strict=False)]
    return alike and not any(count % _LANES for count in counts[:-1]) and all(map(is_even, [elements, *counts]))


Rounds = Callable[[Call, Mapping[Name, Value], torch.device], bool]


def _is_uneven(claim: Claim, tensors: Mapping[Name, Value], device: torch.device, rounds: Rounds) -> bool:
    """Return whether an elementwise operator rounds some elements otherwise than the middle of long stretches."""
    call, func = claim.call, _operator(claim.call)
    kinds = ", ".join(f"{name}: {value.dtype} {prod(value.shape) > 1}" for name, value in tensors.items())
    constants = [item for item in (*call.args, *call.kwargs.values()) if not isinstance(item, Ref | list | tuple)]
    key = f"{rounds.__name__} {func} {kinds} {constants} {device} {torch.backends.cpu.get_cpu_capability()}"
    if key not in _uneven:
        _uneven[key] = rounds(call, tensors, device)
    return _uneven[key]


_uneven: dict[str, bool] = {}


def _rounds_gaps(call: Call, tensors: Mapping[Name, Value], device: torch.device) -> bool:
    """Return whether elements with gaps between them are rounded differently."""
    long, run = _long(call, tensors, device)
    gaps = {n: torch.stack([t, t], dim=-1)[:, 0] if t.numel() > 1 else t.clone() for n, t in long.items()}
    return not _same(run({name: tensor.clone() for name, tensor in long.items()}), run(gaps))


def _rounds_scraps(call: Call, tensors: Mapping[Name, Value], device: torch.device) -> bool:
    """Return whether a few elements are rounded otherwise than many."""
    long, run = _long(call, tensors, device)
    whole = run({name: tensor.clone() for name, tensor in long.items()})
    for start in range(0, _SCRAPS, _SCRAP):
        scrap = {n: t.narrow(0, start, _SCRAP).clone() if t.numel() > 1 else t.clone() for n, t in long.items()}
        if not _same(whole.narrow(0, start, _SCRAP), run(scrap)):
            return True
    return False


def _long(
    call: Call, tensors: Mapping[Name, Value], device: torch.device
) -> tuple[dict[Name, torch.Tensor], Callable[[Mapping[Name, torch.Tensor]], torch.Tensor]]:
    """Return a long stretch of an elementwise operator's arguments, and a function that runs it on such."""
    func = _operator(call)
    generator = torch.Generator(device).manual_seed(_SEED)
    long: dict[Name, torch.Tensor] = {}
    for name, value in tensors.items():
        tensor = torch.empty(_SCRAPS if prod(value.shape) > 1 else 1, dtype=value.dtype, device=device)
        if value.dtype.is_floating_point or value.dtype.is_complex:
            tensor.normal_(generator=generator)
        else:
            tensor.random_(0, 2, generator=generator)
        long[name] = tensor

    def run(given: Mapping[Name, torch.Tensor]) -> torch.Tensor:
        args, kwargs = placed(func, call, with_tensors(by_name(func, call.args, call.kwargs), given))
        return internals.result_leaves(func(*args, **kwargs))[0]

    return long, run


Same = Callable[[torch.Tensor, Any], bool]


class Trial:
    """A stretch of an op and its parts on the same random numbers; each draw has other numbers."""

    def __init__(
        self, claim: Claim, values: Sequence[Value], device: torch.device, stretch: Stretch, draw: int = 0
    ) -> None:
        self.claim, self.way, self.func = claim, claim.way, _operator(claim.call)
        self.low, self.high, self.parts, self.device = stretch.low, stretch.high, stretch.parts, device
        self.whole = (self.low, self.high) == (0, self.way.extent)
        self.generator = torch.Generator(device).manual_seed(_SEED + draw)
        self.given = {name: self._made(name, value) for name, value in _tensors(claim.call, values).items()}
        # Places in a table are spread over all of it, and then counted from where a part begins.
        fit(self.func, self._named(self.given, self.low, self.high, settle=not self.way.rebased))

    def _made(self, name: Name, value: Value) -> torch.Tensor:
        """Make an argument of the stretch."""
        cut = self.way.given.get(name)
        shape, stride = value.shape, value.stride
        if cut is not None and not self.whole:
            shape = cut.part_shape(value.shape, self.low, self.high)
            stride = dense_like(shape, (*stride[: cut.dims[0]], stride[cut.dims[1] - 1], *stride[cut.dims[1] :]))
        # Where it begins matters as well: libraries take other ways through memory that is not aligned.
        shift = value.offset % max(SMALL_ALIGNMENT // value.dtype.itemsize, 1)
        base = torch.empty(shift + extent(shape, stride), dtype=value.dtype, device=self.device)
        flat, tensor = base[shift:], torch.as_strided(base, shape, stride, shift)
        if value.dtype.is_floating_point or value.dtype.is_complex:
            flat.normal_(generator=self.generator)
        elif value.dtype is torch.bool:
            flat.random_(0, 2, generator=self.generator)
        else:
            flat.zero_()
        return tensor

    def _named(
        self,
        tensors: Mapping[Name, torch.Tensor],
        low: int,
        high: int,
        *,
        settle: bool = True,
        call: Call | None = None,
    ) -> dict[str, Any]:
        call = call or self.claim.call
        named = with_tensors(by_name(self.func, call.args, call.kwargs), tensors)
        if settle and self.way.settle is not None and not (self.whole and (low, high) == (self.low, self.high)):
            self.way.settle(named, low, high)
        return named

    def _run(
        self, tensors: Mapping[Name, torch.Tensor], low: int, high: int, call: Call | None = None
    ) -> tuple[list[Any], dict[Name, torch.Tensor]]:
        """Run a part; return its results, and what it has written in place."""
        named = self._named(tensors, low, high, call=call)
        args, kwargs = placed(self.func, self.claim.call, named)
        written = written_arguments(self.func, named)
        out = self.func(*args, **kwargs)
        return internals.result_leaves(out), {name: t for name, t in tensors.items() if name[0] in written}

    def _part(self, name: Name, low: int, high: int) -> torch.Tensor:
        tensor, cut = self.given[name], self.way.given.get(name)
        if name in self.claim.laid:
            return torch.empty_strided(
                tensor.shape, self.claim.laid[name], dtype=tensor.dtype, device=self.device
            ).copy_(tensor)
        if cut is None:
            return (
                tensor.clone()
                if name[0] in written_arguments(self.func, self._named(self.given, low, high))
                else tensor
            )
        dim = cut.dims[0]
        tensor = self._merged(tensor, cut)
        base = cut.ends(self.low, self.high)[0] if not self.whole else 0
        first, last = (end - base for end in cut.ends(low, high))
        inside = max(first, 0), min(last, tensor.shape[dim])
        part = tensor.narrow(dim, inside[0], max(inside[1] - inside[0], 0))
        shape = [*tensor.shape]
        shape[dim] = last - first
        made = torch.empty_strided(shape, dense_like(shape, tensor.stride()), dtype=tensor.dtype, device=self.device)
        if inside != (first, last):
            made.zero_()
        made.narrow(dim, inside[0] - first, part.shape[dim]).copy_(part)
        return made

    def holds(self, same: Same | None = None) -> bool:
        """Return whether the parts equal the stretch, by ``same`` or to the bit."""
        same = same or _same
        written = written_arguments(self.func, self._named(self.given, self.low, self.high))
        # What is not written to need not be there twice.
        given = {name: _copy_in_place(t) if name[0] in written else t for name, t in self.given.items()}
        together, changed = self._run(given, self.low, self.high, self.claim.of)
        for low, high in self.parts:
            for given in self._parts(low, high):
                apart, written = self._run(given, low, high)
                for place, index in enumerate(self.claim.call.results):
                    if index is None or not isinstance(together[place], torch.Tensor):
                        continue
                    cut = self.way.made.get(place)
                    if cut is None and low:
                        continue
                    if not same(self._slice(together[place], cut, low, high), apart[place]):
                        return False
                for name, tensor in written.items():
                    if not same(self._slice(changed[name], self.way.given.get(name), low, high), tensor):
                        return False
        return True

    def _parts(self, low: int, high: int) -> Iterator[dict[Name, torch.Tensor]]:
        """Yield the arguments of a part: in memory of their own, or in place, if the layout differs there."""
        written = written_arguments(self.func, self._named(self.given, low, high))
        views: dict[Name, torch.Tensor] = {}
        for name, tensor in self.given.items():
            cut = self.way.given.get(name)
            if cut is None or not cut.plain or name[0] in written:
                continue
            merged = self._merged(tensor, cut)
            view = merged.narrow(cut.dims[0], low - (0 if self.whole else self.low), high - low)
            gaps = not is_dense(view.shape, view.stride())
            # What has no gaps as a whole is copied where a part has some.
            is_copied = gaps and is_dense(merged.shape, merged.stride())
            if not is_copied and (gaps or view.data_ptr() % SMALL_ALIGNMENT):
                views[name] = view
        for number in range(min(1 << len(views), _EFFORT.placings)):
            there = {name for place, name in enumerate(views) if number >> place & 1}
            yield {name: views[name] if name in there else self._part(name, low, high) for name in self.given}

    def _merged(self, tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
        """View a tensor with the dimensions that are cut as one; copy it if needed."""
        return tensor.flatten(cut.dims[0], cut.dims[1] - 1) if self.whole else tensor

    def _slice(self, tensor: torch.Tensor, cut: Cut | None, low: int, high: int) -> torch.Tensor:
        if cut is None:
            return tensor
        base = cut.ends(self.low, self.high)[0] if not self.whole else 0
        start, last = (each - base for each in cut.ends(low, high))
        return self._merged(tensor, cut).narrow(cut.dims[0], start, last - start)


def _copy_in_place(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with its layout and its misalignment."""
    shift, count = tensor.storage_offset(), extent(tensor.shape, tensor.stride())
    base = torch.empty(shift + count, dtype=tensor.dtype, device=tensor.device)
    base[shift:].copy_(torch.as_strided(tensor, (count,), (1,), shift))
    return torch.as_strided(base, tensor.shape, tensor.stride(), shift)


def _one_of_each(ends: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last part, and one of each length: kernels are chosen by sizes."""
    parts = list(itertools.pairwise(ends))
    lengths = {high - low: (low, high) for low, high in parts[1:-1]}
    return list(dict.fromkeys([parts[0], *lengths.values(), parts[-1]]))


def _same(one: torch.Tensor, other: Any) -> bool:
    """Return whether two tensors have the same bits; all NaN are alike."""
    if not isinstance(other, torch.Tensor) or one.dtype != other.dtype or one.numel() != other.numel():
        return False
    one, other = one.reshape(-1), other.reshape(-1)
    if one.is_complex():
        one, other = torch.view_as_real(one).reshape(-1), torch.view_as_real(other).reshape(-1)
    whole = _WHOLE.get(one.dtype.itemsize)
    if not one.is_floating_point() or whole is None:
        return torch.equal(one, other)
    if torch.equal(one.contiguous().view(whole), other.contiguous().view(whole)):
        return True
    nan = one.isnan()
    if not torch.equal(nan, other.isnan()):
        return False
    return torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(
        one.signbit() & ~nan, other.signbit() & ~nan
    )
