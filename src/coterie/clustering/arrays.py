"""Types and a constant that several modules share."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Labels: TypeAlias = NDArray[np.int64]

TREE_DIMENSIONS = 16  # with more dimensions, a KD-tree is no faster than all distances
