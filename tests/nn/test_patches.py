"""Squares of images: the same as a convolution, in its order, with places and errors that say what to do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from orchard.core.errors import ConfigError, UsageError
from orchard.nn.vision import Patches
from orchard.nn.vision.patches import cut


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_a_map_of_squares_is_a_convolution(patch: int, across: int, channels: int, count: int) -> None:
    side = patch * across
    part = Patches.Config(dim=5, side=side, patch=patch, channels=channels).build()
    images = torch.randn(count, channels, side, side, generator=torch.Generator().manual_seed(side))
    kernel = part.map.weight.view(5, channels, patch, patch)
    wanted = functional.conv2d(images, kernel, part.map.bias, stride=patch).flatten(2).transpose(1, 2) + part.places
    with torch.no_grad():
        assert torch.allclose(part(images), wanted, atol=1e-6)
    assert part.config.tokens == across**2 == part.places.shape[0]


def test_squares_lie_row_by_row() -> None:
    image = torch.arange(16.0).view(1, 1, 4, 4)
    assert cut(image, 2)[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


def test_the_first_token_belongs_to_no_square() -> None:
    part = Patches.Config(dim=4, side=4, patch=2, first=True).build()
    one, other = torch.randn(2, 1, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert part(one).shape == (1, 5, 4)
        assert torch.equal(part(one)[:, 0], part(other)[:, 0]) and not torch.equal(part(one)[:, 1], part(other)[:, 1])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="no whole squares of 5"):
        Patches.Config(dim=4, side=16, patch=5).build()
    part = Patches.Config(dim=4, side=4, patch=2).build()
    for shape in ((3, 4, 4), (1, 1, 4, 4), (1, 3, 8, 4)):
        with pytest.raises(UsageError, match=r"where \[count, 3, 4, 4\] belong"):
            part(torch.zeros(shape))
