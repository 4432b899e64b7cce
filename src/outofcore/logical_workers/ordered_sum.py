"""Sum the gradients of all logical workers, in their order and over all processes; see ``chain``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from outofcore.logical_workers.chain import Span, schedule_rounds
from outofcore.logical_workers.gradients import GradientLayout, PieceBuffers, TensorRows
from outofcore.logical_workers.processes import WorkerProcesses


class OrderedSum:
    """Sums the gradients of all workers piece by piece; ``processes`` are in the order of their workers."""

    def __init__(self, processes: WorkerProcesses) -> None:
        self._processes = processes
        # In each direction, one piece arrives, one is sent and one is added to; the last buffer has the addend.
        self._buffers = PieceBuffers(7)

    def __call__(
        self, gradients: Sequence[TensorRows], target: TensorRows, layout: GradientLayout, divisor: int
    ) -> None:
        """Write the mean of all workers' gradients to ``target`` on every process.

        ``gradients`` are in the order of this process's workers; at process 0 the first may be a sum itself. After a
        ``StateError`` for another process, ``target`` is partly written.
        """
        if self._processes.count == 1:
            for spans in layout.spans:
                total = self._buffers.row(0, layout, spans)
                self._add_gradients(gradients, layout, spans, total, first=True)
                self._write_sum(target, spans, total.div_(divisor))
            return
        self._sum_in_chain(gradients, target, layout, divisor)

    def _sum_in_chain(
        self, gradients: Sequence[TensorRows], target: TensorRows, layout: GradientLayout, divisor: int
    ) -> None:
        """Sum gradients over all processes, and write the sum divided by ``divisor`` to ``target``."""
        processes, pieces = self._processes, layout.spans
        rank, last = processes.rank, processes.count - 1
        sent: dict[int, Callable[[], None]] = {}  # by the buffer that is being sent
        arriving: dict[tuple[int, int], Callable[[], None]] = {}  # by direction and piece

        def buffer(direction: int, piece: int) -> int:
            return 3 * direction + piece % 3

        def expect(direction: int, piece: int, source: int) -> None:
            if piece < len(pieces):
                number = buffer(direction, piece)
                if number in sent:
                    sent.pop(number)()
                arriving[direction, piece] = processes.receive(self._buffers.row(number, layout, pieces[piece]), source)

        def send(number: int, row: torch.Tensor, to: int) -> None:
            sent[number] = processes.send(row, to)

        if rank > 0:
            expect(0, 0, rank - 1)
        if rank < last:
            expect(1, 0, rank + 1)
        for turn in schedule_rounds(len(pieces), processes.count, rank):
            if turn.forward is not None:
                spans, number = pieces[turn.forward], buffer(0, turn.forward)
                if rank > 0:
                    arriving.pop((0, turn.forward))()
                    expect(0, turn.forward + 1, rank - 1)
                elif number in sent:
                    sent.pop(number)()
                total = self._buffers.row(number, layout, spans)
                self._add_gradients(gradients, layout, spans, total, first=rank == 0)
                if rank == last:
                    self._write_sum(target, spans, total.div_(divisor))
                send(number, total, rank - 1 if rank == last else rank + 1)
            if turn.back is not None:
                spans, number = pieces[turn.back], buffer(1, turn.back)
                arriving.pop((1, turn.back))()
                expect(1, turn.back + 1, rank + 1)
                total = self._buffers.row(number, layout, spans)
                self._write_sum(target, spans, total)
                if rank > 0:
                    send(number, total, rank - 1)
        for wait in sent.values():
            wait()

    def _add_gradients(
        self,
        process_gradients: Sequence[TensorRows],
        layout: GradientLayout,
        spans: Sequence[Span],
        total: torch.Tensor,
        *,
        first: bool,
    ) -> None:
        """Add the gradients of this process's workers to ``total``; with ``first``, replace its old content."""
        start = 0
        for span in spans:
            part = total[start : start + span.count]
            for number, gradients in enumerate(process_gradients):
                if first and number == 0:
                    gradients.read(span, part)
                else:
                    addend = self._buffers.row(6, layout, [span])
                    gradients.read(span, addend)
                    part.add_(addend)
            start += span.count

    @staticmethod
    def _write_sum(target: TensorRows, spans: Sequence[Span], total: torch.Tensor) -> None:
        at = 0
        for span in spans:
            target.write(span, total[at : at + span.count])
            at += span.count
