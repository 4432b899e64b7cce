"""Tests of ONNX files as modules: exact within a budget, close to onnxruntime, refused when damaged."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_graphs import GRAPHS, WIDTH, Arrays, GraphWriter
from typer.testing import CliRunner, Result

import outofcore
from outofcore.cli.app import app
from outofcore.errors import InputError, OutOfCoreError
from outofcore.onnx import OnnxModel
from outofcore.onnx.contents import FileRange
from outofcore.onnx.storage import Files
from outofcore.onnx.wire import LARGE_BYTES

onnx = pytest.importorskip("onnx")


def save_graph(folder: Path, name: str, *, outside: bool = False) -> tuple[Path, Arrays]:
    model, arrays = GRAPHS[name]()
    path = folder / f"{name}.onnx"
    if outside:
        onnx.save(model, path, save_as_external_data=True, location=f"{name}.data", size_threshold=1024)
    else:
        onnx.save(model, path)
    return path, arrays


def input_tensors(model: OnnxModel, arrays: Arrays) -> list[torch.Tensor]:
    return [torch.from_numpy(arrays[name].copy()) for name in model.input_names]


def compute_outputs(model: OnnxModel, *inputs: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        result = model(*inputs)
    return list(result) if isinstance(result, tuple) else [result]


def state_bytes(model: OnnxModel) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


def test_cast_without_saturation_overflows_to_nan(tmp_path: Path) -> None:
    """The type has no infinity; 464 is halfway between its largest number and the next, and is rounded down."""
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None)
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT8E4M3FN, None)
    node = onnx.helper.make_node("Cast", ["x"], ["y"], to=onnx.TensorProto.FLOAT8E4M3FN, saturate=0)
    graph = onnx.helper.make_graph([node], "net", [x], [y])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)]), tmp_path / "net.onnx")
    result = outofcore.onnx.load(tmp_path / "net.onnx")(torch.tensor([448.0, 464.0, 465.0, -465.0, torch.inf]))
    assert result.float().nan_to_num(nan=-1.0).tolist() == [448.0, 448.0, -1.0, -1.0, -1.0]


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_has_the_same_bits_within_a_third_of_its_weights(name: str, tmp_path: Path) -> None:
    path, arrays = save_graph(tmp_path, name, outside=len(name) % 2 == 0)
    model = outofcore.onnx.load(path)
    expected = compute_outputs(model, *input_tensors(model, arrays))
    # Dequantised bytes become numbers of four bytes.
    weights = state_bytes(model) * (4 if name.startswith("quantised") else 1)
    with outofcore.budget("64MiB", model, policy=None) as roomy:
        compute_outputs(model, *input_tensors(model, arrays))
        roomy.release()
    with outofcore.budget(weights // 3 + roomy.stats.peak_small_bytes, model, policy=None) as run:
        for _ in range(2):
            results = compute_outputs(model, *input_tensors(model, arrays))
            assert len(results) == len(expected)
            assert all(a.equal(b) for a, b in zip(results, expected, strict=True))
    assert run.stats.fetched_bytes > state_bytes(model) // 2
    runtime = pytest.importorskip("onnxruntime")
    theirs = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, arrays)
    for ours, reference in zip(expected, theirs, strict=True):
        assert ours.shape == reference.shape
        assert np.abs(ours.numpy() - reference).max() <= 1e-5 * np.abs(reference).max()


@pytest.mark.parametrize("name", ["attention_by_products_17", "branches_19"])
def test_compiled_forward_pass_has_the_same_bits(name: str, tmp_path: Path) -> None:
    path, arrays = save_graph(tmp_path, name, outside=True)
    model = outofcore.onnx.load(path)
    inputs = input_tensors(model, arrays)
    expected = compute_outputs(model, *inputs)

    def forward(*args: torch.Tensor) -> list[torch.Tensor]:
        return compute_outputs(model, *args)

    with outofcore.compile(forward, model, budget=state_bytes(model) // 2, home="host") as step:
        for _ in range(2):
            assert all(a.equal(b) for a, b in zip(step(*inputs), expected, strict=True))


def test_training_within_a_budget_is_exact_and_keeps_the_file(tmp_path: Path) -> None:
    path, arrays = save_graph(tmp_path, "attention_by_products_17", outside=True)
    content = (tmp_path / "attention_by_products_17.data").read_bytes()

    def train(budget: int | None) -> tuple[list[float], list[torch.Tensor]]:
        model = outofcore.onnx.load(path)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        (x,) = input_tensors(model, arrays)
        if budget is None:
            losses = [step(x).item() for _ in range(3)]
        else:
            with outofcore.budget(budget, model, policy=None):
                losses = [step(x).item() for _ in range(3)]
        return losses, [parameter.detach().clone() for parameter in model.parameters()]

    plain, weights = train(None)
    ours, budget_weights = train(sum(parameter.numel() for parameter in weights) * 16 // 3)
    assert plain == ours
    assert plain[2] < plain[0]
    assert all(a.equal(b) for a, b in zip(weights, budget_weights, strict=True))
    assert (tmp_path / "attention_by_products_17.data").read_bytes() == content


def test_weights_are_named_parameters_and_stay_in_the_file(tmp_path: Path) -> None:
    path, _ = save_graph(tmp_path, "residual_network_13", outside=True)
    model = outofcore.onnx.load(path)
    proto = onnx.load(path)
    parameters = dict(model.named_parameters())
    for tensor in proto.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        weight = dict(model.state_dict())[tensor.name]
        assert np.array_equal(weight.numpy(), array)
    statistics = {name for node in proto.graph.node if node.op_type == "BatchNormalization" for name in node.input[3:]}
    assert statistics
    assert not statistics & parameters.keys()
    assert {node.name for node in proto.graph.node} <= {node.name for node in model.graph.nodes}
    duplicate = copy.deepcopy(model)
    duplicate.load_state_dict(model.state_dict())
    with torch.no_grad():
        parameters["layers.0.weight"].zero_()
    assert not np.array_equal(
        parameters["layers.0.weight"].detach().numpy(), onnx.numpy_helper.to_array(proto.graph.initializer[0])
    )
    assert outofcore.onnx.load(path).state_dict()["layers.0.weight"].abs().sum() > 0


def test_large_weights_take_no_memory_until_used(tmp_path: Path) -> None:
    g = GraphWriter(21)
    x = g.input("x", np.ones((1, 2048), np.float32))
    for _ in range(2):
        x = g.op("MatMul", x, g.tensor(np.zeros((2048, 2048), np.float32), "weight"))
    paths = [tmp_path / "inside.onnx", tmp_path / "beside.onnx"]
    for path in paths:
        onnx.save(g.model(x), path, save_as_external_data=path.stem == "beside", location="large.data")
    small, _ = save_graph(tmp_path, "perceptron_20")
    code = (
        "import sys, torch, onnx, outofcore\n"
        "def resident(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "outofcore.onnx.load(sys.argv[1])\n"
        "before = resident()\n"
        "models = [outofcore.onnx.load(path) for path in sys.argv[2:]]\n"
        "print(resident() - before, *[sum(p.numel() for p in model.parameters()) for model in models])"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(small), *map(str, paths)], capture_output=True, text=True, check=True
    )
    grown, *counts = map(int, process.stdout.split())
    assert counts == [2 * 2048 * 2048] * 2
    assert grown < 8 << 20


def test_weights_at_unaligned_addresses_give_the_same_bits(tmp_path: Path) -> None:
    g = GraphWriter(21)
    x = g.input("x", g.random.standard_normal((3, 200)).astype(np.float32))
    weight = g.weight(200, 200)
    onnx.save(g.model(g.op("MatMul", x, weight)), tmp_path / "net.onnx")
    model = outofcore.onnx.load(tmp_path / "net.onnx")
    (mapped,) = model.parameters()
    content = (tmp_path / "net.onnx").read_bytes()
    offset = content.index(onnx.numpy_helper.to_array(g.tensors[0]).tobytes())
    assert (mapped.data_ptr() % 64 == 0) == (offset % 64 == 0)
    assert ("aligned" in model.code) == (offset % 64 != 0)
    inputs = torch.from_numpy(g.arrays["x"])
    assert compute_outputs(model, inputs)[0].equal(inputs @ mapped.detach().clone())
    shifted = torch.zeros(17)[1:]
    assert outofcore.aligned(shifted).data_ptr() % 64 == 0
    assert outofcore.aligned(shifted).data_ptr() != shifted.data_ptr()


def test_constants_are_computed_at_load(tmp_path: Path) -> None:
    g = GraphWriter(18)
    x = g.input("x", np.ones((4, 6), np.float32), ["n", 6])
    sizes = g.op("Concat", g.op("Mul", g.ints(3), g.ints(2)), g.ints(-1), axis=0)
    branch = g.op("If", g.tensor(np.array(True)), **two_branches(g, g.op("Reshape", x, sizes), "Relu", "Neg"))
    onnx.save(g.model(branch), tmp_path / "net.onnx")
    model = outofcore.onnx.load(tmp_path / "net.onnx")
    node_names = [node.name for node in model.graph.nodes if node.op != "placeholder" and "onnx" in node.meta]
    assert node_names == ["Reshape_3", "Relu"]
    assert compute_outputs(model, torch.ones(4, 6))[0].shape == (6, 4)


def two_branches(g: GraphWriter, x: str, first: str, second: str) -> dict[str, Any]:
    values = [g.helper.make_tensor_value_info("y", g.types.FLOAT, None)]
    names = (("then_branch", first), ("else_branch", second))
    nodes = {name: [g.helper.make_node(kind, [x], ["y"], name=kind)] for name, kind in names}
    return {name: g.helper.make_graph(nodes[name], name, [], values) for name, _ in names}


def test_error_names_its_node_within_a_branch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    g = GraphWriter(18)
    x = g.input("x", np.ones((4, 6), np.float32), ["n", "m"])
    condition = g.input("goes", np.array(True))
    inner = two_branches(g, x, "Relu", "Det")
    onnx.save(g.model(g.op("If", condition, **inner)), tmp_path / "net.onnx")
    model = outofcore.onnx.load(tmp_path / "net.onnx")
    assert compute_outputs(model, torch.ones(4, 6), torch.tensor(True))[0].shape == (4, 6)
    with pytest.raises(InputError, match=r"node 'Det' \(ai.onnx::Det of opset 18\) .* \(its inputs: float32\[4, 6\]\)"):
        model(torch.ones(4, 6), torch.tensor(False))
    assert capfd.readouterr().err == ""


def test_budget_error_names_the_onnx_node(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, arrays = save_graph(tmp_path, "perceptron_20")
    model = outofcore.onnx.load(path)
    (x,) = input_tensors(model, arrays)

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        return compute_outputs(model, x)

    with (
        outofcore.compile(forward, model, budget="100KiB", home="host") as step,
        pytest.raises(outofcore.BudgetError, match=r"in MatMul_2 at .*test_onnx.py:"),
    ):
        step(x)
    with pytest.raises(outofcore.BudgetError, match=r"in MatMul_2 \(OnnxModel\) at .*test_onnx.py:"):  # noqa: SIM117
        with outofcore.budget("100KiB", model, policy=None):
            forward(x)
    assert "Traceback" not in capfd.readouterr().err


# ---- damaged files --------------------------------------------------------------------------------------------------


def make_tiny_model(**changes: Any) -> Any:
    from onnx import TensorProto, helper, numpy_helper  # noqa: PLC0415

    random_ = np.random.default_rng(0)
    weights = [numpy_helper.from_array(random_.standard_normal((4, 4)).astype(np.float32), name) for name in ("a", "b")]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "y"))
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["p"], name="first"),
        helper.make_node("Softmax", ["p"], ["q"], name="second", axis=-1),
        helper.make_node("MatMul", ["q", "b"], ["y"], name="third"),
    ]
    graph = helper.make_graph(nodes, "net", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def store_outside(model: Any, location: str, **entries: Any) -> None:
    tensor = model.graph.initializer[0]
    onnx.external_data_helper.set_external_data(tensor, location, **entries)
    tensor.ClearField("raw_data")


def _cycle(model: Any) -> None:
    model.graph.node[0].input[0] = "q"


def _self_cycle(model: Any) -> None:
    model.graph.node[1].input[0] = "q"


DAMAGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "absolute": (lambda m: store_outside(m, "/etc/hostname"), "outside of the model's folder"),
    "above": (lambda m: store_outside(m, "../secret.bin"), "outside of the model's folder"),
    "link": (lambda m: store_outside(m, "link.bin"), "outside of the model's folder"),
    "missing file": (lambda m: store_outside(m, "nothing.bin"), "cannot be read"),
    "folder": (lambda m: store_outside(m, "."), "which is not a file"),
    "cut file": (lambda m: store_outside(m, "beside.bin", offset=8, length=64), "which has 64"),
    "wrong length": (lambda m: store_outside(m, "beside.bin", offset=0, length=32), "32 bytes, and its shape"),
    "negative offset": (lambda m: store_outside(m, "beside.bin", offset=-8, length=64), "at bytes -8"),
    "raw length": (lambda m: setattr(m.graph.initializer[0], "raw_data", b"123"), "3 bytes, and its shape"),
    "shape": (lambda m: m.graph.initializer[0].dims.append(1 << 40), "bytes, and its shape"),
    "impossible shape": (lambda m: m.graph.initializer[0].dims.append(-1), "has the impossible shape"),
    "data type": (lambda m: setattr(m.graph.initializer[0], "data_type", 77), "data type 77"),
    "text": (lambda m: setattr(m.graph.initializer[0], "data_type", 8), "elements, and its shape"),
    "cycle": (_cycle, "has a cycle, among others through node 'first'"),
    "cycle of one": (_self_cycle, "has a cycle, among others through node 'second'"),
    "missing input": (lambda m: m.graph.node[2].input.__setitem__(1, "c"), "uses 'c', which no node produces"),
    "missing output": (lambda m: setattr(m.graph.output[0], "name", "z"), "no node produces the output 'z'"),
    "two values": (lambda m: m.graph.node[1].output.__setitem__(0, "p"), "the value 'p' is made twice"),
    "two weights": (
        lambda m: setattr(m.graph.initializer[1], "name", "a"),
        "two initializers of a graph are called 'a'",
    ),
    "two inputs": (lambda m: m.graph.input.append(m.graph.input[0]), "two inputs of a graph are called 'x'"),
    "operator": (
        lambda m: setattr(m.graph.node[1], "op_type", "Sooftmax"),
        "node 'second' (ai.onnx::Sooftmax of opset 21) is not supported",
    ),
    "domain": (lambda m: setattr(m.graph.node[1], "domain", "acme"), "of the domain 'acme', which has no opset"),
    "attribute": (lambda m: setattr(m.graph.node[1].attribute[0], "name", "axes"), "has an attribute 'axes'"),
    "attribute type": (lambda m: setattr(m.graph.node[1].attribute[0], "type", 1), "'axis' is not of the type INT"),
    "inputs": (lambda m: m.graph.node[1].input.append("p"), "has 2 inputs, and the operator allows 1 to 1"),
    "no opset": (lambda m: m.opset_import.pop(), "no graph or no opset"),
    "later opset": (lambda m: setattr(m.opset_import[0], "version", 99), "the model needs opset 99"),
    "no graph": (lambda m: m.ClearField("graph"), "no graph or no opset"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_model_raises_one_clear_error(damage: str, tmp_path: Path) -> None:
    change, message = DAMAGES[damage]
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(64))
    (folder / "beside.bin").write_bytes(bytes(64))
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    model = make_tiny_model()
    change(model)
    path = folder / "net.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InputError) as raised:
        outofcore.onnx.load(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
    assert "Traceback" not in str(raised.value)


def test_file_without_a_model_raises_one_clear_error(tmp_path: Path) -> None:
    for content in (b"", b"hello", b"\x80", bytes(100), b"PK\x03\x04" * 10):
        path = tmp_path / "net.onnx"
        path.write_bytes(content)
        with pytest.raises(InputError, match=str(path)):
            outofcore.onnx.load(path)
    with pytest.raises(InputError, match="cannot read"):
        outofcore.onnx.load(tmp_path / "nothing.onnx")


def test_cut_or_changed_file_loads_or_raises_a_clear_error(tmp_path: Path) -> None:
    content = make_tiny_model().SerializeToString()
    path = tmp_path / "net.onnx"
    cases = [content[:end] for end in range(0, len(content), 3)]
    dice = random.Random(0)
    for _ in range(250):
        changed = bytearray(content)
        for _ in range(dice.choice((1, 1, 2, 5))):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
        cases.append(bytes(changed))
    refused_count = run_count = 0
    for case in cases:
        path.write_bytes(case)
        try:
            model = outofcore.onnx.load(path)
            compute_outputs(model, *(torch.ones(3, 4) for _ in model.input_names))
            run_count += 1
        except OutOfCoreError as error:
            assert str(error).strip()
            refused_count += 1
    assert refused_count > 150
    assert run_count > 30  # most bytes are weights


def test_unsuitable_inputs_are_refused(tmp_path: Path) -> None:
    onnx.save(make_tiny_model(), tmp_path / "net.onnx")
    model = outofcore.onnx.load(tmp_path / "net.onnx")
    for args, message in (
        ((), "is not given its input 'x'"),
        ((torch.ones(2, 5),), r"must have the shape \[n, 4\]"),
        ((torch.ones(2, 4).double(),), "must be of torch.float32"),
        ((torch.ones(2, 4), torch.ones(1)), "has 1 inputs and was given 2"),
        (([1.0],), "must be a tensor"),
    ):
        with pytest.raises(InputError, match=message):
            model(*args)
    with pytest.raises(InputError, match="'z' is unknown"):
        model(z=torch.ones(2, 4))
    assert model(x=torch.ones(2, 4)).shape == (2, 4)


def test_missing_onnx_package_is_reported_with_its_install_command(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['onnx'] = None\n"
        "import outofcore\n"
        "outofcore.onnx\n"
        "try: outofcore.onnx.load('net.onnx')\n"
        "except outofcore.InputError as error: print(error)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install outofcore[onnx]" in process.stdout, process.stderr


# ---- the command line -----------------------------------------------------------------------------------------------


def run_command(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_file_is_run_within_a_budget(tmp_path: Path) -> None:
    path, arrays = save_graph(tmp_path, "decoder_23", outside=True)
    np.savez(tmp_path / "in.npz", **arrays)
    model = outofcore.onnx.load(path)
    (expected,) = compute_outputs(model, *input_tensors(model, arrays))
    result = run_command(
        "run",
        path,
        "--budget",
        state_bytes(model) // 3,
        "--input",
        tmp_path / "in.npz",
        "--output",
        tmp_path / "out.npz",
    )
    assert result.exit_code == 0, result.output
    assert ", 0 B out, " in result.stderr  # no weight is written elsewhere
    with np.load(tmp_path / "out.npz") as saved_outputs:
        assert saved_outputs.files == list(model.output_names)
        assert np.array_equal(saved_outputs[model.output_names[0]], expected.numpy())
    tight = run_command("run", path, "--budget", "100KiB", "--input", tmp_path / "in.npz")
    assert tight.exit_code == 2
    assert "error: " in tight.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--input", "no.npz"), "cannot read arrays from no.npz"),
        ((), "no file contains the model's input 'x'"),
        (("--input", "z=x.npy"), "no file contains the model's input 'x'; the files contain z"),
        (("--input", "x.npy", "--output", "/no/folder/y.npz"), "there is no folder"),
        (("--input", "wrong.npy"), "must have the shape"),
        (("--input", "x.npy", "more"), "takes no arguments"),
    ],
)
def test_invalid_run_arguments_give_one_message(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(make_tiny_model(), "net.onnx")
    np.save("x.npy", np.ones((2, 4), np.float32))
    np.save("wrong.npy", np.ones((2, 5), np.float32))
    result = run_command("run", "net.onnx", "--budget", "1MiB", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.output


def make_convolutions() -> tuple[Any, dict[str, np.ndarray[Any, Any]]]:
    """Make a model whose activations exceed its weights; split ops need a third of the memory."""
    g = GraphWriter(18)
    x = g.input("x", g.random.standard_normal((4, 16, 32, 32)).astype(np.float32))
    for _ in range(2):
        x = g.op("Relu", g.conv(x, 16, 16, pads=[1, 1, 1, 1]))
    return g.model(x), g.arrays


def make_identity() -> tuple[Any, dict[str, np.ndarray[Any, Any]]]:
    g = GraphWriter(18)
    x = g.input("x", g.random.standard_normal((256, 256)).astype(np.float32))
    return g.model(g.op("Identity", x)), g.arrays


@pytest.mark.parametrize("make", [make_convolutions, make_identity, GRAPHS["perceptron_20"]])
def test_plan_and_run_agree_at_every_budget(make: Callable[[], Any], tmp_path: Path) -> None:
    model, arrays = make()
    onnx.save(model, tmp_path / "net.onnx")
    np.savez(tmp_path / "in.npz", **arrays)
    options = (tmp_path / "net.onnx", "--input", tmp_path / "in.npz", "--home", "host", "--budget")
    answer = json.loads(run_command("plan", *options, "1GiB", "--json").stdout)
    smallest, in_core = answer["smallest_budget"], answer["in_core_budget"]
    for budget in {max(size, 1) for size in (smallest - 1, smallest, (smallest + in_core) // 2, in_core)}:
        plan_result, run_result = (
            run_command("plan", *options, f"{budget}B"),
            run_command("run", *options, f"{budget}B"),
        )
        assert plan_result.exit_code == (0 if budget >= smallest else 1), (budget, plan_result.output)
        assert run_result.exit_code == (0 if budget >= smallest else 2), (budget, run_result.output)
        assert "fits, and nothing moves" not in plan_result.output or budget >= in_core


def test_data_dependent_graph_runs_within_a_budget(tmp_path: Path) -> None:
    g = GraphWriter(18)
    x = g.input("x", (g.random.standard_normal((64, 512)) > 0).astype(np.float32))
    onnx.save(g.model(g.op("Cast", g.op("NonZero", x), to=1)), tmp_path / "net.onnx")
    np.savez(tmp_path / "in.npz", **g.arrays)
    options = (tmp_path / "net.onnx", "--input", tmp_path / "in.npz", "--home", "host", "--budget", "4MiB")
    assert "outofcore.budget" in run_command("plan", *options).stderr
    result = run_command("run", *options)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("outofcore: 1 step, peak ")


def test_planning_reads_no_large_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, arrays = save_graph(tmp_path, "perceptron_20", outside=True)
    np.savez(tmp_path / "in.npz", **arrays)
    mapped_sizes: list[int] = []
    mapping = Files.mapping

    def record_and_map(files: Files, place: FileRange) -> Any:
        mapped_sizes.append(place.length)
        return mapping(files, place)

    monkeypatch.setattr(Files, "mapping", record_and_map)
    result = run_command("plan", path, "--input", tmp_path / "in.npz", "--home", "host")
    assert result.exit_code == 0, result.output
    assert max(mapped_sizes, default=0) < LARGE_BYTES
    outofcore.onnx.load(path)
    assert max(mapped_sizes) >= LARGE_BYTES


def test_file_is_planned(tmp_path: Path) -> None:
    path, _ = save_graph(tmp_path, "perceptron_20")
    sizes = ("--dim", "batch=2", "--dim", "length=8")
    result = run_command("plan", path, "--budget", "300KiB", "--home", "host", *sizes, "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["feasible"]
    assert plan["bytes_in"] >= 2 * WIDTH * WIDTH * 4
    assert plan["in_core_budget"] > 4 * WIDTH * WIDTH * 4
    missing = run_command("plan", path, "--budget", "300KiB", "--dim", "batch=2")
    assert missing.exit_code == 2
    assert "such as --dim length=4" in missing.stderr
    unknown = run_command("plan", path, *sizes, "--dim", "depth=8")
    assert "has no dynamic dimension 'depth'; it has batch, length" in unknown.stderr
