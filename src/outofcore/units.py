"""Parse and format byte counts and durations."""

from __future__ import annotations

import re

from outofcore.errors import UnitError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

# Blocks of at least this size are placed in whole pages, which direct I/O requires.
PAGE_BYTES = 4096

_UNITS = {
    "": 1,
    "B": 1,
    "K": KIB,
    "KB": 10**3,
    "KIB": KIB,
    "M": MIB,
    "MB": 10**6,
    "MIB": MIB,
    "G": GIB,
    "GB": 10**9,
    "GIB": GIB,
    "T": TIB,
    "TB": 10**12,
    "TIB": TIB,
}
# Byte counts must fit in 64 bits.
_MAX_BYTES = 1 << 60
_PERCENT = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{0,9})?)\s*%\s*")
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(text: object) -> int:
    """Parse a byte count such as ``6GiB``, ``"512 MB"`` or ``4096``.

    ``KiB``, ``MiB``, ``GiB`` and ``TiB``, and single letters, are powers of 1024; ``KB``, ``MB``, ``GB`` and ``TB`` are
    powers of 1000. Fractions are rounded down to whole bytes.

    Raises:
        UnitError: the text is not a byte count, or the count is not above zero or is above 2^60.

    >>> parse_bytes("1.5KiB"), parse_bytes("2 GB"), parse_bytes(4096)
    (1536, 2000000000, 4096)
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise UnitError(f"a byte count is a whole number or text such as '6GiB', not {type(text).__name__} {text!r}")
    if isinstance(text, int):
        count = text
    else:
        match = _PATTERN.fullmatch(text)
        factor = _UNITS.get(match.group(2).upper()) if match else None
        if match is None or factor is None:
            raise UnitError(f"cannot read {text!r} as a byte count; write for example '6GiB', '512MiB' or 1073741824")
        number = match.group(1)
        try:
            count = int(float(number) * factor) if "." in number else int(number) * factor
        except (ValueError, OverflowError):  # thousands of digits
            count = _MAX_BYTES + 1
    if count > _MAX_BYTES:
        raise UnitError(f"a byte count must be at most {format_bytes(_MAX_BYTES)}, and {str(text)[:40]!r} is more")
    if count <= 0:
        raise UnitError(f"a byte count must be above zero, and {text!r} is not; write for example '6GiB'")
    return count


def share_of(text: object) -> float | None:
    """Parse a share of the available memory, such as ``"70%"``; return None if the value is not a percentage.

    Raises ``UnitError`` for shares outside of 0 % to 100 %, and for 0 %.

    >>> share_of("70%"), share_of("6GiB")
    (0.7, None)
    """
    match = _PERCENT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    share = float(match.group(1)) / 100
    if not 0 < share <= 1:
        raise UnitError(f"a budget is a share above 0% and at most 100%, and {text!r} is not; write for example '70%'")
    return share


def format_bytes(count: float) -> str:
    """Format a byte count in binary units with three significant digits.

    >>> format_bytes(1.5 * GIB), format_bytes(-4096), format_bytes(12)
    ('1.50 GiB', '-4.00 KiB', '12 B')
    """
    sign = "-" if count < 0 else ""
    count = abs(count)
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= factor:
            value = count / factor
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{sign}{value:.{digits}f} {unit}"
    return f"{sign}{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Format a duration with three significant digits in a suitable unit.

    >>> format_seconds(0.0012), format_seconds(90)
    ('1.20 ms', '90.0 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor:
            value = seconds / factor
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def round_up(count: int, multiple: int) -> int:
    """Round ``count`` up to a multiple of ``multiple``.

    >>> round_up(5000, 4096)
    8192
    """
    return -(-count // multiple) * multiple
