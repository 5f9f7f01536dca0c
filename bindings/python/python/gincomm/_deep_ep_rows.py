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
    # Texts are made only for errors: calls of some 50 us make five checks.
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is {type(tensor).__name__}; pass a torch.Tensor")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; pass a tensor on {device}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {tensor.dtype}; pass {' or '.join(map(str, dtypes))}")
    has = tensor.shape
    if len(has) != len(shape) or any(want is not None and want != found for want, found in zip(shape, has)):
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise ValueError(f"{name} has shape {list(has)}; pass [{wanted}]")


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the same elements that kernels take: contiguous, at a multiple of 16 bytes, without a
    gradient, as in the `forward` of an `autograd.Function`, whose inputs may require one."""
    tensor = tensor.detach().contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


class Record:
    """The layout of a row's metadata in words of 4 bytes: named parts, each of some columns of a dtype."""

    def __init__(self, **parts: Tuple[torch.dtype, int]) -> None:
        self.parts: Dict[str, Tuple[torch.dtype, int, int]] = {}
        end = 0
        for name, (dtype, columns) in parts.items():
            if columns > 0:
                self.parts[name] = (dtype, end, end + columns)
                end += columns
        self.end = end

    def pack(self, count: int, device: torch.device, **tensors: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        """Returns rows of words from a tensor `[count][column]` for each part; None if there are no parts. Words of parts
        without a tensor, and words up to a multiple of 16 bytes, are undefined."""
        if self.end == 0:
            return None
        rows = torch.empty(count, -(-self.end // 4) * 4, dtype=torch.int32, device=device)
        for name in self.parts:
            if (tensor := tensors[name]) is not None:
                self.take(name, rows).copy_(tensor.detach())
        return rows

    def take(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Returns a view of a part of rows."""
        dtype, first, end = self.parts[name]
        return rows[:, first:end].view(dtype)
