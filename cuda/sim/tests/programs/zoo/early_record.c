// The event is recorded before the work that it should stand for.
#include "../program.h"

int main(int count, char **arguments) {
    begin(count, arguments);
    CUstream copy = stream(), work = stream();
    CUevent copied = event(), used = event();
    char *slot = pinned();
    CUdeviceptr batch_at = device(), result = device();
    for (int batch = 0; batch < BATCHES; batch++) {
        CK(cuStreamSynchronize(copy));
        memset(slot, batch, BYTES);
        after(copy, used);
        if (!right) CK(cuEventRecord(copied, copy));
        upload(batch_at, slot, copy);
        if (right) CK(cuEventRecord(copied, copy));
        after(work, copied);
        compute(result, batch_at, work);
        CK(cuEventRecord(used, work));
    }
    return end();
}
