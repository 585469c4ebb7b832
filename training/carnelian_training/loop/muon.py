"""The optimiser Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from carnelian_training.distributed import Process

_MOMENTUM = 0.95
_ITERATIONS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Jordan's a, b and c of the Newton-Schulz iteration x -> a x + b x^3 + c x^5, which brings singular values close to 1
in five iterations."""


class Muon(Optimizer):
    """Updates matrices by their momentum with all singular values made equal, and other parameters as AdamW does.

    PyTorch's own Muon takes only 2-D parameters, no convolutions. The update of a matrix is scaled to the size of
    AdamW's, so the same learning rate suits both (Liu et al. 2025, https://arxiv.org/abs/2502.16982). All processes
    have the same momenta; each makes its share of them orthogonal and receives the others.

    A parameter group with `orthogonal: True` holds weights of at least 2 dimensions. Weights [out, in, ...] are updated
    as matrices [out, in * ...], made orthogonal in `dtype`. AdamW, with `betas` and `eps`, updates the other groups.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        dtype: torch.dtype,
        process: Process,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "orthogonal": False}
        super().__init__(params, defaults)
        self._dtype = dtype
        self._process = process

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        matrices: list[tuple[nn.Parameter, dict[str, Any]]] = []
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["orthogonal"]:
                matrices += [(parameter, group) for parameter in parameters]
            elif parameters:
                self._move_others(parameters, group)
        if matrices:
            self._move_matrices(matrices)

    def _move_matrices(self, matrices: list[tuple[nn.Parameter, dict[str, Any]]]) -> None:
        updates = matrices[0][0].new_zeros(sum(parameter.numel() for parameter, _ in matrices))
        pieces = [
            piece.view(parameter.flatten(1).shape)
            for piece, (parameter, _) in zip(
                torch.split(updates, [p.numel() for p, _ in matrices]), matrices, strict=True
            )
        ]
        costliest_first = sorted(range(len(pieces)), key=lambda i: -min(pieces[i].shape) * pieces[i].numel())
        mine = set(costliest_first[self._process.rank :: self._process.size])
        for i, (parameter, _) in enumerate(matrices):
            gradient = parameter.grad
            assert gradient is not None
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["momentum"].lerp_(gradient, 1 - _MOMENTUM)
            if i in mine:
                nesterov = gradient.lerp(state["momentum"], _MOMENTUM)
                pieces[i].copy_(orthogonal(nesterov.flatten(1).to(self._dtype)))
        self._process.total(updates)
        for (parameter, group), piece in zip(matrices, pieces, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(piece.view(parameter.shape), alpha=-group["lr"] * 0.2 * max(piece.shape) ** 0.5)

    def _move_others(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["mean"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["second_moment"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["step"] = torch.zeros(())
            state["step"] = state["step"].to(parameter.device)  # a restored "step" is on the CPU
        beta1, beta2 = group["betas"]
        adamw(
            parameters,  # type: ignore[arg-type]
            [p.grad for p in parameters if p.grad is not None],
            [self.state[p]["mean"] for p in parameters],
            [self.state[p]["second_moment"] for p in parameters],
            [],
            [self.state[p]["step"] for p in parameters],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonal(matrix: Tensor) -> Tensor:
    """Return the matrix with its singular values brought near 1 (0.7 to 1.2), except those far below the largest.

    `matrix` is [rows, columns]; its type is that of the computation.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
