from pathlib import Path

import pytest
from carnelian_training.config import config_from_dict

CLIPS = Path(__file__).parents[2] / "demo" / "clips" / "manifest.jsonl"


@pytest.fixture
def tiny_config():
    """A network of a few thousand parameters on the demo clips."""
    return config_from_dict(
        {
            "name": "tiny",
            "model": {
                "name": "quartznet",
                "stages": [
                    {"filters": 16, "kernel": 5, "stride": 2, "residual": False},
                    {"filters": 16, "kernel": 5, "repeat": 2, "dropout": 0.1},
                ],
            },
            "data": {"train": [{"path": str(CLIPS)}], "dev": str(CLIPS), "batch_s": 12, "num_threads": 1},
            "optimizer": {"name": "adamw", "lr": 0.002, "betas": [0.9, 0.98], "warmup_steps": 2},
            "loop": {"steps": 6, "log_every_steps": 1, "evaluate_every_steps": 3},
        },
        "tiny_config",
    )
