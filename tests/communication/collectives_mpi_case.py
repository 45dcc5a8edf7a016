"""An artifact of four ranks with every collective, and the mpiexec beside this Python."""

from __future__ import annotations

import sys
from pathlib import Path

from artifact_text import write
from run_steps import give_lists

MPIEXEC = Path(sys.executable).parent / "mpiexec"
GRAPH = """rank (float[n, 6] x, int64[i] index, float16[3, 4] half) =>
    (float[a, 3] rows, float[b, 6] columns, float[n, 6] sums, float[n, 6] highest, int64[c, d] loose, float16[3, 4] halves,
     float[i, 6] ring, float[i, 6] crown, float16[3, 4] widest, float16[i, 4] looked_up, int64[k] numbers, float16[k, 4] sent_back)
<float[i, 6] top, float16[3, 4] most, float[n, 6] h, float[n, 12] wide, float[n, 3] part,
 int64[one, count] places, int64[k] asked, int64[8] counts, int64[i] places_of_ids, float[n, 6] spare, float[n, 6] again>
{ h = Gather(x, index)
  sums = partc.comm.AllReduce <group = "all", tag = 0, reduce = "sum"> (h)
  wide = partc.comm.AllGather <group = "pairs", tag = 1, axis = 1> (h)
  rows = partc.comm.ReduceScatter <group = "all", tag = 2, axis = 1, reduce = "sum"> (wide)
  columns = partc.comm.AllToAll <group = "pairs", tag = 3, split_axis = 1, concat_axis = 1> (h)
  highest = partc.comm.AllReduce <group = "crossed", tag = 4, reduce = "max"> (h)
  places = NonZero(h)
  loose = partc.comm.AllGather <group = "pairs", tag = 5, axis = 1> (places)
  halves = partc.comm.AllReduce <group = "all", tag = 6, reduce = "sum"> (half)
  ring = partc.comm.Exchange <group = "all", tag = 8, rank = 2, send_peers = [NEXT, SELF], recv_peers = [LAST, SELF],
         send_boxes = [0, 1, 1, 0, 1, 2, 0, 1, 1, 1, 2, 2], recv_boxes = [0, 1, 1, 0, 1, 2, 0, 1, 1, 1, 2, 2]> (h)
  spare = partc.comm.Broadcast <group = "all", tag = 7, root = 2> (h)
  again = Neg(spare)
  TOP partc.comm.Reduce <group = "all", tag = 9, root = 1, reduce = "sum"> (h)
  CROWN partc.comm.Broadcast <group = "all", tag = 10, root = 1> (GIVEN)
  HALF partc.comm.Reduce <group = "all", tag = 11, root = 1, reduce = "max"> (half)
  FULL partc.comm.Broadcast <group = "all", tag = 12, root = 1> (WIDEST)
  crown = Neg(top)
  widest = Neg(most)
  looked_up, asked, counts, places_of_ids = partc.comm.Pull
         <group = "all", tag = 13, owners = [3, 0, 1, 2], rows = 12, row = [4], givers = [0, 1, 2, 3]> (half, index)
  numbers, sent_back = partc.comm.Push <group = "all", tag = 14, owners = [3, 0, 1, 2], rows = 12, row = [4], givers = [0, 1, 2, 3]>
         (asked, counts, places_of_ids, looked_up) }"""
GROUPS = {"all": [[0, 1, 2, 3]], "pairs": [[0, 1], [3, 2]], "crossed": [[0, 2], [1, 3]]}


def every_op(folder: Path) -> Path:
    """An artifact of 4 ranks with every collective; its first op is a Gather, which fails where `index` is out of range."""
    folder = write(
        folder,
        [
            GRAPH.replace("float[n, 6] h", "float[i, 6] h")
            .replace("NEXT", str((rank + 1) % 4))
            .replace("SELF", str(rank))
            .replace("LAST", str((rank + 3) % 4))
            .replace("TOP", "top =" if rank == 1 else " =")
            .replace("CROWN", " =" if rank == 1 else "top =")
            .replace("GIVEN", "top" if rank == 1 else "")
            .replace("HALF", "most =" if rank == 1 else " =")
            .replace("FULL", " =" if rank == 1 else "most =")
            .replace("WIDEST", "most" if rank == 1 else "")
            for rank in range(4)
        ],
        groups=GROUPS,
        shapes={"places": None, "h": ["i", 6], "wide": ["i", 12]},
    )
    return give_lists(folder)
