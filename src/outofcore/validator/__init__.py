"""Deliberately naive proofs that a program, or a packing, keeps its promises."""

from outofcore.validator.packings import Placed, check_packing
from outofcore.validator.programs import validate

__all__ = ["Placed", "check_packing", "validate"]
