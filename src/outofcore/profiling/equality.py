"""Whether an op computed part by part gives the bits of the op as a whole, tried out on the machine at hand.

That rows of a product do not mix says nothing of how a library adds up: it may take another kernel for fewer rows. So
each way in which a step is to be cut is tried on random numbers, whole against parts, once for a family of ops; what
was found is kept where measurements are kept. Where the whole op does not fit in the budget, as many parts as do are
compared with each of them; where not even two do, a part with its halves.

Elementwise operators take a few elements at a time and compute what is left over at the end of a stretch one by one,
where functions such as ``exp`` may round otherwise. Few elements are concerned, and random numbers find them by chance
alone; so operators of which this is true are found by computing all in scraps, and cut where nothing is left over. So
are those that round otherwise where there are gaps between elements: they are cut where there are none.

A few results prove little: sums of a few terms in another order mostly round to the same. So an op that makes few
elements is tried several times, each time on other numbers.

Limits: random numbers. A kernel that rounds otherwise for other numbers alone would not be noticed.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, prod
from typing import Any

import torch

from outofcore import _torch_internals as internals
from outofcore.analysis.chunks import is_dense
from outofcore.capture.captured import Call, Ref, Value
from outofcore.capture.operators import by_name, traits, written_arguments
from outofcore.capture.patching import TURN
from outofcore.capture.split_rules import Cut, Name, is_elementwise
from outofcore.capture.tiles import ALIGNED, Claim, dense_like
from outofcore.execution.backend import Backend
from outofcore.profiling.cache import Cache
from outofcore.profiling.ops import op_shelf
from outofcore.profiling.scratch import fit

_log = logging.getLogger("outofcore.profiling")

_SEED = 20_406
# A stretch of an elementwise operator that a thread takes is at least so long (GRAIN_SIZE of ATen/TensorIterator.h).
_THREAD_ELEMENTS = 32_768
# More elements than a kernel takes at a time.
_LANES = 64
# Of one scrap, which no kernel takes at a time; and of all.
_SCRAP, _SCRAPS = 7, 7 * 1024
# In so many ways arguments are placed at most: where they lie, or in memory of their own.
_MOST_PLACINGS = 8
# Parts are tried on new numbers until so many elements were compared, or so many bytes given and made, or so often.
_COMPARED, _TRIED_BYTES, _MOST_DRAWS = 4_096, 64 << 20, 64
# Halves of a part that are narrower are not compared: one channel and two may be rounded alike, and many otherwise.
_NARROW = 4
# Whole numbers of as many bytes as others.
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def refuted(
    claims: Sequence[Claim], values: Sequence[Value], backend: Backend, most: int, cache: Cache | None = None
) -> frozenset[str]:
    """The keys of those claims that do not hold here.

    Args:
        claims: what to try.
        values: what the refs of their calls name.
        backend: where the step runs.
        most: bytes that trying one may take.
        cache: where verdicts are kept.
    """
    shelf = None if cache is None else op_shelf(cache, backend.facts(), kind="parts")
    known = {} if shelf is None else shelf.read()
    new: dict[str, object] = {}
    found: set[str] = set()
    for claim in claims:
        # A claim that was tried on less memory says less.
        key = hashlib.sha256(
            f"several draws, not narrow: {claim.key} {_range(claim, values, most)}".encode()
        ).hexdigest()[:24]
        holds = known.get(key)
        if not isinstance(holds, bool):
            holds = new[key] = _holds(claim, values, backend, most)
        if not holds:
            found.add(claim.key)
            _log.info("parts are not the whole, to the bit: %s", claim.key)
    if shelf is not None:
        shelf.write(new)
    return frozenset(found)


def _range(claim: Claim, values: Sequence[Value], most: int) -> tuple[int, ...]:
    """Where the parts that are compared with what they are together begin, and the last one ends."""
    ends = claim.ends
    whole = _bytes(claim, values, ends[0], ends[-1])
    if 2 * whole <= most:
        return ends
    count = len(ends) - 1
    # The last ones: what is left over lies at the end.
    while count > 2 and 2 * _bytes(claim, values, ends[-1 - count], ends[-1]) > most:
        count -= 1
    found = ends[-1 - count :]
    if 2 * _bytes(claim, values, found[0], found[-1]) > most and found[-1] - found[-2] > 1:
        grain = claim.way.grain
        half = (found[-2] + found[-1]) // 2
        return found[-2], half // grain * grain if half // grain * grain > found[-2] else half, found[-1]
    return found


def _bytes(claim: Claim, values: Sequence[Value], low: int, high: int) -> int:
    """Bytes of what a part is given and makes."""
    total = 0.0
    way = claim.way
    tensors = _tensors(claim.call, values)
    results = {place: values[v] for place, v in enumerate(claim.call.results) if v is not None}
    pairs = [(v, way.given.get(name)) for name, v in tensors.items()]
    pairs += [(v, way.made.get(place)) for place, v in results.items()]
    for value, cut in pairs:
        share = (high - low) / way.extent if cut is not None else 1.0
        total += prod(value.shape) * value.dtype.itemsize * share
    return int(total)


def _tensors(call: Call, values: Sequence[Value]) -> dict[Name, Value]:
    found: dict[Name, Value] = {}
    for name, item in by_name(_operator(call), call.args, call.kwargs).items():
        if isinstance(item, Ref):
            found[name, -1] = values[item.value]
        elif isinstance(item, list | tuple):
            found |= {(name, place): values[r.value] for place, r in enumerate(item) if isinstance(r, Ref)}
    return found


def _operator(call: Call) -> Any:
    return call.func


def _holds(claim: Claim, values: Sequence[Value], backend: Backend, most: int) -> bool:
    ends = _range(claim, values, most)
    # Where there is not even room for two parts, halves of one are compared; narrow ones say nothing of the whole.
    if ends[1] not in claim.ends and ends[1] - ends[0] < _NARROW:
        return False
    with TURN, internals.below_autograd():
        try:
            if is_elementwise(_operator(claim.call)) and not _rounds_alike(claim, values, backend.device):
                return False
            draws = _draws(claim, values, ends)
            return all(Trial(claim, values, backend.device, ends[0], ends[-1], d).holds(ends) for d in range(draws))
        except (RuntimeError, ValueError, IndexError) as error:
            # What does not run in parts is not cut.
            _log.info("parts could not be tried: %s: %s", claim.key, error)
            return False


def _draws(claim: Claim, values: Sequence[Value], ends: Sequence[int]) -> int:
    """How often parts are tried: what makes few elements more often."""
    func = _operator(claim.call)
    written = written_arguments(func, by_name(func, claim.call.args, claim.call.kwargs))
    made = [prod(values[v].shape) for v in claim.call.results if v is not None]
    made += [prod(value.shape) for (name, _), value in _tensors(claim.call, values).items() if name in written]
    share = (ends[-1] - ends[0]) / claim.way.extent
    wanted = ceil(_COMPARED / max(min(made, default=1) * share, 1))
    affordable = _TRIED_BYTES // max(_bytes(claim, values, ends[0], ends[-1]), 1)
    return max(min(wanted, affordable, _MOST_DRAWS), 1)


def _rounds_alike(claim: Claim, values: Sequence[Value], device: torch.device) -> bool:
    """Whether an elementwise operator computes all elements alike, or parts are such that it makes no difference."""
    tensors = _tensors(claim.call, values)
    # Parts are put side by side where the whole was not.
    apart = any(prod(v.shape) > 1 and not is_dense(v.shape, v.stride) for v in tensors.values())
    if (apart or claim.laid) and _is_uneven(claim, tensors, device, _rounds_gaps):
        return False
    return _leaves_nothing(claim, tensors) or not _is_uneven(claim, tensors, device, _rounds_scraps)


def _leaves_nothing(claim: Claim, tensors: Mapping[Name, Value]) -> bool:
    """Whether parts of an elementwise operator end where nothing is left over."""
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
    """Whether an elementwise operator rounds some elements otherwise than those in the middle of long stretches."""
    call, func = claim.call, _operator(claim.call)
    kinds = ", ".join(f"{name}: {value.dtype} {prod(value.shape) > 1}" for name, value in tensors.items())
    constants = [item for item in (*call.args, *call.kwargs.values()) if not isinstance(item, Ref | list | tuple)]
    key = f"{rounds.__name__} {func} {kinds} {constants} {device} {torch.backends.cpu.get_cpu_capability()}"
    if key not in _uneven:
        _uneven[key] = rounds(call, tensors, device)
    return _uneven[key]


_uneven: dict[str, bool] = {}


def _rounds_gaps(call: Call, tensors: Mapping[Name, Value], device: torch.device) -> bool:
    """Whether elements with gaps between them are rounded otherwise than those side by side."""
    long, run = _long(call, tensors, device)
    gaps = {n: torch.stack([t, t], dim=-1)[:, 0] if t.numel() > 1 else t.clone() for n, t in long.items()}
    return not _same(run({name: tensor.clone() for name, tensor in long.items()}), run(gaps))


def _rounds_scraps(call: Call, tensors: Mapping[Name, Value], device: torch.device) -> bool:
    """Whether a few elements are rounded otherwise than many."""
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
    """A long stretch of an elementwise operator's arguments, and what runs it on such."""
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
        named = dict(by_name(func, call.args, call.kwargs))
        for name, item in named.items():
            if (name, -1) in given:
                named[name] = given[name, -1]
            elif isinstance(item, list | tuple):
                named[name] = [given.get((name, place), each) for place, each in enumerate(item)]
        names = traits(func).names[: len(call.args)]
        out = func(*[named[name] for name in names], **{name: named[name] for name in call.kwargs})
        return internals.result_leaves(out)[0]

    return long, run


