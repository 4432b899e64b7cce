"""Seed all random generators and run a script: ``python verify_seeded.py SCRIPT [ARGUMENTS]``."""

import random
import runpy
import sys
from pathlib import Path

import numpy as np
import torch

random.seed(0)
np.random.seed(0)
torch.manual_seed(0)
try:
    import monai
except ImportError:
    pass
else:
    monai.utils.set_determinism(0)  # its transforms use their own generators

del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
