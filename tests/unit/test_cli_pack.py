"""Tests of ``outofcore pack``: reading and writing MiniMalloc's CSV, and its errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from outofcore.cli.app import app
from outofcore.cli.pack import read_table
from outofcore.errors import InputError
from outofcore.planning.placement import Rectangle, pack
from outofcore.validator import Placed, check_packing

# The example of MiniMalloc's README: 12 bytes are live at once, and 12 suffice.
EXAMPLE = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"


def outofcore_pack(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["pack", str(path), *arguments])


@pytest.fixture
def example(tmp_path: Path) -> Path:
    path = tmp_path / "input.12.csv"
    path.write_text(EXAMPLE)
    return path


def checked_height(text: str, capacity: int) -> int:
    table = read_table(text)
    at = table.header.index("offset")
    return check_packing(
        (
            Placed(r.id, r.lower, r.upper, r.size, int(row[at]), r.alignment, r.gap)
            for r, row in zip(table.rectangles, table.rows, strict=True)
        ),
        capacity,
    )


def test_offsets_are_added(example: Path, tmp_path: Path) -> None:
    output = tmp_path / "output.csv"
    result = outofcore_pack(example, "--capacity", "12", "--output", str(output))
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert result.stderr == "placed 5 rectangles in 12 bytes; 12 live at once\n"
    written = output.read_text()
    assert [line.rpartition(",")[0] for line in written.splitlines()] == EXAMPLE.splitlines()
    assert written.splitlines()[0] == "id,lower,upper,size,offset"
    assert checked_height(written, 12) == 12


def test_result_goes_to_stdout_without_output_option(example: Path) -> None:
    result = outofcore_pack(example, "--capacity", "1KiB")
    assert result.exit_code == 0, result.output
    assert checked_height(result.stdout, 1024) >= 12


def test_columns_keep_their_order(tmp_path: Path) -> None:
    path = tmp_path / "odd.csv"
    path.write_text('size,name,upper,offset,lower,alignment,id\n4,"a,b",3,-1,0,1,x\n4,c,9,-1,2,8,y\n\n')
    result = outofcore_pack(path, "--capacity", "12")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "size,name,upper,offset,lower,alignment,id"
    assert lines[1].startswith('4,"a,b",3,')
    assert checked_height(result.stdout, 12) in (8, 12)


def test_minimalloc_names_and_gaps_are_read() -> None:
    table = read_table("buffer_id,start,end,size,gaps\nb,0,9,4,3-5\nc,2,2,1,\n")
    # "end" is inclusive; our interval is half-open, so it is one more.
    assert table.rectangles == (Rectangle("b", 0, 10, 4, gap=(3, 6)), Rectangle("c", 2, 3, 1))
    assert read_table("id,lower,upper,size,gaps\nb,0,9,4,3-5\n").rectangles[0].gap == (3, 5)


def test_too_small_capacity_names_the_time_and_the_live_rectangles(example: Path, tmp_path: Path) -> None:
    output = tmp_path / "output.csv"
    result = outofcore_pack(example, "--capacity", "11", "--output", str(output))
    assert result.exit_code == 1
    assert not output.exists()
    assert "no placement can stay within 11 bytes: at time 0, 3 rectangles hold 12 bytes" in result.stderr
    assert "1 too many" in result.stderr
    for name in ("b1, held over [0, 3)", "b3, held over [0, 9)", "b5, held over [0, 21)"):
        assert name in result.stderr
    assert "b2" not in result.stderr


def test_long_lists_of_rectangles_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "many.csv"
    path.write_text("id,lower,upper,size\n" + "".join(f"r{i},0,1,{100 + i}\n" for i in range(30)))
    result = outofcore_pack(path, "--capacity", "100")
    assert result.exit_code == 1
    assert "129  r29" in result.stderr
    assert f"{sum(range(100, 118))}  18 others" in result.stderr


def test_failed_search_reports_its_progress(tmp_path: Path) -> None:
    path = tmp_path / "circle.csv"
    # Arcs of a circle that overlap in pairs: at most two are live, and three bytes are needed.
    path.write_text("id,lower,upper,size,gaps\na,0,4,1,\nb,2,6,1,\nc,0,6,1,2-4\n")
    result = outofcore_pack(path, "--capacity", "2")
    assert result.exit_code == 1
    assert (
        "no placement can stay within 2 bytes, although at most 2 are live at once: the search was exhaustive"
        in result.stderr
    )
    result = outofcore_pack(path, "--capacity", "2", "--effort", "0")
    assert result.exit_code == 1
    assert "no placement within 2 bytes was found: the best takes 3" in result.stderr
    assert "At most 2 are live at once" in result.stderr


def test_same_file_gives_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    rows = [(i, i * 7 % 50, i * 7 % 50 + 1 + i * 13 % 40, 1 + i * 29 % 97) for i in range(120)]
    path.write_text("id,lower,upper,size\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    first, second = (outofcore_pack(path, "--capacity", "1MiB", "--effort", "0.02") for _ in range(2))
    assert first.exit_code == 0, first.output
    assert first.stdout == second.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("id,lower,size\n", "lacks upper"),
        ("id,lower,upper,size,end\n", "names a column twice"),
        ("id,lower,upper,size\na,0,1\n", "line 2 has 3 fields"),
        ("id,lower,upper,size\na,0,1,4\nb,0,x,4\n", "line 3: upper must be a whole number, not 'x'"),
        ("id,lower,upper,size\na,3,1,4\n", "line 2: rectangle a ends at 1"),
        ("id,lower,upper,size,gaps\na,0,9,4,1-2 4-5\n", "line 2: a lifetime may have only one gap"),
        ("id,lower,upper,size,gaps\na,0,9,4,1-2@0:2\n", "line 2: a lifetime may have only one gap"),
        ("id,lower,upper,size,gaps\na,0,9,4,1\n", "line 2: a gap is written as 3-7"),
        ("id,lower,upper,size\na,0,1,4\n\na,2,3,4\n", "line 4 repeats the id 'a' of line 2"),
        ('id,lower,upper,size\na,0,1,4\n"b,0,1,4\nc,0,1,4\n', "line 3 is not CSV"),
        ('id,lower,upper,size,name\na,0,1,4,"two\nlines"\nb,0,1,x,c\n', "line 4: size must be"),
        (f"id,lower,upper,size\na,0,1,{'9' * 5000}\n", "line 2: size must be a whole number, not '9999"),
        (f"id,lower,upper,size\na,0,1,{'9' * 50}\n", "line 2: rectangle a has a time, size"),
        ("id,lower,upper,size,alignment\na,0,1,4,0\n", "line 2: rectangle a has size 4 and alignment 0"),
    ],
)
def test_unreadable_line_is_named(text: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        read_table(text)
    assert message in str(raised.value)


def test_error_is_one_message_with_exit_status_2(tmp_path: Path) -> None:
    path = tmp_path / "twice.csv"
    path.write_text("id,lower,upper,size\na,0,1,4\na,2,3,4\n")
    for result in (
        outofcore_pack(path, "--capacity", "12"),
        outofcore_pack(tmp_path / "none.csv", "--capacity", "12"),
        outofcore_pack(path, "--capacity", "some"),
    ):
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")


def test_packing_does_not_import_torch(example: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None  # to import it is an error\n"
        "from outofcore.cli import main\n"
        "sys.argv = ['outofcore', 'pack', sys.argv[1], '--capacity', '12']\n"
        "try: main()\n"
        "except SystemExit as left: assert left.code in (None, 0), left\n"
    )
    process = subprocess.run([sys.executable, "-c", code, str(example)], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert checked_height(process.stdout, 12) == 12


def test_line_of_invalid_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "damaged.csv"
    path.write_bytes(b"id,lower,upper,size\na,0,1,4\nb,0,\xff,4\n")
    result = outofcore_pack(path, "--capacity", "12")
    assert result.exit_code == 2
    assert "line 3 is not UTF-8 text (byte 0xff)" in result.stderr


@settings(deadline=None, max_examples=examples(200))
@given(st.data())
def test_damaged_file_is_refused_or_placed(data: st.DataObject) -> None:
    rows = [f"r{i},{i},{i + 3},{10 + i},{data.draw(st.sampled_from(['', f'{i + 1}-{i + 2}']))}" for i in range(6)]
    text = "id,lower,upper,size,gaps\n" + "\n".join(rows) + "\n"
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        junk = data.draw(st.sampled_from(['"', ",", "\n", "-", "0", "9" * 30, "\0", "\r", "x", "é", " "]))
        text = text[:at] + junk + text[at + data.draw(st.integers(0, 3)) :]
    try:
        table = read_table(text)
        placement = pack(table.rectangles)
    except InputError as error:
        assert str(error)
        return
    check_packing(
        Placed(r.id, r.lower, r.upper, r.size, offset, r.alignment, r.gap)
        for r, offset in zip(table.rectangles, placement.offsets, strict=True)
    )
    assert checked_height(table.text_with_offsets(placement.offsets), placement.height) == placement.height


def test_missing_compiler_error_names_the_remedy(example: Path, tmp_path: Path) -> None:
    code = "from outofcore.cli import main; main()"
    command = [sys.executable, "-c", code, "pack", str(example), "--capacity", "12"]
    environment = os.environ | {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    message = " ".join(process.stderr.split())
    assert "native code is missing: placement.cpp is not compiled here" in message
    assert "no C++ compiler is on PATH" in message
    assert "Install a C++ compiler such as g++, or a wheel" in message
    assert not list(tmp_path.rglob("*.so"))
