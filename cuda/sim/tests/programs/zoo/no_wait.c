// The compute stream does not wait for the copy: it may compute with the batch before, or with half of each.
#include "../program.h"

int main(int count, char **arguments) {
    begin(count, arguments);
    CUstream copy = stream(), work = stream();
    CUevent copied = event(), used = event();
    char *slot = pinned();
    CUdeviceptr batch_at = device(), result = device();
    for (int batch = 0; batch < BATCHES; batch++) {
        memset(slot, batch, BYTES);
        after(copy, used);
        upload(batch_at, slot, copy);
        CK(cuEventRecord(copied, copy));
        if (right) after(work, copied);
        compute(result, batch_at, work);
        CK(cuEventRecord(used, work));
        CK(cuEventSynchronize(copied));
    }
    return end();
}
