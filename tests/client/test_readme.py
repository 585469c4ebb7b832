import os
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import numpy as np
import soundfile

CLIENT = Path(__file__).parents[2] / "client"
README = CLIENT / "README.md"


def test_the_examples_of_the_readme_run(endpoint, wav, tmp_path, monkeypatch, capsys):
    code, with_asyncio = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("a.wav").write_bytes(wav)
    samples, rate = soundfile.read("a.wav")
    for name in ("clip.flac", "b.ogg", "c.mp3"):
        soundfile.write(name, samples, rate)
    Path("b.ogg").write_bytes(b"")
    exec(compile(code.replace("localhost:8001", endpoint.url), str(README), "exec"), {})
    first, *words, a, b, c = capsys.readouterr().out.splitlines()
    program = f"import asyncio\nasync def example():\n{textwrap.indent(with_asyncio, '    ')}\nasyncio.run(example())"
    exec(compile(program.replace("localhost:8001", endpoint.url), str(README), "exec"), {})
    assert capsys.readouterr().out.splitlines() == [a, b, c]
    assert re.fullmatch(r"\d+ bytes 0\.9", first)
    assert words[1] == "  1.00   1.50 0.90 bytes"
    assert a == f"{len(wav)} bytes"
    assert b.startswith("failed: b.ogg: empty audio")
    assert re.fullmatch(r"\d+ bytes", c)


def test_the_example_for_long_recordings_runs(endpoint, tmp_path, monkeypatch, capsys):
    page = CLIENT / "docs" / "long.md"
    [code] = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    soundfile.write("talk.mp3", np.zeros(70 * 16000), 16000)
    exec(compile(code.replace("localhost:8001", endpoint.url), str(page), "exec"), {})
    words = capsys.readouterr().out.split()
    assert words[1] == "bytes"
    assert 70 > float(words[-1]) > 40


SUBCLASSES = """
from carnelian_client import AsyncCarnelianClient, CarnelianClient
from typing_extensions import assert_type

class Own(CarnelianClient): ...
class OwnAsync(AsyncCarnelianClient): ...

async def keep_their_type() -> None:
    with Own() as own:
        assert_type(own, Own)
    async with OwnAsync() as own_async:
        assert_type(own_async, OwnAsync)
"""


def test_the_examples_and_subclasses_pass_strict_type_checks(tmp_path):
    pages = [README, *sorted((CLIENT / "docs").glob("*.md"))]
    examples = [code for page in pages for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]
    assert len(examples) >= 4
    (tmp_path / "subclasses.py").write_text(SUBCLASSES)
    for number, code in enumerate(examples):
        inside = f"async def example() -> None:\n{textwrap.indent(code, '    ')}" if "await " in code else code
        (tmp_path / f"example_{number}.py").write_text(inside)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", *sorted(tmp_path.iterdir())],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(CLIENT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


class Microphone:
    """Stands for sounddevice's, as there is none where tests run: calls back with one array for all blocks."""

    def __init__(self, *, samplerate, blocksize, channels, dtype, callback):
        assert (samplerate, channels, dtype) == (16_000, 1, "int16")
        self.size, self.callback = blocksize, callback
        self.buffer = np.zeros((blocksize, channels), dtype)

    def __enter__(self):
        for i in range(0, len(self.talk) // self.size * self.size, self.size):
            self.buffer[:, 0] = self.talk[i : i + self.size]
            self.callback(self.buffer, self.size, None, None)
        self.callback(types.SimpleNamespace(copy=lambda: None), 0, None, None)  # ends the example's loop

    def __exit__(self, *error):
        pass


def test_the_example_for_live_audio_runs(endpoint, says_how_long, talk, monkeypatch, capsys):
    page = CLIENT / "docs" / "stream.md"
    [code] = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.setattr(Microphone, "talk", talk, raising=False)
    monkeypatch.setitem(sys.modules, "sounddevice", types.SimpleNamespace(InputStream=Microphone))
    exec(compile(code.replace("localhost:8001", endpoint.url), str(page), "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"1\.\d s  4\d\d\d", first)
    assert re.fullmatch(r"7\.\d s  \d\d\d\d", second)
