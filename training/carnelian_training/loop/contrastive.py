"""The objective of pre-training: to pick each masked frame out of others. Its loss over a step, and its evaluation.

The loss is a sum over clips but for one term: how evenly a step uses the codes depends on their mean use over all its
parts and processes. That mean is computed first, without gradients; given it, the term has a linear form in each clip
with the same gradient.
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
from carnelian_training.models.pretraining import Contrast, PretrainingConfig, Wav2Vec2Pretraining
from carnelian_training.precision import autocast, full_precision


class ContrastiveObjective:
    """The loss of one step, which the loop divides by the hidden frames of all parts and processes.

    Args:
        model: the network itself, where the loop may have wrapped it.
        config: of the run.
        step: from 0.
        process: this one.
    """

    def __init__(self, model: Wav2Vec2Pretraining, config: Config, step: int, process: Process) -> None:
        assert config.pretraining is not None
        self.model, self.config, self.settings = model, config, config.pretraining
        self.step, self.process = step, process
        self.part = 0
        self.mean_usage: Tensor | None = None
        self.sums = torch.zeros(3, device=process.device)  # loss, hits, hidden frames
        self.codes = torch.zeros(2, self.settings.groups, self.settings.codes, device=process.device)

    def planned(self, items: Sequence[Item]) -> float:
        """An estimate of the masked frames; the loop replaces it by their number."""
        return sum(item.duration_s for item in items) * SAMPLE_RATE_HZ / self.config.model.stride / 2

    def batches(self, batches: Iterable[Batch], parts: int) -> Iterable[Batch]:
        """The parts of this process; if there are several, the use of codes is measured over all of them first."""
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
        """The loss of each clip, [batch] float32, and the hidden frames of all."""
        self.part += 1
        self._seed(self.part)
        inputs = augmented(batch, self.config, self.process.device)
        temperature = self.settings.temperature_at(self.step)
        with autocast(self.process.device, self.config.loop.precision):
            contrast: Contrast = network(**inputs, seeds=batch.seeds, temperature=temperature)
        self._count(contrast)
        mean = self.mean_usage
        if mean is None:
            usage, hidden = contrast.usage.detach().sum(0), contrast.hidden.sum()
            mean = self._mean(torch.cat([usage.flatten(), hidden[None]]))
        value, slope = unevenness(mean)
        # Over the whole step the second term adds up to nothing; it is there for its gradient.
        linear = (contrast.usage * slope).sum((1, 2)) - contrast.hidden * (mean * slope).sum()
        diversity = self.settings.diversity_weight * (contrast.hidden * value + linear)
        penalty = self.settings.penalty_weight * contrast.penalty * contrast.hidden
        return contrast.loss + diversity + penalty, int(inputs["time_mask"].sum())

    def measured(self) -> Mapping[str, float]:
        """Accuracy, the contrastive loss alone, and what is used of the codes."""
        total = self.process.total(torch.cat([self.sums, self.codes.flatten()]))
        return figures(total[:3], total[3:].view_as(self.codes)) | {
            "temperature": self.settings.temperature_at(self.step)
        }

    def _seed(self, part: int) -> None:
        """Let dropout draw the same whenever a part is run."""
        word = f"{self.config.loop.seed}/{self.step}/{self.process.rank}/{part}"
        torch.manual_seed(zlib.crc32(word.encode()))

    def _mean(self, total: Tensor) -> Tensor:
        """[groups, codes] of this process's sums and hidden frames, over all processes."""
        total = self.process.total(total)
        return (total[:-1] / total[-1].clamp(min=1)).view(self.settings.groups, self.settings.codes)

    def _count(self, contrast: Contrast) -> None:
        found = [tensor.detach().sum() for tensor in (contrast.loss, contrast.hits, contrast.hidden)]
        self.sums += torch.stack(found)
        self.codes += torch.stack([contrast.usage.detach().sum(0), contrast.chosen.detach().sum(0)])


@torch.enable_grad()
def unevenness(usage: Tensor) -> tuple[Tensor, Tensor]:
    """How far the perplexity of a use of codes is below their number, as a share of it, and the gradient of that.

    Args:
        usage: [groups, codes] float32, probabilities.
    """
    usage = usage.detach().requires_grad_()
    value = (usage.numel() - perplexity(usage)) / usage.numel()
    return value.detach(), torch.autograd.grad(value, usage)[0]


def perplexity(usage: Tensor) -> Tensor:
    """Of [groups, codes] probabilities: the sum over groups, at most as many as there are codes in all."""
    return torch.exp(-(usage * torch.log(usage + 1e-7)).sum(1)).sum()


def figures(sums: Tensor, codes: Tensor) -> dict[str, float]:
    """The figures of the log, from sums.

    Args:
        sums: loss, hits and masked frames.
        codes: [2, groups, codes], the summed probabilities of codes and how often each was the likeliest.
    """
    loss, hits, hidden = sums.tolist()
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
    """The same figures on a manifest, without noise and dropout, and with the same masks each time.

    Raises:
        ValueError: The file is not a manifest, or has no clips.
        RuntimeError: A clip is bad; it is named.
    """
    model.eval()
    items = [Item(clip, seed=seed) for seed, clip in enumerate(read_clips(manifest))]
    items.sort(key=lambda item: item.duration_s)
    shares = group(items, batch_s(config))[process.rank :: process.size]
    sums = torch.zeros(3, device=process.device)
    settings: PretrainingConfig = model.settings
    codes = torch.zeros(2, settings.groups, settings.codes, device=process.device)
    for batch in load(shares, config.features, config.data.num_threads):
        with full_precision():
            contrast = model(**augmented(batch, config, process.device), seeds=batch.seeds)
        sums += torch.stack([contrast.loss.sum(), contrast.hits.sum(), contrast.hidden.sum()])
        codes += torch.stack([contrast.usage.sum(0), contrast.chosen.sum(0)])
    total = process.total(torch.cat([sums, codes.flatten()]))
    return {f"dev_{name}": value for name, value in figures(total[:3], total[3:].view_as(codes)).items()}
