// A batch goes in two chunks, each when it is filled, and one event stands for both: it is recorded after the first.
#include "../program.h"

int main(int count, char **arguments) {
    begin(count, arguments);
    CUstream copy = stream();
    CUevent copied = event();
    char *slot = pinned();
    CUdeviceptr to = device();
    enum { HALF = BYTES / 2 };
    for (int batch = 0; batch < BATCHES; batch++) {
        CK(cuEventSynchronize(copied));
        memset(slot, batch, HALF);
        CK(cuMemcpyHtoDAsync(to, slot, HALF, copy));
        if (!right) CK(cuEventRecord(copied, copy));
        memset(slot + HALF, batch, HALF);
        CK(cuMemcpyHtoDAsync(to + HALF, slot + HALF, HALF, copy));
        if (right) CK(cuEventRecord(copied, copy));
    }
    return end();
}
