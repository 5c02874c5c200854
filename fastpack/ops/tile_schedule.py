"""Tile schedules: which tiles a launch of sums of matmuls computes, and which programs share the last ones.

Low tiles have :data:`BLOCK_T` rows, tall tiles :data:`BLOCK_BELOW` more. The tall tiles cover the top rows and are
computed first. Each program computes one tile a round. The tiles left for an incomplete last round are all low, and
teams of programs share them. :func:`schedule` chooses the schedule whose last program ends first.
"""

from __future__ import annotations

import functools
from math import ceil

BLOCK_T, BLOCK_BELOW = 128, 64
"""Rows of a low tile, and the rows that a tall tile has below those. Two tall tiles cover as many rows as three low
tiles, but read the second factors twice instead of three times. With two heights, fewer rows of padding are
computed."""
LEAST_SAVED, MORE_SAVED, MOST_MEMBERS = 20, 6, 8
"""Limits on sharing, in steps of a sum. Sharing must save each program of a team LEAST_SAVED steps, to pay for writing,
reading and adding up the parts. Each further program on one tile must save MORE_SAVED more. At most MOST_MEMBERS
programs share a tile."""
TALL_STEP, TALL_END, LOW_END, FLATTENED_END, SHARED_END = 1.46, 10, 6, 4, 8
"""Costs, in steps of a low tile (about 0.65 us each).

A step of a tall tile costs TALL_STEP. The end of a tall tile costs TALL_END. The end of a low tile costs LOW_END, or
FLATTENED_END if it overlaps with the start of the next tile. The end of a shared tile costs SHARED_END more.

Fitted to 953 schedules for the matmuls of an 8B model's layer on an H200 at its power limit, with 2,320 to 3,114 rows.
The model is off by 1.4 % on average, which is also how much two measurements of one schedule differ."""


@functools.lru_cache(maxsize=2**14)
def schedule(rows: int, across: int, steps: int, programs: int, flattened: bool) -> tuple[int, int, int]:
    """Return the number of rows of tall tiles, and how many tiles and programs a team has.

    Args:
        rows: the number of real rows.
        across: the number of tiles in a row of tiles.
        steps: the number of steps of each tile's sum.
        programs: the number of programs, one for each processor.
        flattened: whether the end of a low tile overlaps with the start of the next.
    """
    best = (float("inf"), 0, 1, 1)
    for above in range(ceil(rows / BLOCK_BELOW) // 3 + 1):
        down = ceil(max(rows - above * (BLOCK_T + BLOCK_BELOW), 0) / BLOCK_T)
        tall, low = above * across, down * across
        if low < (tall + low) % programs:
            continue  # a tall tile would be left for the last round
        tiles, members = team((tall + low) % programs, steps, programs)
        best = min(best, (_duration(tall, low, steps, programs, tiles, members, flattened), -above, tiles, members))
    return -best[1], *best[2:]


def team(left: int, steps: int, programs: int) -> tuple[int, int]:
    """Return how many tiles and programs a team has, if ``left`` tiles of ``steps`` steps are to be shared.

    A team has one program more than it has tiles, and the fewest tiles (up to four) for which there are enough
    programs. A team of one tile takes further programs as long as some are left and each saves enough steps. If even
    teams of four tiles need too many programs, or sharing saves too few steps, every tile has one program: ``(1, 1)``.
    """
    tiles = next((size for size in (1, 2, 3, 4) if ceil(left / size) * (size + 1) <= programs), 0)
    if not tiles or steps // (tiles + 1) < LEAST_SAVED:
        return 1, 1
    members = tiles + 1
    if tiles == 1:
        worth = [n for n in range(3, MOST_MEMBERS + 1) if steps >= max(MORE_SAVED * (n - 1), 1) * n]
        members = max([2, *(n for n in worth if left * n <= programs)])
    return tiles, members


def _duration(tall: int, low: int, steps: int, programs: int, tiles: int, members: int, flattened: bool) -> float:
    """Return the time until the last program ends, in steps of a low tile."""
    rounds, left = divmod(tall + low, programs)
    tall_rounds, tall_left = divmod(tall, programs)
    low_time = steps + (FLATTENED_END if flattened else LOW_END)
    tall_extra = TALL_STEP * steps + TALL_END - low_time
    shared = steps * tiles / members + LOW_END + (SHARED_END if members > 1 else 0) if left else 0.0
    # programs with one tall tile more than the others are the last to join a team
    if tall_left and tall_left + ceil(left / tiles) * members > programs:
        last = tall_extra + shared
    else:
        last = max(tall_extra if tall_left else 0.0, shared)
    return rounds * low_time + tall_rounds * tall_extra + last
