"""Shared-memory tiles: every element has a place of its own, every copy covers its tile once."""

import pytest
from flashgen.gen.shared_memory.banks import wavefronts
from flashgen.gen.shared_memory.tiles import (
    PADDED,
    ROW,
    SWIZZLED,
    TRANSPOSED,
    lane_spot,
    make_layout,
    make_p_layout,
    plan_copy,
)

KINDS = (ROW, PADDED, SWIZZLED, TRANSPOSED)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "columns", "width", "group"), [(64, 64, 4, 1), (40, 72, 4, 4), (48, 40, 2, 2)]
)
def test_elements_do_not_collide(kind, rows, columns, width, group):
    tile = make_layout(kind, rows, columns, width, group)
    offsets = [tile.offset(row, column) for row in range(rows) for column in range(columns)]
    assert len(set(offsets)) == rows * columns
    assert min(offsets) >= 0 and max(offsets) < tile.floats


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "keys", "lanes"), [(32, 64, 8), (16, 96, 16), (24, 40, 8), (32, 48, 4)])
@pytest.mark.parametrize("roomy", [True, False])
def test_p_elements_do_not_collide(kind, rows, keys, lanes, roomy):
    tile = make_p_layout(kind, rows, keys, lanes, 4, 4, roomy)
    offsets = {tile.offset(row, key) for row in range(rows) for key in range(keys)}
    assert len(offsets) == rows * keys
    assert max(offsets) < tile.floats


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [32, 96, 128, 224])
@pytest.mark.parametrize(
    ("rows", "columns", "vec"), [(64, 64, 4), (40, 40, 4), (16, 250, 2), (48, 65, 1), (8, 256, 4)]
)
def test_a_copy_moves_every_element_once(kind, threads, rows, columns, vec):
    copy = plan_copy(make_layout(kind, rows, columns, vec, 1), rows, columns, vec, threads)
    moved = []
    for thread in range(threads):
        if copy.idle_from and thread >= copy.idle_from:
            continue
        if copy.wide:
            warp, lane = divmod(thread, 32)
            first_row = warp // copy.across * copy.tall + lane // copy.wide
            first_x = warp % copy.across * copy.wide + lane % copy.wide
        else:
            first_row, first_x = thread // copy.across, thread % copy.across * copy.unit
        for r in range(copy.row_passes):
            for c in range(copy.x_passes):
                row, x = first_row + r * copy.row_step, first_x + c * copy.x_step
                assert copy.row_guard or row < rows
                assert copy.x_guard or x < columns
                if row < rows and x < columns:
                    moved += [(row, x + e) for e in range(copy.unit)]
    assert sorted(moved) == [(row, x) for row in range(rows) for x in range(columns)]


def test_wavefronts_of_known_accesses():
    assert wavefronts(list(range(32)), 1) == 1
    assert wavefronts([0] * 32, 1) == 1
    assert wavefronts([32 * lane for lane in range(32)], 1) == 32
    assert wavefronts([2 * lane for lane in range(32)], 1) == 2
    assert wavefronts([4 * lane for lane in range(32)], 4) == 4
    assert wavefronts([4 * (lane % 8) for lane in range(32)], 4) == 1


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_lanes_fill_their_rectangle(lanes):
    spots = {lane_spot(lane, lanes) for lane in range(32)}
    assert spots == {(x, y) for x in range(lanes) for y in range(32 // lanes)}


@pytest.mark.parametrize(("lanes", "rows", "col_group"), [(8, 32, 4), (16, 16, 1), (4, 32, 4)])
def test_a_roomy_p_slab_is_stored_without_conflicts(lanes, rows, col_group):
    tile = make_p_layout(TRANSPOSED, rows, 64, lanes, 4, col_group, True)
    spots = [lane_spot(lane, lanes) for lane in range(32)]
    assert wavefronts([tile.offset(4 * y, col_group * x) for x, y in spots], 4) == 4
