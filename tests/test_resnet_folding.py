"""Folded models against the ones they came from, in every way that they run."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import zoo
from zoo.ops.conv import conv_act, linear_relu
from zoo.resnet import Folding, ResNet, fold_batch_norm

WAYS = list(itertools.product(("glue", "fused"), ("convolution", "matmul")))
CONFIGS: dict[str, dict[str, Any]] = {
    "bottleneck": {},
    "basic": {"block": "basic", "width_per_group": 64},
    "groups": {"groups": 4, "width_per_group": 8},
    "dilated": {"replace_stride_with_dilation": (False, True, True)},
    "frozen": {"norm": "frozen"},
    "eps": {"norm_kwargs": {"eps": 0.1}},
}


def trained(**changes: Any) -> ResNet:
    """A model whose norms are not as they start: folding one that does nothing would be no test."""
    model = zoo.create("resnet-debug", **changes)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "norm." in key and tensor.is_floating_point():
                if key.endswith("running_var"):
                    tensor.uniform_(0.5, 1.5)
                else:
                    # Negative scales too.
                    tensor.normal_(std=0.5)
    return model


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("convolutions", "pointwise"), WAYS)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_folded_model_computes_the_same(config: str, convolutions: str, pointwise: str) -> None:
    model = trained(**CONFIGS[config])
    folded = fold_batch_norm(model.train(), convolutions=convolutions, pointwise=pointwise)
    assert not folded.training and not any(p.requires_grad for p in folded.parameters())
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    assert folded.config.folding == Folding(convolutions=convolutions, pointwise=pointwise)
    images = torch.randn(2, 3, 70, 50)
    model.eval()
    with torch.inference_mode():
        assert error(folded(images), model(images)) < 1e-5
        for got, expected in zip(folded.features(images), model.features(images), strict=True):
            assert error(got, expected) < 1e-5
            assert got.is_contiguous(memory_format=torch.channels_last)
        double = fold_batch_norm(copy.deepcopy(model).double(), convolutions=convolutions, pointwise=pointwise)
        assert error(double(images.double()), copy.deepcopy(model).double()(images.double())) < 1e-13


def test_the_model_stays_as_it_is_and_shares_nothing() -> None:
    model = trained().train()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    folded = fold_batch_norm(model)
    with torch.no_grad():
        for parameter in folded.parameters():
            parameter.zero_()
    assert model.training and model.config.folding is None
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize(("convolutions", "pointwise"), WAYS)
def test_regions_of_folded_models(convolutions: str, pointwise: str) -> None:
    folded = fold_batch_norm(trained(), convolutions=convolutions, pointwise=pointwise)
    eager = copy.deepcopy(folded)
    images = torch.randn(2, 3, 64, 64)
    zoo.compile_regions(folded, backend="aot_eager")
    with torch.inference_mode():
        assert zoo.warm_up(folded, images=images).graphs == 6 + 2
        with zoo.enforce_budget(folded):
            torch.testing.assert_close(folded(images), eager(images), rtol=1e-4, atol=1e-4)


def test_the_operator_of_cudnn_says_its_shapes() -> None:
    for stride, dilation, groups, with_residual in itertools.product((1, 2), (1, 2), (1, 2), (False, True)):
        x = torch.randn(2, 4, 9, 11).contiguous(memory_format=torch.channels_last)
        weight = torch.randn(6, 4 // groups, 3, 3).contiguous(memory_format=torch.channels_last)
        options = ([stride, stride], [dilation, dilation], [dilation, dilation], groups)
        shape = torch.nn.functional.conv2d(x, weight, None, *options).shape
        residual = torch.randn(shape).contiguous(memory_format=torch.channels_last) if with_residual else None
        expected = torch.nn.functional.conv2d(x, weight, torch.arange(6.0), *options)
        expected = expected.relu() if residual is None else (expected + residual).relu()
        torch.testing.assert_close(conv_act(x, weight, torch.arange(6.0), residual, *options), expected)
        torch.library.opcheck(
            conv_act,
            (x, weight, torch.arange(6.0), residual, *options),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"),
        )


def test_the_operator_of_the_product_says_its_shapes() -> None:
    x, weight, bias = torch.randn(7, 4), torch.randn(6, 4), torch.randn(6)
    torch.testing.assert_close(linear_relu(x, weight, bias), torch.nn.functional.linear(x, weight, bias).relu())
    torch.library.opcheck(
        linear_relu, (x, weight, bias), test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static")
    )


def test_what_is_refused() -> None:
    model = trained()
    folded = fold_batch_norm(model)
    with pytest.raises(TypeError, match=r"Linear is not a ResNet of the zoo; zoo\.from_upstream"):
        fold_batch_norm(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="folded already"):
        fold_batch_norm(folded)
    with pytest.raises(ValueError, match="track_running_stats is False"):
        fold_batch_norm(trained(norm_kwargs={"track_running_stats": False}))
    with pytest.raises(ValueError, match="convolutions is 'slow', expected one of 'glue', 'fused'"):
        fold_batch_norm(model, convolutions="slow")
    with pytest.raises(ValueError, match="pointwise is 'gemm', expected one of 'convolution', 'matmul'"):
        fold_batch_norm(model, pointwise="gemm")
    with pytest.raises(ValueError, match="folded into its convolutions; convert the one it came from"):
        zoo.to_upstream(folded)
    with pytest.raises(ValueError, match="a folded model is for inference"):
        folded(torch.zeros(1, 3, 64, 64, requires_grad=True))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"use model\.to\(torch\.bfloat16\)"):
        folded(torch.zeros(1, 3, 64, 64))
    with pytest.raises(TypeError, match=r"expected float32; use images\.to\(torch\.float32\);"):
        folded(torch.zeros(1, 3, 64, 64).half())
