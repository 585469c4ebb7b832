import re
from pathlib import Path

import soundfile

README = Path(__file__).parents[2] / "client" / "README.md"


def test_the_example_of_the_readme_runs(endpoint, wav, tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("a.wav").write_bytes(wav)
    samples, rate = soundfile.read("a.wav")
    for name in ("clip.flac", "b.ogg", "c.mp3"):
        soundfile.write(name, samples, rate)
    Path("b.ogg").write_bytes(b"")
    exec(compile(code.replace("localhost:8001", endpoint.url), str(README), "exec"), {})
    first, *words, a, b, c = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+ bytes 0\.9", first)
    assert words[1] == "  1.00   1.50 0.90 bytes"
    assert a == f"{len(wav)} bytes"
    assert b.startswith("failed: b.ogg: empty audio")
    assert re.fullmatch(r"\d+ bytes", c)
