"""Tests of the measurement cache on disk."""

from __future__ import annotations

import fcntl
import json
import logging
import multiprocessing
import threading
from pathlib import Path

import pytest

from outofcore.errors import InputError
from outofcore.profiling import cache as module
from outofcore.profiling.cache import Cache, Shelf, default_cache_folder, open_cache

FACTS = {"cpu": "8086", "cores": 1}


def values(shelf: Shelf) -> dict[str, object]:
    return shelf.read()


def test_written_values_are_read_back(tmp_path: Path) -> None:
    Cache(tmp_path).shelf("ops", FACTS).write({"a": {"seconds": 0.1}, "b": [1, 2]})
    assert values(Cache(tmp_path).shelf("ops", dict(reversed(FACTS.items())))) == {"a": {"seconds": 0.1}, "b": [1, 2]}


def test_shelves_of_other_facts_and_kinds_are_separate(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.shelf("ops", FACTS).write({"a": 1})
    assert values(cache.shelf("ops", {**FACTS, "cores": 2})) == {}
    assert values(cache.shelf("links", FACTS)) == {}


def test_later_writer_adds_and_replaces(tmp_path: Path) -> None:
    shelf = Cache(tmp_path).shelf("ops", FACTS)
    shelf.write({"a": 1, "b": 1})
    shelf.write({"b": 2, "c": 2})
    assert values(shelf) == {"a": 1, "b": 2, "c": 2}


def test_writing_no_values_creates_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    shelf = Cache(folder).shelf("ops", FACTS)
    assert values(shelf) == {}
    shelf.write({})
    assert not folder.exists()


@pytest.mark.parametrize("damage", ["cut", "other format", "other facts", "binary", "empty", "a list"])
def test_damaged_file_is_reported_and_rewritten(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    shelf = Cache(tmp_path).shelf("ops", FACTS)
    shelf.write({"a": 1})
    whole = shelf.path.read_text(encoding="utf-8")
    content = json.loads(whole)
    shelf.path.write_bytes(
        {
            "cut": whole[: len(whole) // 2].encode(),
            "other format": json.dumps({**content, "format": "outofcore-measured/0"}).encode(),
            "other facts": json.dumps({**content, "facts": {}}).encode(),
            "binary": b"\x1f\x8b\x00",
            "empty": b"",
            "a list": b"[]",
        }[damage]
    )
    with caplog.at_level(logging.WARNING, "outofcore.profiling"):
        assert values(shelf) == {}
    assert str(shelf.path) in caplog.text
    shelf.write({"b": 2})
    assert values(shelf) == {"b": 2}


def test_unwritable_folder_only_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    shelf = Cache(tmp_path / "file" / "cache").shelf("ops", FACTS)
    with caplog.at_level(logging.WARNING, "outofcore.profiling"):
        shelf.write({"a": 1})
    assert "not kept" in caplog.text
    assert values(shelf) == {}


def _write_twenty(folder: Path, writer: int) -> None:
    module._LOCK_SECONDS = 600.0  # the other writers may be slow, and this test is about lost entries
    shelf = Cache(folder).shelf("ops", FACTS)
    for number in range(20):
        shelf.write({f"{writer}-{number}": number})


def test_concurrent_writers_lose_no_entries(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_twenty, args=(tmp_path, writer_number)) for writer_number in range(3)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
        assert process.exitcode == 0
    shelf = Cache(tmp_path).shelf("ops", FACTS)
    assert values(shelf) == {f"{writer_number}-{number}": number for writer_number in range(3) for number in range(20)}
    assert not list(tmp_path.glob("*.part"))


def test_processes_take_turns(tmp_path: Path) -> None:
    shelf = Cache(tmp_path / "new").shelf("parts", {})
    order: list[str] = []

    def other() -> None:
        with shelf.turn():
            order.append("other")

    with shelf.turn():
        waiting = threading.Thread(target=other)
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        shelf.write({"a": 1})  # writing does not wait for the turn
        order.append("one")
    waiting.join(10)
    assert order == ["one", "other"]
    assert shelf.read() == {"a": 1}


def test_missing_lock_does_not_block(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    entered = False
    with Cache(tmp_path / "file").shelf("parts", {}).turn():
        entered = True
    assert entered


def test_writer_gives_up_waiting_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_LOCK_SECONDS", 0.02)
    shelf = Cache(tmp_path).shelf("ops", FACTS)
    shelf.write({"a": 1})
    with shelf.path.with_suffix(".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with caplog.at_level(logging.WARNING, "outofcore.profiling"):
            shelf.write({"a": 2})
    assert "another process" in caplog.text
    assert values(shelf) == {"a": 1}


def test_oldest_entries_are_dropped_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_ENTRIES", 3)
    shelf = Cache(tmp_path).shelf("ops", FACTS)
    shelf.write({"a": 1, "b": 1, "c": 1})
    shelf.write({"a": 2, "d": 2})
    assert values(shelf) == {"c": 1, "a": 2, "d": 2}


def test_clear_removes_only_our_files(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert (cache.bytes(), cache.clear()) == (0, 0)
    cache.shelf("ops", FACTS).write({"a": 1})
    (tmp_path / "thesis.tex").write_text("mine", encoding="utf-8")
    assert cache.bytes() == sum(path.stat().st_size for path in tmp_path.glob("*.json")) > 0
    assert cache.clear() == 2  # with the lock
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert Cache(tmp_path / "missing").clear() == 0


def test_cache_option_accepts_bool_or_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / "outofcore" / "measured"
    assert open_cache(True) == Cache(default_cache_folder())
    assert open_cache(False) is None
    assert open_cache(str(tmp_path / "here")) == Cache(tmp_path / "here")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="not a folder"):
        open_cache(tmp_path / "file")