Same = Callable[[torch.Tensor, Any], bool]


class Trial:
    """A stretch of an op on random numbers, and parts of it on the same; each draw has other numbers."""

    def __init__(
        self, claim: Claim, values: Sequence[Value], device: torch.device, low: int, high: int, draw: int = 0
    ) -> None:
        self.claim, self.way, self.func = claim, claim.way, _operator(claim.call)
        self.low, self.high, self.device = low, high, device
        self.whole = (low, high) == (claim.ends[0], claim.ends[-1]) and (low, high) == (0, self.way.extent)
        self.generator = torch.Generator(device).manual_seed(_SEED + draw)
        self.given = {name: self._made(name, value) for name, value in _tensors(claim.call, values).items()}
        # Places in a table are spread over all of it, and then counted from where a part begins.
        fit(self.func, self._named(self.given, low, high, settle=not self.way.rebased))

    def _made(self, name: Name, value: Value) -> torch.Tensor:
        """An argument of the stretch."""
        cut = self.way.given.get(name)
        shape, stride = value.shape, value.stride
        if cut is not None and not self.whole:
            shape = _part_shape(value.shape, cut, self.low, self.high)
            stride = dense_like(shape, (*stride[: cut.dims[0]], stride[cut.dims[1] - 1], *stride[cut.dims[1] :]))
        # Where it begins matters as well: libraries take other ways through memory that is not aligned.
        shift = value.offset % max(ALIGNED // value.dtype.itemsize, 1)
        base = torch.empty(shift + _extent(shape, stride), dtype=value.dtype, device=self.device)
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
        named = dict(by_name(self.func, call.args, call.kwargs))
        for name, item in named.items():
            if (name, -1) in tensors:
                named[name] = tensors[name, -1]
            elif isinstance(item, list | tuple):
                named[name] = [tensors.get((name, place), each) for place, each in enumerate(item)]
        if settle and self.way.settle is not None and not (self.whole and (low, high) == (self.low, self.high)):
            self.way.settle(named, low, high)
        return named

    def _run(
        self, tensors: Mapping[Name, torch.Tensor], low: int, high: int, call: Call | None = None
    ) -> tuple[list[Any], dict[Name, torch.Tensor]]:
        """What a part returns, and what it has written in place."""
        named = self._named(tensors, low, high, call=call)
        names = traits(self.func).names[: len(self.claim.call.args)]
        written = written_arguments(self.func, named)
        args = [named[name] for name in names]
        out = self.func(*args, **{name: named[name] for name in self.claim.call.kwargs})
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

    def holds(self, ends: Sequence[int], same: Same | None = None) -> bool:
        """Whether the parts between these ends are the stretch.

        Args:
            ends: where they begin, and the last one ends.
            same: what two tensors are the same by; None: to the bit.
        """
        same = same or _same
        together, changed = self._run(
            {name: _copy_in_place(tensor) for name, tensor in self.given.items()}, self.low, self.high, self.claim.of
        )
        for low, high in _one_of_each(ends):
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
        """The arguments of a part: each in memory of its own, or where it lies, if it lies otherwise there."""
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
            if not is_copied and (gaps or view.data_ptr() % ALIGNED):
                views[name] = view
        for number in range(min(1 << len(views), _MOST_PLACINGS)):
            there = {name for place, name in enumerate(views) if number >> place & 1}
            yield {name: views[name] if name in there else self._part(name, low, high) for name in self.given}

    def _merged(self, tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
        """What is whole, with the dimensions that are cut as one; a copy, if need be."""
        return tensor.flatten(cut.dims[0], cut.dims[1] - 1) if self.whole else tensor

    def _slice(self, tensor: torch.Tensor, cut: Cut | None, low: int, high: int) -> torch.Tensor:
        if cut is None:
            return tensor
        base = cut.ends(self.low, self.high)[0] if not self.whole else 0
        start, last = (each - base for each in cut.ends(low, high))
        return self._merged(tensor, cut).narrow(cut.dims[0], start, last - start)


def _copy_in_place(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that lies as the tensor does, and begins as far from what memory is aligned to."""
    shift, count = tensor.storage_offset(), _extent(tensor.shape, tensor.stride())
    base = torch.empty(shift + count, dtype=tensor.dtype, device=tensor.device)
    base[shift:].copy_(torch.as_strided(tensor, (count,), (1,), shift))
    return torch.as_strided(base, tensor.shape, tensor.stride(), shift)


def _one_of_each(ends: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last part, and one of each length: kernels are chosen by sizes."""
    parts = list(itertools.pairwise(ends))
    lengths = {high - low: (low, high) for low, high in parts[1:-1]}
    return list(dict.fromkeys([parts[0], *lengths.values(), parts[-1]]))


def _part_shape(shape: tuple[int, ...], cut: Cut, low: int, high: int) -> tuple[int, ...]:
    first, last = cut.ends(low, high)
    return (*shape[: cut.dims[0]], last - first, *shape[cut.dims[1] :])


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _same(one: torch.Tensor, other: Any) -> bool:
    """Whether two tensors have the same bits; all NaN are alike."""
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
