"""Interrupt code at each place where CPython runs signal handlers."""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any


def interrupt_everywhere(
    run: Callable[[], object], check: Callable[[], object], is_chosen: Callable[[CodeType], bool]
) -> set[str]:
    """Call ``run``, interrupted at its first, second, ... place in chosen code, and ``check`` after each interrupt.

    Ends with the first call that is not interrupted. Returns the names of the interrupted functions.
    """
    names: set[str] = set()
    for number in itertools.count(1):
        with contextlib.suppress(KeyboardInterrupt), _interrupt_at(number, is_chosen) as interrupted:
            run()
        if not interrupted:
            break
        names.add(interrupted.pop().f_code.co_name)
        check()
    return names


@contextlib.contextmanager
def _interrupt_at(number: int, is_chosen: Callable[[CodeType], bool]) -> Iterator[list[FrameType]]:
    """Raise ``KeyboardInterrupt`` at the ``number``-th place for signal handlers that this thread meets in chosen code.

    Yields a list to which the interrupted frame is added.
    """
    remaining, interrupted = number, []
    last_offsets: dict[FrameType, int] = {}

    def trace_instruction(frame: FrameType, event: str, _: object) -> Any:
        nonlocal remaining
        if event == "opcode":
            names = _opcode_names(frame.f_code)
            last = last_offsets.get(frame, -1)
            last_offsets[frame] = frame.f_lasti
            # Handlers run when a function or an iteration of a loop begins, and after calls.
            if names[frame.f_lasti].startswith(("RESUME", "JUMP_BACKWARD")) or names.get(last, "").startswith("CALL"):
                remaining -= 1
                if remaining == 0:
                    interrupted.append(frame)
                    last_offsets.clear()
                    raise KeyboardInterrupt
        elif event == "return":
            last_offsets.pop(frame, None)
        return trace_instruction

    def trace_call(frame: FrameType, *_: object) -> Any:
        if remaining <= 0 or not is_chosen(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace_instruction

    before = sys.gettrace()
    sys.settrace(trace_call)
    try:
        yield interrupted
    finally:
        sys.settrace(before)


@functools.cache
def _opcode_names(code: CodeType) -> dict[int, str]:
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}
