"""Residual networks over images: both libraries' arms from one set of weights, in channels_last."""

from __future__ import annotations

import functools
import re
import time

import torch
from torch import nn

from benchmarks.families import resnet_train, resnet_upstream, resnet_work
from benchmarks.families.base import UNSCALED, Prepared, dtype_of, refuses_unknown
from benchmarks.families.cuts import CUTS, MARK, cut
from benchmarks.plan import Case
from benchmarks.timing import synchronise
from benchmarks.training import READY_BATCHES
from zoo.resnet import ResNet, ResNetConfig, fold_batch_norm
from zoo.resnet.model import PRESETS

_FOLDINGS = ("", "-folded", "-folded-matmul", "-folded-fused", "-folded-fused-matmul")
_MODEL = re.compile(
    r"(?P<preset>resnet(\d+|-debug))(?P<folded>-folded(?P<fused>-fused)?(?P<matmul>-matmul)?)?(-cut-(?P<cut>.+))?"
)
_INPUT = re.compile(r"(jpeg-)?(?P<batch>\d+)x(?P<size>\d+)")


class ResNetWorkload:
    """Inference with random weights over a batch of square images; one call returns the logits.

    ``-folded`` models race the zoo's with its batch norms folded into its convolutions, ``-matmul`` and ``-fused`` in
    other ways to run them (``zoo.resnet.fold_batch_norm``), and ``-cut-<name>`` the zoo's cut into other regions
    (``cuts``). torchvision's arms are the same in all of them: as shipped with its norms, tuned with them
    folded. ``<batch>x<size>`` is the number of images and their pixels a side.

    Training is of models with their norms, in any cut, over float32 weights; the dtype is that of autocast. Batches
    of ``jpeg-<batch>x<size>`` come from files, and a step waits for them.
    """

    family = "resnet"
    models: tuple[str, ...] = (
        "resnet18",
        "resnet18-folded",
        *(
            f"{preset}{folding}{cut}"
            for preset in ("resnet50", "resnet-debug")
            for cut in ("", *(MARK + name for name in CUTS["resnet"]))
            for folding in _FOLDINGS
        ),
    )
    inputs: tuple[str, ...] = ("64x224", "1x224", "128x224", "256x224", "2x32", "4x32", "jpeg-128x224", "jpeg-4x32")

    def default_races(self, device: str, quick: bool, workload: str = "inference") -> list[tuple[str, str]]:
        """(model, input) pairs of a plain run."""
        if workload == "train":
            return [("resnet-debug", "4x32") if device == "cpu" else ("resnet50", "128x224")]
        if device == "cpu":
            return [("resnet-debug", "2x32")]
        races = [("resnet50", "64x224"), ("resnet50", "1x224")]
        return races[:1] if quick else races

    def dtypes(self, device: str) -> tuple[str, ...]:
        """Supported dtypes, the default first."""
        return ("float32", "bfloat16") if device == "cpu" else ("bfloat16", "float16", "float32")

    def refuses(self, case: Case) -> str | None:
        """Why this combination does not exist, or None."""
        if reason := refuses_unknown(self, case, ("inference", "train")):
            return reason
        if case.workload != "train":
            return f"{case.input} is for training" if case.input.startswith("jpeg-") else None
        if _parts(case.model)["folded"]:
            return f"{case.model}: folded models are for inference"
        if case.impl == "upstream-tuned":
            return "tuned is folded, which is for inference; to train, torchvision's users have no better way"
        if case.dtype == "float16":
            return UNSCALED
        return None

    def memory_bytes(self, case: Case) -> int:
        """Estimated peak device memory of the case in bytes, the reference included, which any arm may compute."""
        batch, size = sizes(case.input)
        if case.workload == "train":
            return resnet_train.memory_bytes(_config(case), batch, size, dtype_of(case).itemsize, ready=READY_BATCHES)
        return resnet_work.memory(_config(case), batch, size, dtype_of(case).itemsize)

    def prepare(self, case: Case, *, data_root: str | None, seed: int) -> Prepared:
        """Build model and images on the device.

        Args:
            case: What to build.
            data_root: Not used: there is no data set.
            seed: Of the weights and the images.

        Raises:
            ValueError: If the case is one that :meth:`refuses` names.
        """
        if reason := self.refuses(case):
            raise ValueError(f"{case.arm}: {reason}")
        config, (batch, size) = _config(case), sizes(case.input)
        device, dtype = torch.device(case.device), dtype_of(case)
        if case.workload == "train":
            dtype = torch.float32

        def shipped() -> nn.Module:
            return resnet_upstream.build(config, seed=seed).to(device, dtype)

        images = resnet_upstream.draw_images(config, batch, size, seed=seed).to(device, dtype)
        model, preparation = _implementation(case, shipped())
        if case.impl == "upstream-tuned" and case.strategy == "full" and case.device == "cpu":
            resnet_upstream.freeze_weights()

        raised = case.impl == "upstream-tuned"
        compile_blocks = functools.partial(resnet_upstream.compile_blocks, raised_limit=raised)
        prepared = Prepared(
            model=model.eval().requires_grad_(False),
            inputs={"images" if case.impl == "zoo" else "x": images},
            compile_regions=None if case.impl == "zoo" else compile_blocks,
            # Made anew, so that an arm holds nothing that it does not run on: its memory is measured.
            reference=lambda: resnet_upstream.reference_output(shipped(), images),
            bytes=resnet_work.bytes_moved(config, batch, size, dtype.itemsize),
            bytes_formula=resnet_work.BYTES_FORMULA,
            flops=resnet_work.flops(config, batch, size),
            data="generated, normal",
            preparation_seconds=preparation,
            sizes={
                "batch": batch,
                "pixels": size,
                "blocks": sum(config.layers),
                "classes": config.num_classes,
                "parameters": resnet_work.parameters(config),
            },
            count=batch,
            unit="images",
        )
        if case.workload == "train":
            return resnet_train.for_training(case, prepared, config, batch, size, seed=seed)
        return prepared


