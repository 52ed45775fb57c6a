// What `documented.c` and the zoo begin with: a context, and short names for what they make.
#pragma once
#include "cuda.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BYTES = 1 << 16, BATCHES = 7 };

// Ends the program if a call fails. A call that a capture should refuse is made without it.
#define CK(call) check((call), #call)
static inline void check(CUresult result, const char *call) {
    if (result == CUDA_SUCCESS) return;
    fprintf(stderr, "%s: %d\n", call, result);
    exit(3);
}

static int right; // whether the right form runs: the first argument is "right"
static CUcontext context;

static inline void begin(int count, char **arguments) {
    CUdevice device;
    right = count > 1 && !strcmp(arguments[1], "right");
    CK(cuInit(0));
    CK(cuDeviceGet(&device, 0));
    CK(cuCtxCreate(&context, 0, device));
}
static inline int end(void) {
    CK(cuCtxSynchronize());
    CK(cuCtxDestroy(context));
    return 0;
}
#define MAKE(TYPE, NAME, CALL) static inline TYPE NAME(void) { TYPE new; CK(CALL); return new; }
// A stream as frameworks make it: not ordered with the default stream.
MAKE(CUstream, stream, cuStreamCreate(&new, CU_STREAM_NON_BLOCKING))
MAKE(CUevent, event, cuEventCreate(&new, CU_EVENT_DISABLE_TIMING))
MAKE(char *, pinned, cuMemAllocHost((void **)&new, BYTES))
MAKE(CUdeviceptr, device, cuMemAlloc(&new, BYTES))
static inline void upload(CUdeviceptr to, const char *from, CUstream on) { CK(cuMemcpyHtoDAsync(to, from, BYTES, on)); }
static inline void download(char *to, CUdeviceptr from, CUstream on) { CK(cuMemcpyDtoHAsync(to, from, BYTES, on)); }
// Stands for a kernel that reads `from` and writes `to`.
static inline void compute(CUdeviceptr to, CUdeviceptr from, CUstream on) { CK(cuMemcpyDtoDAsync(to, from, BYTES, on)); }
static inline void after(CUstream later, CUevent earlier) { CK(cuStreamWaitEvent(later, earlier, 0)); }
