"""``outofcore pack``: addresses for the rectangles of a file, in the CSV format of MiniMalloc."""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from outofcore.errors import InputError
from outofcore.planning.placement import Packing, PlacementParams, Rectangle, pack, peak
from outofcore.units import format_bytes
from outofcore.validator import Placed, check_packing

# Other names that MiniMalloc reads. "end" is the last moment at which the bytes are held, "upper" the one after.
_ALIASES = {"buffer": "id", "buffer_id": "id", "start": "lower", "begin": "lower", "end": "upper"}
_NEEDED = ("id", "lower", "upper", "size")
# How many characters of a field a message shows.
_SHOWN = 40
# Rectangles looked at with an effort of 1; see ``PlacementParams``.
EFFORT = 4_000_000_000


@dataclass(frozen=True)
class Table:
    """A file of rectangles as it was read."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    rectangles: tuple[Rectangle, ...]

    def text(self, offsets: tuple[int, ...]) -> str:
        """Format the file with offsets, in a column that is added if there is none."""
        named = [name.strip() for name in self.header]
        at = named.index("offset") if "offset" in named else len(named)
        lines = [self.header, *self.rows]
        fields = ["offset", *map(str, offsets)]
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(
            [*line[:at], field, *line[at + 1 :]] for line, field in zip(lines, fields, strict=True)
        )
        return out.getvalue()


def read_table(text: str) -> Table:
    """Read rectangles: the columns ``id``, ``lower``, ``upper`` and ``size``, in any order.

    ``alignment`` and ``gaps`` (at most one for each rectangle, such as ``3-7``) are understood as well; other columns
    are kept. Raises ``InputError`` that names the line, or a missing column.
    """
    lines = list(_records(text))
    if not lines:
        raise InputError("the file is empty; its first line must name the columns id,lower,upper,size")
    (_, header), *body = lines
    given = [name.strip() for name in header]
    names = [_ALIASES.get(name, name) for name in given]
    missing = [name for name in _NEEDED if name not in names]
    if missing or len(set(names)) < len(names):
        what = f"lacks {', '.join(missing)}" if missing else "names a column twice"
        raise InputError(f"the first line ({','.join(header)}) {what}; it must name the columns id,lower,upper,size")
    last = 1 if "end" in given else 0
    rectangles: list[Rectangle] = []
    known: dict[int | str, int] = {}
    for number, fields in body:
        if len(fields) != len(names):
            raise InputError(f"line {number} has {len(fields)} fields, and the first line names {len(names)} columns")
        one = _rectangle(number, dict(zip(names, fields, strict=True)), last)
        if one.id in known:
            raise InputError(
                f"line {number}: the id {_shown(str(one.id))} is that of line {known[one.id]}; give each its own"
            )
        known[one.id] = number
        rectangles.append(one)
    return Table(header, tuple(fields for _, fields in body), tuple(rectangles))


def _records(text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the records that are not blank, each with the number of its first line."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    while True:
        number = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise InputError(f"line {number} is not CSV: {error}") from error
        if fields is None:
            return
        if any(field.strip() for field in fields):
            yield number, tuple(fields)


def _shown(field: str) -> str:
    return repr(field if len(field) <= _SHOWN else field[:_SHOWN] + "…")


def _rectangle(number: int, fields: Mapping[str, str], last: int) -> Rectangle:
    def whole(name: str) -> int:
        try:
            return int(fields[name])
        except ValueError:
            raise InputError(f"line {number}: {name} must be a whole number, not {_shown(fields[name])}") from None

    alignment = whole("alignment") if "alignment" in fields else 1
    gap = None
    found = fields.get("gaps", "").split()
    if len(found) > 1 or "@" in fields.get("gaps", ""):
        raise InputError(
            f"line {number}: only one gap in a lifetime, without a window, can be used: {_shown(fields['gaps'])}"
        )
    if found:
        try:
            begin, end = (int(part) for part in found[0].split("-"))
        except ValueError:
            raise InputError(f"line {number}: a gap is written as 3-7, not {_shown(found[0])}") from None
        gap = (begin, end + last)
    one = Rectangle(fields["id"].strip(), whole("lower"), whole("upper") + last, whole("size"), alignment, gap)
    try:
        one.check()
    except InputError as error:
        raise InputError(f"line {number}: {error}") from None
    return one


def explain(rectangles: tuple[Rectangle, ...], packing: Packing, capacity: int) -> str:
    """Say why nothing was placed within the capacity."""
    most = peak(rectangles)
    if most.bytes > capacity:
        live = set(most.ids)
        largest = sorted((r for r in rectangles if r.id in live), key=lambda r: -r.size)
        lines = [
            f"no placement can stay within {capacity} bytes: at time {most.time}, {len(largest)} rectangles hold "
            f"{most.bytes} bytes ({format_bytes(most.bytes)}), {most.bytes - capacity} too many:"
        ]
        listed, rest = largest[:12], largest[12:]
        lines += [f"  {r.size:>14}  {r.id}, held over [{r.lower}, {r.upper})" for r in listed]
        if rest:
            lines.append(f"  {sum(r.size for r in rest):>14}  {len(rest)} others")
        return "\n".join(lines)
    alone = next((r for r in rectangles if r.size > capacity), None)
    if alone is not None:  # held at no time at all, so that it is not live above
        return f"no placement can stay within {capacity} bytes: rectangle {alone.id} alone has {alone.size}"
    if packing.lower_bound > capacity:
        return (
            f"no placement can stay within {capacity} bytes, although no more than {most.bytes} are live at once: "
            f"all were tried; the lowest found takes {packing.height} ({format_bytes(packing.height)})"
        )
    return (
        f"no placement within {capacity} bytes was found: the lowest takes {packing.height} "
        f"({format_bytes(packing.height)}), {packing.height - capacity} too many. No more than {packing.lower_bound} "
        "are live at once, so there may be one: search longer with a larger --effort, or raise the capacity"
    )


def _text(file: Path) -> str:
    data = file.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"line {line} is not text in UTF-8 (byte {data[error.start]:#04x})") from error


def run(file: Path, *, capacity: int, output: Path | None, effort: float, seconds: float | None) -> bool:
    """Place the rectangles of a file and write it with offsets; False if no placement within the capacity was found."""
    try:
        table = read_table(_text(file))
    except (OSError, InputError) as error:
        raise InputError(f"cannot read {file}: {error}") from error
    if not math.isfinite(effort):
        raise InputError(f"the effort must be a finite number, and {effort} is not; give --seconds to stop by time")
    params = PlacementParams(effort=int(effort * EFFORT), seconds=seconds)
    found = pack(table.rectangles, capacity=capacity, params=params)
    if found.height > capacity:
        sys.stderr.write(explain(table.rectangles, found, capacity) + "\n")
        return False
    check_packing(
        (
            Placed(r.id, r.lower, r.upper, r.size, offset, r.alignment, r.gap)
            for r, offset in zip(table.rectangles, found.offsets, strict=True)
        ),
        capacity,
    )
    text = table.text(found.offsets)
    sys.stderr.write(
        f"placed {len(table.rows)} rectangles in {found.height} bytes; {peak(table.rectangles).bytes} live at once\n"
    )
    if output is None:
        sys.stdout.write(text)
        return True
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {output}: {error}") from error
    return True
