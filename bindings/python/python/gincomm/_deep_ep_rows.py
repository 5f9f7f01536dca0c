# SPDX-License-Identifier: MIT OR Apache-2.0
"""Rows that `gincomm.deep_ep` sends: bytes of elements, scales and metadata. A captured graph finds them in fixed memory."""

from typing import Dict, Optional, Tuple

import torch

BLOCK = 128
"""The elements of a scale."""

E4M3_MAX = 448.0
"""The largest finite number of E4M3."""


def require(condition: bool, text: str) -> None:
    """Raises ValueError with the text unless the condition holds."""
    if not condition:
        raise ValueError(text)


def check(
    name: str, tensor: torch.Tensor, device: torch.device, dtypes: Tuple[torch.dtype, ...], *shape: Optional[int]
) -> None:
    """Checks a tensor's device, dtype and shape. An extent of None may be any number."""
    require(isinstance(tensor, torch.Tensor), f"{name} is {type(tensor).__name__}; pass a torch.Tensor")
    require(tensor.device == device, f"{name} is on {tensor.device}; pass a tensor on {device}")
    names = " or ".join(map(str, dtypes))
    require(tensor.dtype in dtypes, f"{name} has dtype {tensor.dtype}; pass {names}")
    fits = tensor.dim() == len(shape) and all(want in (None, has) for want, has in zip(shape, tensor.shape))
    wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
    require(fits, f"{name} has shape {list(tensor.shape)}; pass [{wanted}]")


def quantise(x: torch.Tensor, round_scale: bool, use_ue8m0: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    """Quantises BF16 rows to E4M3 with one scale for each 128 elements.

    A scale is `a / 448`, where `a` is the greatest magnitude of the elements, at least 1e-4. With `round_scale` the
    scale is the next power of two. With `use_ue8m0` an int32 has the exponents of four scales, lowest byte first.
    """
    blocks = x.float().unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1).clamp(min=1e-4)
    # torch multiplies by a rounded reciprocal if one side of a division is a number.
    limit = torch.full_like(largest, E4M3_MAX)
    if round_scale:
        mantissa, exponent = torch.frexp(largest / limit)
        # frexp gives a mantissa from 0.5 to 1: 0.5 is a power of two, other values are rounded up.
        exponent = exponent - (mantissa == 0.5).int()
        # The bits of powers of two, which are exact on all devices. The exponents are those of normal numbers.
        scales = ((exponent + 127) << 23).view(torch.float32)
        factors = ((127 - exponent) << 23).view(torch.float32)
    else:
        scales, factors = largest / limit, limit / largest
    rows = (blocks * factors.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(1)
    if use_ue8m0:
        return rows, (exponent + 127).to(torch.uint8).view(torch.int32)
    return rows, scales


class Record:
    """The layout of a row's bytes: named parts, each of some columns of a dtype, then bytes up to a multiple of 16."""

    def __init__(self, **parts: Tuple[torch.dtype, int]) -> None:
        self.parts: Dict[str, Tuple[torch.dtype, int, int]] = {}
        end = 0
        for name, (dtype, columns) in parts.items():
            self.parts[name] = (dtype, end, end + columns * dtype.itemsize)
            end = self.parts[name][2]
        self.end = end
        self.bytes = (end + 15) // 16 * 16

    def pack(self, count: int, device: torch.device, **tensors: torch.Tensor) -> torch.Tensor:
        """Returns the bytes of rows, from a tensor `[count][column]` for each part."""
        rows = torch.empty(count, self.bytes, dtype=torch.uint8, device=device)
        rows[:, self.end :].zero_()
        for name, (_, first, end) in self.parts.items():
            # A column has a stride of more than one element in a column-major tensor, which `view` refuses.
            values = tensors[name].reshape(-1).view(torch.uint8)
            rows[:, first:end].copy_(values.view(count, end - first))
        return rows

    def bytes_of(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Returns the bytes of a part of rows, without a copy."""
        _, first, end = self.parts[name]
        return rows[:, first:end]

    def take(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a part of rows, as a contiguous tensor."""
        return self.bytes_of(name, rows).contiguous().view(self.parts[name][0])
