"""A run of a tiny language model on 600 sentences."""

import random

import pytest
from carnelian_training.loop.train import train
from carnelian_training.run_config import run_from_dict

NOUNS, VERBS = ["cat", "dog", "king", "queen", "ship", "harbour", "letter"], ["saw", "heard", "met", "followed"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    lines = [f"The {rng.choice(NOUNS)} {rng.choice(VERBS)} the {rng.choice(NOUNS)} {i}." for i in range(600)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def tree(text):
    return {
        "name": "tiny",
        "model": {"name": "transformer_xl", "width": 16, "layers": 2, "heads": 2, "feed_forward": 24, "memory": 8},
        "text": {"sources": [str(text)], "tokens": {"size": 60}, "streams": 4, "segment": 12},
        "optimizer": {"name": "adamw", "lr": 0.01, "betas": [0.9, 0.98], "warmup_steps": 6},
        "loop": {"steps": 6, "log_every_steps": 1, "evaluate_every_steps": 3},
    }


@pytest.fixture(scope="module")
def config(tree):
    return run_from_dict(tree, "here")


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    train(config, directory)
    return directory
