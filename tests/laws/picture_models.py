"""Models that enlarge features to the size of earlier ones: U-Net, U-Net++ and a feature pyramid."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import interpolate


def _block(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def _sized(h: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return interpolate(h, size=like.shape[-2:], mode="bilinear", align_corners=False)


class UNet(nn.Module):
    """Each level of the decoder enlarges to the size of its skip connection, and adds it a layer later."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth)]
        self.stem = _block(3, width)
        self.down = nn.ModuleList(_block(small, large, 2) for small, large in pairwise(widths))
        self.up = nn.ModuleList(_block(large, small) for small, large in pairwise(widths))
        self.join = nn.ModuleList(_block(2 * width, width) for width in widths[:-1])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = [self.stem(x)]
        for down in self.down:
            skips.append(down(skips[-1]))
        h = skips.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            skip = skips.pop()
            h = join(torch.cat([up(_sized(h, skip)), skip], 1))
        return interpolate(self.head(h), size=x.shape[-2:])


class NestedUNet(nn.Module):
    """A U-Net++: each level is refined as often as there are levels below it."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList(_block(3 if level == 0 else width, width, 1 + (level > 0)) for level in range(depth))
        self.nested = nn.ModuleDict(
            {
                f"{level}_{turn}": _block((turn + 1) * width, width)
                for turn in range(1, depth)
                for level in range(depth - turn)
            }
        )
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid: dict[tuple[int, int], torch.Tensor] = {}
        for level, down in enumerate(self.down):
            x = grid[level, 0] = down(x)
        for turn in range(1, len(self.down)):
            for level in range(len(self.down) - turn):
                earlier = [grid[level, number] for number in range(turn)]
                enlarged = _sized(grid[level + 1, turn - 1], earlier[0])
                grid[level, turn] = self.nested[f"{level}_{turn}"](torch.cat([*earlier, enlarged], 1))
        return self.head(grid[0, len(self.down) - 1])


class FeaturePyramid(nn.Module):
    """Levels of one width, of which each is enlarged to the size of an activation that nothing else uses any more."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList(_block(3 if level == 0 else width, width, 2) for level in range(depth))
        self.side = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(depth))
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        features = [x]
        for down in self.down:
            features.append(down(features[-1]))
        sides = [side(feature) for side, feature in zip(self.side, features[1:], strict=True)]
        levels = [sides[-1]]
        for side, feature in zip(reversed(sides[:-1]), reversed(features[1:-1]), strict=True):
            levels.append(side + _sized(levels[-1], feature))
        return [smooth(level) for smooth, level in zip(self.smooth, reversed(levels), strict=True)]


PICTURE_MODELS = (UNet, NestedUNet, FeaturePyramid)
