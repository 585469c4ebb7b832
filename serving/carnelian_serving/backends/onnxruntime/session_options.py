"""Builds the options of a session from a model's configuration."""

from __future__ import annotations

import onnxruntime

from carnelian_serving.backends.model_config import ConfigError, ModelConfig
from carnelian_serving.backends.onnxruntime.spinning import limit_spinning
from carnelian_serving.backends.threads import count_cores, thread_count

SESSION_PARAMETERS = (
    "intra_op_thread_count",
    "inter_op_thread_count",
    "execution_mode",
    "enable_mem_arena",
    "enable_mem_pattern",
)
GRAPH_LEVELS = {
    -1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}


def read_session_options(config: ModelConfig) -> onnxruntime.SessionOptions:
    """Read the parameters, which are named as the native backend names them, and the graph's level.

    Raises:
        ConfigError: A parameter has no meaning.
    """
    options = onnxruntime.SessionOptions()
    # A count of 0 makes ONNX Runtime pin a thread to each core but one. The caller is not pinned to the remaining core:
    # it may share the core of another thread while its own sleeps.
    options.intra_op_num_threads = thread_count(config, "intra_op_thread_count") or count_cores()
    options.inter_op_num_threads = config.integer("inter_op_thread_count")
    mode = config.integer("execution_mode")
    if mode not in (0, 1):
        raise ConfigError(f"parameter 'execution_mode' of {config.name!r} must be 0 or 1, but is {mode}")
    if mode:
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    options.enable_cpu_mem_arena = config.boolean("enable_mem_arena")
    options.enable_mem_pattern = config.boolean("enable_mem_pattern")
    if config.graph_level in GRAPH_LEVELS:
        options.graph_optimization_level = GRAPH_LEVELS[config.graph_level]
    limit_spinning(options)
    return options
