"""Sounds for the study of coarse acceptance: harmonic tones that glide, their spectra, and codes for the spectra.

A sound has one of four timbres (how fast its harmonics fade, and a formant) and goes up, stays or goes down. It is made as a
waveform, cut into frames, and each frame becomes the logarithm of 24 bands of its spectrum. K-means turns frames into codes, as
the quantiser of a codec does: many codes lie close together, because loudness, phase and noise move a frame a little.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RATE = 8000
HOP = 160
WINDOW = 400
BANDS = 24
TIMBRES = 4
GLIDES = 3
CLASSES = TIMBRES * GLIDES


@dataclass(frozen=True)
class Sounds:
    """Frames [sounds, time, bands] and what each sound is, from 0 to CLASSES - 1."""

    frames: np.ndarray
    kinds: np.ndarray


def sounds(count: int, frames: int, rng: np.random.Generator) -> Sounds:
    """So many sounds, each `frames` long, of kinds drawn evenly."""
    kinds = rng.integers(CLASSES, size=count)
    return Sounds(np.stack([spectra(_waveform(int(kind), frames, rng)) for kind in kinds]), kinds)


def spectra(wave: np.ndarray) -> np.ndarray:
    """The logarithm of the power in each band, frame by frame: float32 [time, bands]."""
    starts = np.arange(0, len(wave) - WINDOW + 1, HOP)
    pieces = wave[starts[:, None] + np.arange(WINDOW)] * np.hanning(WINDOW)
    power = np.abs(np.fft.rfft(pieces)) ** 2
    return np.log10(power @ _bands().T + 1e-3).astype(np.float32)


def _waveform(kind: int, frames: int, rng: np.random.Generator) -> np.ndarray:
    timbre, glide = kind % TIMBRES, kind // TIMBRES - 1
    length = WINDOW + HOP * (frames - 1)
    at = np.arange(length) / RATE
    octaves = glide * rng.uniform(0.05, 0.8) * at / at[-1] + 0.02 * np.sin(2 * np.pi * rng.uniform(4, 6) * at)
    pitch = rng.uniform(140, 280) * 2.0**octaves
    phase = 2 * np.pi * pitch.cumsum() / RATE
    wave = np.zeros(length)
    for harmonic in range(1, 13):
        centre = 500 + 700 * timbre
        loud = harmonic ** -(0.6 + 0.3 * timbre) + 0.8 * np.exp(-(((harmonic * pitch - centre) / 250) ** 2))
        wave += np.where(harmonic * pitch < RATE / 2, loud, 0) * np.sin(harmonic * phase + rng.uniform(0, 2 * np.pi))
    # Loudness that wanders, and breath.
    steps = rng.normal(size=length // HOP + 2).cumsum() * 0.06
    wander = np.interp(np.arange(length), np.arange(len(steps)) * HOP, steps - steps.mean())
    return np.exp(wander) * wave + 0.4 * rng.normal(size=length)


def _bands() -> np.ndarray:
    """Triangles, evenly apart on the mel scale: [bands, bins]."""
    mel = np.linspace(np.log1p(100 / 700), np.log1p(RATE / 2 / 700), BANDS + 2)
    edges = 700 * np.expm1(mel)
    bins = np.fft.rfftfreq(WINDOW, 1 / RATE)
    rise = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    fall = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    return np.maximum(np.minimum(rise, fall), 0)


def codebook(frames: np.ndarray, codes: int, rng: np.random.Generator, rounds: int = 12) -> np.ndarray:
    """K-means: the centres [codes, bands] of frames [n, bands]. A centre that lost all its frames starts again on one."""
    centres = frames[rng.choice(len(frames), codes, replace=False)].copy()
    for _ in range(rounds):
        nearest = encode(frames, centres)
        counts = np.bincount(nearest, minlength=codes)
        for band in range(frames.shape[1]):
            centres[:, band] = np.bincount(nearest, frames[:, band], codes) / np.maximum(counts, 1)
        lost = counts == 0
        centres[lost] = frames[rng.choice(len(frames), int(lost.sum()))]
    return centres


def encode(frames: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """The nearest centre of each frame."""
    half = (centres**2).sum(1) / 2
    parts = [(part @ centres.T - half).argmax(1) for part in np.array_split(frames, max(1, len(frames) // 4096))]
    return np.concatenate(parts)
