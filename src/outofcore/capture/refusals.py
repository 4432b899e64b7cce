"""Errors for steps that cannot become one graph: the event, the reason and the advice."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from outofcore._torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    MetadataMismatchError,
    UnsupportedFakeTensorException,
    UnsupportedMutationAliasingException,
    UnsupportedOperatorException,
    is_differentiating_forward,
)
from outofcore.capture.device_traits import traits_of
from outofcore.capture.provenance import called_from, find_name_on_stack, running_transform, user_line
from outofcore.errors import CaptureError

NO_VALUES = "the step is captured as one graph without running it, so no tensor has a value to read"

_READ_ADVICE = "return the tensor from the step and read it there, or keep the arithmetic in tensors"
_PRINT_ADVICE = "return the tensor from the step and print it there"
# Functions that read a tensor's value, by PyTorch's names: the user's notation, and the advice.
_READS = {
    "item": (".item()", _READ_ADVICE),
    "__float__": ("float(tensor)", _READ_ADVICE),
    "__int__": ("int(tensor)", _READ_ADVICE),
    "__bool__": (
        "a branch on a tensor (if, while, and, or, bool(tensor))",
        "use torch.where, or move the decision out of the step",
    ),
    "__index__": (
        "a tensor used as an index or a count",
        "make it a plain int before the step and pass it as an argument",
    ),
    "__contains__": ("'in' on a tensor", _READ_ADVICE),
    "__complex__": ("complex(tensor)", _READ_ADVICE),
    "tolist": (".tolist()", "return the tensor from the step and call .tolist() there"),
    "numpy": (".numpy()", "return the tensor from the step and call .numpy() there"),
    "__array__": ("numpy.asarray(tensor)", _READ_ADVICE),
    "__repr__": ("printing a tensor", _PRINT_ADVICE),
    "__format__": ("formatting a tensor into text", _PRINT_ADVICE),
    "data_ptr": (".data_ptr()", "leave addresses out of the step"),
    "equal": ("torch.equal", _READ_ADVICE),
    "untyped_storage": ("code that uses the storage of a tensor", "use operators on the tensor itself"),
    "__dlpack__": ("DLPack", _READ_ADVICE),
    "__reduce_ex__": ("saving or pickling a tensor", "save it after the step"),
    "__deepcopy__": ("copy.deepcopy of a tensor", "write tensor.clone(), or copy before the step"),
    "share_memory_": (".share_memory_()", "call it before the step"),
    "apply_": (".apply_()", "use operators"),
    "map_": (".map_()", "use operators"),
}


# The end of a refusal if the step can run as an eager loop.
_LOOP_ADVICE = "Or run the unchanged loop within outofcore.budget(limit, model)."


def refusal(event: str, reason: str, advice: str, location: str | None = None, *, is_loop: bool = True) -> CaptureError:
    """Return the error for a step that cannot be captured. ``location`` defaults to the user's line."""
    line = user_line() if location is None else location
    prefix = f"{line}: " if line else ""
    return CaptureError(f"{prefix}{event}: {reason}; {advice}.", line, is_loop=is_loop)


def suggest_loop(error: CaptureError, devices: Iterable[torch.device]) -> CaptureError:
    """Add the advice to use ``budget()`` to an error, if ``budget()`` supports all devices."""
    if error.is_loop and all(traits_of(device).supports_eager_loops for device in devices):
        error.args = (f"{str(error).rstrip('.')}. {_LOOP_ADVICE}",)
    return error


def value_read_refusal(function: str) -> CaptureError:
    if called_from("torch/amp/grad_scaler.py"):
        return grad_scaler_refusal()
    written, advice = _READS.get(function, (function, _READ_ADVICE))
    return refusal(f"{written} reads the value of a tensor", NO_VALUES, advice)


def value_dependent_gradient_refusal(function: str) -> CaptureError:
    """Return the error for a gradient formula of prod or cumprod that depends on values."""
    instead = "write torch.cumprod(x, dim).select(dim, -1)" if function == "prod" else "use real numbers"
    return refusal(
        f"the gradient formula of {function} depends on whether there are zeros",
        NO_VALUES,
        f"{instead}, whose gradient has one formula in PyTorch 2.13 and newer, or detach() x if it needs no gradient",
    )


