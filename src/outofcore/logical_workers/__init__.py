"""Training with logical workers: the same bits on any number of processes.

Logical workers whose contexts take turns on one device are the idea of EasyScale (Li et al., "EasyScale: Elastic
training with consistent accuracy and improved utilization on GPUs", SC '23, sections 3 and 4). A step of N workers
equals, bit for bit, this loop in plain PyTorch, in which each worker has its own random generators::

    for k in range(N):
        step(*batches[k])          # gradients add up in .grad, in the order of the workers
    for p in parameters: p.grad /= N
    optimizer.step()

Buffers are treated as in ``DistributedDataParallel`` with ``broadcast_buffers=True``: every worker begins a step with
the buffers that worker 0 wrote in the step before. So all processes have the same statistics, and the size of a
checkpoint does not depend on the number of workers.

``entry`` has ``outofcore.elastic``, and ``training`` the class that it returns. This package uses only public names of
the library.
"""
