"""Words that the shell completes. Without PyTorch, since every press of the Tab key imports this."""

from __future__ import annotations

from collections.abc import Callable

from outofcore.policies import POLICIES
from outofcore.presets import devices

# Models of the zoo in common sizes; the command line also accepts other depths of a resnet.
MODELS = (
    *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152)),
    *("vgg16", "densenet121", "unet3d", "gpt"),
)


def words(*choices: str) -> Callable[[str], list[str]]:
    """Return a completion callback for typer: it offers the choices that begin with the typed text."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in choices if word.startswith(incomplete)]

    return complete


models = words(*MODELS)
policies = words(*POLICIES)
homes = words("disk", "host")
local_devices = words("cpu", "cuda")
all_devices = words("cpu", "cuda", *(device.key for device in devices()))
