"""ResNet, ResNeXt and wide ResNet in channels_last, with its blocks as regions."""

from zoo.registry import Family, register
from zoo.resnet.convert import WEIGHTS
from zoo.resnet.convert import fold_batch_norm as fold_batch_norm
from zoo.resnet.model import PRESETS, example_inputs
from zoo.resnet.model import BasicBlock as BasicBlock
from zoo.resnet.model import Bottleneck as Bottleneck
from zoo.resnet.model import ResNet as ResNet
from zoo.resnet.model import ResNetConfig as ResNetConfig
from zoo.resnet.model import ResNetHead as ResNetHead
from zoo.resnet.model import ResNetStage as ResNetStage
from zoo.resnet.model import Stem as Stem

register(Family(presets=PRESETS, example_inputs=example_inputs, upstream_packages=("torchvision",), weights=WEIGHTS))
