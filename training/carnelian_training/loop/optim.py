"""Optimisers, the learning rate schedule and gradient clipping."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from carnelian_training.config import Config
from carnelian_training.distributed import Process
from carnelian_training.loop.muon import Muon
from carnelian_training.run_config import RunConfig


class NovoGrad(Optimizer):
    """Adam with one second moment per layer (Ginsburg et al. 2019, https://arxiv.org/abs/1905.11286).

    All tensors of a group are updated together. Second moments stay tensors, so that no step waits for the device.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            beta1, beta2 = group["betas"]
            gradients = [p.grad for p in parameters]
            squared_norms = torch._foreach_pow(torch._foreach_norm(gradients), 2)
            for parameter, squared_norm in zip(parameters, squared_norms, strict=True):
                if not self.state[parameter]:
                    momentum = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                    self.state[parameter] = {"momentum": momentum, "second_moment": squared_norm.clone()}
            momenta = [self.state[p]["momentum"] for p in parameters]
            second_moments = [self.state[p]["second_moment"] for p in parameters]
            # At a parameter's first step, its second moment already equals the squared norm.
            torch._foreach_lerp_(second_moments, squared_norms, 1 - beta2)
            divisors = torch._foreach_sqrt(second_moments)
            torch._foreach_add_(divisors, group["eps"])
            torch._foreach_mul_(momenta, beta1)
            torch._foreach_addcdiv_(momenta, gradients, divisors)
            torch._foreach_add_(momenta, parameters, alpha=group["weight_decay"])
            torch._foreach_add_(parameters, momenta, alpha=-group["lr"])


def build_optimizer(config: RunConfig, model: nn.Module, process: Process) -> Optimizer:
    """Build the configured optimiser.

    AdamW and Muon have no weight decay on parameters of one dimension, which are most norms and biases; `biases` of a
    Transformer-XL and `magnitude` of wav2vec 2.0's positions have more. NovoGrad, as published, decays all. Each
    parameter group has `lr_scale`, its factor on the learning rate: a power of `init.stage_lr_decay`.
    """
    optimizer = config.optimizer
    matrices = _matrices(config, model) if optimizer.name == "muon" else set()
    groups: dict[tuple[float, bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decays = optimizer.name == "novograd" or parameter.ndim > 1
        stages_below_head = config.model.num_stages - config.model.stage_of(name)
        scale = config.init.stage_lr_decay**stages_below_head
        groups.setdefault((scale, decays, name in matrices), []).append(parameter)
    # By scale, then decayed before undecayed, so that the order of groups does not depend on that of the layers.
    ordered = sorted(groups.items(), key=lambda group: group[0], reverse=True)
    parameters = [
        {"params": p, "weight_decay": optimizer.weight_decay if decays else 0.0, "lr_scale": scale}
        | ({"orthogonal": orthogonal} if optimizer.name == "muon" else {})
        for (scale, decays, orthogonal), p in ordered
    ]
    if optimizer.name == "novograd":
        return NovoGrad(parameters, optimizer.lr, optimizer.betas, optimizer.weight_decay, optimizer.eps)
    if optimizer.name == "muon":
        # Float32 with fp16: sums of squares overflow float16, and GPUs that need fp16 have no fast bfloat16.
        dtype = torch.bfloat16 if config.loop.precision == "bf16" else torch.float32
        return Muon(parameters, optimizer.lr, optimizer.betas, optimizer.eps, dtype, process)
    if optimizer.name == "adamw":
        return AdamW(parameters, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, fused=True)
    raise ValueError(f"`optimizer.name` must be adamw, muon or novograd, but is {optimizer.name}")


def _matrices(config: RunConfig, model: nn.Module) -> set[str]:
    """Return the names of the weights that Muon makes orthogonal: those that mix channels, except the head's.

    In wav2vec 2.0 these are only the linear layers, because Muon has not been measured on its convolutions.
    """
    layers = {
        f"{name}.weight"
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d)) and layer.weight.shape[1] > 1
    }
    return {name for name in layers if config.model.stage_of(name) < config.model.num_stages}


def learning_rate(config: RunConfig, step: int) -> float:
    """Return the learning rate at `step` (from 0): linear warm-up, hold, decay. It does not depend on the hardware."""
    optimizer = config.optimizer
    scale = 1.0
    if optimizer.lr_batch_s is not None and isinstance(config, Config):
        scale = math.sqrt(config.data.batch_s / optimizer.lr_batch_s)
    peak, floor = scale * optimizer.lr, scale * optimizer.min_lr
    if step < optimizer.warmup_steps:
        share = (step + 1) / optimizer.warmup_steps
        return peak * (optimizer.start_share + (1 - optimizer.start_share) * share)
    start = optimizer.warmup_steps + optimizer.hold_steps
    decaying = max(0, step - start)
    if optimizer.schedule == "exponential":
        return max(floor, peak * math.pow(optimizer.decay, decaying / optimizer.decay_steps))
    progress = min(1.0, decaying / max(1, config.loop.steps - start))
    if optimizer.schedule == "tri_stage":
        return peak * math.pow(optimizer.final_share, progress)
    if optimizer.schedule == "linear":
        return floor + (peak - floor) * (1 - progress)
    if optimizer.schedule == "cosine":
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    raise ValueError(
        f"`optimizer.schedule` must be cosine, linear, exponential or tri_stage, but is {optimizer.schedule}"
    )


def clip_gradients(model: nn.Module, max_norm: float | None, correction: float) -> Tensor:
    """Scale the gradients by `correction`, then clip them to `max_norm` (None: do not); return the unclipped norm."""
    if correction != 1.0:
        torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], correction)
    if max_norm is not None:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm
