"""Which tiles of a sum of products are tall, and who shares the last: a plan is arithmetic."""

from __future__ import annotations

import itertools

import pytest

from fastpack.ops import tile_plan as plans

PROGRAMS = 132


def made(rows: int, above: int, across: int) -> tuple[int, int]:
    """How many tiles are tall, and how many low."""
    below = max(0, rows - above * (plans.BLOCK_T + plans.BLOCK_BELOW))
    return above * across, -(-below // plans.BLOCK_T) * across


def last_end(tall: int, low: int, steps: int, tiles: int, members: int, flattened: bool, programs: int) -> float:
    """When the last program ends, each of which is followed as the kernel has it."""
    of_low = steps + (plans.FLATTENED_END if flattened else plans.LOW_END)
    of_tall = plans.TALL_STEP * steps + plans.TALL_END
    ends = [0.0] * programs
    left = (tall + low) % programs
    for tile in range(tall + low - left):
        ends[programs - 1 - tile % programs] += of_tall if tile < tall else of_low
    for first in range(0, left, tiles):
        for member in range(members):
            shared = plans.SHARED_END if members > 1 else 0
            ends[first // tiles * members + member] += steps * tiles / members + plans.LOW_END + shared
    return max(ends)


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize("steps", [3, 64, 225, 448])
@pytest.mark.parametrize("across", [1, 2, 16, 24, 56, 131, 132])
def test_the_best_plan_is_taken(across: int, steps: int, flattened: bool) -> None:
    """Of those that leave nothing but low tiles, and no more than there are programs for."""
    tall_ones = 0
    for rows in (0, 1, 64, 65, 128, 129, 192, 300, 2784, 2843, 2944, 3114):
        found = plans.plan(rows, across, steps, PROGRAMS, flattened)
        ends = {}
        for above in range(-(-rows // plans.BLOCK_BELOW) // 3 + 1):
            tall, low = made(rows, above, across)
            left = (tall + low) % PROGRAMS
            if left <= low:
                tiles, members = plans.team(left, steps, PROGRAMS)
                assert -(-left // tiles) * members <= PROGRAMS
                ends[above, tiles, members] = last_end(tall, low, steps, tiles, members, flattened, PROGRAMS)
        assert ends[found] == pytest.approx(min(ends.values()))
        tall_ones += found[0]
    assert tall_ones or across in (1, 2) or steps == 3, "the check can fail"


def test_tall_tiles_are_worth_it() -> None:
    """As modelled, for the products of an 8B model's layer, of any number of rows near 3,000: by 1.9 % on average."""
    low = high = 0.0
    for rows, (across, steps) in itertools.product(range(2100, 3700, 17), ((24, 65), (16, 65), (56, 64), (16, 225))):
        flattened = steps == 64
        above, *team = plans.plan(rows, across, steps, PROGRAMS, flattened)
        high += last_end(*made(rows, above, across), steps, *team, flattened, PROGRAMS)
        without = made(rows, 0, across)
        low += last_end(*without, steps, *plans.team(without[1] % PROGRAMS, steps, PROGRAMS), flattened, PROGRAMS)
    assert 0.97 < high / low < 0.985, "modelled, not measured"


@pytest.mark.parametrize(
    ("left", "steps", "team"),
    [
        (88, 64, (2, 3)),  # 132 programs, which have 21 steps less than without
        (104, 64, (1, 1)),  # five for four would be spared 12
        (104, 448, (4, 5)),
        (106, 448, (1, 1)),  # and are not there
        (66, 64, (1, 2)),
        (44, 64, (1, 3)),
        (20, 64, (1, 3)),  # a fourth would be spared 5 steps
        (20, 72, (1, 4)),
        (12, 448, (1, 8)),
        (1, 16, (1, 1)),
    ],
)
def test_who_shares_what_is_left(left: int, steps: int, team: tuple[int, int]) -> None:
    assert plans.team(left, steps, PROGRAMS) == team
