"""Validate programs and packings by deliberately simple code, independent of the planner."""

from outofcore.validator.packings import Placed, check_packing
from outofcore.validator.programs import validate

__all__ = ["Placed", "check_packing", "validate"]
