"""A prefetcher on NVIDIA's binding (`pip install cuda-bindings`): two page-locked and two device slots, a copy stream and
a compute stream.

    cuda-sim run -- python prefetch.py [FAULT]    FAULT: host, stream or use, the edge that is left out
"""

import ctypes
import sys

from cuda.bindings import driver as cu

BYTES, BATCHES, SLOTS = 1 << 16, 8, 2
NON_BLOCKING, DISABLE_TIMING = 1, 2


def check(result):
    code, *values = result
    if code != cu.CUresult.CUDA_SUCCESS:
        raise RuntimeError(code)
    return values[0] if values else None


def fill(slot, value):
    """Stands for reading a batch."""
    ctypes.memset(int(slot), value, BYTES)


def prefetch(fault):
    copy, compute = (check(cu.cuStreamCreate(NON_BLOCKING)) for _ in range(2))
    slots = [check(cu.cuMemHostAlloc(BYTES, 0)) for _ in range(SLOTS)]
    device = [check(cu.cuMemAlloc(BYTES)) for _ in range(SLOTS)]
    result = check(cu.cuMemAlloc(BYTES))
    copied, used = ([check(cu.cuEventCreate(DISABLE_TIMING)) for _ in range(SLOTS)] for _ in range(2))
    for batch in range(BATCHES):
        slot = batch % SLOTS
        if fault != "host":
            check(cu.cuEventSynchronize(copied[slot]))
        fill(slots[slot], batch)
        if fault != "use":
            check(cu.cuStreamWaitEvent(copy, used[slot], 0))
        check(cu.cuMemcpyHtoDAsync(device[slot], slots[slot], BYTES, copy))
        check(cu.cuEventRecord(copied[slot], copy))
        if fault != "stream":
            check(cu.cuStreamWaitEvent(compute, copied[slot], 0))
        check(cu.cuMemcpyDtoDAsync(result, device[slot], BYTES, compute))  # stands for a kernel
        check(cu.cuEventRecord(used[slot], compute))
    check(cu.cuCtxSynchronize())
    last = (ctypes.c_ubyte * BYTES)()
    check(cu.cuMemcpyDtoH(last, result, BYTES))
    return set(last)


def main():
    fault = sys.argv[1] if len(sys.argv) > 1 else None
    check(cu.cuInit(0))
    device = check(cu.cuDeviceGet(0))
    check(cu.cuCtxSetCurrent(check(cu.cuDevicePrimaryCtxRetain(device))))
    last = prefetch(fault)
    if fault is None and last != {BATCHES - 1}:
        sys.exit(f"wanted the last batch, found {last}")
    check(cu.cuDevicePrimaryCtxRelease(device))


main()
