"""Pictures of coloured shapes with captions that describe them: what the diffusion pipeline of this example learns to draw."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy
import torch
from PIL import Image, ImageDraw

SIZE = 32  # pixels
COLORS = {
    "red": (214, 48, 49),
    "orange": (240, 147, 43),
    "yellow": (249, 202, 36),
    "green": (39, 174, 96),
    "blue": (41, 98, 205),
    "purple": (142, 68, 173),
    "black": (45, 52, 54),
    "white": (245, 246, 250),
}
SHAPES = ("circle", "square", "triangle", "star")
# How much of the picture a shape takes.
SCALES = {"small": 0.2, "large": 0.38}
# Shapes are drawn larger, and scaled down to have smooth edges.
OVERSAMPLING = 4


class Scene(NamedTuple):
    """What a picture shows."""

    scale: str
    color: str
    shape: str
    background: str

    @property
    def caption(self) -> str:
        """A text such as "a small red circle on blue"."""
        return f"a {self.scale} {self.color} {self.shape} on {self.background}"

    def picture(self, x: float, y: float) -> Image.Image:
        """The scene with the center of its shape at x and y, from 0 to 1."""
        side = SIZE * OVERSAMPLING
        image = Image.new("RGB", (side, side), COLORS[self.background])
        radius = SCALES[self.scale] * side
        x, y = x * side, y * side
        draw = ImageDraw.Draw(image)
        if self.shape == "circle":
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), COLORS[self.color])
        elif self.shape == "square":
            draw.rectangle(
                (x - radius * 0.85, y - radius * 0.85, x + radius * 0.85, y + radius * 0.85), COLORS[self.color]
            )
        elif self.shape == "triangle":
            draw.polygon(_corners(x, y, [radius] * 3), COLORS[self.color])
        else:
            draw.polygon(_corners(x, y, [radius, radius * 0.42] * 5), COLORS[self.color])
        return image.resize((SIZE, SIZE), Image.Resampling.LANCZOS)


def _corners(x: float, y: float, radii: list[float]) -> list[tuple[float, float]]:
    angles = [2 * numpy.pi * corner / len(radii) for corner in range(len(radii))]
    return [
        (x + radius * float(numpy.sin(angle)), y - radius * float(numpy.cos(angle)))
        for radius, angle in zip(radii, angles, strict=True)
    ]


def scenes(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Endless random scenes: the caption, and the picture as `[3, SIZE, SIZE]` from -1 to 1."""
    random = numpy.random.default_rng(seed)
    while True:
        color, background = random.choice(tuple(COLORS), 2, replace=False)
        scene = Scene(random.choice(tuple(SCALES)), color, random.choice(SHAPES), background)
        x, y = random.uniform(0.42, 0.58, 2)
        pixels = numpy.asarray(scene.picture(x, y), dtype=numpy.float32)
        yield scene.caption, torch.from_numpy(pixels / 127.5 - 1).permute(2, 0, 1)
