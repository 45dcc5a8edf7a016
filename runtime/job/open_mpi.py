"""What Open MPI is told before it begins, by variables of the environment, which win where they are set already."""

SETTINGS = {
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_coll_libnbc_iallreduce_algorithm": "rabenseifner",
    "OMPI_MCA_btl_tcp_links": "2",
}
"""The first lets its waits give their cores up; the others keep both directions of a network busy. Its own choice of a sum under way
among two or three ranks adds up on one of them, which sends the sum back; Rabenseifner's algorithm sends as few bytes for any number of
ranks, both ways at once. On the one connection of a pair, the word that a large message may come waits behind a large one that leaves."""
