"""Conversion between `model.stages` and the blocks of NeMo (`encoder.jasper`) and DLE (`encoder.blocks`)."""

import itertools
from typing import Any

from carnelian_training.config_errors import shown
from carnelian_training.foreign.options import Options, check, single
from carnelian_training.weight_files import CheckpointError

FIXED: Options = {
    "groups": 1,
    "heads": -1,
    "se": False,
    "residual_mode": "add",
    "stride_last": False,
    "future_context": -1,
    "normalization": "batch",
    "padding": "same",
}
IGNORED = {"se_reduction_ratio", "se_context_size", "se_interpolation_mode", "norm_groups"}


def model_tree(blocks: Any, num_mels: int, kernel_key: str, where: str, *, scales_kernels: bool) -> Options:
    """Convert a toolkit's blocks to the `model` section of a configuration.

    Args:
        blocks: one entry per block.
        num_mels: number of mel bands of the features.
        kernel_key: the toolkit's name of the kernel width.
        where: the place, with which messages begin.
        scales_kernels: whether the toolkit multiplies kernels by `kernel_size_factor` and makes even ones odd, as all
            do except DLE's Jasper.

    Raises:
        CheckpointError: `blocks` is not a list of blocks, or a block has an unsupported option; the message names it.
    """
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise CheckpointError(f"{where} must be a list of blocks, but is {shown(blocks)}")
    stages = [_stage(block, kernel_key, scales_kernels, f"{where}, block {i}") for i, block in enumerate(blocks)]
    is_dense = any(block.get("residual_dense") for block in blocks)
    if is_dense and any(block.get("residual") and not block.get("residual_dense") for block in blocks):
        raise CheckpointError(f"{where}: all residual blocks must be `residual_dense`, or none, but some are")
    name = "jasper" if is_dense or not any(stage["separable"] for stage in stages) else "quartznet"
    # Equal blocks in a row are one stage.
    grouped = [stage | {"blocks": len(list(equal))} for stage, equal in itertools.groupby(stages)]
    tree = {"name": name, "stages": grouped, "num_mels": num_mels}
    return tree | {"dense": is_dense} if name == "jasper" else tree


def _stage(block: Options, kernel_key: str, scales_kernels: bool, where: str) -> Options:
    carried = {"filters", "repeat", kernel_key, "stride", "dilation", "dropout", "residual", "residual_dense"}
    carried |= {"separable", "kernel_size_factor"} if scales_kernels else {"separable"}
    check(block, fixed=FIXED, carried=carried, ignored=IGNORED, where=where)
    missing = {"filters", "repeat", kernel_key, "stride", "dilation", "residual"} - block.keys()
    if missing:
        raise CheckpointError(f"{where} must say {', '.join(sorted(missing))}, but does not")
    stride, repeat = (single(block[name], f"{where}, `{name}`") for name in ("stride", "repeat"))
    if stride > 1 and repeat > 1:
        raise CheckpointError(f"{where}: `stride` must be 1 where `repeat` is above 1, but is {stride}")
    kernel = int(single(block[kernel_key], f"{where}, `{kernel_key}`"))
    if scales_kernels:
        kernel = int(kernel * single(block.get("kernel_size_factor", 1.0), f"{where}, `kernel_size_factor`"))
        kernel += kernel % 2 == 0
    return {
        "filters": block["filters"],
        "kernel": kernel,
        "repeat": repeat,
        "stride": stride,
        "dilation": single(block["dilation"], f"{where}, `dilation`"),
        "dropout": block.get("dropout", 0.0),
        "residual": block["residual"],
        "separable": block.get("separable", False),
    }


def block_list(stages: list[Any], is_dense: bool) -> list[Options]:
    """Convert stages to the blocks of NeMo, `encoder.jasper`.

    Raises:
        CheckpointError: NeMo does not support a stage.
    """
    blocks = []
    for i, stage in enumerate(stages):
        if stage.stride > 1 and stage.repeat > 1:
            raise CheckpointError(
                f"`model.stages.{i}` must not have a stride and repeated sub-blocks, for NeMo strides in each of them, "
                f"but has stride {stage.stride} and repeat {stage.repeat}"
            )
        block = {
            "filters": stage.filters,
            "repeat": stage.repeat,
            "kernel": [stage.kernel],
            "stride": [stage.stride],
            "dilation": [stage.dilation],
            "dropout": stage.dropout,
            "residual": stage.residual,
            "separable": stage.separable,
        }
        if is_dense and stage.residual:
            block["residual_dense"] = True
        blocks += [dict(block) for _ in range(stage.blocks)]
    return blocks
