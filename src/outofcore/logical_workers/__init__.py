"""Training with logical workers: the same bits on any number of processes.

Logical workers whose contexts take turns on one device are the idea of EasyScale (Li et al., "EasyScale: Elastic
training with consistent accuracy and improved utilization on GPUs", SC '23, sections 3 and 4). ``outofcore.elastic``
defines a step. Every worker begins it with the buffers that worker 0 wrote in the step before, as in
``DistributedDataParallel`` with ``broadcast_buffers=True``. So the size of a checkpoint does not depend on the number
of workers. This package uses only public names of the library.
"""
