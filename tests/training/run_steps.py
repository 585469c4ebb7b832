"""Take steps without evaluation or files, as one process or, under `torchrun`, as one of several.

python run_steps.py STEPS CONFIG.json...: the first process prints one JSON object for each configuration.
"""

import json
import sys
from contextlib import closing
from itertools import islice
from pathlib import Path

from carnelian_training.config import config_from_dict
from carnelian_training.data.manifest import read_manifest
from carnelian_training.distributed import joined
from carnelian_training.loop.recognition import shares
from carnelian_training.loop.state import new_state
from carnelian_training.loop.train import optimise


def main(steps: int, paths: list[str]) -> None:
    with joined() as process:
        for path in paths:
            config = config_from_dict(json.loads(Path(path).read_text()), path)
            state = new_state(config, process)
            clips = read_manifest(config.data.train[0].path) * 3
            losses, norms, parts, empty = [], [], 0, 0
            with closing(shares(clips, config, state)) as taken:  # else the loader's threads are cut at the exit
                for share in islice(taken, steps):
                    outcome = optimise(state, share, config)
                    losses.append(outcome.loss)
                    norms.append(outcome.grad_norm)
                    state.step += 1
                    parts += share.parts
                    empty += len(share.items) < process.size
            buffers = [buffer for buffer in state.best_model.buffers() if buffer.is_floating_point()]
            statistics = process.union({process.rank: [float(buffer.mean()) for buffer in buffers]})
            if process.leads:
                found = {"losses": losses, "norms": norms, "parts": parts, "empty": empty}
                found["statistics"] = list(statistics.values())
                sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
