"""What Open MPI is told before it begins, by variables of the environment, which win where they are set already.

The first lets its waits give their cores up; the others keep both directions of a network busy. On the one connection of a pair, the word
that a large message may come waits behind a large one that leaves. Open MPI's own choice of a sum under way among two or three ranks adds
up on one of them, which sends the sum back; Rabenseifner's algorithm sends as few bytes for any number of ranks, both ways at once.
"""

_SETTINGS = (
    ("OMPI_MCA_mpi_yield_when_idle", "1", 1),
    ("OMPI_MCA_btl_tcp_links", "2", 1),
    ("OMPI_MCA_coll_libnbc_iallreduce_algorithm", "rabenseifner", 5),
)
"""Name, value, and the first version of Open MPI for which it is: an older one may not know the value, and says so at length."""


def settings(version: int) -> dict[str, str]:
    """The variables for a version of Open MPI; libraries of other makers do not read them."""
    return {name: value for name, value, since in _SETTINGS if version >= since}
