"""The processes of a run, one per device, as `torchrun` starts them on one machine or many; one alone without it.

All of them walk through the same steps. What they must agree on (the loss, when to stop) travels in small sums;
gradients and Muon's updates are large ones.
"""

import datetime
import inspect
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")

# Long enough for one to write a large checkpoint, or to evaluate a slower share, while the others wait.
_TIMEOUT = datetime.timedelta(hours=1)


@dataclass(frozen=True)
class Process:
    """This process among those of the run."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes files."""
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """The sum of `values` over all processes, in place; every process has to call it."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def any(self, *flags: bool) -> list[bool]:
        """Of each flag, whether it is up in any process. Does not wait for a GPU."""
        counts = self.total(torch.tensor(flags, dtype=torch.int64))
        return [bool(count) for count in counts]

    def broadcast(self, word: str) -> str:
        """The leader's `word`, in every process; every process has to call it."""
        words = [word]
        if self.size > 1:
            dist.broadcast_object_list(words, device=torch.device("cpu"))
        return words[0]

    def union(self, part: dict[int, T]) -> dict[int, T]:
        """What all processes have found together; every process has to call it."""
        if self.size == 1:
            return part
        parts: list[dict[int, T]] = [{} for _ in range(self.size)]
        dist.all_gather_object(parts, part)
        return {key: value for found in parts for key, value in found.items()}

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes, by rank, on the CPU; every process has to call it."""
        tensors = [tensor.cpu()] * self.size
        if self.size > 1:
            dist.all_gather_object(tensors, tensor.cpu())
        return tensors

    def parallel(self, model: nn.Module) -> nn.Module:
        """The same model, whose backward pass leaves the mean of all processes' gradients in every one of them."""
        if self.size == 1:
            return model
        devices = [self.device] if self.device.type == "cuda" else None
        # Batch-norm statistics are shared or averaged step by step: `loop.batch_statistics`, `State.took_step`.
        known = inspect.signature(DistributedDataParallel).parameters
        keep_buffers: dict[str, Any] = {
            "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False
        }
        # Gradients of channels-last convolutions are copied into the buckets; that is nothing to warn of at each start.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True, **keep_buffers)

    def gradient_sync(self, network: nn.Module, is_last: bool) -> AbstractContextManager[None]:
        """The context of one part of a step: gradients accumulate in each process and are averaged in the last part."""
        if isinstance(network, DistributedDataParallel) and not is_last:
            context: AbstractContextManager[None] = network.no_sync()
            return context
        return nullcontext()


def is_first() -> bool:
    """Whether this process is the one that leads; known before it has joined the others."""
    return int(os.environ.get("RANK", 0)) == 0


def find_device() -> torch.device:
    """The GPU of this process, and the CPU where there is none.

    Raises:
        RuntimeError: More processes than GPUs were started on this machine.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= torch.cuda.device_count():
        raise RuntimeError(
            f"each process must have a GPU of its own, but process {local_rank} found {torch.cuda.device_count()}: "
            "start `torchrun` with --nproc-per-node=gpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


@contextmanager
def joined() -> Iterator[Process]:
    """Join the processes that `torchrun` started; the log of all but the first is kept to warnings.

    Raises:
        RuntimeError: as :func:`find_device`, or the processes could not be started again.
    """
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) and os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
        # PyTorch 2.13 keeps one store for all attempts: the second would look for the processes of the first.
        raise RuntimeError(
            "`torchrun --max-restarts` must run with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment, and with "
            "--rdzv-backend=c10d and --rdzv-endpoint in the place of --master-addr and --master-port"
        )
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = find_device()
    process = Process(device, rank, size)
    if not process.leads:
        logging.getLogger("carnelian_training").setLevel(logging.WARNING)
    if size == 1:
        yield process
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
    yield process
    # Not after an error: the others may be gone or waiting, and `torchrun` ends them.
    dist.destroy_process_group()
