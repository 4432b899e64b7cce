"""Train a GPT that needs several times the budget, with and without outofcore, and compare.

Peaks are counted above the resident memory of a tiny model, which is that of the interpreter and its libraries.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from _common import Spec, Worker, parse_options

from outofcore.units import MIB, format_bytes, format_seconds, parse_bytes

_TINY = {"batch": 1, "layers": 1, "width": 64, "heads": 1, "context": 32}
_WANTED_RATIO = 2.5  # in-core peak over the budget
_SLACK_SHARE, _SLACK_BYTES = 1.02, 64 * MIB  # allowed overhead of the process above its budget


def _train(name: str, spec: Spec, steps: int, picture: Path | None = None) -> tuple[Worker, dict[str, Any]]:
    print(f"{name} …", file=sys.stderr, flush=True)
    with Worker(name, spec) as worker:
        for number in range(1, steps + 1):
            result = worker.step()
            if steps > 1:
                text = f"  step {number}/{steps}: loss {float.fromhex(result['loss']):.4f}, {result['seconds']:.2f} s"
                print(text, file=sys.stderr, flush=True)
        report = worker.ask("report")
        if picture is not None:
            worker.ask(f"picture {picture}")
        return worker, report


def main(
    *,
    budget: Annotated[str, typer.Option(help="Memory budget for all tensors of a step, e.g. 400MiB.")] = "400MiB",
    layers: Annotated[int, typer.Option(help="Number of blocks.")] = 8,
    width: Annotated[int, typer.Option(help="Width of the model.")] = 512,
    context: Annotated[int, typer.Option(help="Tokens per sequence.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences per batch.")] = 8,
    steps: Annotated[int, typer.Option(min=2, help="Number of steps to train.")] = 10,
    home: Annotated[str, typer.Option(help="Home: disk, host, or a folder on a disk.")] = "disk",
    policy: Annotated[str, typer.Option(help="Planning policy.")] = "auto",
    option: Annotated[list[str] | None, typer.Option(help="Further model option, as name=value; repeatable.")] = None,
    picture: Annotated[Path, typer.Option(help="File for the timeline, HTML.")] = Path("out/demo.html"),
) -> None:
    """Train with and without outofcore; exit with status 1 if a check at the end fails."""
    limit = parse_bytes(budget)
    options = {"batch": batch, "layers": layers, "width": width, "context": context, "lr": 1e-4}
    options |= parse_options(option or [])
    picture = picture.resolve()
    ours: dict[str, Any] = {"mode": "outofcore", "budget": limit, "home": home, "policy": policy}
    _, tiny_eager = _train("a tiny model, plain PyTorch", Spec("gpt", _TINY), 1)
    _, tiny_ours = _train("a tiny model, outofcore", Spec("gpt", _TINY, **ours), 1)
    eager, eager_end = _train("plain PyTorch", Spec("gpt", options), steps)
    step, step_end = _train("outofcore", Spec("gpt", options, **ours), steps, picture)

    eager_peak, peak = eager_end["peak_rss"] - tiny_eager["rss"], step_end["peak_rss"] - tiny_ours["rss"]
    allowed = int(_SLACK_SHARE * limit) + _SLACK_BYTES
    identical = [s["loss"] for s in eager.steps] == [s["loss"] for s in step.steps]
    eager_s, step_s = eager.median("seconds", 1), step.median("seconds", 1)
    plan = step_end["plan"]
    rows = [
        (
            "peak RSS, plain PyTorch",
            f"{format_bytes(eager_end['peak_rss'])}; {format_bytes(eager_peak)} above a tiny model",
        ),
        ("peak RSS, outofcore", f"{format_bytes(step_end['peak_rss'])}; {format_bytes(peak)} above a tiny model"),
        ("budget", f"{format_bytes(limit)}, of which the step takes {format_bytes(plan['arena_bytes'])}"),
        ("median step", f"{format_seconds(eager_s)} plain, {format_seconds(step_s)} outofcore"),
        ("step-time ratio", f"{step_s / eager_s:.2f}"),
        ("predicted step", format_seconds(step.steps[-1]["predicted_seconds"])),
        (
            "moved per step",
            f"{format_bytes(step.median('bytes_out', 1))} out, {format_bytes(step.median('bytes_in', 1))} in "
            f"({plan['policy']}, {home})",
        ),
        ("picture", str(picture)),
    ]
    claims = [
        (
            f"in-core peak at least {_WANTED_RATIO} × the budget",
            eager_peak >= _WANTED_RATIO * limit,
            eager_peak / limit,
        ),
        (f"peak within {_SLACK_SHARE} × budget + {format_bytes(_SLACK_BYTES)}", peak <= allowed, peak / limit),
    ]
    print(f"\n{step.facts['workload']}")
    print("\n".join(f"  {name:<24} {text}" for name, text in rows))
    print("\n".join(f"{name}: {'yes' if holds else 'no'} ({ratio:.2f} ×)" for name, holds, ratio in claims))
    print(f"losses identical: {'yes' if identical else 'no'} (all bits of {steps} losses)")
    if not (identical and all(holds for _, holds, _ in claims)):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
