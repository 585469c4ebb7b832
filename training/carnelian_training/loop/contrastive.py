"""The contrastive objective of pre-training: the loss of a step, and its evaluation.

The loss is a sum over clips, except for the diversity term: how evenly a step uses the codes depends on their mean
usage over all its parts and processes. That mean is computed first, without gradients; with it, the term is replaced by
a linear function of each clip that has the same gradient.
"""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from carnelian_training.config import Config
from carnelian_training.data.loading import Batch, load
from carnelian_training.data.manifest import read_clips
from carnelian_training.data.plan import Item, group
from carnelian_training.distributed import Process
from carnelian_training.evaluation.evaluate import batch_s
from carnelian_training.features import SAMPLE_RATE_HZ
from carnelian_training.loop.ctc_loss import augmented
from carnelian_training.loop.task import Objective
from carnelian_training.models.network import evaluating
from carnelian_training.models.pretraining import Contrast, PretrainingConfig, Wav2Vec2Pretraining
from carnelian_training.precision import autocast, full_precision


class ContrastiveObjective(Objective):
    """The contrastive loss of one step, which the loop divides by the hidden frames of all parts and processes.

    `model` is the network itself, without the wrapper that the loop may have put around it; steps count from 0.
    """

    def __init__(self, model: Wav2Vec2Pretraining, config: Config, step: int, process: Process) -> None:
        assert config.pretraining is not None
        self.model, self.config, self.settings = model, config, config.pretraining
        self.step, self.process = step, process
        self.part = 0
        self.mean_usage: Tensor | None = None
        self.sums = no_sums(self.settings, process)

    def planned(self, items: Sequence[Item]) -> float:
        """Return an estimate of the step's hidden frames: half of all frames. The loop corrects it later."""
        return sum(item.duration_s for item in items) * SAMPLE_RATE_HZ / self.config.model.stride / 2

    def batches(self, batches: Iterable[Batch], parts: int) -> Iterable[Batch]:
        """Return the parts of this process; if there are several, first compute their mean code usage."""
        if parts == 1:
            return batches
        batches = list(batches)
        total = torch.zeros(self.settings.groups * self.settings.codes + 1, device=self.process.device)
        with torch.no_grad():
            for part, batch in enumerate(batches, start=1):
                self._seed(part)
                with autocast(self.process.device, self.config.loop.precision):
                    usage, hidden = self.model.usage(**augmented(batch, self.config, self.process.device))
                total += torch.cat([usage.flatten(), hidden[None]])
        self.mean_usage = self._mean(total)
        return batches

    def losses(self, network: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Return the loss of each clip, [batch] float32, and the number of hidden frames of all clips."""
        self.part += 1
        self._seed(self.part)
        inputs = augmented(batch, self.config, self.process.device)
        temperature = self.settings.temperature_at(self.step)
        with autocast(self.process.device, self.config.loop.precision):
            contrast: Contrast = network(**inputs, seeds=batch.seeds, temperature=temperature)
        self.sums += sums_of(contrast).detach()
        mean = self.mean_usage
        if mean is None:
            usage, hidden = contrast.usage.detach().sum(0), contrast.hidden.sum()
            mean = self._mean(torch.cat([usage.flatten(), hidden[None]]))
        value, slope = unevenness(mean)
        # Over the whole step the linear term adds up to zero; it is there for its gradient.
        linear = (contrast.usage * slope).sum((1, 2)) - contrast.hidden * (mean * slope).sum()
        diversity = self.settings.diversity_weight * (contrast.hidden * value + linear)
        penalty = self.settings.penalty_weight * contrast.penalty * contrast.hidden
        return contrast.loss + diversity + penalty, int(inputs["time_mask"].sum())

    def measured(self) -> Mapping[str, float]:
        """Return the step's contrastive loss, accuracy, perplexity and number of codes used, and the temperature."""
        found = figures(self.process.total(self.sums), self.settings)
        return found | {"temperature": self.settings.temperature_at(self.step)}

    def _seed(self, part: int) -> None:
        """Seed the random generator by step, process and part, so that a repeated part draws the same dropout."""
        word = f"{self.config.loop.seed}/{self.step}/{self.process.rank}/{part}"
        torch.manual_seed(zlib.crc32(word.encode()))

    def _mean(self, total: Tensor) -> Tensor:
        """Return the mean code usage over all processes, [groups, codes], from this process's sums."""
        total = self.process.total(total)
        return (total[:-1] / total[-1].clamp(min=1)).view(self.settings.groups, self.settings.codes)


@torch.enable_grad()
def unevenness(usage: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the diversity loss, 1 - perplexity / number of codes, and its gradient.

    Args:
        usage: [groups, codes] float32, the mean probability of each code.

    Returns:
        The loss, a scalar, and its gradient with respect to `usage`, [groups, codes].
    """
    usage = usage.detach().requires_grad_()
    value = (usage.numel() - perplexity(usage)) / usage.numel()
    return value.detach(), torch.autograd.grad(value, usage)[0]


def perplexity(usage: Tensor) -> Tensor:
    """Return the perplexity of `usage` [groups, codes], summed over groups; at most the number of all codes."""
    return torch.exp(-(usage * torch.log(usage + 1e-7)).sum(1)).sum()


def no_sums(settings: PretrainingConfig, process: Process) -> Tensor:
    """Return zeros to add :func:`sums_of` to."""
    return torch.zeros(3 + 2 * settings.groups * settings.codes, device=process.device)


def sums_of(contrast: Contrast) -> Tensor:
    """Return what :func:`figures` needs of a batch, in one tensor: [3 + 2 * groups * codes] float32.

    They are loss, hits and hidden frames, the summed probability of each code, and how often each was the most
    probable.
    """
    counts = torch.stack([values.sum() for values in (contrast.loss, contrast.hits, contrast.hidden)])
    return torch.cat([counts, contrast.usage.sum(0).flatten(), contrast.chosen.sum(0).flatten()])


def figures(sums: Tensor, settings: PretrainingConfig) -> dict[str, float]:
    """Compute the figures of the log from the :func:`sums_of` batches.

    Returns:
        `contrastive_loss` and `accuracy` per hidden frame, `perplexity` and `codes_used`.
    """
    loss, hits, hidden = sums[:3].tolist()
    codes = sums[3:].view(2, settings.groups, settings.codes)
    if not hidden:
        return {"contrastive_loss": math.nan, "accuracy": math.nan, "perplexity": math.nan, "codes_used": 0.0}
    return {
        "contrastive_loss": round(loss / hidden, 4),
        "accuracy": round(hits / hidden, 4),
        "perplexity": round(float(perplexity(codes[0] / hidden)), 1),
        "codes_used": float((codes[1] > 0).sum()),
    }


@torch.inference_mode()
def evaluate(model: Wav2Vec2Pretraining, config: Config, manifest: Path, process: Process) -> dict[str, Any]:
    """Compute the figures of :func:`figures` on a manifest, without noise and dropout, with the same masks each time.

    Returns:
        The figures of :func:`figures`, with `dev_` before each name.

    Raises:
        ValueError: The file is not a manifest, or has no clips.
        RuntimeError: Clips are bad; see :func:`.load`.
    """
    items = [Item(clip, seed=seed) for seed, clip in enumerate(read_clips(manifest))]
    items.sort(key=lambda item: item.duration_s)
    shares = group(items, batch_s(config))[process.rank :: process.size]
    sums = no_sums(model.settings, process)
    for batch in load(shares, config.features, config.data.num_threads, manifest=manifest):
        with evaluating(model), full_precision():
            contrast = model(**augmented(batch, config, process.device), seeds=batch.seeds)
        sums += sums_of(contrast)
    return {f"dev_{name}": value for name, value in figures(process.total(sums), model.settings).items()}
