import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
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


def test_the_program_for_long_recordings_cuts_in_pauses_and_shifts_the_times(endpoint, tmp_path, monkeypatch, capsys):
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, (70 * 8000, 2)).astype(np.float32)
    for pause_s in (5, 20, 40):  # the first is too early to be of use
        samples[pause_s * 8000 : (pause_s + 1) * 8000] = 0
    soundfile.write(tmp_path / "talk.wav", samples, 8000, subtype="FLOAT")
    page = CLIENT / "docs" / "long.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.setattr("sys.argv", ["long.py", str(tmp_path / "talk.wav")])
    exec(compile(code.replace("localhost:8001", endpoint.url), str(page), "exec"), {})

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {(name, channel, duration_s, confidence) for name, channel, _, duration_s, _, confidence in lines} == {
        ("talk", "1", "0.50", "0.90")
    }
    starts_s = [float(line[2]) for line in lines[::2]]  # each piece says its size in bytes, in two words
    assert starts_s[0] == 0
    assert 20 < starts_s[1] < 21
    assert 40 < starts_s[2] < 41
    ends_s = [start_s + (int(line[4]) - 58) / 4 / 8000 for start_s, line in zip(starts_s, lines[::2], strict=True)]
    assert ends_s == pytest.approx([*starts_s[1:], 70], abs=0.006)  # nothing is left out, nothing is sent twice
    assert [float(line[2]) for line in lines[1::2]] == pytest.approx([start_s + 1 for start_s in starts_s])
