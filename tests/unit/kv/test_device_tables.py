"""Page tables on another device: updated by deltas, inside and outside of inference mode."""

import numpy as np
import torch

from quire.kv.flat_batch import DeviceTable
from quire.kv.tables import LaneTable
from quire.layout.pages import LaneGroup
from support.small_memory import plain_class

ROWS = np.array([0, 1])


def table_of(**options):
    group = LaneGroup(name="kv", page_class=plain_class(), layers=(0,))
    return LaneTable(group, 2, **options)


def append(table, first_page):
    pages = np.array([first_page, first_page + 1], dtype=np.int32)
    table.append(ROWS, np.ones((2, 1), dtype=np.int32), pages)


def test_device_table_on_a_cpu_shares_memory_with_the_table():
    table = table_of()
    device_table = DeviceTable(table, torch.device("cpu"))
    append(table, 5)

    assert device_table.current().data_ptr() == table.pages.ctypes.data
    assert device_table.current()[:, 0, 0].tolist() == [5, 6]


def test_device_table_made_in_inference_mode_is_updated_outside_of_it():
    # steps run in inference mode, evictions between them do not; both update the table
    table = table_of(track_changes=True)
    device_table = DeviceTable(table, torch.device("meta"))  # any device but the CPU
    append(table, 5)
    with torch.inference_mode():
        made = device_table.current()
    append(table, 7)

    assert device_table.current() is made
    assert not len(table.drain_changes())
