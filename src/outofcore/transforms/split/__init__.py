"""Split ops that need more memory than there is; what passes between parts has storages of its own.

A large op is split along an axis on which its parts do not mix, and its neighbours with it. Large tensors between them
are cut into cells, one for each part where all cut them alike. Inputs and results of the step stay whole, and parts
view them through windows. The same tensors and the same op budget give the same step.

- ``step``: ``tiled``, the front door: prepares, searches, builds, and leaves out what an operator refuses.
- ``prepare``: divides ops that no rule can split.
- ``rules``: the table: along which axes an operator can be split, in the words of ``ways``.
- ``needs``: what ops need and access, as a whole and in parts.
- ``search``: which ops are split, along which axes, into how many parts; the ``cells`` of storages.
- ``rewrite``: the pieces of the split step; ``writer`` adds their ops, and copies from and to cells.
- ``state_ranges``: parameters and optimizer state that are at home and fetched range by range.
- ``exactness``: the claims on which the bits rely, checked by ``profiling.equality``.

Cutting ops along dimensions that do not mix is the idea of "Tofu" (Wang, Huang, Li: EuroSys 2019) and of FlexFlow's
SOAP dimensions (Jia, Zaharia, Aiken: MLSys 2019), there for several devices; here the parts follow one another on one.

Limits: ``rules`` says which operators can be split. Gradients that are left to the user are not.
"""

from outofcore.transforms.split.exactness import Claim
from outofcore.transforms.split.step import Tiled, tiled

__all__ = ["Claim", "Tiled", "tiled"]
