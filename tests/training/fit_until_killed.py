"""`carnelian-train` whose last step waits to be killed, so that it never ends before; once restarted, it ends."""

import os
import signal

from carnelian_training.cli import main
from carnelian_training.loop import train

optimise = train.optimise


def wait_before_the_last_step(state, share, config):
    if state.step == config.loop.steps - 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        signal.pause()
    return optimise(state, share, config)


train.optimise = wait_before_the_last_step
main()
