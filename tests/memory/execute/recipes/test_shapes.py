"""Views, and operators that move elements: every recipe repeats its operator to the bit."""

import pytest
import torch
from torch.nn import functional as F

from tests.memory.execute.recipes.probe import Function, as_complex, check_recipe

EXAMPLES: dict[str, Function] = {
    "ChannelShuffle": lambda _, x: F.channel_shuffle(x, 2),
    "Col2Im": lambda _, x: F.fold(x.view(16, 8 * 4, 16), (8, 8), 2, stride=2),
    "DiagEmbed": lambda _, x: torch.diag_embed(x, 1, -2, -1),
    "Diagonal": lambda _, x: x.repeat(2, 1, 1, 1).diagonal(1, 1, -1),
    "Expand": lambda p, _: p.bias.expand(512, 8),
    "FftC2C": lambda p, x: torch.fft.ifft2(as_complex(p, x)),
    "FftC2R": lambda p, x: torch.fft.irfft(as_complex(p, x), n=9),
    "FftR2C": lambda _, x: torch.fft.rfft(x, norm="ortho"),
    "Flip": lambda _, x: x.flip(1, -1),
    "Im2Col": lambda _, x: F.unfold(x, 3, padding=1, stride=2),
    "Permute": lambda _, x: x.permute(0, 2, 3, 1),
    "PixelShuffle": lambda _, x: F.pixel_shuffle(x, 2),
    "PixelUnshuffle": lambda _, x: F.pixel_unshuffle(x, 2),
    "Repeat": lambda _, x: x.repeat(2, 1, 1, 1),
    "Roll": lambda _, x: x.roll((1, -2), (1, -1)),
    "Rot90": lambda _, x: x.rot90(1, (2, 3)),
    "Select": lambda _, x: x.select(1, -2),
    "Slice": lambda _, x: x[:, 1:-1],
    "Split": lambda _, x: x.split(3, 1)[1],
    "SplitWithSizes": lambda _, x: x.split([3, 5], -3)[1],
    "Squeeze": lambda _, x: x.unsqueeze(0).squeeze(),
    "SqueezeBackward3": lambda m, x: x.sum(1, keepdim=True).squeeze_(),
    "SqueezeBackward4": lambda m, x: x.sum(1, keepdim=True).squeeze_(1),
    "SqueezeBackward5": lambda m, x: x.sum(1, keepdim=True).squeeze_((1,)),
    "T": lambda _, x: x.flatten(1).t(),
    "TBackward1": lambda m, x: (x.flatten(1) * 2).t_(),
    "ToCopy": lambda _, x: x.to(torch.bfloat16),
    "Transpose": lambda _, x: x.transpose(1, -1),
    "TransposeBackward1": lambda m, x: (x * 2).transpose_(1, 2),
    "Tril": lambda _, x: x.tril(1),
    "Triu": lambda _, x: x.triu(-1),
    "Unbind": lambda _, x: x.unbind(1)[3],
    "Unfold": lambda _, x: x.unfold(2, 3, 2),
    "UnsafeSplit": lambda _, x: torch.unsafe_split(x, 3, 1)[0],
    "UnsafeSplitWithSizes": lambda _, x: torch.unsafe_split_with_sizes(x, [2, 6], 1)[1],
    "UnsafeView": lambda _, x: x.transpose(1, 2).flatten(1),
    "Unsqueeze": lambda _, x: x.unsqueeze(2),
    "UnsqueezeBackward1": lambda m, x: (x * 2).unsqueeze_(1),
    "View": lambda _, x: x.view(64, -1),
    "ViewAsComplex": lambda _, x: torch.view_as_complex(x.reshape(16, 8, 8, 4, 2)),
    "ViewAsReal": lambda p, x: torch.view_as_real(as_complex(p, x)),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_recipe_repeats_its_operator(name: str) -> None:
    check_recipe(name, EXAMPLES[name])
