from __future__ import annotations

import inspect
from itertools import islice
from pathlib import Path

import pytest
import torch
from effort import some_of
from torch import nn

from outofcore import zoo
from outofcore.errors import InputError
from outofcore.zoo.data import image_batches, library_text
from outofcore.zoo.gpt import GPTShape, choose_shape
from outofcore.zoo.vision import ResNetShape, choose_resnet_shape

# Small enough to train one step within a second.
TINY = {
    "resnet": {"batch": 2, "depth": 18, "size": 32},
    "vgg16": {"batch": 2, "size": 32},
    "densenet121": {"batch": 2, "size": 32},
    "unet3d": {"batch": 2, "size": 8, "base": 4},
    "gpt": {"batch": 2, "layers": 2, "width": 32, "heads": 2, "context": 16},
}


def tiny(name: str, **options: object) -> zoo.Workload:
    return zoo.workload(name, **{**TINY[name], **options})


def test_every_name_has_a_tiny_workload() -> None:
    assert set(TINY) == set(zoo.names())


@pytest.mark.parametrize(
    ("name", "options", "published"),
    [
        ("resnet", {"depth": 18}, 11_689_512),
        ("resnet", {"depth": 34}, 21_797_672),
        ("resnet", {"depth": 50}, 25_557_032),
        ("resnet", {"depth": 101}, 44_549_160),
        ("resnet", {"depth": 152}, 60_192_808),
        ("vgg16", {}, 138_357_544),
        ("densenet121", {}, 7_978_856),
        ("gpt", {"vocab": 50257}, 124_439_808),
    ],
)
def test_parameter_count_matches_the_publication(name: str, options: dict[str, int], published: int) -> None:
    assert zoo.workload(name, batch=1, **options).parameter_count() == published


def test_unet3d_parameters_without_norms_match_the_publication() -> None:
    with torch.device("meta"):
        model = zoo.workload("unet3d", batch=1).network()
    norms = sum(p.numel() for m in model.modules() if isinstance(m, nn.BatchNorm3d) for p in m.parameters())
    assert sum(p.numel() for p in model.parameters()) - norms == 19_069_955


@pytest.mark.parametrize("depth", some_of([18, 34, 50, 101, 152, 1001, 2498], lambda depth: depth < 2000))
def test_depth_counts_the_layers(depth: int) -> None:
    shape = choose_resnet_shape(depth)
    assert sum(shape.blocks) * (3 if shape.bottleneck else 2) + 2 == depth
    with torch.device("meta"):
        model = zoo.workload("resnet", batch=1, depth=depth).network()
    shortcuts = 4 if shape.bottleneck else 3
    weighted = sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules())
    assert weighted - shortcuts == depth


def test_deep_networks_grow_in_the_third_stage() -> None:
    assert choose_resnet_shape(50) == ResNetShape((3, 4, 6, 3), bottleneck=True)
    assert choose_resnet_shape(101) == ResNetShape((3, 4, 23, 3), bottleneck=True)
    assert choose_resnet_shape(2498) == ResNetShape((6, 32, 788, 6), bottleneck=True)


@pytest.mark.parametrize(("depth", "nearest"), [(51, "50 or 53"), (1000, "998 or 1001"), (20, "35 or 38")])
def test_impossible_depth_names_the_nearest_depths(depth: int, nearest: str) -> None:
    with pytest.raises(InputError, match=nearest):
        zoo.workload("resnet", batch=1, depth=depth)


@pytest.mark.parametrize("size", ["10M", "125M", "350M", "1.3B", "13B"])
def test_params_option_picks_a_gpt_of_matching_size(size: str) -> None:
    count = zoo.parse_count(size)
    work = zoo.workload("gpt", batch=1, params=size)
    assert abs(work.parameter_count() / count - 1) < 0.05
    assert work.parameter_count() == choose_shape(count, 1024, 256, 0.1).parameters


def test_params_keeps_a_usual_aspect() -> None:
    shape = choose_shape(350_000_000, 1024, 256, 0.1)
    assert shape.width == 64 * shape.heads
    assert 32 <= shape.width / shape.layers <= 128


def test_gpt_counts_its_parameters_by_formula() -> None:
    work = zoo.workload("gpt", batch=1, layers=3, width=96, heads=4, context=20, vocab=300)
    assert work.parameter_count() == GPTShape(3, 96, 4, 20, 300).parameters


@pytest.mark.parametrize(("text", "count"), [("350M", 350_000_000), ("1.3B", 1_300_000_000), (7, 7), (" 2 k ", 2000)])
def test_parse_count_reads_suffixes(text: str | int, count: int) -> None:
    assert zoo.parse_count(text) == count


