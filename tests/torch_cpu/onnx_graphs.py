"""Handwritten ONNX graphs of opsets 13 to 23 with inputs, one for each kind of model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

WIDTH, LENGTH, HEADS = 160, 12, 4
Arrays = dict[str, np.ndarray[Any, Any]]


class GraphWriter:
    def __init__(self, opset: int, seed: int = 0) -> None:
        from onnx import TensorProto, helper  # noqa: PLC0415 - tests skip where it is not installed

        self.helper, self.types = helper, TensorProto
        self.opset = opset
        self.random = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.tensors: list[Any] = []
        self.inputs: list[Any] = []
        self.arrays: Arrays = {}
        self.functions: list[Any] = []
        self.count = 0

    def input(self, name: str, array: np.ndarray[Any, Any], shape: Sequence[Any] | None = None) -> str:
        kind = self.helper.np_dtype_to_tensor_dtype(array.dtype)
        self.inputs.append(self.helper.make_tensor_value_info(name, kind, shape or array.shape))
        self.arrays[name] = array
        return name

    def image(self, channels: int = 3, size: int = 24) -> str:
        array = self.random.standard_normal((2, channels, size, size)).astype(np.float32)
        return self.input("image", array, ["batch", channels, size, size])

    def sequence(self) -> str:
        array = self.random.standard_normal((2, LENGTH, WIDTH)).astype(np.float32)
        return self.input("x", array, ["batch", "length", WIDTH])

    def weight(self, *shape: int, fan: int | None = None) -> str:
        scale = 1 / np.sqrt(fan or shape[0])
        return self.tensor((self.random.standard_normal(shape) * scale).astype(np.float32), "weight")

    def tensor(self, array: Any, kind: str = "c") -> str:
        from onnx import numpy_helper  # noqa: PLC0415

        name = f"layers.{len(self.tensors)}.{kind}"
        self.tensors.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def ints(self, *numbers: int) -> str:
        return self.tensor(np.array(numbers, dtype=np.int64))

    def op(self, kind: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        self.count += 1
        names = [f"v{self.count}_{place}" for place in range(outputs)]
        self.nodes.append(
            self.helper.make_node(kind, list(inputs), names, name=f"{kind}_{self.count}", domain=domain, **attributes)
        )
        return names[0] if outputs == 1 else names

    def linear(self, x: str, out: int = WIDTH, width: int = WIDTH) -> str:
        return self.op("Add", self.op("MatMul", x, self.weight(width, out)), self.weight(out, fan=100))

    def conv(self, x: str, channels: int, out: int, edge: int = 3, **attributes: Any) -> str:
        groups = attributes.get("group", 1)
        w = self.weight(out, channels // groups, edge, edge, fan=channels // groups * edge * edge)
        return self.op("Conv", x, w, self.weight(out, fan=100), **attributes)

    def norm(self, x: str) -> str:
        return self.op("LayerNormalization", x, self.tensor(np.ones(WIDTH, np.float32)), self.weight(WIDTH), axis=-1)

    def model(self, *outputs: str) -> Any:
        kind = self.types.FLOAT
        outputs_info = [self.helper.make_tensor_value_info(name, kind, None) for name in outputs]
        graph = self.helper.make_graph(self.nodes, "net", self.inputs, outputs_info, self.tensors)
        imports = [self.helper.make_opsetid("", self.opset)]
        imports += [self.helper.make_opsetid(domain, 1) for domain in {function.domain for function in self.functions}]
        return self.helper.make_model(graph, opset_imports=imports, functions=self.functions, ir_version=10)


Graph = Callable[[], tuple[Any, Arrays]]
GRAPHS: dict[str, Graph] = {}


def graph(function: Callable[[], tuple[Any, Arrays]]) -> Graph:
    GRAPHS[function.__name__] = function
    return function


@graph
def residual_network_13() -> tuple[Any, Arrays]:
    g = GraphWriter(13)
    x = g.op("Relu", g.conv(g.image(), 3, 64, pads=[1, 1, 1, 1], strides=[2, 2]))
    x = g.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], ceil_mode=1)
    for _ in range(8):
        y = g.conv(x, 64, 64, pads=[1, 1, 1, 1])
        variances = np.ones(64, np.float32)
        y = g.op("BatchNormalization", y, g.weight(64, fan=1), g.weight(64), g.weight(64), g.tensor(variances * 1.5))
        x = g.op("Relu", g.op("Add", x, y))
    x = g.op("Flatten", g.op("GlobalAveragePool", x))
    return g.model(g.op("Gemm", x, g.weight(10, 64), g.weight(10), transB=1)), g.arrays


@graph
def pyramid_17() -> tuple[Any, Arrays]:
    g = GraphWriter(17)
    x = g.op("HardSwish", g.conv(g.image(size=12), 3, 64, auto_pad="SAME_UPPER", strides=[2, 2]))
    down = g.op("AveragePool", x, kernel_shape=[3, 3], strides=[2, 2], ceil_mode=0, auto_pad="SAME_LOWER")
    down = g.op("LeakyRelu", g.conv(down, 64, 64, pads=[2, 2, 2, 2], dilations=[2, 2]), alpha=0.1)
    for _ in range(7):
        down = g.op("Elu", g.conv(down, 64, 64, pads=[1, 1, 1, 1]), alpha=0.5)
    down = g.conv(down, 64, 64, group=4, pads=[0, 1, 2, 1])
    sizes = g.op("Slice", g.op("Shape", x), g.ints(2), g.ints(4), g.ints(0))
    sizes = g.op("Concat", g.op("Slice", g.op("Shape", down), g.ints(0), g.ints(2)), sizes, axis=0)
    up = g.op("Resize", down, "", "", sizes, mode="linear", coordinate_transformation_mode="half_pixel")
    x = g.op("Concat", x, up, axis=1)
    x = g.op("ConvTranspose", x, g.weight(128, 16, 4, 4, fan=512), strides=[2, 2], pads=[1, 1, 1, 1], group=4)
    x = g.op("Clip", g.conv(x, 64, 64), g.tensor(np.float32(-1)), g.tensor(np.float32(2)))
    return g.model(g.op("ReduceMean", x, axes=[2, 3], keepdims=0)), g.arrays


def _split_heads(g: GraphWriter, x: str, lead: str) -> str:
    shape = g.op("Concat", lead, g.ints(HEADS, WIDTH // HEADS), axis=0)
    return g.op("Transpose", g.op("Reshape", x, shape), perm=[0, 2, 1, 3])


@graph
def attention_by_products_17() -> tuple[Any, Arrays]:
    g = GraphWriter(17)
    x = g.sequence()
    shape = g.op("Shape", x)
    lead = g.op("Slice", shape, g.ints(0), g.ints(2), g.ints(0))
    length = g.op("Gather", shape, g.tensor(np.int64(1)))
    square = g.op("Concat", *[g.op("Unsqueeze", length, g.ints(0))] * 2, axis=0)
    full_mask = g.op("ConstantOfShape", square, value=g.helper.make_tensor("v", g.types.FLOAT, [1], [1.0]))
    mask = g.op("Cast", g.op("Trilu", full_mask, upper=0), to=g.types.BOOL)
    for _ in range(2):
        y = g.norm(x)
        q, k, v = (_split_heads(g, g.linear(y), lead) for _ in range(3))
        size = g.op("Cast", g.op("Gather", g.op("Shape", q), g.tensor(np.int64(-1))), to=g.types.FLOAT)
        scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = g.op("Div", scores, g.op("Sqrt", size))
        scores = g.op("Where", mask, scores, g.tensor(np.float32(-3e38)))
        y = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        y = g.op("Reshape", y, g.op("Concat", lead, g.ints(-1), axis=0))
        x = g.op("Add", x, g.linear(y))
        y = g.linear(g.norm(x), 2 * WIDTH)
        half = g.op("Div", y, g.tensor(np.float32(np.sqrt(2))))
        y = g.op(
            "Mul", g.op("Mul", y, g.tensor(np.float32(0.5))), g.op("Add", g.op("Erf", half), g.tensor(np.float32(1)))
        )
        x = g.op("Add", x, g.linear(y, WIDTH, 2 * WIDTH))
    return g.model(x), g.arrays


@graph
def attention_by_einsum_18() -> tuple[Any, Arrays]:
    g = GraphWriter(18)
    x = g.sequence()
    for _ in range(3):
        qkv = g.op("Reshape", g.linear(g.norm(x), 3 * WIDTH), g.ints(0, 0, 3 * HEADS, -1))
        q, k, v = g.op("Split", qkv, outputs=3, axis=2, num_outputs=3)
        scores = g.op("Einsum", q, k, equation="bqhd,bkhd->bhqk")
        weights = g.op("Softmax", g.op("Mul", scores, g.tensor(np.float32(0.158))), axis=-1)
        y = g.op("Einsum", weights, v, equation="bhqk,bkhd->bqhd")
        x = g.op("Add", x, g.linear(g.op("Reshape", y, g.ints(0, 0, -1))))
        x = g.op("Add", x, g.linear(g.op("Mish", g.norm(x))))
    return g.model(g.op("ReduceLogSumExp", x, g.ints(-1), keepdims=0), x), g.arrays


@graph
def decoder_23() -> tuple[Any, Arrays]:
    g = GraphWriter(23)
    ids = g.input("ids", g.random.integers(0, 300, (2, LENGTH)), ["batch", "length"])
    x = g.op("Gather", g.tensor(g.random.standard_normal((300, WIDTH)).astype(np.float32), "weight"), ids)
    size = WIDTH // HEADS
    angles = np.outer(np.arange(64), 1e4 ** -(np.arange(0, size, 2) / size)).astype(np.float32)
    cosines, sines = g.tensor(np.cos(angles)), g.tensor(np.sin(angles))
    length = g.op("Gather", g.op("Shape", ids), g.tensor(np.int64(1)))
    positions = g.op("Range", g.tensor(np.int64(0)), length, g.tensor(np.int64(1)))
    positions = g.op("Expand", g.op("Unsqueeze", positions, g.ints(0)), g.op("Shape", ids))
    for _ in range(2):
        scale = g.tensor(np.ones(WIDTH, np.float32) * 1.1, "scale")
        y = g.op("RMSNormalization", x, scale, axis=-1, epsilon=1e-6)
        q, k, v = g.linear(y), g.linear(y, WIDTH // 2), g.linear(y, WIDTH // 2)
        q = g.op("RotaryEmbedding", q, cosines, sines, positions, num_heads=HEADS)
        k = g.op("RotaryEmbedding", k, cosines, sines, positions, num_heads=HEADS // 2, interleaved=0)
        y = g.op("Attention", q, k, v, is_causal=1, q_num_heads=HEADS, kv_num_heads=HEADS // 2)
        x = g.op("Add", x, g.linear(y))
        gate = g.linear(g.op("RMSNormalization", x, scale), 2 * WIDTH)
        y = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), g.linear(x, 2 * WIDTH))
        x = g.op("Add", x, g.linear(y, WIDTH, 2 * WIDTH))
    return g.model(x), g.arrays


@graph
def perceptron_20() -> tuple[Any, Arrays]:
    g = GraphWriter(20)
    x = g.sequence()
    for approximate in ("none", "tanh", "none", "tanh"):
        x = g.op("Add", x, g.op("Gelu", g.linear(g.norm(x)), approximate=approximate))
    return g.model(g.op("LogSoftmax", x, axis=1)), g.arrays


@graph
def long_short_term_memory_14() -> tuple[Any, Arrays]:
    g = GraphWriter(14)
    steps = g.random.standard_normal((7, 3, WIDTH)).astype(np.float32)
    x = g.input("x", steps, ["length", "batch", WIDTH])
    lengths = g.tensor(np.array([7, 4, 5], np.int32))
    for width in (WIDTH, 128, 128, 128):
        w, r = g.weight(2, 256, width, fan=width), g.weight(2, 256, 64, fan=64)
        y, _, _ = g.op("LSTM", x, w, r, g.weight(2, 512), lengths, outputs=3, hidden_size=64, direction="bidirectional")
        x = g.op("Reshape", g.op("Transpose", y, perm=[0, 2, 1, 3]), g.ints(0, 0, -1))
    return g.model(x), g.arrays


@graph
def gated_recurrent_22() -> tuple[Any, Arrays]:
    g = GraphWriter(22)
    x = g.input("x", g.random.standard_normal((5, 3, WIDTH)).astype(np.float32))
    for late in (0, 1):
        w, r = g.weight(1, 3 * WIDTH, WIDTH, fan=WIDTH), g.weight(1, 3 * WIDTH, WIDTH, fan=WIDTH)
        y, last = g.op("GRU", x, w, r, g.weight(1, 6 * WIDTH), outputs=2, hidden_size=WIDTH, linear_before_reset=late)
        x = g.op("Squeeze", y, g.ints(1))
    return g.model(x, last), g.arrays


@graph
def lookups_16() -> tuple[Any, Arrays]:
    g = GraphWriter(16)
    ids = g.input("ids", g.random.integers(-200, 200, (2, LENGTH)))
    x = g.op("Gather", g.weight(200, WIDTH, fan=1), ids)
    for _ in range(3):
        x = g.op("Tanh", g.linear(x))
    turned = g.op("Slice", x, g.ints(-1, 2), g.ints(-100, 100), g.ints(1, 2), g.ints(-1, 3))
    best, places = g.op("TopK", turned, g.ints(5), outputs=2, axis=-1)
    gathered = g.op("GatherElements", turned, places, axis=-1)
    at = g.tensor(np.array([[0, 1], [1, 3]], np.int64))
    x = g.op("ScatterND", x, at, g.weight(2, WIDTH, fan=1))
    x = g.op(
        "ScatterElements", x, g.tensor(np.array([[[3, 3, 0]]], np.int64)), g.weight(1, 1, 3), axis=2, reduction="add"
    )
    return g.model(
        x, g.op("Sub", best, g.op("Mul", gathered, g.tensor(np.float32(0.5)))), g.op("CumSum", best, g.ints(1))
    ), g.arrays


@graph
def branches_19() -> tuple[Any, Arrays]:
    g = GraphWriter(19)
    x = g.sequence()
    w = [g.weight(WIDTH, WIDTH) for _ in range(4)]
    rows = g.op("Gather", g.op("Shape", x), g.tensor(np.int64(1)))
    even = g.op("Equal", g.op("Mod", rows, g.tensor(np.int64(2))), g.tensor(np.int64(0)))
    branch_outputs = [g.helper.make_tensor_value_info("y", g.types.FLOAT, None)]
    branches = {
        f"{name}_branch": g.helper.make_graph(
            [g.helper.make_node("MatMul", [x, weight], ["y"])], name, [], branch_outputs
        )
        for name, weight in (("then", w[0]), ("else", w[1]))
    }
    x = g.op("If", even, **branches)
    x = g.op("MatMul", g.op("Relu", x), w[2])
    steps = g.op("Range", g.tensor(np.int64(0)), rows, g.tensor(np.int64(1)))
    steps = g.op("Cast", g.op("Reshape", steps, g.ints(1, -1, 1)), to=g.types.FLOAT)
    x = g.op("Add", x, g.op("Expand", steps, g.op("Shape", x)))
    x = g.op("Pad", x, g.ints(1, 0, 0, 1), "", g.ints(1, 2), mode="reflect")
    x = g.op("MatMul", g.op("Slice", x, g.ints(0), g.ints(-1), g.ints(2)), w[3])
    tiled = g.op("Tile", g.op("ReduceMean", x, g.ints(2)), g.ints(1, 1, 3))
    return g.model(x, tiled), g.arrays


@graph
def quantised_21() -> tuple[Any, Arrays]:
    g = GraphWriter(21)
    x = g.image(16, 8)
    for place in range(10):
        if place == 0:  # in later layers a value between two integers may be rounded to either
            scale, zero = g.tensor(np.float32(0.05)), g.tensor(np.uint8(120))
            x = g.op("DequantizeLinear", g.op("QuantizeLinear", x, scale, zero), scale, zero)
        channels = 16 if place == 0 else 96
        whole = g.tensor(g.random.integers(-90, 90, (96, channels, 3, 3)).astype(np.int8), "quantised")
        scales = g.tensor((0.0005 + 0.0001 * g.random.random(96)).astype(np.float32))
        w = g.op("DequantizeLinear", whole, scales, g.tensor(np.zeros(96, np.int8)), axis=0)
        x = g.op("Relu", g.op("Conv", x, w, g.weight(96), pads=[1, 1, 1, 1]))
    return g.model(x), g.arrays


@graph
def functions_18() -> tuple[Any, Arrays]:
    g = GraphWriter(18)
    node = g.helper.make_node
    scaled = node("LeakyRelu", ["p"], ["y"])
    scaled.attribute.append(_attribute_reference(g, "alpha", "slope"))
    body = [node("MatMul", ["x", "w"], ["p"]), scaled]
    imports = [g.helper.make_opsetid("", 18)]
    g.functions.append(g.helper.make_function("own", "Layer", ["x", "w"], ["y"], body, imports, ["slope"]))
    x = g.sequence()
    for slope in (0.1, 0.3):
        x = g.op("Layer", x, g.weight(WIDTH, WIDTH), domain="own", slope=slope)
    w = g.weight(WIDTH, WIDTH)
    value, kinds = g.helper.make_tensor_value_info, g.types
    inner = g.helper.make_graph(
        [
            node("MatMul", ["state", w], ["p"]),
            node("Tanh", ["p"], ["next"]),
            node("Identity", ["goes"], ["on"]),
            node("ReduceSum", ["next"], ["sum"], keepdims=0),
        ],
        "turn",
        [value("turn", kinds.INT64, []), value("goes", kinds.BOOL, []), value("state", kinds.FLOAT, None)],
        [value("on", kinds.BOOL, []), value("next", kinds.FLOAT, None), value("sum", kinds.FLOAT, None)],
    )
    x, sums = g.op("Loop", g.tensor(np.int64(3)), "", x, outputs=2, body=inner)
    return g.model(g.op("MatMul", x, g.weight(WIDTH, WIDTH)), sums), g.arrays


def _attribute_reference(g: GraphWriter, name: str, to: str) -> Any:
    attribute = g.helper.make_attribute(name, 1.0)
    attribute.ClearField("f")
    attribute.ref_attr_name = to
    return attribute
