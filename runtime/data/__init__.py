"""Data for training: the sources of records, their order, and the shards of a batch that each rank reads.

A batch is read by one fancy indexing of arrays in memory or mapped from files, and transformed as a whole: a record of MNIST costs about a
microsecond. Code that processes records one by one in Python, as torch's `DataLoader` does, spends tens of microseconds on each; a small
network computes a record in thirty. Such code can be used, too, unchanged and at that cost.

    loader.py        batches, read ahead                batches.py         sources of a loader's batches
    dataset.py       fields, opened by a spec           sampler.py         the records of each batch
    files.py         .npz, .npy, folders, IDX           padding.py         padded lengths of a batch
    npy.py           arrays in numpy's format           code.py            the user's Python files
    memory.py        limits of memory for data          constants.py       inputs without records
    fields.py        a field, read by indices           convert.py         from a field to an input
    reader.py        a rank's shards of a batch         rank_inputs.py     spans and shards of inputs
    sources/         records with an index: the user's objects, arrow tables
    streams/         records and batches in an order of their own: a `DataLoader`, an iterable

The plan's settings of data are in `artifact/training/data_spec.py`.
"""
