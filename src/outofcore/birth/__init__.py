"""Models that are never whole in memory: each parameter begins its life at home."""

from outofcore.birth.building import build
from outofcore.birth.materializing import materialize, realise

__all__ = ["build", "materialize", "realise"]
