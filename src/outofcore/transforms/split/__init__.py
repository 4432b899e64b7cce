"""Split ops that need more memory than the op budget.

A large op is split along an axis on which its elements do not mix, and its neighbours with it. Large tensors between
them are cut into cells. The step's inputs and results stay whole; parts view them through windows.

- ``step``: ``split_step``, the entry point.
- ``prepare``: rewrites ops that no rule can split.
- ``rules``: the table of operators and their axes; ``ways`` defines its types.
- ``needs``: bytes that ops need, whole and split.
- ``search``: chooses the ops, axes and numbers of parts, and the ``cells`` of storages.
- ``rewrite``: builds the split step; ``writer`` adds its ops, and copies from and to cells.
- ``state_ranges``: parameters and optimizer state fetched range by range.
- ``exactness``: the exactness checks that ``profiling.equality`` runs.

"Tofu" (Wang, Huang, Li: EuroSys 2019) and FlexFlow's SOAP dimensions (Jia, Zaharia, Aiken: MLSys 2019) cut ops so for
several devices; here the parts run one after another on one.
"""

from outofcore.transforms.split.exactness import ExactnessCheck
from outofcore.transforms.split.step import SplitStep, split_step

__all__ = ["ExactnessCheck", "SplitStep", "split_step"]
