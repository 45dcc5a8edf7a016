"""Data for training: where records come from, in which order, and what each rank reads of a batch.

A batch is read by one fancy indexing of arrays in memory or mapped from files, and transformed as a whole. Loaders that handle records
one by one in Python, `grain` and torch's `DataLoader` among them, spend tens of microseconds on each: more than a small network,
which computes a record in thirty, has. Here a record of MNIST costs about one.

    dataset.py   fields, opened by a spec        fields.py      a field, read by indices     sampler.py         which records a batch has
    convert.py   from a field to an input        files.py       .npz, .npy, folders, IDX     length_buckets.py  records of similar length
    code.py      the user's Python files         constants.py   inputs without records       padding.py         how far records are padded
    reader.py    what a rank reads of a batch    prefetch.py    a thread that reads ahead    loader.py          all of it, step by step

What a plan says of data is `artifact/training/data_spec.py`.
"""

from partc.runtime.artifact.training.data_spec import Spec

from .dataset import Dataset, open_data
from .loader import Loader, open_loader
from .reader import Reader
from .sampler import Order, Position

__all__ = ["Dataset", "Loader", "Order", "Position", "Reader", "Spec", "open_data", "open_loader"]
