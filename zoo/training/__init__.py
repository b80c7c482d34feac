"""The training step: forward, loss, backward, clipping and optimizer, as one call that a CUDA graph can hold.

The loop, the data and the schedule stay the user's own.
"""

from zoo.training.checkpointing import checkpoint_regions as checkpoint_regions
from zoo.training.fused import AdamW as AdamW
from zoo.training.fused import LinearCrossEntropy as LinearCrossEntropy
from zoo.training.fused import float8_products as float8_products
from zoo.training.parallel import parallelize as parallelize
from zoo.training.step import NonFiniteError as NonFiniteError
from zoo.training.step import TrainingStep as TrainingStep
from zoo.training.step import TrainingWarning as TrainingWarning
from zoo.training.step import capture_obstacles as capture_obstacles
