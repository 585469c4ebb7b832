"""No tensor of the CPU meets one of the GPU, for every network. Tensors here only say that they are on a GPU.

Their values are on the CPU. An operator that gets some of them, and others with more than one number that are not,
fails as on a GPU. Kernels, precisions and speed of a GPU stay untested.
"""

from pathlib import Path

import pytest
import torch
from carnelian_training.cli import main
from carnelian_training.config import config_from_dict
from carnelian_training.data.loading import Batch
from carnelian_training.data.manifest import Clip
from carnelian_training.data.plan import Item
from carnelian_training.distributed import Process
from carnelian_training.language_models.streams import Segment, Stretch
from carnelian_training.language_models.task import NextTokenObjective
from carnelian_training.loop.recognition import choose_objective
from carnelian_training.loop.state import new_state
from carnelian_training.loop.task import Share
from carnelian_training.loop.train import optimise
from carnelian_training.models.depthwise import runs_on
from carnelian_training.models.masked import MaskedConv
from carnelian_training.run_config import run_from_dict
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "quartznet_demo.pt"
CLIPS = ROOT / "demo" / "clips" / "manifest.jsonl"
NGRAMS = ROOT / "model_repository" / "quartznet_demo_ctc" / "1" / "english.klm"
GPU = torch.device("cuda", 0)
aten = torch.ops.aten
MIXING = {aten.copy_.default, aten._to_copy.default, aten.index.Tensor, aten.index_put_.default}
"""Operators that take tensors of both."""


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    device = GPU
    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values):
        made = Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype
        )
        made.values_on_cpu = values
        return made

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return run(operator, args, kwargs or {})

    def __deepcopy__(self, memo):
        return OnGpu(self.values_on_cpu.detach().clone()).requires_grad_(self.requires_grad)

    def cpu(self):
        return self.values_on_cpu.detach().clone()

    def tolist(self):
        return self.values_on_cpu.tolist()

    def numpy(self):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


class Operators(TorchDispatchMode):
    """Runs operators that get no tensors, such as `torch.zeros(3, device="cuda")`."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return run(operator, args, kwargs or {})


class Functions(TorchFunctionMode):
    """Tells tensors that PyTorch makes within a function of a GPU's tensors from those that the caller makes."""

    of_gpu = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        before = Functions.of_gpu
        Functions.of_gpu = any(isinstance(leaf, OnGpu) for leaf in tree_leaves((args, kwargs)))
        try:
            return function(*args, **(kwargs or {}))
        finally:
            Functions.of_gpu = before


