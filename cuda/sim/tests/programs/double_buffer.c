// A plain double buffer on the driver API: the host fills one slot while the other is copied, a second stream computes.
//
//     cc double_buffer.c -I. -L FOLDER -lcuda -o double_buffer && cuda-sim run --seeds 20 -- ./double_buffer [FAULT]
//
// FAULT: host, stream or use is the edge that is left out; early reads a result before its download is done.
#include "cuda.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BYTES = 1 << 16, BATCHES = 8, SLOTS = 2 };

static void check(CUresult result) {
    if (result == CUDA_SUCCESS) return;
    fprintf(stderr, "error %d\n", result);
    exit(3);
}

int main(int count, char **arguments) {
    const char *fault = count > 1 ? arguments[1] : "";
    CUdevice device;
    CUcontext context;
    CUstream copy, compute;
    CUevent copied[SLOTS], used[SLOTS];
    CUdeviceptr batch_at[SLOTS], sum_at;
    char *slots[SLOTS], *sum;
    check(cuInit(0));
    check(cuDeviceGet(&device, 0));
    check(cuCtxCreate(&context, 0, device));
    check(cuStreamCreate(&copy, CU_STREAM_NON_BLOCKING));
    check(cuStreamCreate(&compute, CU_STREAM_NON_BLOCKING));
    check(cuMemAllocHost((void **)&sum, BYTES));
    check(cuMemAlloc(&sum_at, BYTES));
    for (int slot = 0; slot < SLOTS; slot++) {
        check(cuMemAllocHost((void **)&slots[slot], BYTES));
        check(cuMemAlloc(&batch_at[slot], BYTES));
        check(cuEventCreate(&copied[slot], CU_EVENT_DISABLE_TIMING));
        check(cuEventCreate(&used[slot], CU_EVENT_DISABLE_TIMING));
    }
    for (int batch = 0; batch < BATCHES; batch++) {
        int slot = batch % SLOTS;
        if (strcmp(fault, "host")) check(cuEventSynchronize(copied[slot]));
        memset(slots[slot], batch, BYTES); // stands for reading it
        if (strcmp(fault, "use")) check(cuStreamWaitEvent(copy, used[slot], 0));
        check(cuMemcpyHtoDAsync(batch_at[slot], slots[slot], BYTES, copy));
        check(cuEventRecord(copied[slot], copy));
        if (strcmp(fault, "stream")) check(cuStreamWaitEvent(compute, copied[slot], 0));
        check(cuMemcpyDtoDAsync(sum_at, batch_at[slot], BYTES, compute)); // stands for a kernel
        check(cuEventRecord(used[slot], compute));
    }
    check(cuMemcpyDtoHAsync(sum, sum_at, BYTES, compute));
    if (strcmp(fault, "early")) check(cuStreamSynchronize(compute));
    int last = sum[BYTES - 1];
    check(cuCtxSynchronize());
    check(cuCtxDestroy(context));
    return *fault || last == BATCHES - 1 ? 0 : 4;
}
