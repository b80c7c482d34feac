"""One step of sampling, all of it on the device: what a CUDA graph is captured around.

Shape legend: B images, R rows of the model (2 B with guidance: without the text first, then with it), L tokens of the
text, C channels, H height, W width, N steps, K tensors that go from step to step, S channels of all shifts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.unet.conditions import TextKeysValues, TimeShifts
from zoo.unet.model import UNet
from zoo.unet.schedule import Schedule


class DenoiseState:
    """What a step reads and writes, in memory that never moves.

    Attributes:
        tracks: [K, B, C, H, W] float32: latents, then what the solver remembers of earlier steps.
        input_scales: [N] float32, of the schedule.
        transitions: [N, K, K + 1] float32, of the schedule.
        shifts: [N, R, S] or [N, 1, S], of the timesteps.
        keys_values: [R, L, 2 × channels of all cross-attentions], of the text.
        guidance: Scalar float32.
        step: [1] int64, the step to come.
    """

    def __init__(self, shape: tuple[int, ...], kept: int, steps: int, shifts: Tensor, keys_values: Tensor) -> None:
        exact = torch.float64 if shifts.dtype == torch.float64 else torch.float32
        with shifts.device:
            self.tracks = torch.zeros(kept, *shape, dtype=exact)
            self.input_scales = torch.zeros(steps, dtype=exact)
            self.transitions = torch.zeros(steps, kept, kept + 1, dtype=exact)
            self.shifts = torch.zeros(steps, *shifts.shape[1:], dtype=shifts.dtype)
            self.keys_values = torch.zeros_like(keys_values)
            self.guidance = torch.zeros((), dtype=exact)
            self.step = torch.zeros(1, dtype=torch.int64)

    def fits(self, schedule: Schedule, shifts: Tensor, keys_values: Tensor) -> bool:
        """Whether a run has the shapes that this holds; fewer steps and a simpler solver fit too."""
        return (
            schedule.steps <= len(self.input_scales)
            and schedule.kept <= len(self.tracks)
            and (shifts.shape[1:], shifts.dtype) == (self.shifts.shape[1:], self.shifts.dtype)
            and (keys_values.shape, keys_values.dtype) == (self.keys_values.shape, self.keys_values.dtype)
            and keys_values.device == self.keys_values.device
        )

    def begin(
        self, schedule: Schedule, noise: Tensor, shifts: Tensor, keys_values: Tensor, guidance_scale: float
    ) -> None:
        """Set up a run. No value of it is baked into a captured step."""
        steps, kept, spare = schedule.steps, schedule.kept, len(self.tracks) - schedule.kept
        # Solvers that remember less than there is room for: the output stays the last column.
        matrices = schedule.transitions
        matrices = torch.cat([F.pad(matrices[..., :kept], (0, spare)), matrices[..., kept:]], dim=-1)
        self.transitions[:steps].copy_(F.pad(matrices, (0, 0, 0, spare)))
        self.input_scales[:steps].copy_(schedule.input_scales)
        self.shifts[:steps].copy_(shifts)
        self.keys_values.copy_(keys_values)
        self.guidance.fill_(guidance_scale)
        self.tracks.zero_()
        self.tracks[0].copy_(noise)
        self.tracks[0].mul_(schedule.noise_scale)
        self.step.zero_()


def denoise_step(model: UNet, state: DenoiseState, guided: bool) -> None:
    """Run the model on the latents and move on to the next step's; all reads and writes are of ``state``."""
    index = state.step
    sample = (state.tracks[0] * state.input_scales.index_select(0, index)).to(model.dtype)
    shifts = TimeShifts(state.shifts.index_select(0, index)[0])
    sample = torch.cat([sample, sample]) if guided else sample
    output = model(sample, shifts, TextKeysValues(state.keys_values)).sample.to(state.tracks.dtype)
    if guided:
        without, with_text = output.chunk(2)
        output = without + state.guidance * (with_text - without)
    shares = state.transitions.index_select(0, index)[0]
    moved = shares[:, :, None, None, None, None] * torch.cat([state.tracks, output[None]])
    state.tracks.copy_(moved.sum(1))
    # Runs before a capture may be more than the steps that there are.
    index.add_(1).remainder_(len(state.input_scales))
