"""Writes scikit-learn's handwritten digits as the .npz file that train_on_device.py takes; needs no torch.

python digits.py digits.npz
"""

from __future__ import annotations

import sys

import numpy as np
from sklearn.datasets import load_digits

bunch = load_digits()
images = bunch.images.astype(np.float32)[:, None]
# Scaled as ortlaunch's data=digits scales them.
images = (images - images.mean()) / images.std(ddof=1)
np.savez(sys.argv[1], pixel_values=images, labels=bunch.target.astype(np.int64))
