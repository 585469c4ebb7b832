"""Optimisers and the learning rate over the steps."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from carnelian_training import finetune
from carnelian_training.config import Config, OptimizerConfig


class NovoGrad(Optimizer):
    """Adam with one second moment per layer (Ginsburg et al. 2019, https://arxiv.org/abs/1905.11286).

    The second moment stays a tensor, so that no step waits for the device.
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
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad
                squared_norm = gradient.square().sum()
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                    state["second_moment"] = squared_norm
                else:
                    state["second_moment"] = torch.lerp(squared_norm, state["second_moment"], beta2)
                direction = gradient / (state["second_moment"].sqrt() + group["eps"])
                direction = direction.add(parameter, alpha=group["weight_decay"])
                state["momentum"].mul_(beta1).add_(direction)
                parameter.add_(state["momentum"], alpha=-group["lr"])


def build_optimizer(config: Config, model: nn.Module) -> Optimizer:
    """The configured optimiser. AdamW leaves norms and biases undecayed; NovoGrad, as published, decays all.

    Each group carries `lr_scale`, its factor on the learning rate: a power of `init.stage_lr_decay`.
    """
    optimizer = config.optimizer
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decays = optimizer.name == "novograd" or parameter.ndim > 1
        stages_below_head = len(config.model.stages) - finetune.stage_of(name, config)
        scale = config.init.stage_lr_decay**stages_below_head
        groups.setdefault((scale, optimizer.weight_decay if decays else 0.0), []).append(parameter)
    # Decayed parameters first, then undecayed ones, whatever layer comes first.
    ordered = sorted(groups.items(), key=lambda group: group[0], reverse=True)
    parameters = [{"params": p, "weight_decay": decay, "lr_scale": scale} for (scale, decay), p in ordered]
    if optimizer.name == "novograd":
        return NovoGrad(parameters, optimizer.lr, optimizer.betas, optimizer.weight_decay)
    return AdamW(parameters, lr=optimizer.lr, betas=optimizer.betas)


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of `step` (from 0) out of `steps`: linear warm-up, hold, cosine down to `min_lr`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    decay_steps = max(1, steps - config.warmup_steps - config.hold_steps)
    progress = min(1.0, max(0, step - config.warmup_steps - config.hold_steps) / decay_steps)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def clip_gradients(model: nn.Module, max_norm: float | None) -> Tensor:
    """Scale the gradients down to `max_norm` (None: leave them) and return the norm that they had."""
    return nn.utils.clip_grad_norm_(model.parameters(), math.inf if max_norm is None else max_norm)
