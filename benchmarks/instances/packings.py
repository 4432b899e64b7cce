"""Buffer lifetimes published in ``cappadokes/idealloc``, mostly of training steps under MindSpore.

The files have MiniMalloc's format without a capacity. The peak of live bytes is a lower bound, which some instances
cannot reach.
"""

from __future__ import annotations

from instances.sources import Clone

from outofcore.cli.pack import read_table
from outofcore.planning.placement import Rectangle

REPOSITORY = "idealloc"
CASES = {
    "tiny BERT": ("5e0b783", "somas_tensors/tiny_bert.csv"),
    "ResNet-50": ("HEAD", "benchmarks/somas_tensors/resnet50.csv"),
    "BERT base": ("c8ad82c", "somas_tensors/bert_base.csv"),
    "BERT large": ("f81e2b1", "somas_tensors/bert_large.csv"),
    "BERT NEZHA": ("f81e2b1", "somas_tensors/bert_nezha.csv"),
    "PanGu 13B": ("f81e2b1", "somas_tensors/pangu_13B.csv"),
    "PanGu 2.6B": ("HEAD", "benchmarks/somas_tensors/pangu_2.6B.csv"),
    "MobileBERT (IREE)": ("c259e0b", "coreba/tests/data/iree_mobilebert.csv"),
    "IOPDDL G": ("HEAD", "benchmarks/iopddl/G_1.csv"),
    "IOPDDL S": ("HEAD", "benchmarks/iopddl/S_1.csv"),
    "IOPDDL Y": ("HEAD", "benchmarks/iopddl/Y_1.csv"),
}


def read_rectangles(clone: Clone, case: str) -> tuple[Rectangle, ...]:
    commit, name = CASES[case]
    return read_table(clone.read(name, commit).decode()).rectangles
