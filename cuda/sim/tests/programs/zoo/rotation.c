// Two slots and three events in rotation: a slot waits for the copy of three batches ago, and its last one was two ago.
#include "../program.h"

int main(int count, char **arguments) {
    begin(count, arguments);
    CUstream copy = stream();
    char *slots[2] = {pinned(), pinned()};
    CUevent copied[3] = {event(), event(), event()};
    CUdeviceptr to = device();
    int events = right ? 2 : 3;
    for (int batch = 0; batch < BATCHES; batch++) {
        CK(cuEventSynchronize(copied[batch % events]));
        memset(slots[batch % 2], batch, BYTES);
        upload(to, slots[batch % 2], copy);
        CK(cuEventRecord(copied[batch % events], copy));
    }
    return end();
}
