"""Tests of eager loops in which autograd saves recipes instead of tensors."""

from __future__ import annotations

import ctypes
import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from effort import some_of
from following import AMPLE_BYTES, peak_of, train_loop
from loops import LOOPS, Language, adamw, loss_of, sentences, tensors_in
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import outofcore
from outofcore.follow.native import load_paging
from outofcore.follow.recipes import Recipes
from outofcore.follow.remaking import choose_recomputed
from outofcore.units import KIB

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("one_thread")


def recipes_of(run: outofcore.Loop) -> Recipes:
    assert run._space is not None
    return Recipes(run._space)


def recompute_all(run: outofcore.Loop) -> None:
    recipes_of(run).recompute_all()


def loop_peak(name: str, share: float = 1.0) -> int:
    return peak_of(*LOOPS[name], share)


@pytest.mark.parametrize("name", some_of(LOOPS, ["branches", "checkpointed", "autocast", "pictures", "ragged"]))
def test_loop_matches_plain_pytorch_when_recomputing_all(name: str) -> None:
    theirs, _ = train_loop(*LOOPS[name])
    # Alternate the two settings over the loops: the suite is long.
    share, stress = ((0.3, False), (0.5, True))[list(LOOPS).index(name) % 2]
    # Recomputation also creates small tensors, which the measured run did not.
    budget = loop_peak(name, share) + 256 * KIB
    ours, stats = train_loop(*LOOPS[name], budget=budget, stress=stress, prepare=recompute_all, policy=None)
    assert ours.differs_from(theirs) == ""
    assert stats is not None
    assert stats.peak_bytes <= budget
    assert stats.reruns > 0
    assert stats.dropped_bytes > 0


def test_recomputation_lowers_the_peak_without_evictions() -> None:
    stats = train_loop(*LOOPS["plain"], budget=AMPLE_BYTES, prepare=recompute_all, policy=None)[1]
    assert stats is not None
    assert stats.peak_bytes < 0.8 * loop_peak("plain")
    assert stats.evictions == 0


@pytest.fixture
def run() -> Iterator[outofcore.Loop]:
    with outofcore.budget(64 * MIB, home="host") as loop:
        recipes_of(loop).recompute_all()
        yield loop


def run_without_and_with_recipes(run: outofcore.Loop, program: Callable[[], Any]) -> tuple[Any, Any]:
    """Return a program's tensors or error type, first without recipes, then with them."""
    results: list[Any] = []
    for recompute in (False, True):
        switch = recipes_of(run)
        switch.recompute_all() if recompute else switch.switch_off()
        torch.manual_seed(3)
        try:
            results.append([t.clone() for t in tensors_in(program())])
        except RuntimeError as error:
            results.append(type(error))
        if isinstance(results[-1], list):
            results[-1].append(torch.get_rng_state())
    return results[0], results[1]


def assert_same_results(run: outofcore.Loop, program: Callable[[], Any], *, reruns: bool = True) -> None:
    before = run.stats.reruns
    theirs, ours = run_without_and_with_recipes(run, program)
    if isinstance(theirs, list):
        assert isinstance(ours, list)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    else:
        assert ours is theirs
    assert (run.stats.reruns > before) == reruns


def evict(tensor: Tensor) -> None:
    assert load_paging().follow_evict(tensor.untyped_storage()._cdata) == 1


def run_in_thread(change: Callable[[], object]) -> None:
    thread = threading.Thread(target=change)
    thread.start()
    thread.join()


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or (128, 256)), requires_grad=True)


WEIGHT = (256, 256)


def test_saved_storage_is_freed_and_recomputed(run: outofcore.Loop) -> None:
    x, weight = leaf(), leaf(*WEIGHT)
    y = F.gelu(x * 2)
    address = y.untyped_storage()._cdata
    weak = torch.UntypedStorage._new_with_weak_ptr
    reference = y.untyped_storage()._weak_ref()  # type: ignore[attr-defined]
    assert weak(reference) is not None
    z = y @ weight
    z.sum()  # autograd has the node of an op only at the next op
    before = run.stats.bytes_in_use
    del y
    assert address
    assert weak(reference) is None
    assert run.stats.bytes_in_use < before
    saved = z.grad_fn._saved_self  # type: ignore[union-attr]
    assert torch.equal(saved, F.gelu(x * 2))
    assert saved.requires_grad
    assert run.stats.reruns >= 1


