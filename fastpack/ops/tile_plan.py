"""Which tiles the processors of a device make of sums of products, and who shares the last ones.

Low tiles have :data:`BLOCK_T` rows, tall ones :data:`BLOCK_BELOW` more. Tall ones lie on top and are made first; each
program makes one tile after the other, round after round; what is left for a last round, all of it low, is shared by
teams. Of all such plans :func:`plan` takes the one whose last program ends first.
"""

from __future__ import annotations

import functools
from math import ceil

BLOCK_T, BLOCK_BELOW = 128, 64
"""Rows of a low tile, and those that a tall one has below them. A tall one reads the second factors less often than two
low ones for three, and with both heights fewer rows are made that don't count."""
LEAST_SAVED, MORE_SAVED, MOST_MEMBERS = 20, 6, 8
"""Steps of a sum, of which a program has to be spared so many for its part to be written, read and added up, and so
many for each part more; and the programs that share a tile, at most."""
TALL_STEP, TALL_END, LOW_END, FLATTENED_END, SHARED_END = 1.46, 10, 6, 4, 8
"""What a step of a tall tile takes, and the ends of tiles: tall ones, low ones, low ones whose end overlaps with the
begin of the next, and on top of that those of which others have made a part. In steps of a low one, some 0.65 us.

Fitted to 953 plans for the products of an 8B model's layer on an H200 at its limit of power, 2,320 to 3,114 rows: they
explain its times but for 1.4 % on average, as much as two measurements of one plan differ."""


@functools.lru_cache(maxsize=2**14)
def plan(rows: int, across: int, steps: int, programs: int, flattened: bool) -> tuple[int, int, int]:
    """How many rows of tiles are tall, and how many tiles and programs a team has.

    Args:
        rows: that count.
        across: tiles beside each other.
        steps: of each tile's sums.
        programs: one for each processor.
        flattened: whether the end of a low tile overlaps with the begin of the next.
    """
    best = (float("inf"), 0, 1, 1)
    for above in range(ceil(rows / BLOCK_BELOW) // 3 + 1):
        down = ceil(max(rows - above * (BLOCK_T + BLOCK_BELOW), 0) / BLOCK_T)
        tall, low = above * across, down * across
        if low < (tall + low) % programs:
            continue  # a tall one would be left
        tiles, members = team((tall + low) % programs, steps, programs)
        best = min(best, (_end(tall, low, steps, programs, tiles, members, flattened), -above, tiles, members))
    return -best[1], *best[2:]


def team(left: int, steps: int, programs: int) -> tuple[int, int]:
    """Tiles and programs of a team, where ``left`` tiles of so many steps are shared.

    The fewest tiles with which a program more for each team leaves them programs enough; a team of one tile takes as
    many programs as are there and worth their part. Where five programs for four tiles are too many, or are spared too
    few steps, each tile has a program of its own.
    """
    tiles = next((few for few in (1, 2, 3, 4) if ceil(left / few) * (few + 1) <= programs), 0)
    if not tiles or steps // (tiles + 1) < LEAST_SAVED:
        return 1, 1
    members = tiles + 1
    if tiles == 1:
        worth = [n for n in range(3, MOST_MEMBERS + 1) if steps >= max(MORE_SAVED * (n - 1), 1) * n]
        members = max([2, *(n for n in worth if left * n <= programs)])
    return tiles, members


def _end(tall: int, low: int, steps: int, programs: int, tiles: int, members: int, flattened: bool) -> float:
    """When the last program ends, in steps of a low tile."""
    rounds, left = divmod(tall + low, programs)
    rounds_of_tall, more_of_tall = divmod(tall, programs)
    of_low = steps + (FLATTENED_END if flattened else LOW_END)
    longer = TALL_STEP * steps + TALL_END - of_low
    shared = steps * tiles / members + LOW_END + (SHARED_END if members > 1 else 0) if left else 0.0
    # who has one tall tile more is the last to share what is left
    if more_of_tall and more_of_tall + ceil(left / tiles) * members > programs:
        last = longer + shared
    else:
        last = max(longer if more_of_tall else 0.0, shared)
    return rounds * of_low + rounds_of_tall * longer + last
