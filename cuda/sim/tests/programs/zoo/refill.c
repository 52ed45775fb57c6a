// A slot is refilled before its copy is done: half of the next batch may arrive.
#include "../program.h"

int main(int count, char **arguments) {
    begin(count, arguments);
    CUstream copy = stream();
    char *slots[2] = {pinned(), pinned()};
    CUevent copied[2] = {event(), event()};
    CUdeviceptr to = device();
    for (int batch = 0; batch < BATCHES; batch++) {
        int slot = batch % 2;
        if (right) CK(cuEventSynchronize(copied[slot]));
        memset(slots[slot], batch, BYTES);
        upload(to, slots[slot], copy);
        CK(cuEventRecord(copied[slot], copy));
    }
    return end();
}
