"""The host fills a page-locked buffer again while a copy may still read it. The program needs no package and no device."""

import ctypes

cuda = ctypes.CDLL("libcuda.so.1")
context, stream, buffer, memory = (ctypes.c_void_p() for _ in range(4))
cuda.cuInit(0)
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
cuda.cuCtxSetCurrent(context)
cuda.cuStreamCreate(ctypes.byref(stream), 1)
cuda.cuMemAllocHost_v2(ctypes.byref(buffer), ctypes.c_size_t(4096))
cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(4096))


def fill(batch):
    ctypes.memset(buffer, batch, 4096)


for batch in range(2):
    fill(batch)
    cuda.cuMemcpyHtoDAsync_v2(memory, buffer, ctypes.c_size_t(4096), stream)
cuda.cuStreamSynchronize(stream)  # belongs in the loop, after the copy
