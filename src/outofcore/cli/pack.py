"""``outofcore pack``: assign addresses to the rectangles of a file, in the CSV format of MiniMalloc."""

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

# Other column names of MiniMalloc. "end" is the last moment of a lifetime, "upper" the moment after it.
_ALIASES = {"buffer": "id", "buffer_id": "id", "start": "lower", "begin": "lower", "end": "upper"}
_REQUIRED_COLUMNS = ("id", "lower", "upper", "size")
# The maximum number of characters of a field in a message.
_MAX_SHOWN = 40
# Rectangles visited with an effort of 1; see ``PlacementParams``.
EFFORT = 4_000_000_000


@dataclass(frozen=True)
class Table:
    """A CSV file of buffers: its header, its rows, and a rectangle (lifetime and size) for each row."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    rectangles: tuple[Rectangle, ...]

    def text_with_offsets(self, offsets: tuple[int, ...]) -> str:
        names = [name.strip() for name in self.header]
        column = names.index("offset") if "offset" in names else len(names)
        lines = [self.header, *self.rows]
        fields = ["offset", *map(str, offsets)]
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(
            [*line[:column], field, *line[column + 1 :]] for line, field in zip(lines, fields, strict=True)
        )
        return out.getvalue()


def read_table(text: str) -> Table:
    """Parse a CSV table; raise an ``InputError`` that names the wrong line or the missing column."""
    lines = list(_records(text))
    if not lines:
        raise InputError("the file is empty; its first line must name the columns id,lower,upper,size")
    (_, header), *body = lines
    raw_names = [name.strip() for name in header]
    names = [_ALIASES.get(name, name) for name in raw_names]
    missing = [name for name in _REQUIRED_COLUMNS if name not in names]
    if missing or len(set(names)) < len(names):
        problem = f"lacks {', '.join(missing)}" if missing else "names a column twice"
        raise InputError(f"the first line ({','.join(header)}) {problem}; it must name the columns id,lower,upper,size")
    end_offset = 1 if "end" in raw_names else 0  # such ends are inclusive
    rectangles: list[Rectangle] = []
    line_of_id: dict[int | str, int] = {}
    for number, fields in body:
        if len(fields) != len(names):
            raise InputError(f"line {number} has {len(fields)} fields, but the first line names {len(names)} columns")
        rectangle = _rectangle(number, dict(zip(names, fields, strict=True)), end_offset)
        if rectangle.id in line_of_id:
            raise InputError(
                f"line {number} repeats the id {_short_text(str(rectangle.id))} of line {line_of_id[rectangle.id]}; "
                "make ids unique"
            )
        line_of_id[rectangle.id] = number
        rectangles.append(rectangle)
    return Table(header, tuple(fields for _, fields in body), tuple(rectangles))


def _records(text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield a line number and the fields of each CSV record that is not blank."""
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


def _short_text(field: str) -> str:
    return repr(field if len(field) <= _MAX_SHOWN else field[:_MAX_SHOWN] + "…")


def _rectangle(line: int, fields: Mapping[str, str], end_offset: int) -> Rectangle:
    """Parse the fields of a line as a rectangle; raise ``InputError`` if they are invalid."""

    def whole(name: str) -> int:
        try:
            return int(fields[name])
        except ValueError:
            raise InputError(f"line {line}: {name} must be a whole number, not {_short_text(fields[name])}") from None

    alignment = whole("alignment") if "alignment" in fields else 1
    gap = None
    gaps = fields.get("gaps", "").split()
    if len(gaps) > 1 or "@" in fields.get("gaps", ""):
        raise InputError(
            f"line {line}: a lifetime may have only one gap, such as 3-7, and no window (@), not "
            f"{_short_text(fields['gaps'])}"
        )
    if gaps:
        try:
            begin, end = (int(part) for part in gaps[0].split("-"))
        except ValueError:
            raise InputError(f"line {line}: a gap is written as 3-7, not {_short_text(gaps[0])}") from None
        gap = (begin, end + end_offset)
    rectangle = Rectangle(
        fields["id"].strip(), whole("lower"), whole("upper") + end_offset, whole("size"), alignment, gap
    )
    try:
        rectangle.check()
    except InputError as error:
        raise InputError(f"line {line}: {error}") from None
    return rectangle


def explain_failure(rectangles: tuple[Rectangle, ...], packing: Packing, capacity: int) -> str:
    """Explain why the rectangles do not fit the capacity; ``packing`` is the best placement that was found."""
    peak_use = peak(rectangles)
    if peak_use.bytes > capacity:
        live = set(peak_use.ids)
        largest = sorted((r for r in rectangles if r.id in live), key=lambda r: -r.size)
        lines = [
            f"no placement can stay within {capacity} bytes: at time {peak_use.time}, {len(largest)} rectangles hold "
            f"{peak_use.bytes} bytes ({format_bytes(peak_use.bytes)}), {peak_use.bytes - capacity} too many:"
        ]
        listed, remaining = largest[:12], largest[12:]
        lines += [f"  {r.size:>14}  {r.id}, held over [{r.lower}, {r.upper})" for r in listed]
        if remaining:
            lines.append(f"  {sum(r.size for r in remaining):>14}  {len(remaining)} others")
        return "\n".join(lines)
    oversized = next((r for r in rectangles if r.size > capacity), None)
    if oversized is not None:  # its lifetime is empty, so it does not count above
        return f"no placement can stay within {capacity} bytes: rectangle {oversized.id} alone has {oversized.size}"
    if packing.lower_bound > capacity:
        return (
            f"no placement can stay within {capacity} bytes, although at most {peak_use.bytes} are live at once: "
            f"the search was exhaustive; the best placement takes {packing.height} ({format_bytes(packing.height)})"
        )
    return (
        f"no placement within {capacity} bytes was found: the best takes {packing.height} "
        f"({format_bytes(packing.height)}), {packing.height - capacity} too many. At most {packing.lower_bound} "
        "are live at once, so one may exist: search longer with a larger --effort, or raise the capacity"
    )


def _read_text(file: Path) -> str:
    data = file.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"line {line} is not UTF-8 text (byte {data[error.start]:#04x}); save it as UTF-8") from error


def run(file: Path, *, capacity: int, output: Path | None, effort: float, seconds: float | None) -> bool:
    """Place the buffers of a CSV file, and write it with their offsets; return False if no placement is found."""
    try:
        table = read_table(_read_text(file))
    except (OSError, InputError) as error:
        raise InputError(f"cannot read {file}: {error}") from error
    if not math.isfinite(effort):
        raise InputError(f"--effort must be a finite number, not {effort}; to limit the time, use --seconds")
    params = PlacementParams(effort=int(effort * EFFORT), seconds=seconds)
    packing = pack(table.rectangles, capacity=capacity, params=params)
    if packing.height > capacity:
        sys.stderr.write(explain_failure(table.rectangles, packing, capacity) + "\n")
        return False
    check_packing(
        (
            Placed(r.id, r.lower, r.upper, r.size, offset, r.alignment, r.gap)
            for r, offset in zip(table.rectangles, packing.offsets, strict=True)
        ),
        capacity,
    )
    text = table.text_with_offsets(packing.offsets)
    sys.stderr.write(
        f"placed {len(table.rows)} rectangles in {packing.height} bytes; {peak(table.rectangles).bytes} live at once\n"
    )
    if output is None:
        sys.stdout.write(text)
        return True
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {output}: {error}") from error
    return True
