"""What an Hourglass saves of a training step of wav2vec 2.0, factor by factor, beside the published row.

In: a training configuration. Out: one raw file with every step, and its table. The plain transformer and every factor
take turns, step by step, so that other load on the machine affects all alike. A step is that of `carnelian-train fit`
itself. CPU seconds, summed over the threads of the process, are kept beside wall seconds.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from carnelian_training.checkpoint import build_network
from carnelian_training.config import Config
from carnelian_training.distributed import Process, find_device
from carnelian_training.loop.state import State, new_state
from carnelian_training.models.hourglass import HourglassConfig
from carnelian_training.models.wav2vec2_config import Wav2Vec2Config
from torch import Tensor
from tqdm import tqdm

from carnelian_perf.machine import measure_busy_cores, name_gpu, torch_threads
from carnelian_perf.raw_file import describe_origin
from carnelian_perf.training.hourglass_results import Form, Measurement, Work
from carnelian_perf.training.step import timed_step
from carnelian_perf.training.steps import draw_batch, draw_clips


def measure(config: Config, factors: list[int], work: Work) -> Iterator[Measurement]:
    """Time training steps of the plain transformer and of an Hourglass for each factor, in turns.

    Yields:
        What was measured so far, after each turn, in which every form has taken a step.

    Raises:
        ValueError: The configuration is not of wav2vec 2.0.
    """
    if not isinstance(config.model, Wav2Vec2Config):
        raise ValueError(
            f"`model.name` must be wav2vec2, whose layers an Hourglass pools, but is {config.model.name} in "
            f"{config.name}; give a YAML such as training/configs/wav2vec2_base.yaml"
        )
    forms = [Form(factor) for factor in (1, *factors)]
    device = find_device()
    origin = describe_origin(name_gpu(device.type))
    with torch_threads(work.threads):
        takers: list[_Taker] = []
        for form in forms:
            takers.append(_Taker(config, form, work, device, takers[0].state if takers else None))
        for taker in takers:
            taker.warm_up()
        for _ in tqdm(range(work.steps), desc=config.name, unit="turn", disable=None):
            for taker in takers:
                taker.step()
            yield Measurement(
                model=config.name,
                **origin,
                others_busy_cores=measure_busy_cores(),
                precision=config.loop.precision,
                objective="pre-training" if config.pretraining is not None else "fine-tuning",
                work=work,
                forms=copy.deepcopy(forms),
            )


class _Taker:
    """Takes the steps of one form."""

    def __init__(self, config: Config, form: Form, work: Work, device: torch.device, first: State | None) -> None:
        assert isinstance(config.model, Wav2Vec2Config)
        hourglass = hourglass_of(config.model, form.factor)
        self.config = replace(config, model=replace(config.model, hourglass=hourglass, layer_drop=0.0))
        self.form = form
        if first is None:
            self.state = new_state(self.config, Process(device))
        else:  # all forms have the same weights: they share them and the optimiser's memory
            network = build_network(self.config).to(device)
            network.load_state_dict(first.model.state_dict(keep_vars=True), assign=True)
            self.state = replace(first, model=network)
        self.batch = draw_batch(config, draw_clips(config, work.batch, work.duration_s), seed=0)

    def warm_up(self) -> None:
        """Take a step that is not timed, and record the memory that it keeps for its backward pass."""
        own = {parameter.untyped_storage().data_ptr() for parameter in self.state.model.parameters()}
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        if self.state.process.device.type == "cuda":
            self._take()  # the very first step allocates the optimiser's memory, which each form must count
            torch.cuda.reset_peak_memory_stats()
            self._take()
            self.form.kept_bytes = torch.cuda.max_memory_allocated()
            return
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self._take()
        self.form.kept_bytes = sum(kept.values())

    def step(self) -> None:
        """Take a step and time it."""
        wall_s, cpu_s, _ = self._take()
        self.form.wall_s.append(wall_s)
        self.form.cpu_s.append(cpu_s)

    def _take(self) -> tuple[float, float, float]:
        return timed_step(self.state, self.batch.items, self.batch, self.config)


def hourglass_of(model: Wav2Vec2Config, factor: int) -> HourglassConfig | None:
    """Make the Hourglass that pools two thirds of the layers, as published (8 of Base's 12); None for factor 1."""
    if factor == 1:
        return None
    outer = max(1, model.layers // 6)
    return HourglassConfig(before=outer, pooled=model.layers - 2 * outer, after=outer, factor=factor)
