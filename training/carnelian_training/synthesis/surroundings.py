"""Synthetic noises and room impulse responses for training, for those who have no recordings; fixed by the seed.

Noises are coloured noise with a random slope of its spectrum and a changing level, with mains hum and its harmonics;
and, from a manifest, babble of several voices at once. Rooms are impulse responses after Polack's model: the direct
sound and a tail of noise that decays exponentially, high frequencies fastest.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from carnelian_training.data.acoustics import find_sounds, to_mono_16khz
from carnelian_training.data.audio import read_samples
from carnelian_training.data.defects import SILENT_RMS
from carnelian_training.data.manifest import Clip
from carnelian_training.data.sound_file import write_sound
from carnelian_training.features import SAMPLE_RATE_HZ
from carnelian_training.replacement import remove_partials

Signal = npt.NDArray[np.float64]

NOISE_S = 30


def write_surroundings(directory: Path, seed: int, rooms: int, noises: int, voices: Sequence[Clip]) -> None:
    """Write `rooms/*.wav` and `noise/*.wav` below `directory`; with `voices`, a third of the noises is babble.

    Raises:
        ValueError: A voice cannot be read or is silent; or a folder to write to holds other sounds, which training
            would read too.
    """
    for folder, count in ((directory / "rooms", rooms), (directory / "noise", noises)):
        made = {folder / f"{i:04d}.wav" for i in range(count)}
        others = [path for path in find_sounds(folder) if path not in made]
        if count and others:
            raise ValueError(
                f"{folder} must hold no other sounds than are made, for training reads all, but has "
                f"{len(others)}, such as {others[0].name}: delete them, or choose another folder"
            )
        if count:
            remove_partials(folder, "[0-9]*.wav")
    rng = np.random.default_rng(seed)
    for i in tqdm(range(rooms), "rooms", disable=None):
        _write(directory / "rooms" / f"{i:04d}.wav", room(rng))
    for i in tqdm(range(noises), "noises", disable=None):
        noise = babble(voices, rng) if voices and i % 3 == 0 else coloured_noise(rng)
        _write(directory / "noise" / f"{i:04d}.wav", noise)


def room(rng: np.random.Generator) -> Signal:
    """Draw an impulse response with a reverberation time (60 dB) of 0.15 to 0.9 s.

    The ratio of direct to reverberant energy is 0 to 15 dB.
    """
    reverberation_s = rng.uniform(0.15, 0.9)
    seconds = np.arange(int(reverberation_s * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    tail = np.zeros(len(seconds))
    for low_hz, high_hz, factor in ((0, 500, 1.1), (500, 2000, 1.0), (2000, 8001, rng.uniform(0.4, 0.9))):
        spectrum = np.fft.rfft(rng.standard_normal(len(seconds)))
        hz = np.fft.rfftfreq(len(seconds), 1 / SAMPLE_RATE_HZ)
        spectrum[(hz < low_hz) | (hz >= high_hz)] = 0
        decay = 10 ** (-3 * seconds / (reverberation_s * factor))
        tail += np.fft.irfft(spectrum, len(seconds)) * decay
    tail[: rng.integers(16, 160)] = 0  # the first reflection comes 1 to 10 ms after the direct sound
    tail *= 10 ** (-rng.uniform(0, 15) / 20) / np.linalg.norm(tail)
    tail[0] = 1.0
    return tail


def coloured_noise(rng: np.random.Generator) -> Signal:
    """Draw noise between white and brown, with mains hum in a third of the cases."""
    size = NOISE_S * SAMPLE_RATE_HZ
    hz = np.fft.rfftfreq(size, 1 / SAMPLE_RATE_HZ)
    spectrum = np.fft.rfft(rng.standard_normal(size)) * np.maximum(hz, 20.0) ** -rng.uniform(0, 1)
    noise = np.fft.irfft(spectrum, size)
    noise /= noise.std()
    swell = np.interp(np.arange(size), np.linspace(0, size, 20), rng.uniform(-6, 6, 20))
    noise *= 10 ** (swell / 20)
    if rng.random() < 1 / 3:
        mains_hz, seconds = rng.choice([50.0, 60.0]), np.arange(size) / SAMPLE_RATE_HZ
        for harmonic in range(1, 8):
            phase = rng.uniform(0, 2 * np.pi)
            noise += rng.uniform(0, 1) / harmonic * np.sin(2 * np.pi * mains_hz * harmonic * seconds + phase)
    return noise


def babble(voices: Sequence[Clip], rng: np.random.Generator) -> Signal:
    """Mix three to eight voices, each a sequence of random clips."""
    mixed = np.zeros(NOISE_S * SAMPLE_RATE_HZ)
    for _ in range(rng.integers(3, 9)):
        spoken: list[Signal] = []
        while sum(map(len, spoken)) < len(mixed):
            spoken.append(_read_voice(voices[rng.integers(len(voices))]))
        mixed += np.concatenate(spoken)[: len(mixed)]
    return mixed


def _read_voice(clip: Clip) -> Signal:
    voice = to_mono_16khz(*read_samples(clip)).astype(np.float64)
    rms = np.sqrt(np.mean(voice**2)) if len(voice) else 0.0
    if not SILENT_RMS <= rms < np.inf:
        raise ValueError(
            f"{clip.title} must be a voice, but its {len(voice)} samples have a root mean square of {rms:.1e}; "
            "leave it out of the manifest"
        )
    return voice


def _write(path: Path, sound: Signal) -> None:
    write_sound(path, 0.5 * sound / np.abs(sound).max(), SAMPLE_RATE_HZ)