@pytest.mark.parametrize("text", ["", "M", "-3", "0", "3 GiB", True])
def test_parse_count_refuses_invalid_text(text: str) -> None:
    with pytest.raises(InputError, match="number of parameters"):
        zoo.parse_count(text)


@pytest.mark.parametrize("name", some_of(zoo.names(), lambda name: name != "densenet121"))
def test_shapes_of_batches_and_results(name: str) -> None:
    work = tiny(name, batch=3)
    inputs, targets = next(work.batches())
    result = work.build()(inputs)
    match name:
        case "gpt":
            assert (inputs.shape, targets.shape, result.shape) == ((3, 16), (3, 16), (3, 16, 256))
        case "unet3d":
            assert (inputs.shape, targets.shape) == ((3, 3, 8, 8, 8), (3, 8, 8, 8))
            assert result.shape == (3, 3, 8, 8, 8)
        case _:
            assert (inputs.shape, targets.shape, result.shape) == ((3, 3, 32, 32), (3,), (3, 1000))
    assert targets.dtype == torch.int64
    empty = work.empty_batch()
    assert [(x.shape, x.dtype) for x in empty] == [(x.shape, x.dtype) for x in (inputs, targets)]
    assert all(x.is_meta for x in empty)
    assert next(work.batches(batch=5))[0].shape[0] == 5


@pytest.mark.parametrize("name", zoo.names())
def test_data_depends_on_the_seed_alone(name: str) -> None:
    first = list(islice(tiny(name, seed=3).batches(), 2))
    repeated = list(islice(tiny(name).batches(seed=3), 2))
    other_seed = list(islice(tiny(name).batches(seed=4), 2))
    for expected, actual in zip(first, repeated, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    assert not torch.equal(first[0][0], first[1][0])
    assert not torch.equal(first[0][0], other_seed[0][0])


@pytest.mark.parametrize("name", zoo.names())
def test_weights_depend_on_the_seed_alone(name: str) -> None:
    work = tiny(name)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = work.build().state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(12)
    repeated, other_seed = work.build().state_dict(), work.build(seed=1).state_dict()
    assert all(torch.equal(first[key], repeated[key]) for key in first)
    assert any(not torch.equal(first[key], other_seed[key]) for key in first)


# Deep networks take seconds to build.
QUICKLY_BUILT = [name for name in zoo.names() if name not in ("densenet121", "vgg16")]


@pytest.mark.parametrize("name", some_of(zoo.names(), QUICKLY_BUILT))
def test_step_changes_the_parameters(name: str) -> None:
    work = tiny(name)
    model = work.build()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = work.make_step(model, work.optimizer(model))(*next(work.batches()))
    assert loss.shape == ()
    assert torch.isfinite(loss)
    assert all(parameter.grad is None for parameter in model.parameters())
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert sum(changed) > 0.9 * len(changed)


@pytest.mark.exhaustive
def test_gpt_learns() -> None:
    work = tiny("gpt", batch=16, width=64, context=32, dropout=0.0, lr=3e-3)
    model = work.build()
    step = work.make_step(model, work.optimizer(model))
    losses = [step(*batch).item() for batch in islice(work.batches(), 40)]
    # The first loss is that of guessing among 256 bytes: ln 256 is 5.55.
    assert 5.3 < losses[0] < 5.8
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5


def test_gpt_does_not_see_later_tokens() -> None:
    work = tiny("gpt", dropout=0.0)
    model, tokens = work.build(), next(work.batches())[0]
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 256
    original_output, changed_output = model(tokens), model(changed)
    assert torch.equal(original_output[:, :10], changed_output[:, :10])
    assert not torch.equal(original_output[:, 10:], changed_output[:, 10:])


def test_gpt_shares_its_embedding() -> None:
    model = tiny("gpt").build()
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")


@pytest.mark.parametrize("impl", [None, *zoo.OptimizerImpl])
@pytest.mark.parametrize("rule", list(zoo.OptimizerName))
def test_optimizers_train_with_each_implementation(rule: zoo.OptimizerName, impl: zoo.OptimizerImpl | None) -> None:
    options = {"optimizer": rule.value, "optimizer_impl": impl and impl.value}
    if rule is zoo.OptimizerName.RMSPROP and impl is zoo.OptimizerImpl.FUSED:
        with pytest.raises(InputError, match="no fused rmsprop"):
            tiny("gpt", **options)
        return
    work = tiny("gpt", **options)
    model = work.build()
    optimizer = work.optimizer(model)
    if impl is not None:
        assert bool(optimizer.defaults.get("fused")) == (impl is zoo.OptimizerImpl.FUSED)
        assert optimizer.defaults["foreach"] == (impl is zoo.OptimizerImpl.FOREACH)
    step = work.make_step(model, optimizer)
    losses = [step(*batch).item() for batch in islice(work.batches(), 2)]
    assert losses[0] != losses[1]


def test_amp_computes_in_bfloat16() -> None:
    batch = next(tiny("gpt").batches())
    losses: list[float] = []
    for amp in (False, True):
        work = tiny("gpt", amp=amp, dropout=0.0)
        model = work.build()
        dtypes: set[torch.dtype] = set()
        model.get_submodule("head").register_forward_hook(lambda _, __, out, dtypes=dtypes: dtypes.add(out.dtype))
        losses.append(work.make_step(model, work.optimizer(model))(*batch).item())
        assert dtypes == {torch.bfloat16 if amp else torch.float32}
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]


