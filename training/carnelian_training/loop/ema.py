"""The exponential moving average of a network over the steps: better than any of the networks it averages."""

import copy

import torch
from torch import nn


class Average:
    """A copy of a network that follows it slowly, batch-norm statistics included.

    Unlike `torch.optim.swa_utils.AveragedModel` it never waits for the device and averages few steps at first, so that
    the random weights of the start are soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay
        pairs = zip(self.model.state_dict().values(), model.state_dict().values(), strict=True)
        self._averages, self._values = zip(*[pair for pair in pairs if pair[0].is_floating_point()], strict=True)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the network after `step` steps: by 1 - decay, by more in the first (as TensorFlow's average)."""
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._averages, self._values, share)