def run(operator, args, kwargs):
    """Run an operator on the CPU; what comes out is where its inputs are, or where it is asked for."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, OnGpu)]
    others = [tensor for tensor in tensors if not isinstance(tensor, OnGpu) and tensor.dim()]
    if ours and others and operator not in MIXING:
        raise RuntimeError(f"{operator}: expected all tensors on one device, but {list(others[0].shape)} is not")
    to_gpu = bool(ours) or Functions.of_gpu or (kwargs.get("device") or torch.device("cpu")).type == "cuda"
    if operator is aten.copy_.default:
        to_gpu = isinstance(args[0], OnGpu)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map_only(OnGpu, lambda tensor: tensor.values_on_cpu, (args, kwargs))
    out = operator(*args, **kwargs)
    changed_in_place = {id(tensor.values_on_cpu): tensor for tensor in ours}

    def place(values):
        if id(values) in changed_in_place:
            return changed_in_place[id(values)]
        return OnGpu(values) if to_gpu else values

    return tree_map_only(Tensor, place, out)


class CpuGenerator(torch.Generator):
    """What is drawn on the GPU that is not there."""

    def __new__(cls, device=None):
        return super().__new__(cls, "cpu")


@pytest.fixture
def gpu(monkeypatch):
    """A process whose device looks like a GPU."""
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr("carnelian_training.models.masked.runs_on", lambda device: False)
    monkeypatch.setattr(torch, "Generator", CpuGenerator)
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # for `Module.to` of a subclass
    with Operators(), Functions():
        yield Process(GPU)
    torch.__future__.set_overwrite_module_params_on_conversion(False)


STAGES = [
    {"filters": 8, "kernel": 5, "stride": 2, "residual": False},
    {"filters": 8, "kernel": 5, "repeat": 2, "dropout": 0.1},
    {"filters": 8, "kernel": 5, "dilation": 2, "residual": False},
]
WAV2VEC2 = {"name": "wav2vec2", "conv_channels": [8] * 7, "width": 16, "layers": 3, "heads": 2, "feed_forward": 16}
WAV2VEC2 |= {"position_kernel": 16, "position_groups": 2, "layer_drop": 0.3}
HOURGLASS = {"before": 1, "pooled": 1, "after": 1, "factor": 3, "resampling": "linear"}
SPANS = {"spans": {"time_probability": 0.65, "channel_probability": 0.2, "channel_length": 4}}
MASKS = {"frequency_masks": 2, "time_masks": 2, "cutout_boxes": 1, "frequency_warp": 0.1}
VIEWS = {"consistency": 0.2}
WAVEFORM = {"features": {"name": "waveform"}}
ADAMW = {"name": "adamw", "betas": [0.9, 0.98], "ema": 0.9, "warmup_steps": 2}
NOVOGRAD = {"max_grad_norm": 1.0, "warmup_steps": 2}
MUON = {"name": "muon", "betas": [0.9, 0.98], "warmup_steps": 2}
RUNS = {
    "quartznet": {"model": {"name": "quartznet", "stages": STAGES}, "augment": MASKS, "optimizer": NOVOGRAD},
    "two_views": {"model": {"name": "quartznet", "stages": STAGES}, "augment": MASKS | VIEWS, "optimizer": MUON},
    "recomputed": {"model": {"name": "quartznet", "stages": STAGES}, "loop": {"recompute": True}, "optimizer": ADAMW},
    "jasper": {"model": {"name": "jasper", "stages": [*STAGES[:2], STAGES[1]], "head_frames": 2}, "optimizer": ADAMW},
    "wav2vec2": {"model": WAV2VEC2 | {"hourglass": HOURGLASS}, "augment": SPANS, "optimizer": ADAMW, **WAVEFORM},
    "views_of_waveforms": {"model": WAV2VEC2, "augment": SPANS | VIEWS, "optimizer": ADAMW, **WAVEFORM},
    "large": {"model": WAV2VEC2 | {"conv_norm": "layer", "norm_first": True}, "optimizer": ADAMW, **WAVEFORM},
    "pretraining": {
        **{"model": WAV2VEC2, "augment": SPANS, "optimizer": ADAMW, **WAVEFORM},
        "pretraining": {"codes": 8, "code_width": 8, "width": 8, "negatives": 5},
    },
    "transformer_xl": {
        "model": {"name": "transformer_xl", "width": 8, "layers": 2, "heads": 2, "feed_forward": 8, "cutoffs": [20]},
        "text": {"tokens": {"size": 40}},
        "optimizer": ADAMW,
    },
}


def step(config, state):
    """A step in two parts, the second of them, of clips, empty; it knows nothing of devices."""
    torch.manual_seed(state.step)
    if not hasattr(config, "data"):
        items = [Stretch(i, 0, 6) for i in range(4)]
        tokens = torch.randint(3, 40, (4, 7))
        parts = [
            Segment(items[rows], tokens[rows, :-1], tokens[rows, 1:], torch.full((2, 6), 9), rows)
            for rows in (slice(2), slice(2, 4))
        ]
        objective = NextTokenObjective(state, config)
    else:
        frames = 16_000 if config.features.hop_samples == 1 else 101
        items = [Item(Clip(Path(f"{i}.wav"), 1.0, "abc"), seed=i) for i in range(3)]
        channels = config.model.feature_channels
        parts = [
            Batch(items, torch.randn(3, channels, frames), torch.tensor([frames, frames - 9, frames // 2])),
            Batch((), torch.zeros(1, channels, 1), torch.zeros(1, dtype=torch.int64)),
        ]
        objective = choose_objective(config, state)
    outcome = optimise(state, Share(items, iter(parts), len(parts), objective), config)
    state.step += 1
    return outcome


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_on_a_gpu(name, tmp_path, request):
    config = run_from_dict({"name": name, **RUNS[name]}, "here")
    on_cpu = new_state(config, Process(torch.device("cpu")))
    step(config, on_cpu)
    on_cpu.save(tmp_path / "one.pt", config, on_cpu.whole_memory())
    content = torch.load(tmp_path / "one.pt", map_location="cpu", weights_only=True)
    gpu = request.getfixturevalue("gpu")
    state = new_state(config, gpu)
    state.restore(content)
    assert all(step(config, state).is_finite for _ in range(2))
    for values in (*state.model.state_dict().values(), *tree_leaves(state.optimizer.state_dict()["state"])):
        assert isinstance(values, OnGpu) or (name == "transformer_xl" and values.dtype == torch.uint8)


def test_a_tensor_that_was_left_on_the_cpu_is_found(gpu):
    with pytest.raises(RuntimeError, match=r"expected all tensors on one device, but \[3\] is not"):
        torch.ones(3, device=gpu.device) + torch.arange(3)


@pytest.mark.parametrize(
    "command",
    [
        ("evaluate", DEMO, CLIPS),
        ("evaluate", "--table", DEMO, CLIPS),
        ("transcribe", DEMO, CLIPS, "--out", "heard.jsonl"),
        ("weigh", DEMO, CLIPS, "--lm", NGRAMS, "--out", "weights.json"),
    ],
)
def test_every_command_takes_the_device_that_there_is(command, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("carnelian_training.distributed.find_device", lambda: torch.device("meta"))
    status, _, err = call(main, *command)
    assert status == 1
    assert "meta tensor" in err


def config_with(**loop):
    tree = {"name": "x", "model": {"name": "quartznet", "stages": [{"filters": 8, "kernel": 3, "residual": False}]}}
    return config_from_dict({**tree, "loop": loop}, "test")


def uses_triton(config, process):
    model = new_state(config, process).model
    return {module.uses_triton for module in model.modules() if isinstance(module, MaskedConv) and module.groups > 1}


def test_without_a_gpu_the_kernels_are_not_used():
    assert uses_triton(config_with(depthwise="triton"), Process(torch.device("cpu"))) == {False}


def test_where_the_kernels_do_not_run_a_warning_says_why_and_pytorch_s_are_used(gpu, monkeypatch, caplog):
    monkeypatch.setattr("carnelian_training.models.masked.runs_on", runs_on)
    assert uses_triton(config_with(), gpu) == {False}  # there is no Triton here, or no GPU for it
    assert "need a C compiler and Triton 3.3, of PyTorch 2.7, or later; PyTorch's" in caplog.text


@pytest.mark.parametrize(
    ("loop", "expected"), [({}, True), ({"depthwise": "pytorch"}, False), ({"compile": True}, False)]
)
def test_on_a_gpu_the_kernels_are_used_unless_told_or_compiled(loop, expected, gpu, monkeypatch):
    monkeypatch.setattr("carnelian_training.models.masked.runs_on", lambda device: True)
    assert uses_triton(config_with(**loop), gpu) == {expected}
