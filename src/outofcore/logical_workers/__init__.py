"""Training with logical workers: any number of processes gives the same bits as any other.

Logical workers whose contexts take turns on one device are the idea of EasyScale (Li et al., "EasyScale: Elastic
training with consistent accuracy and improved utilization on GPUs", SC '23, sections 3 and 4). A step of N workers is,
to the last bit, this loop in plain PyTorch, with each worker's own random generators::

    for k in range(N):
        step(*batches[k])          # gradients add up in .grad, in the order of the workers
    for p in parameters: p.grad /= N
    optimizer.step()

Buffers are as in ``DistributedDataParallel`` with ``broadcast_buffers=True``: every worker begins a step with those
that worker 0 has left in the step before. So a model has the same statistics whichever process evaluates or saves it,
and the size of a checkpoint does not depend on the number of workers.

``entry`` has ``outofcore.elastic``, and ``training`` the class that it returns. The package uses public names of the
library only.
"""
