"""The published policies, faithful to their papers and tunable. ``auto`` does not use them."""

from outofcore.planning.baselines.dtr import DTR
from outofcore.planning.baselines.pooch import PoocH
from outofcore.planning.baselines.profile_guided import ProfileGuided
from outofcore.planning.baselines.sqrt_checkpoint import SqrtCheckpoint
from outofcore.planning.baselines.superneurons import SuperNeurons
from outofcore.planning.baselines.tflms import TFLMS
from outofcore.planning.baselines.window import Window

__all__ = ["DTR", "TFLMS", "PoocH", "ProfileGuided", "SqrtCheckpoint", "SuperNeurons", "Window"]