def test_dropout_is_recomputed_with_the_same_draws(run: outofcore.Loop) -> None:
    def program() -> list[Any]:
        x, weight = leaf(), leaf(*WEIGHT)
        y = F.dropout(F.silu(x @ weight), 0.3)
        torch.rand(5)
        y = torch.bernoulli(torch.full_like(y, 0.5)) * y + torch.rand_like(y) * y
        y = F.alpha_dropout(F.dropout1d(y, 0.2), 0.1)
        y.square().mean().backward()
        return [x.grad, weight.grad, torch.rand(3)]

    assert_same_results(run, program)


def test_recomputation_leaves_user_generators_unchanged(run: outofcore.Loop) -> None:
    def program() -> list[Any]:
        draw = torch.Generator().manual_seed(5)
        x, weight = leaf(), leaf(*WEIGHT)
        mask = torch.empty(128, 256).bernoulli_(0.5, generator=draw).div_(0.5)
        y = (x @ weight) * mask
        del mask
        (y * y).sum().backward()
        return [x.grad, weight.grad, torch.rand(4, generator=draw)]

    assert_same_results(run, program)


@pytest.mark.parametrize("train", [True, False])
def test_batch_norm_counts_each_batch_once(run: outofcore.Loop, train: bool) -> None:
    def program() -> list[Any]:
        model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 8, 3))
        model.train(train)
        loss = sum(model(torch.randn(8, 3, 24, 24)).square().mean() for _ in range(2))
        assert isinstance(loss, Tensor)
        loss.backward()
        return [p.grad for p in model.parameters()] + list(model.state_dict().values())

    assert_same_results(run, program)


CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    # Changes of the input of a recipe (h) or of the saved tensor (y).
    "none": lambda h, y: None,
    "input": lambda h, y: h.detach().add_(1),
    "input_behind_autograd": lambda h, y: h.data.mul_(3),
    "saved": lambda h, y: y.detach().add_(1),
    "saved_behind_autograd": lambda h, y: y.data.mul_(3),
    "part_of_input": lambda h, y: h.data[3:5].zero_(),
    "input_by_address": lambda h, y: h.detach().numpy().fill(2.0),
    "saved_by_address": lambda h, y: y.detach().numpy().fill(2.0),
    "input_by_out": lambda h, y: torch.add(h.detach(), 1, out=h.data),
    "input_twice": lambda h, y: (h.data.add_(1), h.data.sub_(1.5)),
}


# A program cannot change a tensor that it has dropped.
@pytest.mark.parametrize(
    ("change", "keeps_saved"), [(c, k) for c in CHANGES for k in (True, False) if k or "saved" not in c]
)
@pytest.mark.parametrize("kind", ["saves_input", "saves_nothing", "saves_result"])
def test_change_before_backward_acts_as_in_plain_pytorch(
    run: outofcore.Loop, change: str, keeps_saved: bool, kind: str
) -> None:
    op: dict[str, Callable[[Tensor], Tensor]] = {
        "saves_input": F.gelu,
        "saves_nothing": lambda h: h + 1,
        "saves_result": torch.sigmoid,
    }

    def program() -> list[Any]:
        x, weight = leaf(), leaf(*WEIGHT)
        h = x * 2
        y = op[kind](h)
        z = y @ weight
        total = z.sum()
        if not keeps_saved:
            y = h
        CHANGES[change](h, y)
        del h, y, z
        total.backward()
        return [x.grad, weight.grad]

    theirs, ours = run_without_and_with_recipes(run, program)
    if isinstance(theirs, list):
        assert isinstance(ours, list)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    else:
        assert ours is theirs


