// Calls put results beside the bytes that a copy uses, as a program does that keeps the state of a slot in its memory. With an
// argument, the program races with the copy.
#include "program.h"

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end);

int main(int count, char **arguments) {
    begin(count, arguments);
    CUstream on = stream();
    CUdeviceptr memory = device();
    CUevent start, stop;
    CK(cuEventCreate(&start, 0));
    CK(cuEventCreate(&stop, 0));
    CK(cuEventRecord(start, on));
    CK(cuEventRecord(stop, on));
    struct {
        float milliseconds;
        CUdeviceptr more;
        char bytes[1000];
    } *slot = (void *)pinned();
    for (int batch = 0; batch < BATCHES; batch++) {
        CK(cuStreamSynchronize(on));
        memset(slot->bytes, batch, sizeof slot->bytes);
        slot->milliseconds = -1;
        CK(cuMemcpyHtoDAsync(memory, slot->bytes, sizeof slot->bytes, on));
        CK(cuEventElapsedTime(&slot->milliseconds, start, stop));
        CK(cuMemAlloc(&slot->more, 64));
        if (slot->milliseconds < 0 || !slot->more) return 4;
    }
    if (count > 1) slot->bytes[7] = 1;
    return end();
}
