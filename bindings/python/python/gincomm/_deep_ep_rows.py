# SPDX-License-Identifier: MIT OR Apache-2.0
"""Arguments of `gincomm.deep_ep`, and the metadata of rows that it sends."""

from typing import Dict, NoReturn, Optional, Tuple

import torch

BLOCK = 128
"""The elements of a scale."""


def require(condition: bool, text: str) -> None:
    """Raises ValueError with the text unless the condition holds."""
    if not condition:
        raise ValueError(text)


def refuse(name: str, remedy: str) -> NoReturn:
    """Raises NotImplementedError for what the module does not have."""
    raise NotImplementedError(f"gincomm.deep_ep has no {name}: {remedy}")


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


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the same elements that kernels take: contiguous, at a multiple of 16 bytes, without a
    gradient, as in the `forward` of an `autograd.Function`, whose inputs may require one."""
    tensor = tensor.detach().contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


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
            values = tensors[name].detach().reshape(-1).view(torch.uint8)
            rows[:, first:end].copy_(values.view(count, end - first))
        return rows

    def take(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a part of rows, as a contiguous tensor."""
        dtype, first, end = self.parts[name]
        return rows[:, first:end].contiguous().view(dtype)
