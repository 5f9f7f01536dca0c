# SPDX-License-Identifier: MIT OR Apache-2.0
"""GPU-initiated networking: kernels put data into other GPUs' memory. docs/python.md has the whole interface."""

import sys

from ._gin import *
from ._gin import __all__, __version__, ep

# So that `import gincomm.ep` finds it.
sys.modules[f"{__name__}.ep"] = ep
