"""The regions in every mode and size; channels_last wherever weights come from; every bad input and its error."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import update_bn

import zoo
from tests.fuzzing import relative_error
from zoo.ops import images as stem
from zoo.ops.images import Norm, bias_act, bias_act_pool, conv_norm_act, max_pool, mean_linear, norm_act, norm_act_pool
from zoo.resnet import ResNet, fold_batch_norm


def debug(**changes: Any) -> ResNet:
    return zoo.create("resnet-debug", **changes)


# Graphs of blocks, which both ends come on top of.
@pytest.mark.parametrize(
    ("preset", "changes", "blocks"),
    [
        ("resnet18", {}, 7), ("resnet50", {}, 8), ("resnet101", {}, 8), ("resnext50_32x4d", {}, 8),
        ("resnet50", {"replace_stride_with_dilation": (False, True, True)}, 8),
        ("resnet50", {"layers": (5, 6, 9, 4)}, 8),
    ],
)  # fmt: skip
def test_deeper_is_no_more_graphs(preset: str, changes: dict[str, Any], blocks: int) -> None:
    model = zoo.create(preset, device="meta", **changes)
    report = zoo.find_regions(model)
    assert report.graphs_needed == blocks + 2 <= 10
    assert all(found.graphs_needed <= found.budget for found in report.regions)


def test_features_are_the_outputs_of_the_stages() -> None:
    model = zoo.compile_regions(debug(), backend="eager")
    images = torch.randn(2, 3, 70, 100)
    with torch.inference_mode():
        features = model(images, stages=True)
        torch.testing.assert_close(model.head(features[-1]), model(images))
    shapes = [(2, 256, 18, 25), (2, 512, 9, 13), (2, 1024, 5, 7), (2, 2048, 3, 4)]
    assert [tuple(feature.shape) for feature in features] == shapes
    assert all(feature.is_contiguous(memory_format=torch.channels_last) for feature in features)


def test_images_too_small_norms_without_momentum_or_of_several_processes_are_refused_in_training() -> None:
    model = debug().train()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.zeros(1, 3, 32, 20))
    for images in (torch.zeros(1, 3, 33, 20), torch.zeros(2, 3, 1, 1)):
        model(images)
    debug(norm="frozen").train()(torch.zeros(1, 3, 1, 1))
    assert model.eval()(torch.zeros(1, 3, 1, 1)).shape == (1, 10)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        debug(track_running_stats=False)(torch.zeros(1, 3, 32, 32))
    model = debug().train()
    images = torch.randn(4, 3, 40, 40)
    with pytest.raises(ValueError, match=r"the momentum of a norm is None.*update_bn.*zoo\.to_upstream\(model\)"):
        update_bn([images], model)
    several = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    for call in (several, torch.compile(several, backend="eager")):
        with pytest.raises(ValueError, match="a norm is a SyncBatchNorm"):
            call(images)


@pytest.mark.slow
def test_norms_keep_a_mode_and_a_momentum_of_their_own() -> None:
    model = debug().train()
    theirs = zoo.to_upstream(model)
    images = torch.randn(4, 3, 40, 40)
    for each, first, last in (
        (model, model.stages[0].blocks[0].conv1.norm, model.stages[0].blocks[0].join.shortcut_norm),
        (theirs, theirs.layer1[0].bn1, theirs.layer1[0].downsample[1]),
    ):
        first.eval()
        last.eval()
        each.get_submodule("stem.norm" if each is model else "bn1").momentum = 0.3
    zoo.compile_regions(model, backend="aot_eager")
    torch.testing.assert_close(model(images), theirs(images), rtol=1e-4, atol=1e-5)
    ours = zoo.to_upstream(model.train()).state_dict()
    for name, expected in theirs.state_dict().items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-5)


def test_convolutions_that_are_pruned_learn_and_zero_init_residual_starts_blocks_as_their_shortcuts() -> None:
    model = debug().train()
    for module in list(model.modules()):
        if isinstance(module, nn.Conv2d):
            prune.custom_from_mask(module, "weight", (torch.rand_like(module.weight) > 0.5).float())
    images = torch.randn(4, 3, 40, 40)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
    model(images)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            torch.testing.assert_close(module.weight, module.weight_orig * module.weight_mask)
    model = debug(zero_init_residual=True, layers=(2, 1, 1, 1))
    x = torch.rand(2, 256, 4, 4)
    with torch.no_grad():
        assert torch.equal(model.stages[0].blocks[1](x), x)
        assert not torch.equal(debug(layers=(2, 1, 1, 1)).stages[0].blocks[1](x), x)


STEM_SHAPES = [(2, 3, 32, 32), (1, 3, 33, 47), (2, 1, 7, 9), (2, 4, 30, 31), (3, 2, 224, 10)]


@pytest.fixture
def squares(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of what was cut into squares, by torch's operators: kernels are said to run."""
    shapes: list[torch.Size] = []
    by_torch = stem.space_to_depth

    def noted(x: torch.Tensor, *sizes: object) -> torch.Tensor:
        shapes.append(x.shape)
        with monkeypatch.context() as patch:
            patch.setattr(stem, "kernels_run", lambda *_: False)
            return by_torch(x, *sizes)

    monkeypatch.setattr(stem, "kernels_run", lambda *_: True)
    monkeypatch.setattr(stem, "space_to_depth", noted)
    return shapes