# Advice by the name of a higher-order operator.
_PLAIN_ADVICE = {
    "cond": "write torch.where, or branch on a plain bool before the step",
    "while_loop": "write a Python loop with a fixed number of iterations",
    "map_impl": "write a Python loop and torch.stack, or one batched operator",
    "scan": "write a Python loop and torch.stack",
    "associative_scan": "write torch.cumsum, torch.cumprod or a Python loop",
    "flex_attention": "write torch.nn.functional.scaled_dot_product_attention with attn_mask",
    "flex_attention_backward": "write torch.nn.functional.scaled_dot_product_attention with attn_mask",
}


def higher_order_refusal(name: str, module: str) -> CaptureError:
    return refusal(
        f"the step uses the higher-order operator {name}{module and f' in {module}'}",
        "it decides at run time which functions run, and how often, so it is not one op of a graph",
        _PLAIN_ADVICE.get(name, "call its functions directly"),
    )


def zero_gradient_refusal() -> CaptureError:
    """Return the error for a gradient that is zero everywhere, which PyTorch represents without memory."""
    reason = "PyTorch allocates no memory for such a tensor, and handles it specially in later operators"
    if is_differentiating_forward():
        return refusal(
            f"the step differentiates forward ({running_transform() or 'torch.autograd.forward_ad'}) and meets a "
            "derivative that is zero throughout",
            reason,
            "use reverse mode, with torch.func.vjp, jacrev or grad, or torch.autograd.grad",
        )
    return refusal(
        "the step takes a gradient that is zero throughout",
        reason,
        "detach() the input of that derivative, or use torch.sign in place of torch.sgn",
    )


def grad_scaler_refusal() -> CaptureError:
    return refusal(
        "the step uses a GradScaler",
        "whether it skips an update depends on the values of the gradients",
        "use torch.autocast with bfloat16, which needs no scaler, or GradScaler(enabled=False)",
    )


def undeclared_tensor_refusal(tensor: torch.Tensor) -> CaptureError:
    """Return the error for a tensor from outside that is no argument, parameter or buffer."""
    dtype, name = str(tensor.dtype).removeprefix("torch."), find_name_on_stack(tensor)
    return refusal(
        f"the step uses a {dtype} tensor of shape {tuple(tensor.shape)} from outside{name and f', {name}'}",
        "it is neither an argument of the step nor a parameter or buffer of the models given, "
        "so its changes would go unnoticed",
        "pass it as an argument of the step, register it as a buffer of the model, or add its module to the list of "
        "models",
    )


def translate_error(error: Exception, function: str) -> CaptureError | None:
    """Translate an error of fake tensors in ``function`` into a ``CaptureError``; return None for other errors."""
    match error:
        case DataDependentOutputException():
            return value_read_refusal(function)
        case RuntimeError() if "its data is not allocated yet" in str(error):
            return refusal(
                f"{function or 'code below the operators of PyTorch'} reads the memory of a tensor",
                NO_VALUES,
                "keep the arithmetic in tensors; register custom kernels as operators, with torch.library",
            )
        case NotImplementedError() if "Not available for 'meta' device type" in str(error):
            return value_read_refusal("untyped_storage")
        case NotImplementedError() if "Cannot access storage of" in str(error):
            return refusal(
                f"{function or 'the step'} makes a tensor that has no memory of the usual kind, such as a sparse one",
                "its bytes alone do not define its values",
                "use dense tensors",
            )
        case DynamicOutputShapeException():
            return refusal(
                f"the size of the result of {error.func} depends on the values of its input",
                NO_VALUES,
                "write it with masks of a fixed size, such as torch.where or a multiplication by the mask",
            )
        case UnsupportedOperatorException():
            return refusal(
                f"the operator {error.func} does not define the shape of its result",
                "it has no meta implementation",
                "register one with torch.library.register_fake, or use another operator",
            )
        case UnsupportedFakeTensorException() | UnsupportedMutationAliasingException() | MetadataMismatchError():
            return refusal(
                "a tensor in the step is of a kind that cannot be captured",
                str(error.reason),
                "use dense tensors of a plain dtype",
            )
        case _:
            return None