def sizes(input: str) -> tuple[int, int]:
    """Images and their pixels a side.

    Raises:
        ValueError: If the name is not ``<batch>x<size>`` or ``jpeg-<batch>x<size>``.
    """
    found = _INPUT.fullmatch(input)
    if found is None or int(found["batch"]) < 1 or int(found["size"]) < 1:
        raise ValueError(f"input {input!r} is not BATCHxPIXELS or jpeg-BATCHxPIXELS")
    return int(found["batch"]), int(found["size"])


def _implementation(case: Case, shipped: nn.Module) -> tuple[nn.Module, dict[str, float]]:
    """The case's model, and the seconds of what was prepared once."""
    if case.impl == "upstream":
        return shipped, {}
    from zoo.resnet.convert import WEIGHTS

    parts = _parts(case.model)
    device = next(shipped.parameters()).device
    model = shipped if case.impl == "upstream-tuned" else WEIGHTS.from_upstream(shipped)
    preparation: dict[str, float] = {}
    if case.impl == "upstream-tuned" or parts["folded"]:
        synchronise(device.type)
        began = time.perf_counter()
        if isinstance(model, ResNet):
            model = fold_batch_norm(
                model,
                convolutions="fused" if parts["fused"] else "glue",
                pointwise="matmul" if parts["matmul"] else "convolution",
            )
        else:
            model = resnet_upstream.fold(model)
        synchronise(device.type)
        preparation["batch norm folding"] = time.perf_counter() - began
    if isinstance(model, ResNet) and parts["cut"]:
        cut(model, "resnet", parts["cut"])
    return model, preparation


def _parts(model: str) -> dict[str, str | None]:
    found = _MODEL.fullmatch(model)
    assert found is not None, model
    return found.groupdict()


def _config(case: Case) -> ResNetConfig:
    return PRESETS[str(_parts(case.model)["preset"])]


WORKLOAD = ResNetWorkload()
