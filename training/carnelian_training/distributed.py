"""The processes of a run, one per device: started by `torchrun` on one or more machines, or a single one without it.

All processes take the same steps. Small sums over them decide what they must agree on (the loss, when to stop);
gradients and Muon's updates are large sums.
"""

import datetime
import inspect
import logging
import os
import time
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

# Long enough for one process to write a large checkpoint, or to evaluate a slower share, while the others wait.
_TIMEOUT = datetime.timedelta(hours=1)
# Gloo's threads drop the tensors of the last sums a moment after these are done, and need the interpreter for that. One
# that is late, as it ends, aborts the process (https://github.com/pytorch/pytorch/pull/179291).
_SETTLE_S = 0.5


@dataclass(frozen=True)
class Process:
    """This process, among `size` processes of the run."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process of rank 0, which writes files."""
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """Sum `values` over all processes, in place, and return them; every process has to call it."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def any(self, *flags: bool) -> list[bool]:
        """Return for each flag whether any process has set it; never waits for a GPU. Every process must call it."""
        counts = self.total(torch.tensor(flags, dtype=torch.int64))
        return [bool(count) for count in counts]

    def broadcast(self, value: T) -> T:
        """Return the `value` of rank 0; every process has to call it."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, device=torch.device("cpu"))
        return values[0]

    def union(self, part: dict[int, T]) -> dict[int, T]:
        """Merge the dictionaries of all processes, in the order of ranks; every process has to call it."""
        if self.size == 1:
            return part
        parts: list[dict[int, T]] = [{} for _ in range(self.size)]
        dist.all_gather_object(parts, part)
        return {key: value for found in parts for key, value in found.items()}

    def parallel(self, model: nn.Module) -> nn.Module:
        """Wrap the model so that its backward pass gives every process the mean of all processes' gradients."""
        if self.size == 1:
            return model
        devices = [self.device] if self.device.type == "cuda" else None
        # Batch-norm statistics are shared or averaged step by step: `loop.batch_statistics`, `State.took_step`.
        known = inspect.signature(DistributedDataParallel).parameters
        keep_buffers: dict[str, Any] = {
            "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False
        }
        # Gradients of channels-last convolutions are copied into the buckets, which does not deserve a warning.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True, **keep_buffers)

    def gradient_sync(self, network: nn.Module, is_last: bool) -> AbstractContextManager[None]:
        """Return the context for one part of a step: gradients accumulate locally and are averaged in the last part."""
        if isinstance(network, DistributedDataParallel) and not is_last:
            context: AbstractContextManager[None] = network.no_sync()
            return context
        return nullcontext()


def is_first() -> bool:
    """Return whether this process has rank 0; works before :func:`joined`."""
    return int(os.environ.get("RANK", 0)) == 0


def find_device() -> torch.device:
    """Return the GPU of this process, or the CPU if there is no GPU.

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
    """Join the processes that `torchrun` started; all but the first log only warnings.

    Raises:
        RuntimeError: There are more processes than GPUs, or `torchrun` has options with which it could not restart.
    """
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) and os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
        # PyTorch 2.13 uses one store for all attempts, so a second attempt would look for the first one's processes.
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
    # Not after an error: the other processes may be gone or waiting, and `torchrun` ends them.
    dist.destroy_process_group()
    time.sleep(_SETTLE_S)
