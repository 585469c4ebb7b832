"""The README's first command, and what the README says that it prints."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"\d+(\.\d+)?")


def run_demo(*files: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "demo" / "run.py"), *files]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def without_times(lines: list[str]) -> list[str]:
    return [NUMBER.sub("0", line) if re.match(r"ready|  (time|  )", line) else line for line in lines]


def test_readme_shows_what_the_demo_prints():
    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"The demo prints:\n\n(.*?)\n\n    \.\.\. and four more clips\n", readme, re.S)
    assert shown is not None
    wanted = [line.removeprefix("    ") for line in shown[1].splitlines()]

    demo = run_demo()

    assert demo.returncode == 0, demo.stderr
    printed = demo.stdout.splitlines()
    assert without_times(printed[: len(wanted)]) == without_times(wanted)
    assert sum(line.startswith("  heard") for line in printed) == 6


def test_a_clip_has_its_reference_under_a_relative_path_too():
    demo = run_demo("demo/clips/storm.flac")
    assert re.search(r"^  reference  the storm had passed", demo.stdout, re.M), demo.stdout + demo.stderr


def test_a_clip_that_fails_is_named_and_the_others_are_heard(tmp_path):
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"RIFF")

    demo = run_demo(str(broken), str(ROOT / "demo" / "clips" / "storm.flac"), "absent.wav")

    assert demo.returncode == 1
    absent, failed = (line for line in demo.stderr.splitlines() if line)
    assert absent == "absent.wav: No such file or directory"
    assert re.fullmatch(f"{broken}: (?!.*broken).*convert the file.*", failed)
    assert "storm had passed in the night" in demo.stdout


def test_without_a_file_that_can_be_opened_no_server_is_started(tmp_path):
    demo = run_demo("absent.wav", str(tmp_path))
    assert (demo.returncode, demo.stdout) == (1, "")
    assert demo.stderr == f"absent.wav: No such file or directory\n\n{tmp_path}: Is a directory\n\n"
