"""Example models with training data, in plain PyTorch: for trying, measuring and testing outofcore.

    import outofcore
    from outofcore import zoo

    work = zoo.workload("gpt", batch=8, params="125M")
    model = work.build()
    optimizer = work.optimizer(model)
    step = work.make_step(model, optimizer)       # plain PyTorch; pass it to outofcore.compile unchanged
    for batch in work.batches():
        loss = step(*batch)

The models follow their papers, in the usual configurations; their parameter counts are tested.
"""

from outofcore.zoo.data import ImageSource
from outofcore.zoo.workload import OptimizerImpl, OptimizerName, Workload, ZooOptions, names, parse_count, workload

__all__ = [
    "ImageSource",
    "OptimizerImpl",
    "OptimizerName",
    "Workload",
    "ZooOptions",
    "names",
    "parse_count",
    "workload",
]
