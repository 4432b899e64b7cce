"""Models with data to train them on, in plain PyTorch: for trying outofcore, measuring it and testing it.

    import outofcore
    from outofcore import zoo

    work = zoo.workload("gpt", batch=8, params="125M")
    model = work.build()
    optimizer = work.optimizer(model)
    step = work.make_step(model, optimizer)       # plain PyTorch; hand it to outofcore.compile as it is
    for batch in work.batches():
        loss = step(*batch)

The models are those of their papers, in the configuration in common use; their parameter counts are tested.
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