def test_clip_bounds_the_update() -> None:
    batch = next(tiny("gpt").batches())
    moved: list[float] = []
    for clip in (None, 1e-3):
        work = tiny("gpt", optimizer="sgd", lr=1.0, clip=clip, dropout=0.0)
        model = work.build()
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        work.make_step(model, work.optimizer(model))(*batch)
        moved.append((nn.utils.parameters_to_vector(model.parameters()) - before).norm().item())
    assert moved[1] == pytest.approx(1e-3, rel=0.01)
    assert moved[0] > 10 * moved[1]


@pytest.mark.parametrize("source", list(zoo.ImageSource))
def test_images_are_of_order_one_and_labelled(source: zoo.ImageSource) -> None:
    if source is not zoo.ImageSource.GENERATED:
        pytest.importorskip("sklearn")
    if source is zoo.ImageSource.PHOTOS:
        pytest.importorskip("PIL")
    images, labels = next(image_batches(32, 64, 1000, 0, source))
    assert images.shape == (32, 3, 64, 64)
    assert images.dtype == torch.float32
    assert images.is_contiguous()
    assert images.abs().mean() < 3
    assert 0.2 < images.std() < 3
    assert 4 < len(labels.unique()) <= 10
    assert next(image_batches(32, 64, 3, 0, source))[1].max() == 2


def test_images_with_one_label_are_alike() -> None:
    images, labels = next(image_batches(64, 32, 1000, 0, zoo.ImageSource.GENERATED))
    means = torch.stack([images[labels == label].mean((0, 2, 3)) for label in labels.unique()])
    assert (means[:, 0] - means[:, 2]).abs().max() < 1
    red = images[labels < 5].std((2, 3))
    blue = images[labels >= 5].std((2, 3))
    assert (red[:, 0] > red[:, 2]).all()
    assert (blue[:, 0] < blue[:, 2]).all()


def test_volumes_hold_every_class() -> None:
    volumes, masks = next(zoo.workload("unet3d", batch=2, size=32).batches())
    assert masks.unique().tolist() == [0, 1, 2]
    inside = volumes.movedim(1, -1)[masks == 1].mean(0)
    outside = volumes.movedim(1, -1)[masks == 0].mean(0)
    assert (inside - outside).norm() > 0.1


def test_text_is_the_source_of_the_library() -> None:
    text = bytes(library_text(1 << 20).tolist())
    assert len(text) == 1 << 20
    assert text.startswith(Path(inspect.getfile(__import__("__future__"))).read_bytes())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("alexnet", {}, "It has resnet, vgg16"),
        ("resnet", {"layers": 3}, "no option 'layers'"),
        ("gpt", {"size": 3}, "no option 'size'"),
        ("gpt", {"width": 100, "heads": 3}, "do not divide"),
        ("gpt", {"params": "1M", "layers": 3}, "not both"),
        ("gpt", {"params": 1000}, "the smallest has"),
        ("gpt", {"vocab": 100}, "at least 256"),
        ("gpt", {"optimizer": "lion"}, "use one of: sgd"),
        ("gpt", {"dropout": 1.0}, "below 1"),
        ("gpt", {"seed": -1}, "must not be negative"),
        ("resnet", {"size": 16}, "at least 32"),
        ("unet3d", {"size": 12}, "multiple of 8"),
        ("unet3d", {"batch": 0}, "batch must be above zero"),
        ("unet3d", {"clip": 0.0}, "clip must be above zero"),
    ],
)
def test_invalid_options_are_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        zoo.workload(name, **{"batch": 1, **options})


def test_describe_names_the_main_settings() -> None:
    text = zoo.workload("gpt", batch=8, amp=True, clip=1.0, optimizer_impl="fused").describe()
    for part in ("gpt: 12 layers of width 768", "86,039,040 parameters", "batch 8", "adamw at 0.0003 (fused)"):
        assert part in text
    assert "bfloat16; gradients clipped to 1;" in text