def test_parameter_update_before_backward_acts_as_in_plain_pytorch(run: outofcore.Loop) -> None:
    def program() -> list[Any]:
        x, shift, weight = torch.randn(128, 256), leaf(), leaf(*WEIGHT)
        z = ((x + shift) @ weight).sum()
        with torch.no_grad():
            shift.add_(1)  # autograd has not saved it
        z.backward()
        return [shift.grad, weight.grad]

    assert_same_results(run, program)
    small = nn.LayerNorm(256)
    weight = leaf(*WEIGHT)

    def with_small_parameters() -> list[Any]:
        x = leaf()
        z = (small(x) @ weight).sum()
        small.weight.data.add_(1)  # plain PyTorch does not notice this change, either
        z.backward()
        gradients = [weight.grad]
        weight.grad = None
        small.weight.data.sub_(1)
        return gradients

    assert_same_results(run, with_small_parameters)


def test_repeated_and_double_backward_match_plain_pytorch(run: outofcore.Loop) -> None:
    def twice() -> list[Any]:
        x, weight = leaf(), leaf(*WEIGHT)
        loss = F.softmax(F.gelu(x @ weight), -1).square().sum()
        loss.backward(retain_graph=True)
        first = weight.grad
        loss.backward()
        return [first, weight.grad, x.grad]

    def higher() -> list[Any]:
        x, weight = leaf(), leaf(*WEIGHT)
        loss = F.softmax(torch.tanh(x @ weight), -1).square().sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (slope.square().sum() + loss).backward()
        return [x.grad, weight.grad]

    def backward_of_freed_graph() -> list[Any]:
        x, weight = leaf(), leaf(*WEIGHT)
        loss = F.gelu(x @ weight).square().sum()
        loss.backward()
        loss.backward()
        return []

    assert_same_results(run, twice)
    assert_same_results(run, higher)
    theirs, ours = run_without_and_with_recipes(run, backward_of_freed_graph)
    assert ours is theirs is RuntimeError


def test_unsaved_intermediates_are_recomputed_too(run: outofcore.Loop) -> None:
    """As in rotary embeddings, where autograd saves the sum but not its terms."""

    def program() -> list[Any]:
        x, weight, angles = leaf(), leaf(*WEIGHT), torch.randn(128, 256)
        h = x * 1
        y = h * angles.cos() + torch.cat([-h[:, 128:], h[:, :128]], 1) * angles.sin()
        del h
        (y @ weight).square().sum().backward()
        return [x.grad, weight.grad]

    assert_same_results(run, program)


def test_views_lists_and_multi_output_ops_are_recomputed(run: outofcore.Loop) -> None:
    def program() -> list[Any]:
        x, weight = leaf(), leaf(*WEIGHT)
        y = F.relu(x @ weight)
        halves = y.view(64, 2, 256).transpose(0, 1).unbind(0)
        joined = torch.cat([halves[0] * halves[1], torch.stack([halves[0], halves[1]], 0).sum(0)], 1)
        best, positions = F.max_pool1d(joined[None], 2, return_indices=True)
        picked = joined[torch.arange(64).flip(0)] * joined[:, ::2].repeat(1, 2)
        spread, middle = torch.var_mean(picked, dim=1)
        del y, halves, joined
        (best.square().mean() + picked.tanh().mean() + (spread - middle).mean()).backward()
        return [x.grad, weight.grad, positions]

    assert_same_results(run, program)


def test_user_saved_tensor_hooks_see_the_tensors_of_plain_pytorch(run: outofcore.Loop) -> None:
    def program() -> list[Any]:
        packed: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor.detach())
            return tensor * 1

        x, weight = leaf(), leaf(*WEIGHT)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            y = F.gelu(F.silu(x @ weight))
            z = y @ weight
        pack_count = len(packed)
        z.square().mean().backward()
        assert len(packed) == pack_count
        return [x.grad, weight.grad, torch.tensor(pack_count), *packed]

    theirs, ours = run_without_and_with_recipes(run, program)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_nested_checkpoints_match_plain_pytorch(run: outofcore.Loop, reentrant: bool) -> None:
    def program() -> list[Any]:
        x, weight = leaf(), leaf(*WEIGHT)

        def inner(h: Tensor) -> Tensor:
            return F.dropout(F.gelu(h @ weight), 0.2)

        def outer(h: Tensor) -> Tensor:
            return F.silu(checkpoint(inner, h, use_reentrant=reentrant) + h)

        h = F.gelu(x * 2)
        h = checkpoint(outer, h, use_reentrant=reentrant)
        (F.gelu(h) @ weight).square().mean().backward()
        return [x.grad, weight.grad]

    assert_same_results(run, program)


