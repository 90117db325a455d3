"""A stand-in for NVIDIA's management library: a card that tells of its clock alone, which falls and rises."""

from itertools import cycle

_CLOCKS_MHZ = cycle((1980, 1500, 1500))


class NVMLError(Exception):
    pass


def nvmlInit():
    pass


def nvmlDeviceGetHandleByPciBusId(bus_id):
    return bus_id


def nvmlDeviceGetClockInfo(handle, kind):
    assert kind == 1  # that of the multiprocessors
    return next(_CLOCKS_MHZ)


def __getattr__(name):
    def refuse(*arguments):
        raise NVMLError(name)

    return refuse
