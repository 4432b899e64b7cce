"""Measurements on disk: found again, never mixed up, and no worse than absent where they are damaged."""

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


def test_what_is_written_is_read_by_another_process(tmp_path: Path) -> None:
    Cache(tmp_path).shelf("ops", FACTS).write({"a": {"seconds": 0.1}, "b": [1, 2]})
    assert values(Cache(tmp_path).shelf("ops", dict(reversed(FACTS.items())))) == {"a": {"seconds": 0.1}, "b": [1, 2]}


def test_other_facts_and_other_kinds_are_kept_apart(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.shelf("ops", FACTS).write({"a": 1})
    assert values(cache.shelf("ops", {**FACTS, "cores": 2})) == {}
    assert values(cache.shelf("links", FACTS)) == {}


def test_a_later_writer_adds_and_replaces(tmp_path: Path) -> None:
    shelf = Cache(tmp_path).shelf("ops", FACTS)
    shelf.write({"a": 1, "b": 1})
    shelf.write({"b": 2, "c": 2})
    assert values(shelf) == {"a": 1, "b": 2, "c": 2}


def test_nothing_is_made_for_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    shelf = Cache(folder).shelf("ops", FACTS)
    assert values(shelf) == {}
    shelf.write({})
    assert not folder.exists()


@pytest.mark.parametrize("damage", ["cut", "other format", "other facts", "binary", "empty", "a list"])
def test_a_damaged_file_is_told_of_and_written_anew(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_a_folder_that_cannot_be_written_to_costs_nothing_but_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    shelf = Cache(tmp_path / "file" / "cache").shelf("ops", FACTS)
    with caplog.at_level(logging.WARNING, "outofcore.profiling"):
        shelf.write({"a": 1})
    assert "not cached" in caplog.text
    assert values(shelf) == {}


def _write_many(folder: Path, who: int) -> None:
    module._LOCK_SECONDS = 600.0  # the others may be slow: what is tested is that nothing is lost
    shelf = Cache(folder).shelf("ops", FACTS)
    for number in range(20):
        shelf.write({f"{who}-{number}": number})


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(tmp_path, who)) for who in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    shelf = Cache(tmp_path).shelf("ops", FACTS)
    assert values(shelf) == {f"{who}-{number}": number for who in range(3) for number in range(20)}
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
        shelf.write({"a": 1})  # not kept up by the turn
        order.append("one")
    waiting.join(10)
    assert order == ["one", "other"]
    assert shelf.read() == {"a": 1}


def test_where_no_lock_can_be_had_nobody_waits(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    entered = False
    with Cache(tmp_path / "file").shelf("parts", {}).turn():
        entered = True
    assert entered


def test_a_writer_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_LOCK_SECONDS", 0.02)
    shelf = Cache(tmp_path).shelf("ops", FACTS)
    shelf.write({"a": 1})
    with shelf.path.with_suffix(".lock").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with caplog.at_level(logging.WARNING, "outofcore.profiling"):
            shelf.write({"a": 2})
    assert "another process" in caplog.text
    assert values(shelf) == {"a": 1}


def test_what_was_written_longest_ago_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_ENTRIES", 3)
    shelf = Cache(tmp_path).shelf("ops", FACTS)
    shelf.write({"a": 1, "b": 1, "c": 1})
    shelf.write({"a": 2, "d": 2})
    assert values(shelf) == {"c": 1, "a": 2, "d": 2}


def test_clearing_takes_our_files_alone(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert (cache.bytes(), cache.clear()) == (0, 0)
    cache.shelf("ops", FACTS).write({"a": 1})
    (tmp_path / "thesis.tex").write_text("mine", encoding="utf-8")
    assert cache.bytes() == sum(path.stat().st_size for path in tmp_path.glob("*.json")) > 0
    assert cache.clear() == 2  # with the lock
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert Cache(tmp_path / "missing").clear() == 0


def test_what_a_user_may_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / "outofcore" / "measured"
    assert open_cache(True) == Cache(default_cache_folder())
    assert open_cache(False) is None
    assert open_cache(str(tmp_path / "here")) == Cache(tmp_path / "here")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="not a folder"):
        open_cache(tmp_path / "file")
