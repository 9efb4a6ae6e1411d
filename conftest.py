"""Holds for every pytest run, and so for the notebooks' kernels, which inherit this environment."""

import os

import matplotlib.font_manager  # noqa: F401 (on a new machine this builds a cache and says so: here, not in a notebook)

os.environ["TQDM_DISABLE"] = "1"  # progress bars are not output that can be compared
os.environ.pop("MPLBACKEND", None)  # a fixed backend would keep figures out of the notebooks
