"""Data for training: where records come from, in which order, and what each rank reads of a batch.

A batch is read by one fancy indexing of arrays in memory or mapped from files, and transformed as a whole: a record of MNIST costs about a
microsecond. What handles records one by one in Python, as torch's `DataLoader` does, spends tens of microseconds on each, more than a small
network, which computes a record in thirty. It is taken as it is, too, and then costs what it costs.

    loader.py        all of it, read ahead              batches.py         what a loader reads from
    dataset.py       fields, opened by a spec           sampler.py         which records a batch has
    files.py         .npz, .npy, folders, IDX           length_buckets.py  records of similar length
    npy.py           arrays in numpy's format           padding.py         how far a batch is filled up
    memory.py        what data may take                 code.py            the user's Python files
    fields.py        a field, read by indices           constants.py       inputs without records
    reader.py        what a rank reads of a batch       convert.py         from a field to an input
    rank_inputs.py   spans and shards of inputs
    sources/         records with an index: the user's objects, arrow tables
    streams/         records and batches in an order of their own: a `DataLoader`, an iterable

What a plan says of data is `artifact/training/data_spec.py`.
"""
