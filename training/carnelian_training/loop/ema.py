"""The exponential moving average of a network's weights over the steps, often better than any of the averaged ones."""

import copy

import torch
from torch import nn


class Average:
    """A copy of a network whose weights and batch-norm statistics are exponential moving averages of the network's.

    Unlike `torch.optim.swa_utils.AveragedModel`, it never waits for the device. It averages over few steps at first, so
    that the random weights of the start have little influence.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay
        pairs = zip(self.model.state_dict().values(), model.state_dict().values(), strict=True)
        self._averages, self._values = zip(*[pair for pair in pairs if pair[0].is_floating_point()], strict=True)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the network after `step` steps.

        The share is 1 - decay, and more in the first steps, as in TensorFlow's `ExponentialMovingAverage`.
        """
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._averages, self._values, share)