@pytest.mark.parametrize("shape", STEM_SHAPES, ids=str)
def test_output_and_gradient_of_the_weight(shape: tuple[int, ...], squares: list[torch.Size]):
    x = torch.randn(shape, dtype=torch.float64)
    conv = nn.Conv2d(shape[1], 8, 7, 2, 3, bias=False, dtype=torch.float64).to(memory_format=torch.channels_last)
    expected, found = conv(x), stem.stem_conv(x, conv)
    assert squares == [x.shape, conv.weight.shape]
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, expected)
    (wanted,) = torch.autograd.grad(expected.sin().sum(), conv.weight)
    (given,) = torch.autograd.grad(found.sin().sum(), conv.weight)
    torch.testing.assert_close(given, wanted)


def test_autocast_narrows_images_and_weight(squares: list[torch.Size]):
    conv, x = nn.Conv2d(3, 8, 7, 2, 3, bias=False), torch.randn(2, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = stem.stem_conv(x, conv), conv(x)
    assert found.dtype == torch.bfloat16 and squares
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    found.float().square().sum().backward()
    assert conv.weight.grad is not None


@pytest.mark.parametrize(
    ("options", "shape", "helps"),
    [
        ({}, (1, 3, 8, 8), True), ({"kernel_size": 3, "padding": 1}, (1, 3, 8, 8), False),
        ({"stride": 1}, (1, 3, 8, 8), False), ({"dilation": 2}, (1, 3, 20, 20), False), ({}, (1, 6, 8, 8), False),
    ],
)  # fmt: skip
def test_which_convolutions_are_computed_so(options, shape, helps, squares):
    conv = nn.Conv2d(shape[1], 4, **{"kernel_size": 7, "stride": 2, "padding": 3, **options})
    x = torch.randn(shape)
    found = stem.stem_conv(x, conv)
    assert bool(squares) == helps
    torch.testing.assert_close(found + conv.bias[:, None, None], conv(x))
    squares.clear()
    stem.stem_conv(x.requires_grad_(), conv)
    assert not squares  # images that want a gradient get it


CONFIGS: dict[str, dict[str, Any]] = {
    "bottleneck": {}, "basic": {"block": "basic", "width_per_group": 64},
    "groups": {"groups": 4, "width_per_group": 8}, "dilated": {"replace_stride_with_dilation": (False, True, True)},
    "frozen": {"norm": "frozen"}, "eps": {"norm_eps": 0.1},
}  # fmt: skip


def trained(**changes: Any) -> ResNet:
    """A model whose norms are not as they start: folding one that does nothing would be no test."""
    model = zoo.create("resnet-debug", **changes)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "norm." in key and tensor.is_floating_point():
                if key.endswith("running_var"):
                    tensor.uniform_(0.5, 1.5)
                else:
                    tensor.normal_(std=0.5)
    return model


@pytest.mark.parametrize("config", CONFIGS)
def test_a_folded_model_computes_the_same(config: str) -> None:
    model = trained(**CONFIGS[config])
    folded = fold_batch_norm(model.train())
    assert not folded.training and not any(p.requires_grad for p in folded.parameters())
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    assert folded.config.folded
    images = torch.randn(2, 3, 70, 50)
    model.eval()
    with torch.inference_mode():
        assert relative_error(folded(images), model(images)) < 1e-5
        for got, expected in zip(folded(images, stages=True), model(images, stages=True), strict=True):
            assert relative_error(got, expected) < 1e-5
            assert got.is_contiguous(memory_format=torch.channels_last)
        double = fold_batch_norm(copy.deepcopy(model).double())
        assert relative_error(double(images.double()), copy.deepcopy(model).double()(images.double())) < 1e-13


def test_the_model_stays_as_it_is_and_shares_nothing() -> None:
    model = trained().train()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    folded = fold_batch_norm(model)
    with torch.no_grad():
        for parameter in folded.parameters():
            parameter.zero_()
    assert model.training and not model.config.folded
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_a_folded_model_runs_the_hooks_of_its_convolutions(device: str) -> None:
    folded, images = fold_batch_norm(trained().to(device)), torch.randn(2, 3, 64, 64, device=device)
    seen: list[nn.Module] = []
    convolutions = [each for each in folded.modules() if isinstance(each, nn.Conv2d)]
    with torch.inference_mode():
        before = folded(images)
        for each in convolutions:
            each.register_forward_hook(lambda module, *_: seen.append(module))
        assert relative_error(folded(images), before) < 1e-3
    assert set(seen) == set(convolutions) and len(seen) == len(convolutions)


def test_regions_of_folded_models() -> None:
    folded = fold_batch_norm(trained())
    eager = copy.deepcopy(folded)
    images = torch.randn(2, 3, 64, 64)
    zoo.compile_regions(folded, backend="aot_eager")
    with torch.inference_mode():
        assert zoo.warm_up(folded, images=images).graphs == 6 + 2
        with zoo.enforce_budget(folded):
            torch.testing.assert_close(folded(images), eager(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_operator_of_cudnn_is_what_torch_expects(device: str) -> None:
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    conv_act = torch.ops.zoo_resnet.conv_act.default
    bias, places = torch.arange(8.0, device=device), {"device": device, "memory_format": torch.channels_last}
    with torch.backends.cudnn.flags(enabled=device == "cuda", allow_tf32=False):
        for stride, dilation, groups, with_residual in itertools.product((1, 2), (1, 2), (1, 2), (False, True)):
            x, weight = torch.randn(2, 8, 9, 11).to(**places), torch.randn(8, 8 // groups, 3, 3).to(**places)
            options = ([stride, stride], [dilation, dilation], [dilation, dilation], groups)
            expected = torch.nn.functional.conv2d(x, weight, bias, *options)
            residual = torch.randn_like(expected) if with_residual else None
            expected = (expected if residual is None else expected + residual).relu()
            torch.testing.assert_close(conv_act(x, weight, bias, residual, *options), expected, rtol=1e-4, atol=1e-4)
            torch.library.opcheck(conv_act, (x, weight, bias, residual, *options), test_utils=checks)


def calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    x, more = (torch.randn(2, 6, 7, 4).contiguous(memory_format=torch.channels_last) for _ in range(2))
    mean, variance, count = torch.randn(6), torch.rand(6) + 0.5, torch.tensor(0)
    learning = [each.clone().requires_grad_() for each in (x, more, mean, variance, mean, variance)]
    frozen, batch = (mean, variance), (mean, variance, count, True, 0.1)
    conv = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
    half = x.bfloat16()
    images, pixels = torch.randn(2, 16, 7, 4).bfloat16(), nn.Conv2d(16, 16, 1, bias=False).bfloat16()
    windows = nn.Conv2d(16, 16, 3, padding=1, bias=False).to(torch.bfloat16, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return {
        "norm": (lambda x, *norm: norm_act(x, Norm(*norm, *frozen)), (learning[0], *learning[2:4])),
        "norm of the batch": (lambda x, *norm: norm_act(x, Norm(*norm, *batch)), (learning[0], *learning[2:4])),
        "wider weights": (lambda x, *norm: norm_act(x, Norm(*norm, *frozen)), (half, *learning[2:4])),
        "residual": (lambda x, r, *norm: norm_act(x, Norm(*norm, *batch), r), learning[:4]),
        "two norms": (lambda x, r, w, b, *norm: norm_act(x, Norm(w, b, *batch), r, Norm(*norm, *batch)), learning),
        "convolution": (conv_norm_act, (images, pixels.requires_grad_(False), Norm(*[torch.rand(16)] * 4))),
        "few windows": (conv_norm_act, (images[:1], windows.requires_grad_(False), Norm(*[torch.rand(16)] * 4))),
        "means": (mean_linear, (images[:1], nn.Linear(16, 8).bfloat16().requires_grad_(False))),
        "two frozen norms": (norm_act, (x, Norm(*frozen, *frozen), more, Norm(*frozen, *frozen))),
        "bias": (bias_act, (x, mean)),
        "bias and residual": (bias_act, (x, mean, more)),
        "pooled norm": (norm_act_pool, (x, Norm(*frozen, *frozen))),
        "pooled bias": (bias_act_pool, (x, mean)),
        "pool": (max_pool, learning[:1]),
        "stem": (stem.stem_conv, (torch.randn(2, 3, 16, 12), conv.requires_grad_(False))),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_regions_compute_and_learn_as_eager_blocks_do_on_a_gpu(training: bool) -> None:
    model = zoo.create("resnet-debug", device="cuda").train(training)
    eager = copy.deepcopy(model)
    images = torch.randn(4, 3, 40, 33, device="cuda")
    zoo.compile_regions(model)
    with torch.set_grad_enabled(training), zoo.enforce_budget(model):
        for own in (model, eager):
            out = own(images)
            if training:
                out.square().sum().backward()
        torch.testing.assert_close(model(images), eager(images), rtol=1e-3, atol=1e-4)
    for ours, theirs in ((model.named_parameters(), eager.parameters()), (model.named_buffers(), eager.buffers())):
        for (name, found), expected in zip(ours, theirs, strict=True):
            found, expected = (found, expected) if found.grad is None else (found.grad, expected.grad)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3, msg=name)
