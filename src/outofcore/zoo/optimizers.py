"""The optimizers of the zoo: PyTorch's own, with usual settings."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn, optim

from outofcore.errors import InputError
from outofcore.zoo.options import OptimizerImpl, OptimizerName, ZooOptions


def learning_rate(options: ZooOptions) -> float:
    """The learning rate that was asked for, or a usual one for the update rule."""
    if options.lr is not None:
        return options.lr
    match options.optimizer:
        case OptimizerName.SGD:
            return 0.05
        case OptimizerName.MOMENTUM | OptimizerName.ADAGRAD:
            return 0.01
        case OptimizerName.ADAMW:
            return 3e-4
        case OptimizerName.RMSPROP:
            return 1e-4


def make_optimizer(parameters: Iterable[nn.Parameter], options: ZooOptions) -> optim.Optimizer:
    """The optimizer that the options name.

    Raises:
        InputError: PyTorch has no such implementation of that update rule.
    """
    check_optimizer(options)
    lr = learning_rate(options)
    # Naming one implementation rules the other out: PyTorch refuses both at once.
    foreach = None if options.optimizer_impl is None else options.optimizer_impl is OptimizerImpl.FOREACH
    fused = None if options.optimizer_impl is None else options.optimizer_impl is OptimizerImpl.FUSED
    match options.optimizer:
        case OptimizerName.SGD:
            return optim.SGD(parameters, lr=lr, foreach=foreach, fused=fused)
        case OptimizerName.MOMENTUM:
            return optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-4, foreach=foreach, fused=fused)
        case OptimizerName.ADAMW:
            return optim.AdamW(parameters, lr=lr, foreach=foreach, fused=fused)
        case OptimizerName.ADAGRAD:
            return optim.Adagrad(parameters, lr=lr, foreach=foreach, fused=fused)
        case OptimizerName.RMSPROP:
            return optim.RMSprop(parameters, lr=lr, foreach=foreach)


def check_optimizer(options: ZooOptions) -> None:
    """Refuse an implementation that PyTorch does not have.

    Raises:
        InputError: there is no such implementation of the update rule.
    """
    if options.optimizer is OptimizerName.RMSPROP and options.optimizer_impl is OptimizerImpl.FUSED:
        raise InputError("PyTorch has no fused rmsprop; take optimizer_impl 'foreach' or 'plain'")