class Scaled(torch.autograd.Function):
    """An autograd function that checks the identity of a saved weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y, weight)
        ctx.weight = weight
        return y * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, y, weight = ctx.saved_tensors
        assert weight is ctx.weight
        assert x.requires_grad
        return gradients[0] * y * weight + x * 0, gradients[0] * y


def test_custom_autograd_function_matches_plain_pytorch(run: outofcore.Loop) -> None:
    def program() -> list[Any]:
        x, weight = leaf(), leaf(128, 256)
        h = torch.tanh(x * 2)
        y = Scaled.apply(h, weight)
        del h
        y.square().mean().backward()
        return [x.grad, weight.grad]

    assert_same_results(run, program)


def test_tensor_with_python_attributes_keeps_its_identity(run: outofcore.Loop) -> None:
    class SavesInput(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return gradients[0] * x.factor

    x = leaf()
    h = x * 3
    h.factor = 5.0  # type: ignore[attr-defined]
    y = SavesInput.apply(h)
    del h
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 15.0))


def test_recomputation_uses_the_settings_of_the_forward_pass(run: outofcore.Loop) -> None:
    def program() -> list[Any]:
        x, weight = leaf(), leaf(*WEIGHT)
        with torch.autocast("cpu", torch.bfloat16):
            y = F.gelu(x @ weight)
            z = F.layer_norm(y @ weight, (256,)).float()
        torch.set_flush_denormal(True)
        torch.set_default_dtype(torch.float64)
        try:
            z.square().mean().backward()
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_flush_denormal(False)
        return [x.grad, weight.grad]

    assert_same_results(run, program)
    assert torch.get_default_dtype() is torch.float32


def test_functional_transforms_match_plain_pytorch(run: outofcore.Loop) -> None:
    def program() -> list[Any]:
        x, weight = torch.randn(128, 256), torch.randn(*WEIGHT)

        def loss(w: Tensor) -> Tensor:
            return F.gelu(F.gelu(x @ w) @ w).square().mean()

        rows = torch.func.vmap(torch.func.grad(lambda row: torch.tanh(row * 2).sum()))(x)
        return [torch.func.grad(loss)(weight), rows, *torch.func.vjp(loss, weight)[1](torch.tensor(1.0))]

    theirs, ours = run_without_and_with_recipes(run, program)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_backward_can_be_repeated_after_a_failing_hook(run: outofcore.Loop) -> None:
    def program() -> list[Any]:
        x, weight = leaf(), leaf(*WEIGHT)
        h = x @ weight

        def refuse(_: Tensor) -> None:
            raise RuntimeError("not this one")

        hook = h.register_hook(refuse)
        loss = F.gelu(F.gelu(h) @ weight).square().mean()
        with pytest.raises(RuntimeError, match="not this one"):
            loss.backward(retain_graph=True)
        hook.remove()
        x.grad = weight.grad = None
        loss.backward()
        return [x.grad, weight.grad]

    assert_same_results(run, program)


def test_graph_outlives_its_loop() -> None:
    torch.manual_seed(0)
    x, weight, shift = leaf(), leaf(*WEIGHT), leaf()
    expected = torch.autograd.grad((F.gelu(x + shift) @ weight).square().sum(), (x, weight, shift))
    with outofcore.budget(8 * MIB, home="host") as run:
        recipes_of(run).recompute_all()
        loss = (F.gelu(x + shift) @ weight).square().sum()
        loss = loss * 1
        assert run.stats.dropped_bytes > 0
    with torch.no_grad():
        shift.data.add_(1)  # unnoticed: the change bypasses autograd, and the sum is not saved
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(loss, (x, weight, shift)), expected, strict=True))


def test_another_thread_can_run_backward(run: outofcore.Loop) -> None:
    def program() -> list[Any]:
        x, weight = leaf(), leaf(*WEIGHT)
        loss = F.gelu(F.gelu(x @ weight) @ weight).square().mean() * 1
        run_in_thread(loss.backward)
        return [x.grad, weight.grad]

    assert_same_results(run, program)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.untyped_storage().resize_(0),
        lambda h: run_in_thread(lambda: h.add_(1)),
        lambda h: (run_in_thread(lambda: h.data.add_(1)), evict(h)),
    ],
    ids=["resized", "by_thread", "by_thread_then_evicted"],
)
def test_backward_refuses_storages_changed_by_untracked_code(
    run: outofcore.Loop, change: Callable[[Tensor], object]
) -> None:
    x, weight = leaf(), leaf(*WEIGHT)
    recipes_of(run).switch_off()  # so that h has no recipe
    h = (x * 2).detach()
    recipes_of(run).recompute_all()
    evict(h)  # so that h is clean after its fetch
    z = (h + 1) @ weight
    loss = z.sum()
    change(h)
    with pytest.raises(RuntimeError, match="code that is not observed"):
        loss.backward()


def test_recipes_are_freed_with_their_graph(run: outofcore.Loop) -> None:
    x, weight = leaf(), leaf(*WEIGHT)
    used_bytes = []
    for step in range(12):
        h = x * 2
        loss = F.gelu(F.dropout(h @ weight) @ weight).square().mean() * 1
        if step % 3:
            loss.backward()
            x.grad = weight.grad = None
        del loss, h
        gc.collect()
        used_bytes.append(run.stats.bytes_in_use)
    assert used_bytes[-1] == used_bytes[2]


def test_chosen_storages_are_recomputed_from_the_next_step_on() -> None:
    def train(run: outofcore.Loop | None) -> tuple[list[float], list[outofcore.LoopStats]]:
        torch.manual_seed(0)
        model = Language()
        optimizer, losses, history = adamw(model), [], []
        for step, (ids, targets) in enumerate(sentences(8)):
            if run is not None:
                recipes = recipes_of(run)
                if step == 2:
                    recipes.start_noting()
                if step == 3:
                    candidates = recipes.read_notes()
                    assert sum(candidate.saved for candidate in candidates) > 40
                    # Measured times depend on the machine: choose every recipe that frees more than it holds.
                    recipes.choose(choose_recomputed(candidates, 1.0))
            optimizer.zero_grad()
            loss = loss_of(model, ids, targets)
            if run is not None:
                history.append(run.stats)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            del loss
        return losses, history

    theirs, _ = train(None)
    with outofcore.budget(AMPLE_BYTES, home="host", policy=None) as run:
        ours, history = train(run)
    assert ours == theirs
    assert [stats.recipes > 0 for stats in history] == [False] * 3 + [True] * 5
    steps = [after.recipes - before.recipes for before, after in itertools.pairwise(history[3:])]
    assert len(set(steps)) == 1  # the choice persists across steps
    # Between forward and backward all saved tensors are resident; recipes leave fewer of them.
    assert history[4].bytes_in_use < 0.8 * history[2].bytes_in_use
    assert run.stats.reruns > 0


def test_loop_has_no_recipes_by_default() -> None:
    model = Language()
    with outofcore.budget(AMPLE_BYTES, model) as run:
        ids, targets = next(sentences(1))
        loss = loss_of(model, ids, targets)
        assert loss.grad_fn is not None
        loss.backward()
    assert run.stats.recipes == run.stats.reruns == 0


def test_invalid_recompute_mode_is_refused(run: outofcore.Loop) -> None:
    library = load_paging()
    assert library.follow_recompute(run._space, 7) == -1
    assert b"unknown mode 7" in library.follow_failure()
    assert library.follow_recompute_set(run._space, (ctypes.c_int64 * 1)(3), 1) == 0


def test_ctrl_c_while_replacing_saved_tensors_is_raised(run: outofcore.Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: Tensor, library: ctypes.CDLL) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    x, weight = leaf(), leaf(*WEIGHT)
    y = F.gelu(x @ weight)
    monkeypatch.setattr("outofcore.follow.recipes._replace_saved", interrupt)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(3):
            y = y * 2
