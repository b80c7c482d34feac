"""Sampling: from noise and a text to latents, by a step that is captured once.

What does not change from step to step is computed before them: keys and values of the text in all cross-attentions, and
what every timestep adds in all resnet blocks. A step reads its rows of the tables by an index on the device, and the
host does nothing but launch it.

Shape legend: B images, L tokens of the text, D its width, C channels, H height, W width, X and Y as the model's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from zoo.engine.cuda_graph import cuda_graph as capture
from zoo.engine.graphed_step import GraphedStep
from zoo.unet.denoise import DenoiseState, denoise_step
from zoo.unet.model import UNet
from zoo.unet.sampler_inputs import (
    Side,
    check_model,
    checked_guidance,
    checked_schedule,
    checked_shape,
    initial_noise,
    joined,
)
from zoo.unet.schedule import Schedule

# How many steps the host is ahead of the device while it shows progress: enough that the device never waits.
_AHEAD = 2


class Sampler:
    """Makes latents of texts with a UNet and a schedule; compile the model's regions before the first call.

    The first call captures a step. Further ones replay it: texts, seeds, guidance, schedules of no more steps, and
    solvers that remember no more, are copied in. What changes a shape (texts of another length, guidance or none) is
    captured again, in place of what was.

    Args:
        model: A UNet of the zoo.
        schedule: Of all calls that bring no other; of ``make_schedule``.
        shape: [B, C, H, W] of the latents: for an image of 512 × 512 pixels Stable Diffusion has [1, 4, 64, 64].
        guidance_scale: How far to go from the output without the text past the one with it; up to 1 the model runs on
            the text alone.
        most_steps: Steps that a captured step has room for; the schedule's when left out.
        cuda_graph: Run steps as a CUDA graph; left out, where there is a GPU.

    Raises:
        TypeError: If the model is not of this family, or the schedule is none.
        ValueError: If the model cannot be sampled from by text alone, or a size does not fit.
    """

    def __init__(
        self,
        model: UNet,
        schedule: Schedule,
        *,
        shape: tuple[int, int, int, int],
        guidance_scale: float = 7.5,
        most_steps: int | None = None,
        cuda_graph: bool | None = None,
    ) -> None:
        check_model(model)
        self.shape = checked_shape(shape, model)
        self.model = model
        self.schedule = checked_schedule(schedule)
        self.guidance_scale = checked_guidance(guidance_scale)
        self.most_steps = schedule.steps if most_steps is None else most_steps
        if not isinstance(self.most_steps, int) or isinstance(self.most_steps, bool) or self.most_steps < 1:
            raise ValueError(f"most_steps is {most_steps!r}, expected a positive integer")
        self.cuda_graph = cuda_graph
        self.captures = 0
        self._state: DenoiseState | None = None
        self._step: GraphedStep | None = None

    def __call__(
        self,
        text: Tensor,
        negative: Tensor | None = None,
        *,
        added: Mapping[str, Tensor] | None = None,
        negative_added: Mapping[str, Tensor] | None = None,
        latents: Tensor | None = None,
        seed: int = 0,
        schedule: Schedule | None = None,
        guidance_scale: float | None = None,
        progress: bool = False,
    ) -> Tensor:
        """Run all steps.

        Args:
            text: [B, L, D], or [1, L, D] for all images alike.
            negative: The same of what guidance leads away from, with it the encoding of an empty text at least.
            added: ``text_embeds`` [B, X] and ``time_ids`` [B, Y], or [1, ...], for models that take them.
            negative_added: The same for ``negative``.
            latents: [B, C, H, W], noise of standard deviation 1 to start from, in place of the seed's.
            seed: Of the noise, drawn on the host: the same on every device. The global random state is neither used
                nor changed.
            schedule: In place of the sampler's.
            guidance_scale: In place of the sampler's.
            progress: Show a bar; the host then waits for the device, but never the device for the host.

        Returns:
            [B, C, H, W] float32 on the model's device: what a VAE decodes, once divided by its scaling factor. The
            device may still be at work on it.

        Raises:
            TypeError, ValueError: If an input is missing or does not fit, before any step runs.
        """
        schedule = self.schedule if schedule is None else checked_schedule(schedule)
        scale = self.guidance_scale if guidance_scale is None else checked_guidance(guidance_scale)
        guided = scale > 1
        sides = [Side("text", text, "added", added)]
        if guided:
            sides.insert(0, Side("negative", negative, "negative_added", negative_added))
        noise = initial_noise(self.shape, latents, seed)
        with torch.inference_mode():
            texts, conditions = joined(self.model, self.shape[0], sides)
            timesteps = schedule.timesteps[:, None].to(self.model.device)
            shifts = self.model.time_shifts(timesteps, conditions).shifts
            keys_values = self.model.text_keys_values(texts).keys_values
            state = self._state
            if state is None or not state.fits(schedule, shifts, keys_values):
                state = self._make_room(schedule, shifts, keys_values)
                state.begin(schedule, noise, shifts, keys_values, scale)
                self._capture(state, guided)
            state.begin(schedule, noise, shifts, keys_values, scale)
            self._run(state, schedule.steps, guided, progress)
        return state.tracks[0].clone()

    def _make_room(self, schedule: Schedule, shifts: Tensor, keys_values: Tensor) -> DenoiseState:
        kept = schedule.kept if self._state is None else max(schedule.kept, len(self._state.tracks))
        self.most_steps = max(self.most_steps, schedule.steps)
        # What was captured before goes first: its memory is wanted.
        self._state = self._step = None
        return DenoiseState(self.shape, kept, self.most_steps, shifts, keys_values)

    def _capture(self, state: DenoiseState, guided: bool) -> None:
        if self.cuda_graph or (self.cuda_graph is None and self.model.device.type == "cuda"):
            # It is run some times before it is captured.
            self._step = capture(denoise_step, (self.model, state, guided), static=(0, 1), clone_outputs=False)
            self.captures += 1
        self._state = state

    def _run(self, state: DenoiseState, steps: int, guided: bool, progress: bool) -> None:
        step = denoise_step if self._step is None else self._step
        if not progress:
            for _ in range(steps):
                step(self.model, state, guided)
            return
        from tqdm.auto import tqdm

        running: deque[torch.cuda.Event] = deque()
        with tqdm(total=steps, desc="sampling", unit="step") as bar:
            for _ in range(steps):
                step(self.model, state, guided)
                if self.model.device.type == "cuda":
                    running.append(torch.cuda.current_stream(self.model.device).record_event())
                    if len(running) <= _AHEAD:
                        continue
                    running.popleft().synchronize()
                bar.update()
            for event in running:
                event.synchronize()
                bar.update()
